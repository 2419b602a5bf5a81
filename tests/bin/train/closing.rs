//! The last lines of a run: verdict, memory, report and commands that work as printed; also after a
//! resumed or finished run.

use std::path::Path;
use std::process::{Command, Stdio};

use assert_cmd::cargo::cargo_bin;

use crate::test_dir::{TestDir, lora};

/// Returns the stderr of a command that must succeed.
fn said(dir: &TestDir, args: &[&str]) -> String {
    let output = dir.command(args).output().unwrap();
    let said = dir.told(&output.stderr);
    assert!(output.status.success(), "{args:?}\n{said}");
    said
}

/// Returns the commands below `next:`.
fn next(said: &str) -> Vec<String> {
    let (_, commands) = said.split_once("\nnext:\n").unwrap_or_else(|| panic!("{said}"));
    commands.lines().map(|line| line.trim().to_owned()).collect()
}

/// Runs a printed command in a shell with `input` on stdin; returns its stdout.
fn typed(dir: &TestDir, command: &str, input: &str) -> String {
    let folder = cargo_bin!("finetune").parent().unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    dir.write("typed", input);
    let mut shell = Command::new("bash");
    shell.args(["-c", command]).current_dir(dir.path("."));
    shell.stdin(Stdio::from(std::fs::File::open(dir.path("typed")).unwrap()));
    let output = shell.env("PATH", path).env("HF_HUB_OFFLINE", "1").env("HF_HOME", dir.path("hf")).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{command}\n{}", dir.told(&output.stderr));
    dir.told(&output.stdout)
}

#[test]
fn the_commands_after_a_run_on_chats_work_as_printed() {
    let dir = TestDir::new();
    let said = said(&dir, &lora(&["--eval-dataset", "rows.jsonl"]));
    assert!(said.contains("\ndone in ") && said.contains(": 4 steps, "), "{said}");
    assert!(said.contains("\nheld-out loss: better, ") && said.contains("\npeak memory "), "{said}");
    assert!(said.contains("\nreport: out/report.html\n"), "{said}");
    let commands = next(&said);
    assert_eq!(
        commands,
        [
            "finetune generate --adapter out --chat",
            "finetune merge --adapter out --output out-merged",
            "finetune export --model out-merged --format gguf --output out.gguf",
        ]
    );
    for command in &commands {
        typed(&dir, command, "Count to 4\n");
    }
    assert!(dir.path("out.gguf").is_file());
    // Output names that exist are not suggested again.
    let more = said_again(&dir);
    assert_eq!(next(&more)[1], "finetune merge --adapter again --output again-merged-2");
    assert!(next(&more)[2].ends_with("--output again-2.gguf"), "{more}");
}

fn said_again(dir: &TestDir) -> String {
    std::fs::create_dir(dir.path("again-merged")).unwrap();
    dir.write("again.gguf", "");
    said(dir, &[&lora(&[])[..6], &["--output", "again", "--steps", "1"]].concat())
}

#[test]
fn the_commands_after_a_run_on_prompts_ask_what_was_trained() {
    let dir = TestDir::new();
    let rows: String = (0..8)
        .map(|n| format!("{{\"prompt\": \"What is {n}'s double?\\n\", \"completion\": \"{}\"}}\n", 2 * n))
        .collect();
    dir.write("pairs.jsonl", &rows);
    let args = [
        "--model",
        "model",
        "--dataset",
        "pairs.jsonl",
        "--eval-dataset",
        "pairs.jsonl",
        "--output",
        "run 1",
    ];
    let said = said(&dir, &[&args[..], &["--recipe", "full", "--steps", "2"]].concat());
    let commands = next(&said);
    assert_eq!(commands[0], r"finetune generate --model 'run 1' --prompt $'What is 0\'s double?\n'");
    assert!(commands[1].starts_with("finetune eval --model 'run 1' --recipe 'run 1/recipe.toml' --dataset "));
    assert_eq!(commands[2], "finetune export --model 'run 1' --format gguf --output 'run 1.gguf'");
    for command in &commands {
        let printed = typed(&dir, &command.replace("[DIR]", &dir.path("").display().to_string()), "");
        assert!(!command.contains(" generate ") || printed.starts_with("What is 0's double?\n"), "{printed}");
    }
}

/// Returns the model card of the run in `out`.
fn card(dir: &TestDir) -> String {
    dir.told(&std::fs::read(dir.path("out/README.md")).unwrap())
}

#[test]
fn the_card_of_a_run_on_chats_has_commands_that_work_in_its_folder() {
    let dir = TestDir::new();
    said(&dir, &lora(&[]));
    let card = card(&dir);
    let command = "finetune generate --model [DIR]/model --adapter . --chat";
    for line in [
        command,
        "tokenizer = AutoTokenizer.from_pretrained(\"[DIR]/model\")",
        "model = AutoModelForCausalLM.from_pretrained(\"[DIR]/model\")",
    ] {
        assert!(card.lines().any(|known| known == line), "no {line} in {card}");
    }
    assert!(
        card.contains("apply_chat_template") && card.contains(" for the local model `model`, "),
        "{card}"
    );
    assert!(!card.contains("base_model"), "{card}");
    let command = command.replace("[DIR]", &dir.path(".").canonicalize().unwrap().display().to_string());
    typed(&dir, &format!("cd out && {command}"), "Count to 4\n");
}

#[test]
fn the_card_of_a_run_on_prompts_shows_prompts() {
    let dir = TestDir::new();
    let row = |n: u32| format!("{{\"prompt\": \"twice {n} is\", \"completion\": \" {}\"}}\n", 2 * n);
    dir.write("rows.jsonl", &(0..8).map(row).collect::<String>());
    said(&dir, &lora(&[]));
    let card = card(&dir);
    let command = "finetune generate --model [DIR]/model --adapter . --prompt \"...\"";
    assert!(card.lines().any(|line| line == command), "{card}");
    assert!(card.contains("inputs = tokenizer(\"...\"") && !card.contains("apply_chat_template"), "{card}");
}

#[test]
fn a_run_that_got_worse_says_so_and_why() {
    let dir = TestDir::new();
    let said = said(&dir, &lora(&["--eval-dataset", "rows.jsonl", "--lr", "1.0"]));
    let line = said.lines().find(|line| line.starts_with("held-out loss: ")).unwrap();
    assert!(line.starts_with("held-out loss: worse than before training, "), "{line}");
    assert!(
        line.ends_with("; the learning rate of 1 is 5000 times the usual 2e-4: try `--lr 2e-4`"),
        "{line}"
    );
}

fn metrics(dir: &Path) -> String {
    std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap()
}

#[test]
fn a_resumed_run_keeps_what_it_measured_before_and_a_finished_one_says_so() {
    let dir = TestDir::new();
    said(&dir, &lora(&["--eval-dataset", "rows.jsonl", "--set", "checkpoint.save_steps=2"]));
    let ended = said(&dir, &["--resume", "--output", "out"]);
    assert!(ended.contains("nothing is left to do: the run in out has done its 4 steps"), "{ended}");
    assert!(ended.contains("to train longer: `finetune --resume --output out --steps 8`"), "{ended}");
    assert!(!ended.contains("adapter saved") && !ended.contains("peak memory"), "{ended}");
    // The command works as printed.
    let log = metrics(&dir.path("out"));
    // A step of the first part takes an hour: the total time must include it.
    let first = log.lines().find(|line| line.contains("\"other_secs\"")).unwrap();
    let (start, rest) = first.split_once("\"other_secs\":").unwrap();
    let end = rest.find([',', '}']).unwrap();
    let slow = format!("{start}\"other_secs\":3600.0{}", &rest[end..]);
    dir.write("out/metrics.jsonl", &log.replace(first, &slow));
    let more = said(&dir, &["--resume", "--output", "out", "--steps", "8"]);
    assert!(more.contains("\ndone in 1 h 00 min: 8 steps, "), "{more}");
    assert!(more.contains("\nheld-out loss: better, "), "{more}");
    let card = std::fs::read_to_string(dir.path("out/README.md")).unwrap();
    let row = card.lines().find(|line| line.starts_with("| loss (nats per token) |")).unwrap();
    assert!(!row.contains('–'), "{row}");
}
