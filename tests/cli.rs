//! The binary from the outside: help, exit codes, and the verbs that need no model.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use assert_cmd::cargo::cargo_bin;
use insta::assert_snapshot;

fn finetune(folder: &Path, args: &[&str]) -> Output {
    Command::new(cargo_bin!("finetune"))
        .args(args)
        .current_dir(folder)
        .env_remove("RUST_BACKTRACE")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Exit code, standard output and standard error as one text.
fn told(args: &[&str]) -> String {
    let output = finetune(Path::new(env!("CARGO_TARGET_TMPDIR")), args);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap().replace(".exe", "");
    format!("exit {:?}\n{}{}", output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn help_of_the_root() {
    assert_snapshot!(told(&["--help"]), @"");
    assert_eq!(told(&[]).replace("exit 2", "exit 0"), told(&["--help"]), "nothing asked: help");
}

#[test]
fn help_of_every_verb() {
    assert_snapshot!(told(&["merge", "--help"]), @"");
    assert_snapshot!(told(&["generate", "--help"]), @"");
    assert_snapshot!(told(&["eval", "--help"]), @"");
    assert_snapshot!(told(&["inspect", "--help"]), @"");
    assert_snapshot!(told(&["data", "--help"]), @"");
    assert_snapshot!(told(&["recipes", "--help"]), @"");
    assert_snapshot!(told(&["doctor", "--help"]), @"");
    assert_snapshot!(told(&["completions", "--help"]), @"");
}

#[test]
fn usage_errors() {
    assert_snapshot!(told(&["merg"]), @"");
    assert_snapshot!(told(&["--modle", "x"]), @"");
    assert_snapshot!(told(&["my.toml"]), @"");
    assert_snapshot!(told(&["--recipe", "lora", "merge"]), @"");
    assert_snapshot!(told(&["--recipe", "lora", "--gpus", "3-1"]), @"");
    assert_snapshot!(told(&["merge", "--model", "m", "--adapter", "a", "--output", "o", "--dtype", "bf15"]), @"");
    assert_snapshot!(told(&["generate", "--model", "m"]), @"");
    assert_snapshot!(told(&["generate", "--model", "m", "--prompt", "p", "--top-p", "1.5"]), @"");
    assert_snapshot!(told(&["--recipe", "lora", "--quiet", "-v"]), @"");
}

#[test]
fn recipes_listed_and_shown() {
    assert_eq!(told(&["recipes"]), told(&["recipes", "list"]));
    assert_snapshot!(told(&["recipes"]), @"");
    let shown = told(&["recipes", "show", "lora.toml"]);
    assert_eq!(shown, format!("exit 0\n{}", include_str!("../recipes/lora.toml")));
    assert_snapshot!(told(&["recipes", "show", "reference"]), @"");
    assert_snapshot!(told(&["recipes", "show", "flul"]), @"");
}

#[test]
fn a_recipe_is_written_once() {
    let folder = tempfile::tempdir().unwrap();
    let first = finetune(folder.path(), &["recipes", "write", "full"]);
    assert!(first.status.success());
    assert_eq!(first.stdout, b"full.toml\n");
    let path = folder.path().join("full.toml");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), include_str!("../recipes/full.toml"));

    std::fs::write(&path, "mine").unwrap();
    let second = finetune(folder.path(), &["recipes", "write", "full"]);
    assert_eq!((second.status.code(), std::fs::read(&path).unwrap()), (Some(1), b"mine".to_vec()));
    assert_snapshot!(String::from_utf8(second.stderr).unwrap(), @"");
}

#[test]
fn completions_know_the_verbs() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = told(&["completions", shell]);
        assert!(
            script.starts_with("exit 0\n") && script.contains("eval-dataset") && script.contains("merge"),
            "{shell}"
        );
    }
}

/// `finetune recipes show reference | head -1` is no crash.
#[cfg(unix)]
#[test]
fn a_reader_may_leave() {
    let mut child = Command::new(cargo_bin!("finetune"))
        .args(["completions", "zsh"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()));
}

/// An output that cannot be written is said, with the exit code of storage.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_said() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Command::new(cargo_bin!("finetune")).arg("recipes").stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(74));
    assert_snapshot!(String::from_utf8(output.stderr).unwrap(), @"");
}
