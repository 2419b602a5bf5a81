//! The last lines of a run: verdict, memory, report and commands that work as printed; also after a
//! resumed or finished run.

use std::path::Path;
use std::process::{Command, Stdio};

use assert_cmd::cargo::cargo_bin;

use crate::place::{Place, lora};

/// Returns the stderr of a command that must succeed.
fn said(place: &Place, args: &[&str]) -> String {
    let output = place.command(args).output().unwrap();
    let said = place.told(&output.stderr);
    assert!(output.status.success(), "{args:?}\n{said}");
    said
}

/// Returns the commands below `next:`.
fn next(said: &str) -> Vec<String> {
    let (_, commands) = said.split_once("\nnext:\n").unwrap_or_else(|| panic!("{said}"));
    commands.lines().map(|line| line.trim().to_owned()).collect()
}

/// Runs a printed command in a shell with `input` on stdin; returns its stdout.
fn typed(place: &Place, command: &str, input: &str) -> String {
    let folder = cargo_bin!("finetune").parent().unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    place.write("typed", input);
    let mut shell = Command::new("bash");
    shell.args(["-c", command]).current_dir(place.path("."));
    shell.stdin(Stdio::from(std::fs::File::open(place.path("typed")).unwrap()));
    let output = shell.env("PATH", path).env("HF_HUB_OFFLINE", "1").env("HF_HOME", place.path("hf")).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{command}\n{}", place.told(&output.stderr));
    place.told(&output.stdout)
}

#[test]
fn the_commands_after_a_run_on_chats_work_as_printed() {
    let place = Place::new();
    let said = said(&place, &lora(&["--eval-dataset", "rows.jsonl"]));
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
        typed(&place, command, "Count to 4\n");
    }
    assert!(place.path("out.gguf").is_file());
    // Output names that exist are not suggested again.
    let more = said_again(&place);
    assert_eq!(next(&more)[1], "finetune merge --adapter again --output again-merged-2");
    assert!(next(&more)[2].ends_with("--output again-2.gguf"), "{more}");
}

fn said_again(place: &Place) -> String {
    std::fs::create_dir(place.path("again-merged")).unwrap();
    place.write("again.gguf", "");
    said(place, &[&lora(&[])[..6], &["--output", "again", "--steps", "1"]].concat())
}

#[test]
fn the_commands_after_a_run_on_prompts_ask_what_was_trained() {
    let place = Place::new();
    let rows: String = (0..8)
        .map(|n| format!("{{\"prompt\": \"What is {n}'s double?\\n\", \"completion\": \"{}\"}}\n", 2 * n))
        .collect();
    place.write("pairs.jsonl", &rows);
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
    let said = said(&place, &[&args[..], &["--recipe", "full", "--steps", "2"]].concat());
    let commands = next(&said);
    assert_eq!(commands[0], r"finetune generate --model 'run 1' --prompt $'What is 0\'s double?\n'");
    assert!(commands[1].starts_with("finetune eval --model 'run 1' --recipe 'run 1/recipe.toml' --dataset "));
    assert_eq!(commands[2], "finetune export --model 'run 1' --format gguf --output 'run 1.gguf'");
    for command in &commands {
        let printed = typed(&place, &command.replace("[DIR]", &place.path("").display().to_string()), "");
        assert!(!command.contains(" generate ") || printed.starts_with("What is 0's double?\n"), "{printed}");
    }
}

/// Returns the model card of the run in `out`.
fn card(place: &Place) -> String {
    place.told(&std::fs::read(place.path("out/README.md")).unwrap())
}

#[test]
fn the_card_of_a_run_on_chats_has_commands_that_work_in_its_folder() {
    let place = Place::new();
    said(&place, &lora(&[]));
    let card = card(&place);
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
    let command = command.replace("[DIR]", &place.path(".").canonicalize().unwrap().display().to_string());
    typed(&place, &format!("cd out && {command}"), "Count to 4\n");
}

#[test]
fn the_card_of_a_run_on_prompts_shows_prompts() {
    let place = Place::new();
    let row = |n: u32| format!("{{\"prompt\": \"twice {n} is\", \"completion\": \" {}\"}}\n", 2 * n);
    place.write("rows.jsonl", &(0..8).map(row).collect::<String>());
    said(&place, &lora(&[]));
    let card = card(&place);
    let command = "finetune generate --model [DIR]/model --adapter . --prompt \"...\"";
    assert!(card.lines().any(|line| line == command), "{card}");
    assert!(card.contains("inputs = tokenizer(\"...\"") && !card.contains("apply_chat_template"), "{card}");
}

#[test]
fn a_run_that_got_worse_says_so_and_why() {
    let place = Place::new();
    let said = said(&place, &lora(&["--eval-dataset", "rows.jsonl", "--lr", "1.0"]));
    let line = said.lines().find(|line| line.starts_with("held-out loss: ")).unwrap();
    assert!(line.starts_with("held-out loss: worse than before training, "), "{line}");
    assert!(
        line.ends_with("; the learning rate of 1 is 5000 times the usual 2e-4: try `--lr 2e-4`"),
        "{line}"
    );
}

fn metrics(place: &Path) -> String {
    std::fs::read_to_string(place.join("metrics.jsonl")).unwrap()
}

#[test]
fn a_resumed_run_keeps_what_it_measured_before_and_a_finished_one_says_so() {
    let place = Place::new();
    said(&place, &lora(&["--eval-dataset", "rows.jsonl", "--set", "checkpoint.save_steps=2"]));
    let ended = said(&place, &["--resume", "--output", "out"]);
    assert!(ended.contains("nothing is left to do: the run in out has done its 4 steps"), "{ended}");
    assert!(ended.contains("to train longer: `finetune --resume --output out --steps 8`"), "{ended}");
    assert!(!ended.contains("adapter saved") && !ended.contains("peak memory"), "{ended}");
    // The command works as printed.
    let log = metrics(&place.path("out"));
    // A step of the first part takes an hour: the total time must include it.
    let first = log.lines().find(|line| line.contains("\"other_secs\"")).unwrap();
    let (start, rest) = first.split_once("\"other_secs\":").unwrap();
    let end = rest.find([',', '}']).unwrap();
    let slow = format!("{start}\"other_secs\":3600.0{}", &rest[end..]);
    place.write("out/metrics.jsonl", &log.replace(first, &slow));
    let more = said(&place, &["--resume", "--output", "out", "--steps", "8"]);
    assert!(more.contains("\ndone in 1 h 00 min: 8 steps, "), "{more}");
    assert!(more.contains("\nheld-out loss: better, "), "{more}");
    let card = std::fs::read_to_string(place.path("out/README.md")).unwrap();
    let row = card.lines().find(|line| line.starts_with("| loss (nats per token) |")).unwrap();
    assert!(!row.contains('–'), "{row}");
}
