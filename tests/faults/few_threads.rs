//! Threads that the system refuses to start, as under `ulimit -u` or pids.max.

use crate::faults::library;
use crate::test_dir::{TestDir, lora};

/// Upper bound for the threads of a command.
const MOST: usize = 60;

/// Runs the command with ever more threads until it gets all it starts. Each earlier run must end
/// with 75 and name the limit, or continue without an optional thread. Returns how many ended.
fn with_ever_more_threads(dir: &TestDir, args: &[&str], output: &str) -> usize {
    let mut refused = 0;
    for from in 1..MOST {
        let mut command = dir.command(args);
        command.env("LD_PRELOAD", library().unwrap()).env("FAULT_THREADS", from.to_string());
        let done = command.env("RAYON_NUM_THREADS", "2").output().unwrap();
        let said = dir.told(&done.stderr);
        for text in ["internal error", "panicked", "RUST_BACKTRACE", "report it"] {
            assert!(!said.contains(text), "{text}, thread {from} of {args:?}: {said}");
        }
        let named = said.contains("`ulimit -u`") && said.contains("pids.max");
        match done.status.code() {
            Some(75) => {
                assert!(named, "thread {from} of {args:?}: {said}");
                refused += 1;
            }
            Some(0) if !named => return refused,
            code => assert_eq!(code, Some(0), "thread {from} of {args:?}: {said}"),
        }
        drop(std::fs::remove_dir_all(dir.path(output)));
    }
    panic!("{args:?} starts {MOST} threads or more");
}

#[test]
fn a_thread_that_the_system_refuses_is_a_limit_that_is_named() {
    if library().is_none() {
        return;
    }
    let dir = TestDir::new();
    let short = ["--set", "train.max_steps=2", "--set", "checkpoint.save_steps=1"];
    let in_ranks = [&short[..], &["--ranks", "2"]].concat();
    let eval = ["eval", "--model", "model", "--dataset", "rows.jsonl"];
    let export = ["export", "--model", "model", "--format", "hf", "--type", "f16", "--output", "half"];
    for (args, output, least) in [
        (lora(&short), "out", 4),
        (lora(&in_ranks), "out", 5),
        (eval.to_vec(), "out", 2),
        (export.to_vec(), "half", 3),
    ] {
        let refused = with_ever_more_threads(&dir, &args, output);
        assert!(refused >= least, "{args:?}: {refused}");
    }
}

/// Commands that compute nothing need no threads.
#[test]
fn what_only_shows_starts_no_thread() {
    if library().is_none() {
        return;
    }
    let dir = TestDir::new();
    for args in [&["recipes"][..], &["completions", "bash"], &["inspect", "model"], &["--help"]] {
        let mut command = dir.command(args);
        command.env("LD_PRELOAD", library().unwrap()).env("FAULT_THREADS", "1");
        let done = command.output().unwrap();
        assert_eq!(done.status.code(), Some(0), "{args:?}: {}", dir.told(&done.stderr));
    }
}
