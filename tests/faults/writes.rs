//! A kill and an error at every call with which a run changes its folder.

use crate::child::{assert_goes_on, assert_sound, command, last_saved};
use crate::faults::{ALL, Fault, NEEDED, calls, library};
use crate::{assert_tidy, finish};

/// Returns the calls of an undisturbed run.
fn all_calls(ops: &str) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    calls(&mut command("fresh", &output), &output, ops)
}

#[test]
fn a_kill_at_every_call() {
    if library().is_none() {
        return;
    }
    let calls = all_calls(ALL);
    for letter in ALL.chars() {
        assert!(calls.iter().any(|call| call.starts_with(letter)), "no call {letter} among {calls:?}");
    }
    for (at, call) in calls.iter().enumerate() {
        let (at, what) = (at + 1, format!("killed at {call}"));
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("out");
        let mut run = command("fresh", &output);
        Fault { at, what: "kill".into(), ops: ALL, ..Fault::default() }.strike(&mut run, &output, None);
        let done = finish(&mut run);
        assert_eq!(done.code, None, "{what}: {done:?}");
        assert_sound(&output, last_saved(&done), &what);
        assert_goes_on(&output, &what);
    }
}

/// Each call fails once; for a full or read-only disk all later ones fail, too.
#[test]
fn an_error_at_every_call() {
    if library().is_none() {
        return;
    }
    let errors = [
        (libc::ENOSPC, "No space left on device", "owm"),
        (libc::EROFS, "Read-only file system", "owtsrmu"),
        (libc::EDQUOT, "Disk quota exceeded", "owm"),
        (libc::EIO, "Input/output error", ""),
    ];
    let mut ended = 0;
    let calls = all_calls(NEEDED);
    for (at, call) in calls.iter().enumerate() {
        let (code, text, sticky) = errors[at % errors.len()];
        let (at, what) = (at + 1, format!("{text} at {call}"));
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("out");
        let mut run = command("fresh", &output);
        let fault = Fault { at, what: code.to_string(), ops: NEEDED, sticky, ..Fault::default() };
        fault.strike(&mut run, &output, None);
        let done = finish(&mut run);
        // Cleanup may fail.
        let well = done.code == Some(0) && done.said.contains("published\n");
        let clear = done.code == Some(74) && done.errors.contains(text);
        assert!(well || clear, "{what}: {done:?}");
        ended += usize::from(clear);
        assert_sound(&output, last_saved(&done), &what);
        assert_goes_on(&output, &what);
    }
    assert!(ended + 5 >= calls.len(), "only {ended} of {} errors ended a run", calls.len());
}

/// An old checkpoint that cannot be removed causes one warning, stays, and ends no run.
#[test]
fn a_checkpoint_that_cannot_be_removed() {
    if library().is_none() {
        return;
    }
    for (ops, only) in [("r", "-removed"), ("u", "-removed")] {
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("out");
        let mut run = command("fresh", &output);
        let fault = Fault { at: 1, what: libc::EACCES.to_string(), ops, only, sticky: ops, free: None };
        fault.strike(&mut run, &output, None);
        let done = finish(&mut run);
        assert!(done.code == Some(0) && done.said.contains("published\n"), "{done:?}");
        let said = "cannot be removed and stays: Permission denied";
        assert_eq!(done.said.matches(said).count(), 1, "{done:?}");
        assert_sound(&output, 4, only);
        assert_eq!(output.join("checkpoint-2").exists(), ops == "r");
        // The next run saves nothing more, so it removes only leftovers.
        let next = finish(&mut command("resume", &output));
        assert!(next.code == Some(0) && next.said.contains("published\n"), "{next:?}");
        assert_tidy(&output, only);
    }
}
