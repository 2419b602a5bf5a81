//! Damaged checkpoints: every change is detected before anything is used, and an older checkpoint
//! is used instead.

use std::path::{Path, PathBuf};
use std::process::Command;

use finetune::checkpoint::{self, SavedCheckpoint};

use crate::test_dir::{TestDir, lora};
use crate::{Random, finish};

/// A place with a run of the binary that left two checkpoints.
fn trained() -> TestDir {
    let dir = TestDir::new();
    let keys = ["checkpoint.save_steps=2", "checkpoint.keep_last=9", "log.tensorboard=false"];
    let keys = keys.map(|key| ["--set", key]).concat();
    let mut command = dir.command(&lora(&[&keys[..], &["--quiet"]].concat()));
    let done = finish(command.env("RAYON_NUM_THREADS", "1"));
    assert_eq!(done.code, Some(0), "{done:?}");
    dir
}

fn members(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 5, "{paths:?}");
    paths
}

/// Returns the message about the skipped checkpoint-4, in place of which checkpoint-2 is used.
fn passed_over(out: &Path, what: &str) -> String {
    let (newest, passed) = checkpoint::newest(out).unwrap();
    assert_eq!(newest.map(|newest| newest.state.step), Some(2), "{what} was not found");
    assert_eq!(passed.len(), 1, "{what}: {passed:?}");
    assert!(passed[0].contains("checkpoint-4 is damaged: "), "{what}: {passed:?}");
    passed[0].clone()
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

#[test]
fn every_file_cut_at_seven_places() {
    let dir = trained();
    let out = dir.path("out");
    for path in members(&out.join("checkpoint-4")) {
        let whole = std::fs::read(&path).unwrap();
        // The end of the header in safetensors files, any offset in others.
        let header = u64::from_le_bytes(whole[..8].try_into().unwrap()).min(whole.len() as u64 / 3) + 8;
        for end in [0, 1, 7, 8, header as usize, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..end]).unwrap();
            let what = format!("{} cut at {end} of {}", name(&path), whole.len());
            let said = passed_over(&out, &what);
            assert!(said.contains(&name(&path)), "{what}: {said}");
        }
        std::fs::write(&path, whole).unwrap();
    }
    assert_eq!(checkpoint::newest(&out).unwrap().0.unwrap().state.step, 4);
}

#[test]
fn two_hundred_flipped_bits() {
    let dir = trained();
    let out = dir.path("out");
    let files = members(&out.join("checkpoint-4"));
    let (mut random, mut caught) = (Random(15), 0);
    for turn in 0..200 {
        // Small files are hit as often as large ones.
        let path = &files[turn % files.len()];
        let whole = std::fs::read(path).unwrap();
        let (at, bit) = (random.below(whole.len() as u64) as usize, random.below(8));
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << bit;
        std::fs::write(path, flipped).unwrap();
        passed_over(&out, &format!("bit {bit} of byte {at} of {}", name(path)));
        caught += 1;
        std::fs::write(path, whole).unwrap();
    }
    assert_eq!(caught, 200);
    assert_eq!(checkpoint::newest(&out).unwrap().0.unwrap().state.step, 4);
}

/// A member that is missing, unexpected, from another step, a folder, a link or a pipe. Reading
/// never blocks on the pipe.
#[cfg(unix)]
#[test]
fn members_that_are_not_what_was_written() {
    let dir = trained();
    let (out, moved) = (dir.path("out"), dir.path("kept"));
    let sound = out.join("checkpoint-4");
    for path in members(&sound) {
        let name = name(&path);
        std::fs::rename(&path, &moved).unwrap();
        let said = passed_over(&out, &format!("no {name}"));
        assert!(said.contains(&name), "{said}");
        std::os::unix::fs::symlink(&moved, &path).unwrap();
        let said = passed_over(&out, &format!("a link {name}"));
        assert!(said.contains(&format!("{name} is a link: put the file itself in its place")), "{said}");
        assert!(moved.exists(), "what the link leads to stays");
        std::fs::remove_file(&path).unwrap();
        let made = Command::new("mkfifo").arg(&path).status();
        if made.is_ok_and(|made| made.success()) {
            let said = passed_over(&out, &format!("a pipe {name}"));
            assert!(said.contains(&format!("{name} is a pipe or a device")), "{said}");
            std::fs::remove_file(&path).unwrap();
        }
        std::fs::create_dir(&path).unwrap();
        passed_over(&out, &format!("a folder {name}"));
        std::fs::remove_dir(&path).unwrap();
        std::fs::copy(out.join("checkpoint-2").join(&name), &path).unwrap();
        let same = std::fs::read(&moved).unwrap() == std::fs::read(&path).unwrap();
        if !same {
            passed_over(&out, &format!("{name} of another step"));
        }
        std::fs::rename(&moved, &path).unwrap();
    }
    std::fs::write(sound.join("more.json"), "{}").unwrap();
    assert!(passed_over(&out, "a file too many").contains("more.json does not belong to it"));
    std::fs::remove_file(sound.join("more.json")).unwrap();
    // A checkpoint may itself be a link.
    std::fs::rename(&sound, &moved).unwrap();
    std::os::unix::fs::symlink(&moved, &sound).unwrap();
    assert_eq!(checkpoint::newest(&out).unwrap().0.unwrap().state.step, 4);
    assert_eq!(SavedCheckpoint::open(&sound).unwrap().state.step, 4);
}

/// The user gets a warning, and the run resumes to the same result.
#[cfg(unix)]
#[test]
fn a_run_goes_on_from_the_older_one() {
    let dir = trained();
    let out = dir.path("out");
    let adapter = out.join("adapter_model.safetensors");
    let wanted = std::fs::read(&adapter).unwrap();
    let member = out.join("checkpoint-4/optimizer.safetensors");
    std::fs::rename(&member, dir.path("kept")).unwrap();
    std::os::unix::fs::symlink(dir.path("kept"), &member).unwrap();
    // A checkpoint that its owner deletes is made anew.
    std::fs::remove_file(&adapter).unwrap();
    std::fs::remove_file(out.join("README.md")).unwrap();
    let keys = ["checkpoint.save_steps=2", "checkpoint.keep_last=9", "log.tensorboard=false"];
    let keys = keys.map(|key| ["--set", key]).concat();
    let mut command = dir.command(&lora(&[&keys[..], &["--quiet", "--resume"]].concat()));
    let done = finish(command.env("RAYON_NUM_THREADS", "1"));
    assert_eq!(done.code, Some(0), "{done:?}");
    let said = "warning: out/checkpoint-4 is damaged: optimizer.safetensors is a link: put the file itself in its place; skipped";
    assert!(done.errors.contains(said), "{done:?}");
    assert!(std::fs::read(&adapter).unwrap() == wanted && out.join("README.md").exists());
    assert!(out.join("checkpoint-4.aside-1").exists() && dir.path("kept").exists());
}
