//! Output files at paths of the user on disks that are full or lack system calls, and folders that
//! are temporarily unreadable.

use std::path::Path;
use std::process::{Command, Stdio};

use finetune::checkpoint;

use crate::faults::{Fault, library};
use crate::test_dir::{TestDir, copy_folder, golden, lora};
use crate::{Done, finish, names, told};

/// A place with an empty folder `made` for the output.
fn prepared() -> TestDir {
    let dir = TestDir::new();
    std::fs::create_dir(dir.path("made")).unwrap();
    dir
}

/// A command that writes `made/NAME`, given relative to its working folder.
fn writing(dir: &TestDir, name: &str) -> Command {
    let path = dir.path("made").join(name).display().to_string();
    let export = |format| {
        dir.command(&["export", "--model", "model", "--format", format, "--quiet", "--output", &path])
    };
    match name {
        "m.gguf" => export("gguf"),
        "folder" => export("hf"),
        _ => dir.command(&["plan", "--model", "model", "--on", "4090", "--quiet", "--html", &path]),
    }
}

fn struck(dir: &TestDir, name: &str, fault: Fault<'_>) -> Done {
    let mut command = writing(dir, name);
    fault.strike(&mut command, &dir.path("made"), None);
    finish(&mut command)
}

/// A full disk, at each write and at the flush: exit code 74, the old file stays and no other file
/// is left.
#[test]
fn a_full_disk_leaves_what_was_there() {
    if library().is_none() {
        return;
    }
    let dir = prepared();
    let made = dir.path("made");
    let full = |ops| Fault { at: 1, what: libc::ENOSPC.to_string(), ops, sticky: "wos", ..Fault::default() };
    for (name, option) in [("p.html", "--html"), ("m.gguf", "--output"), ("folder", "--output")] {
        for ops in ["o", "w", "s"] {
            let done = struck(&dir, name, full(ops));
            assert_eq!(done.code, Some(74), "{name}, {ops}: {done:?}");
            assert!(done.errors.contains("No space left on device"), "{name}, {ops}: {done:?}");
            let hint = format!("hint: free space on that disk, or choose another path with `{option}`");
            assert!(ops != "w" || done.errors.contains(&hint), "{name}: {done:?}");
            assert_eq!(names(&made), [""; 0], "{name}, {ops}");
        }
    }
    assert_eq!(finish(&mut writing(&dir, "p.html")).code, Some(0));
    let before = std::fs::read(made.join("p.html")).unwrap();
    for ops in ["o", "w", "s", "r"] {
        let done = struck(&dir, "p.html", full(ops));
        assert_eq!(done.code, Some(74), "{ops}: {done:?}");
        assert!(done.errors.contains("or choose another path with `--html`"), "{done:?}");
        assert!(std::fs::read(made.join("p.html")).unwrap() == before, "{ops}");
        assert_eq!(names(&made), ["p.html"], "{ops}");
    }
}

/// File systems without exclusive rename, and without hard links, too: the file still gets its
/// name.
#[test]
fn file_systems_that_lack_calls() {
    if library().is_none() {
        return;
    }
    let dir = prepared();
    let made = dir.path("made");
    let lacks = |ops, what: i32| Fault { at: 1, what: what.to_string(), ops, ..Fault::default() };
    for name in ["p.html", "m.gguf"] {
        let exclusive = lacks("r", libc::EINVAL);
        let neither = Fault { sticky: "l", ..lacks("r", libc::EPERM) };
        for fault in [exclusive, neither] {
            let done = struck(&dir, name, fault.clone());
            assert_eq!(done.code, Some(0), "{fault:?}: {done:?}");
            assert_eq!(names(&made), [name], "{fault:?}");
            std::fs::remove_file(made.join(name)).unwrap();
        }
    }
}

/// Runs a command that stops at its first call of `ops` below `made`; then calls `act` and lets the
/// command continue.
fn meanwhile(mut command: Command, made: &Path, ops: &str, act: impl FnOnce()) -> Done {
    Fault { at: 1, what: "stop".into(), ops, ..Fault::default() }.strike(&mut command, made, None);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (pid, mut status) = (child.id() as libc::pid_t, 0);
    // SAFETY: the child is this process's own, and `status` lives until the call returns.
    let waited = unsafe { libc::waitpid(pid, &mut status, libc::WUNTRACED) };
    assert!(waited == pid && libc::WIFSTOPPED(status), "{ops}: it did not stop");
    act();
    // SAFETY: as above; it has not been waited for to its end.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGCONT) }, 0);
    told(child.wait_with_output().unwrap())
}

/// A file created while an export writes its own, or right before the rename: it stays, the exit
/// code is 1, and no other file is left.
#[test]
fn a_file_that_comes_meanwhile_stays() {
    if library().is_none() {
        return;
    }
    for ops in ["w", "r"] {
        let dir = prepared();
        let made = dir.path("made");
        let comes = || std::fs::write(made.join("m.gguf"), "precious").unwrap();
        let done = meanwhile(writing(&dir, "m.gguf"), &made, ops, comes);
        assert_eq!(done.code, Some(1), "{ops}: {done:?}");
        assert!(done.errors.contains("it appeared while finetune wrote the new file"), "{done:?}");
        assert_eq!(std::fs::read(made.join("m.gguf")).unwrap(), b"precious");
        assert_eq!(names(&made), ["m.gguf"], "{ops}");
    }
}

/// The same for a folder, or a link to one, at the path of an output folder.
#[test]
fn a_folder_that_comes_meanwhile_stays() {
    if library().is_none() {
        return;
    }
    let merge = ["merge", "--model", "model", "--adapter", "adapter"];
    let verbs = [
        &["export", "--model", "model", "--format", "hf"][..],
        &["quantize", "--model", "model", "--kind", "nf4"],
        &merge,
    ];
    for verb in verbs {
        for is_link in [false, true] {
            let dir = prepared();
            copy_folder(&golden("train/lora/adapter_final"), &dir.path("adapter"));
            let (made, out) = (dir.path("made"), dir.path("made/out"));
            let output = out.display().to_string();
            let comes = || {
                let folder = if is_link { dir.path("theirs") } else { out.clone() };
                std::fs::create_dir(&folder).unwrap();
                std::fs::write(folder.join("x"), "precious").unwrap();
                if is_link {
                    std::os::unix::fs::symlink(&folder, &out).unwrap();
                }
            };
            let command = dir.command(&[verb, &["--quiet", "--output", &output]].concat());
            let done = meanwhile(command, &made, "s", comes);
            assert!(done.code.is_some_and(|code| code != 0), "{verb:?}: {done:?}");
            assert!(done.errors.contains("cannot write to "), "{verb:?}: {done:?}");
            assert_eq!(names(&out), ["x"], "{verb:?}");
            assert_eq!((names(&made), out.is_symlink()), (vec!["out".to_owned()], is_link), "{verb:?}");
        }
    }
}

/// The open-file limit, reached temporarily: finetune treats neither the folder as in use by others
/// nor the newest checkpoint as damaged.
#[test]
fn a_folder_that_cannot_be_listed_now_is_not_in_use() {
    if library().is_none() {
        return;
    }
    let dir = TestDir::new();
    let out = dir.path("out");
    let run = |more: &[&str]| {
        let sets = ["--quiet", "--set", "checkpoint.save_steps=2", "--set", "log.tensorboard=false"];
        let output = out.display().to_string();
        let args = lora(&[&sets[..], more].concat());
        let args: Vec<&str> = args.into_iter().map(|arg| if arg == "out" { &*output } else { arg }).collect();
        dir.command(&args)
    };
    let limited = |mut command: Command, ops, only| {
        let what = libc::EMFILE.to_string();
        Fault { at: 1, what, ops, only, ..Fault::default() }.strike(&mut command, &out, None);
        let done = finish(&mut command);
        let wrong =
            ["not empty", "damaged", "skipped", "in use"].iter().any(|word| done.errors.contains(word));
        assert!(done.code.is_some_and(|code| code != 0) && !wrong, "{ops} {only}: {done:?}");
        assert!(done.errors.contains("Too many open files"), "{ops} {only}: {done:?}");
    };
    // State after a run that never began.
    std::fs::create_dir_all(out.join(".finetune")).unwrap();
    std::fs::write(out.join(".finetune/lock"), "").unwrap();
    limited(run(&[]), "d", ".finetune");
    limited(run(&[]), "d", "");
    assert_eq!(finish(&mut run(&[])).code, Some(0));
    let before = crate::tree(&out);
    let longer = ["--resume", "--set", "train.max_steps=6"];
    limited(run(&longer), "i", "checkpoint-4/manifest.json");
    limited(run(&longer), "d", "checkpoint-4");
    assert!(crate::tree(&out) == before);
    assert_eq!(finish(&mut run(&longer)).code, Some(0));
    let (newest, passed) = checkpoint::newest(&out).unwrap();
    assert_eq!((newest.unwrap().state.step, passed.len()), (6, 0));
    assert!(!names(&out).iter().any(|name| name.contains("aside")));
}
