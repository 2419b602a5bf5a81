//! A disk without enough space, reported before a run and before a save, and a disk that fills up
//! during a save.

use std::process::Command;

use finetune::checkpoint;

use crate::faults::{Fault, library};
use crate::test_dir::{TestDir, lora};
use crate::{Done, assert_tidy, finish};

/// A run that saves every step into `out`.
fn train(dir: &TestDir, more: &[&str]) -> Command {
    let output = dir.path("out").display().to_string();
    let keys = ["--quiet", "--set", "checkpoint.save_steps=1", "--set", "log.tensorboard=false"];
    let args = lora(&[&keys[..], more].concat());
    let args: Vec<&str> = args.into_iter().map(|arg| if arg == "out" { &output } else { arg }).collect();
    let mut command = dir.command(&args);
    command.env("RAYON_NUM_THREADS", "1");
    command
}

/// Checks for exit code 74 and the texts `said` in order.
fn assert_storage(dir: &TestDir, done: &Done, said: &[&str]) {
    let text = dir.told(done.errors.as_bytes());
    assert_eq!(done.code, Some(74), "{text}");
    let mut rest = text.as_str();
    for part in said {
        let at = rest.find(part).unwrap_or_else(|| panic!("no `{part}` in {text}"));
        rest = &rest[at + part.len()..];
    }
}

#[test]
fn a_run_that_has_no_room_does_not_begin() {
    if library().is_none() {
        return;
    }
    let dir = TestDir::new();
    let mut run = train(&dir, &["--set", "checkpoint.keep_last=3"]);
    Fault { at: 1, free: Some(1000), ..Fault::default() }.strike(&mut run, &dir.path("out"), None);
    let done = finish(&mut run);
    let said = [
        "error: cannot train into [DIR]/out\n",
        "are needed on the disk of [DIR]/out/.finetune: 1000 B available\n",
        "hint: free space on that disk",
    ];
    assert_storage(&dir, &done, &said);
    assert!(!dir.path("out").exists(), "nothing is left of the try");
}

#[test]
fn a_save_that_has_no_room_does_not_begin() {
    if library().is_none() {
        return;
    }
    let dir = TestDir::new();
    let whole = finish(&mut train(&dir, &[]));
    assert_eq!(whole.code, Some(0), "{whole:?}");
    let adapter = || std::fs::read(dir.path("out/adapter_model.safetensors")).unwrap();
    let wanted = adapter();
    std::fs::remove_dir_all(dir.path("out")).unwrap();
    let mut run = train(&dir, &[]);
    // Free space is queried before the run and before each save.
    Fault { at: 4, free: Some(1000), ..Fault::default() }.strike(&mut run, &dir.path("out"), None);
    let done = finish(&mut run);
    assert_storage(
        &dir,
        &done,
        &["cannot save step 3", "cannot write [DIR]/out/checkpoint-3", "1000 B available"],
    );
    let (newest, passed) = checkpoint::newest(&dir.path("out")).unwrap();
    assert_eq!((newest.unwrap().state.step, passed.len()), (2, 0));
    assert_tidy(&dir.path("out"), "no room");
    let resumed = finish(&mut train(&dir, &["--resume"]));
    assert_eq!(resumed.code, Some(0), "{resumed:?}");
    assert!(adapter() == wanted);
}

/// The final checkpoint, which follows the result, does not fit: the result exists.
#[test]
fn a_last_checkpoint_that_has_no_room_costs_no_result() {
    if library().is_none() {
        return;
    }
    let dir = TestDir::new();
    let mut run = train(&dir, &["--set", "checkpoint.save_steps=auto", "--set", "train.max_steps=2"]);
    // Free space is queried before the run and before its one save.
    Fault { at: 2, free: Some(1000), ..Fault::default() }.strike(&mut run, &dir.path("out"), None);
    let done = finish(&mut run);
    assert_storage(&dir, &done, &["cannot save step 2", "1000 B available"]);
    assert!(dir.path("out/adapter_model.safetensors").exists());
    assert_tidy(&dir.path("out"), "no room at the end");
}

/// The disk fills up while a checkpoint or the result is written.
#[test]
fn a_disk_that_fills_up_leaves_the_last_checkpoint() {
    if library().is_none() {
        return;
    }
    for (only, newest) in [("checkpoint-3", 2), ("/result/", 4)] {
        let dir = TestDir::new();
        let mut run = train(&dir, &[]);
        let what = libc::ENOSPC.to_string();
        let fault = Fault { at: 2, what, ops: "w", only, sticky: "wom", free: None };
        fault.strike(&mut run, &dir.path("out"), None);
        let done = finish(&mut run);
        assert_storage(&dir, &done, &["cannot ", "No space left on device"]);
        let (saved, passed) = checkpoint::newest(&dir.path("out")).unwrap();
        assert_eq!((saved.unwrap().state.step, passed.len()), (newest, 0), "{only}");
        assert!(!dir.path("out/adapter_config.json").exists());
        assert_tidy(&dir.path("out"), only);
        let resumed = finish(&mut train(&dir, &["--resume"]));
        assert_eq!(resumed.code, Some(0), "{resumed:?}");
        assert!(dir.path("out/adapter_config.json").exists());
    }
}
