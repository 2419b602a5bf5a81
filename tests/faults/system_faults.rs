//! Faults of the system during a command: signals in pairs, file size limits, and outputs that
//! cannot be written.
#![cfg(unix)]

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::at_work::{go_on, has_stopped, stops_at_work};
use crate::test_dir::{TestDir, lora};

/// Returns `command` as run by a shell after `setup`.
pub(crate) fn in_shell(setup: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &format!("{setup}; exec \"$0\" \"$@\"")])
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell.current_dir(command.get_current_dir().unwrap()).stdin(Stdio::null());
    shell
}

/// A job's signal may reach a process twice, directly and through its group: it counts once, and
/// the run saves.
#[test]
fn two_signals_at_once_are_one() {
    let dir = TestDir::new();
    let mut run = dir.command(&lora(&["--set", "train.max_steps=200"]));
    let mut child = stops_at_work(&mut run).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    while !std::fs::read_to_string(dir.path("out/metrics.jsonl")).is_ok_and(|text| text.lines().count() > 0) {
        assert!(child.try_wait().unwrap().is_none(), "the run ended before it was stopped");
        sleep(Duration::from_millis(2));
    }
    // Both signals are pending until the run continues, and arrive together.
    has_stopped(&mut child);
    let pid = child.id().to_string();
    // One process sends both with no delay; two of the same kind could merge into one.
    let both = Command::new("sh").args(["-c", "kill -TERM $0; kill -INT $0", &pid]).status();
    assert!(both.unwrap().success());
    go_on(&child);
    let done = child.wait_with_output().unwrap();
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(85), "{said}");
    assert!(said.contains("as asked, saved in out/checkpoint-"), "{said}");
}

/// `ulimit -f` would end a process by SIGXFSZ without a message.
#[test]
fn a_limit_on_the_size_of_files_is_an_error() {
    let dir = TestDir::new();
    let args = lora(&["--set", "checkpoint.save_steps=2", "--set", "log.tensorboard=false"]);
    // Blocks have 512 or 1024 bytes: the adapter is larger than the limit, the log is not.
    let done = in_shell("ulimit -f 64", &dir.command(&args)).output().unwrap();
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(74), "{said}");
    assert!(said.contains("error: cannot save step 2\n") && said.contains("File too large"), "{said}");
    let left: Vec<_> =
        std::fs::read_dir(dir.path("out")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    let begun = left.iter().any(|name| name.to_string_lossy().starts_with("checkpoint-"));
    assert!(!begun, "nothing half written stays: {left:?}");
}

/// Help on a full disk is an error; a closed pipe is not.
#[test]
#[cfg(target_os = "linux")]
fn help_on_a_full_disk_is_an_error() {
    let dir = TestDir::new();
    for args in [&["--help"][..], &["--version"], &["merge", "--help"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let done = dir.command(args).stdout(full).output().unwrap();
        let said = dir.told(&done.stderr);
        assert_eq!(done.status.code(), Some(74), "{args:?}: {said}");
        assert!(said.starts_with("error: cannot write the output\n"), "{said}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let done = dir.command(args).stdout(writer).output().unwrap();
        assert_eq!(done.status.code(), Some(0), "{args:?}: {}", dir.told(&done.stderr));
    }
    assert_eq!(dir.command(&["--nonsense"]).output().unwrap().status.code(), Some(2));
}
