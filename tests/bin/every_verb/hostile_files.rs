//! Input paths that are no regular files, endless tables, escape sequences in text, and code that
//! comes with a model: one clear error each, without waiting.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::test_dir::{TestDir, lora};

/// Returns the output of a command that must end soon by itself.
fn ended(mut command: Command) -> Output {
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(300) {
            child.kill().unwrap();
            panic!("{command:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// Returns the only error of a command that must be refused with exit code 1.
fn refused(dir: &TestDir, args: &[&str]) -> String {
    let output = ended(dir.command(args));
    let said = dir.told(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
    assert_eq!(said.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{said}");
    assert!(!said.contains("internal error"), "{said}");
    said
}

fn fifo(path: &Path) {
    let _ = std::fs::remove_file(path);
    let made = Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}

/// Replaces `name`, in turn, by a FIFO without a writer, a link to one, and a link to an endless
/// device; each must be refused.
fn no_files(dir: &TestDir, name: &str, args: &[&str]) {
    let path = dir.path(name);
    let pipe = dir.path("a-pipe");
    fifo(&pipe);
    let put = [
        ("a FIFO", &(|| fifo(&path)) as &dyn Fn()),
        ("a FIFO", &|| symlink(&pipe, &path).unwrap()),
        ("a device", &|| symlink("/dev/zero", &path).unwrap()),
    ];
    for (kind, put) in put {
        let _ = std::fs::remove_file(&path);
        put();
        let said = refused(dir, args);
        assert!(said.contains(kind) || said.contains("it is not a file"), "{name}: {said}");
        assert!(said.contains(name), "{said}");
    }
}

#[test]
fn what_is_no_file_is_refused_at_once() {
    let data = ["data", "--model", "model", "--dataset", "rows.jsonl", "--quiet"];
    no_files(&TestDir::new(), "rows.jsonl", &data);
    no_files(&TestDir::new(), "model/config.json", &data);
    no_files(&TestDir::new(), "model/tokenizer_config.json", &data);
    no_files(&TestDir::new(), "model/model.safetensors", &["inspect", "model"]);
}

#[test]
fn other_input_files_that_are_none() {
    let dir = TestDir::new();
    let train = lora(&["--dry-run"]);
    let recipe: Vec<&str> = train.iter().map(|arg| if *arg == "lora" { "mine.toml" } else { arg }).collect();
    no_files(&dir, "mine.toml", &recipe);
    let dir = TestDir::new();
    no_files(&dir, "rows.csv", &["data", "--model", "model", "--dataset", "rows.csv"]);
    no_files(&dir, "rows.parquet", &["data", "--model", "model", "--dataset", "rows.parquet"]);
    // A FIFO counts as a missing file.
    fifo(&dir.path("model/tokenizer.json"));
    let said = refused(&dir, &["data", "--model", "model", "--dataset", "rows.jsonl"]);
    assert!(said.contains("tokenizer.json"), "{said}");
}

#[test]
fn a_quote_that_is_not_closed_swallows_nothing_in_silence() {
    let dir = TestDir::new();
    dir.write("rows.csv", "prompt,completion\na,b\nc,\"d\ne,f\ng,h\n");
    let said = refused(&dir, &["data", "--model", "model", "--dataset", "rows.csv"]);
    assert!(said.contains("the quoted field that begins on line 3 does not end"), "{said}");
    let wide = vec!["c"; 200_000].iter().enumerate().map(|(i, c)| format!("{c}{i}")).collect::<Vec<_>>();
    dir.write("wide.csv", &format!("{}\n", wide.join(",")));
    let said = refused(&dir, &["data", "--model", "model", "--dataset", "wide.csv"]);
    assert!(said.contains("200000 columns"), "{said}");
}

#[test]
fn text_that_is_not_utf_8_is_the_users_fault_with_its_line() {
    let dir = TestDir::new();
    std::fs::write(dir.path("mine.toml"), b"[train]\nseed = 1\n# \xFF\n").unwrap();
    let said = refused(&dir, &["--model", "model", "--recipe", "mine.toml", "--dataset", "rows.jsonl"]);
    assert!(said.contains("the first bad byte is in line 3, 19 bytes after"), "{said}");
    std::fs::write(dir.path("model/config.json"), b"{\"model_type\": \"\xFF\"}").unwrap();
    refused(&dir, &["data", "--model", "model", "--dataset", "rows.jsonl"]);
}

#[test]
fn a_loop_of_links_is_read_once() {
    let dir = TestDir::new();
    std::fs::create_dir_all(dir.path("rows/deep")).unwrap();
    std::fs::copy(dir.path("rows.jsonl"), dir.path("rows/a.jsonl")).unwrap();
    symlink(dir.path("rows"), dir.path("rows/deep/again")).unwrap();
    symlink(dir.path("rows/deep"), dir.path("rows/aside")).unwrap();
    let rows = |dataset: &str| {
        let output = ended(dir.command(&["data", "--model", "model", "--dataset", dataset, "--rows", "0"]));
        assert!(output.status.success(), "{}", dir.told(&output.stderr));
        dir.told(&output.stdout)
    };
    let (alone, looped) = (rows("rows.jsonl"), rows("rows"));
    assert!(looped.contains("leads to a folder that is read already"), "{looped}");
    let count = |text: &str| text.lines().find(|line| line.contains(" rows")).unwrap().to_owned();
    assert_eq!(
        count(&alone).split(" rows").next(),
        count(&looped).split(" rows").next(),
        "{alone}\n{looped}"
    );
}

/// Text from files in every kind of message: no escape sequence reaches the terminal.
#[test]
fn escapes_in_files_are_shown_not_sent() {
    let dir = TestDir::new();
    let evil = "\u{1b}]0;owned\u{7}\u{9b}2J\u{202e}";
    let check = |args: &[&str], wanted: &str| {
        let output = ended(dir.command(args));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(wanted), "{said:?}");
        let raw = said.chars().find(|c| (c.is_control() && !"\n\t".contains(*c)) || *c == '\u{202e}');
        assert_eq!(raw, None, "{said:?}");
    };
    let data = ["data", "--model", "model", "--dataset", "rows.jsonl"];
    // JSON allows no raw control characters except in a quoted key, so they appear as escapes.
    dir.write("rows.jsonl", &format!("{{\"\\u001b]0;owned{}\": 1}}\n", "\\u009b2J\\u202e"));
    check(&data, r"\u{1b}]0;owned");
    dir.write("rows.csv", &format!("a{evil},a{evil}\n1,2\n"));
    check(&["data", "--model", "model", "--dataset", "rows.csv"], r"\u{1b}");
    dir.write(&format!("{evil}.jsonl"), "not json\n");
    check(&["data", "--model", "model", "--dataset", &format!("{evil}.jsonl")], r"\u{1b}]0;owned");
    dir.write("model/config.json", "{\"model_type\": \"\\u001b[31mred\"}");
    check(&["data", "--model", "model", "--dataset", "rows.csv"], "[31mred");
    check(&["--recipe", evil], r"\u{1b}]0;owned");
}

#[test]
fn code_that_comes_with_a_model_is_named_and_not_run() {
    let dir = TestDir::new();
    let path = dir.path("model/config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["auto_map"] = serde_json::json!({"AutoModelForCausalLM": "modeling_own.OwnModel"});
    std::fs::write(&path, config.to_string()).unwrap();
    dir.write("model/modeling_own.py", "open('ran', 'w')\n");
    let output = ended(dir.command(&["data", "--model", "model", "--dataset", "rows.jsonl"]));
    let said = dir.told(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("warning: `auto_map` of config.json names modeling_own.OwnModel"), "{said}");
    assert!(said.contains("never reads or runs code"), "{said}");
    assert!(!dir.path("ran").exists());
}

#[test]
fn pickles_are_refused_with_a_way_out() {
    let dir = TestDir::new();
    dir.write("rows.pkl", "\u{80}");
    let said = refused(&dir, &["data", "--model", "model", "--dataset", "rows.pkl"]);
    assert!(said.contains("pickle, which can run code") && said.contains("hint: "), "{said}");
    std::fs::rename(dir.path("model/model.safetensors"), dir.path("model/pytorch_model.bin")).unwrap();
    let said = refused(&dir, &["inspect", "model"]);
    assert!(said.contains("pickle files (pytorch_model.bin)") && said.contains("hint: convert it"), "{said}");
}

/// A model's template that exhausts memory ends neither the run nor the machine.
#[test]
fn a_template_that_takes_all_memory_is_a_fault_of_its_rows() {
    let dir = TestDir::new();
    let rows = std::fs::read_to_string(dir.path("rows.jsonl")).unwrap();
    dir.write("rows.jsonl", rows.lines().next().unwrap());
    let bomb = "{% set ns = namespace(x='aaaaaaaa') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}";
    dir.write("model/chat_template.jinja", bomb);
    let said = refused(&dir, &["data", "--model", "model", "--dataset", "rows.jsonl"]);
    // On a busy machine the time limit may be reached before the memory limit.
    let memory = said.contains("it needs more than 512 MiB of memory");
    assert!(memory || said.contains("it takes more processor time"), "{said}");
    dir.write("model/chat_template.jinja", &format!("{{{{ {}1 }}}}", "1+".repeat(100_000)));
    let said = refused(&dir, &["data", "--model", "model", "--dataset", "rows.jsonl"]);
    assert!(said.contains("it nests too deep"), "{said}");
}
