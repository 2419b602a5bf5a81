//! A rank that hangs, computes for ever or is stopped ends the run with its name, its phase and where the others wait; one
//! that is slow, or that was stopped together with its process, does not.

use std::path::Path;
use std::process::{Child, Output};
use std::time::{Duration, Instant};

use super::failure::{command, watched};

/// What the tests allow a rank instead of 15 seconds; far more than a step of the tiny model takes on a busy machine.
const LIMIT: &str = "parallel.timeout_secs=3";

/// From the moment a rank hangs to the end of its process, where the machine is busy.
const PROMISE: Duration = Duration::from_secs(60);

fn train(output: &Path, fault: &str, ranks: usize) -> Output {
    let more = ["--set", LIMIT, "--set", "parallel.strategy=auto"];
    watched(command(output, Some(fault), ranks, &more).spawn().unwrap(), PROMISE)
}

fn said(run: &Output) -> String {
    String::from_utf8_lossy(&run.stderr).into_owned()
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_rank_that_hangs_is_named_with_those_that_wait_for_it() {
    let place = tempfile::tempdir().unwrap();
    let done = train(&place.path().join("out"), "1:backward:2:hang", 2);
    let text = said(&done);
    assert_eq!(done.status.code(), Some(75), "{text}");
    assert!(text.contains("error: rank 1 hangs: no progress in phase backward\n"), "{text}");
    assert!(text.contains("`parallel.timeout_secs` allows 3.0 s\n"), "{text}");
    assert!(text.contains("caused by: rank 1 is in phase backward; its last call was "), "{text}");
    assert!(text.contains("caused by: rank 0 waits in phase "), "{text}");
    assert!(text.contains("`--resume`"), "{text}");
}

/// A thread that computes without an end looks busy to the system.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_rank_that_computes_for_ever_is_one_that_hangs() {
    let place = tempfile::tempdir().unwrap();
    let done = train(&place.path().join("out"), "0:update:2:spin", 2);
    let text = said(&done);
    assert_eq!(done.status.code(), Some(75), "{text}");
    assert!(text.contains("error: rank 0 hangs: no progress in phase update\n"), "{text}");
}

/// Nobody waits for the only rank of a run.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn the_only_rank_hangs() {
    let place = tempfile::tempdir().unwrap();
    let done = train(&place.path().join("out"), "0:save:hang", 1);
    let text = said(&done);
    assert_eq!(done.status.code(), Some(75), "{text}");
    assert!(text.contains("error: rank 0 hangs: no progress in phase save\n"), "{text}");
}

/// Ten times slower than its peers in each pass, which is seconds here and far longer in all than a rank may be silent.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_slow_rank_does_not_hang() {
    let place = tempfile::tempdir().unwrap();
    let done = train(&place.path().join("out"), "1:forward:slow=1500ms", 2);
    let text = said(&done);
    assert!(done.status.success(), "{text}");
    assert!(text.contains("strikes"), "{text}");
    assert!(text.contains("rank 1 was the slowest"), "{text}");
}

/// Whether Linux says that a process is stopped.
fn is_stopped(run: &Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", run.id())).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
}

/// A process that was stopped for longer than its ranks may be silent goes on where it was.
#[test]
#[cfg(target_os = "linux")]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_process_that_was_stopped_goes_on() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("out");
    let run = command(&output, Some("0:forward:2:stop"), 2, &["--set", LIMIT]).spawn().unwrap();
    let begin = Instant::now();
    while !is_stopped(&run) {
        assert!(begin.elapsed() < PROMISE, "the process was not stopped");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_secs(4));
    // SAFETY: a signal to a process that this test has started and not waited for.
    unsafe { libc::kill(libc::pid_t::try_from(run.id()).unwrap(), libc::SIGCONT) };
    let done = watched(run, PROMISE);
    assert!(done.status.success(), "{}", said(&done));
}
