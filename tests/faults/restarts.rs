//! `--max-restarts`: a run that crashes, is killed or hangs restarts by itself and ends like the
//! unbroken run. Failures that the user must fix, and runs that the user ended, are not restarted.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use crate::faulty_run::{command, names, watched};

/// Time limit of a run after its first fault, restarts included.
const PATIENCE: Duration = Duration::from_secs(300);

/// Uses a planted clock, so that only the delayed rank counts as hanging.
fn train(output: &Path, fault: Option<&str>, more: &[&str]) -> Output {
    watched(command(output, fault, 2, more).env("FINETUNE_CLOCK", "planted").spawn().unwrap(), PATIENCE)
}

fn said(run: &Output) -> String {
    String::from_utf8_lossy(&run.stderr).into_owned()
}

/// Returns the trained weights in a folder.
fn weights(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let files = names(folder).into_iter().filter(|name| name.ends_with(".safetensors"));
    files.map(|name| (name.clone(), std::fs::read(folder.join(&name)).unwrap())).collect()
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_run_that_is_lost_goes_on_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let output = |name: &str| -> PathBuf { dir.path().join(name) };
    assert!(train(&output("whole"), None, &[]).status.success());
    let whole = weights(&output("whole"));
    assert_eq!(whole.len(), 2);
    // Each fault strikes in the third step of the first run, whose phases run once more for the
    // longest micro-batch. The restarted run has one step left.
    for (kind, how) in [("panic", "ended with exit code 75"), ("exit", "ended with exit code 3")] {
        let fault = format!("1:backward:4:{kind}");
        let done = train(&output(kind), Some(&fault), &["--max-restarts", "2"]);
        let text = said(&done);
        assert!(done.status.success(), "{kind}: {text}");
        let warning = format!("the run {how}: restart 1 of 2, from the newest checkpoint");
        assert_eq!(text.matches("restart 1 of 2").count(), 1, "{kind}: {text}");
        assert!(text.contains(&warning), "{kind}: {text}");
        assert!(weights(&output(kind)) == whole, "{kind}: other weights");
    }
    let more = ["--max-restarts", "1", "--set", "parallel.timeout_secs=3"];
    let done = train(&output("hang"), Some("1:backward:4:hang"), &more);
    let text = said(&done);
    assert!(done.status.success(), "{text}");
    assert!(text.contains("rank 1 hangs: no progress in phase backward"), "{text}");
    assert!(weights(&output("hang")) == whole, "other weights after a hang");
}

/// A recurring fault ends the run after the last restart, with its own exit code. A user error ends
/// it at once.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn restarts_are_used_up_or_of_no_use() {
    let dir = tempfile::tempdir().unwrap();
    let done = train(&dir.path().join("out"), Some("1:data:error"), &["--max-restarts", "1"]);
    let text = said(&done);
    assert_eq!(done.status.code(), Some(75), "{text}");
    assert_eq!(text.matches("rank 1 failed in phase data").count(), 2, "{text}");
    let done =
        train(&dir.path().join("other"), None, &["--max-restarts", "3", "--set", "data.max_seq_len=1"]);
    let text = said(&done);
    assert_eq!(done.status.code(), Some(1), "{text}");
    assert!(!text.contains("restart"), "{text}");
}

/// The parent refuses an occupied folder. A process would refuse the recipe first.
#[test]
fn an_occupied_folder_is_refused_before_a_process_starts() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("notes.txt"), "").unwrap();
    let done = train(dir.path(), None, &["--max-restarts", "1", "--set", "train.nonsense=1"]);
    let text = said(&done);
    assert_eq!(done.status.code(), Some(1), "{text}");
    assert!(text.contains("error: cannot write to ") && !text.contains("nonsense"), "{text}");
}

/// A signal to the parent reaches the run, which saves and is not restarted.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_run_that_is_asked_to_stop_stays_so() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let more = ["--max-restarts", "3", "--set", "train.max_steps=400"];
    let run = command(&output, Some("0:data:slow=50ms"), 2, &more).spawn().unwrap();
    let begin = Instant::now();
    while !output.join("checkpoint-1").exists() {
        assert!(begin.elapsed() < PATIENCE, "nothing was saved");
        std::thread::sleep(Duration::from_millis(20));
    }
    // SAFETY: a signal to a process that this test started and has not waited for.
    unsafe { libc::kill(libc::pid_t::try_from(run.id()).unwrap(), libc::SIGTERM) };
    let done = watched(run, PATIENCE);
    let text = said(&done);
    assert_eq!(done.status.code(), Some(85), "{text}");
    assert!(!text.contains("restart "), "{text}");
}

/// The system kills the run, as it does when memory runs out.
#[test]
#[cfg(target_os = "linux")]
fn a_run_that_is_killed_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let more = ["--max-restarts", "1", "--set", "train.max_steps=12"];
    // Slow enough to be killed on the way, also on a busy machine.
    let run = command(&output, Some("0:data:slow=300ms"), 2, &more).spawn().unwrap();
    let children = format!("/proc/{0}/task/{0}/children", run.id());
    let begin = Instant::now();
    while !output.join("checkpoint-1").exists() {
        assert!(begin.elapsed() < PATIENCE, "nothing was saved");
        std::thread::sleep(Duration::from_millis(5));
    }
    let child = std::fs::read_to_string(children).unwrap().trim().parse().unwrap();
    // SAFETY: a signal to the child of a process that this test started; its parent has not waited
    // for it.
    unsafe { libc::kill(child, libc::SIGKILL) };
    let done = watched(run, PATIENCE);
    let text = said(&done);
    assert!(done.status.success(), "{text}");
    assert!(text.contains("the run was killed by signal 9: restart 1 of 1"), "{text}");
}
