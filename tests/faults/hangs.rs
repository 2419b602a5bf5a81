//! A rank that hangs, spins or is stopped ends the run; the error names the rank, its phase and
//! where the others wait. A slow rank, or one stopped together with its whole process, does not end
//! the run.

use std::path::Path;
use std::process::Output;
use std::time::Duration;

#[cfg(target_os = "linux")]
use crate::at_work::{go_on, has_stopped};
use crate::faulty_run::{command, watched};

/// Seconds without progress that a rank may have, instead of 15. The planted clock advances only
/// while one rank is held up and all others wait for it.
const LIMIT: &str = "parallel.timeout_secs=3";

/// The same limit by the real clock: far more than any part of the tiny model takes on a busy
/// machine.
const REAL_LIMIT: &str = "parallel.timeout_secs=10";

/// Time limit of a process.
const PATIENCE: Duration = Duration::from_secs(300);

fn train(output: &Path, fault: &str, ranks: usize) -> Output {
    let mut run = command(output, Some(fault), ranks, &["--set", LIMIT, "--set", "parallel.strategy=auto"]);
    watched(run.env("FINETUNE_CLOCK", "planted").spawn().unwrap(), PATIENCE)
}

fn said(run: &Output) -> String {
    String::from_utf8_lossy(&run.stderr).into_owned()
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_rank_that_hangs_is_named_with_those_that_wait_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let done = train(&dir.path().join("out"), "1:backward:2:hang", 2);
    let text = said(&done);
    assert_eq!(done.status.code(), Some(75), "{text}");
    assert!(text.contains("error: rank 1 hangs: no progress in phase backward\n"), "{text}");
    assert!(text.contains("`parallel.timeout_secs` allows 3.0 s\n"), "{text}");
    assert!(text.contains("caused by: rank 1 is in phase backward; its last call was "), "{text}");
    assert!(text.contains("caused by: rank 0 waits in phase "), "{text}");
    assert!(text.contains("`--resume`"), "{text}");
}

/// A spinning thread looks busy to the system.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_rank_that_computes_for_ever_is_one_that_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let done = train(&dir.path().join("out"), "0:update:2:spin", 2);
    let text = said(&done);
    assert_eq!(done.status.code(), Some(75), "{text}");
    assert!(text.contains("error: rank 0 hangs: no progress in phase update\n"), "{text}");
}

/// No other rank waits for the only rank of a run.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn the_only_rank_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let done = train(&dir.path().join("out"), "0:save:hang", 1);
    let text = said(&done);
    assert_eq!(done.status.code(), Some(75), "{text}");
    assert!(text.contains("error: rank 0 hangs: no progress in phase save\n"), "{text}");
}

/// The rank is a second slower than its peers in each pass, in total longer than the limit.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_slow_rank_does_not_hang() {
    let dir = tempfile::tempdir().unwrap();
    let sets = [REAL_LIMIT, "train.max_steps=12", "eval.steps=12", "checkpoint.save_steps=12"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let output = dir.path().join("out");
    let run = command(&output, Some("1:forward:slow=1000ms"), 2, &sets).spawn().unwrap();
    let done = watched(run, PATIENCE);
    let text = said(&done);
    assert!(done.status.success(), "{text}");
    assert!(text.contains("strikes"), "{text}");
}

/// A process that was stopped for longer than the limit continues where it was.
#[test]
#[cfg(target_os = "linux")]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_process_that_was_stopped_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let mut run = command(&output, Some("0:forward:2:stop"), 2, &["--set", REAL_LIMIT]).spawn().unwrap();
    has_stopped(&mut run);
    std::thread::sleep(Duration::from_secs(12));
    go_on(&run);
    let done = watched(run, PATIENCE);
    assert!(done.status.success(), "{}", said(&done));
}
