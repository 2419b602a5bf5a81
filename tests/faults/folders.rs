//! A folder belongs to one run, is locked by one process, and keeps verified checkpoints: with
//! clocks ahead or behind, links, read-only parents, many simultaneous starts, users' changes and
//! power cuts.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use finetune::checkpoint;

use crate::child::{assert_goes_on, command};
use crate::faults::{Fault, library};
use crate::test_dir::{TestDir, lora};
use crate::{Done, assert_tidy, finish, names, told, tree};

/// A short training run of the binary into `output`, an absolute path.
fn run(dir: &TestDir, output: &Path, more: &[&str]) -> Command {
    let output = output.display().to_string();
    let args = lora(&[&["--quiet"][..], more].concat());
    let args: Vec<&str> = args.into_iter().map(|arg| if arg == "out" { &output } else { arg }).collect();
    let mut command = dir.command(&args);
    command.env("RAYON_NUM_THREADS", "1");
    command
}

/// A run that saves every step.
fn train(dir: &TestDir, output: &Path, more: &[&str]) -> Command {
    run(dir, output, &[&["--set", "checkpoint.save_steps=1"][..], more].concat())
}

/// Runs a job of the child, which must succeed.
fn done(job: &str, output: &Path) -> Done {
    let done = finish(&mut command(job, output));
    assert!(done.code == Some(0) && done.said.contains("published\n"), "{done:?}");
    done
}

#[test]
fn of_fifty_starts_at_once_one_trains() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let start = |_| {
        let mut run = command("wait", &output);
        run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut runs: Vec<_> = (0..50).map(start).collect();
    let started = Instant::now();
    let mut refused = Vec::new();
    while runs.len() > 1 {
        assert!(started.elapsed() < Duration::from_secs(240), "{} runs are left", runs.len());
        let ended = runs.iter_mut().position(|run| run.try_wait().unwrap().is_some());
        match ended {
            Some(at) => refused.push(told(runs.swap_remove(at).wait_with_output().unwrap())),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    let mut winner = runs.pop().unwrap();
    assert!(winner.try_wait().unwrap().is_none(), "the last one works on");
    let named = format!("the folder is in use by process {} on host ", winner.id());
    for done in &refused {
        assert_eq!(done.code, Some(1), "{done:?}");
        assert!(done.errors.contains(&named) || done.errors.contains("the folder is not empty"), "{done:?}");
    }
    let mut said = BufReader::new(winner.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.contains("at work")));
    winner.kill().unwrap();
    winner.wait().unwrap();
    assert_goes_on(&output, "after the kill");
}

/// Sets the modification time of everything below a folder.
fn set_times(folder: &Path, time: SystemTime) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            set_times(&path, time);
        }
        std::fs::File::open(&path).unwrap().set_modified(time).unwrap();
    }
    std::fs::File::open(folder).unwrap().set_modified(time).unwrap();
}

/// The step decides which checkpoint is the newest, whether the file system's clock runs ahead or
/// behind.
#[test]
fn clocks_that_are_ahead_or_behind() {
    let dir = TestDir::new();
    let (now, year) = (SystemTime::now(), Duration::from_secs(365 * 86_400));
    for (name, all, older) in
        [("ahead", now + year, now - 10 * year), ("behind", now - 10 * year, now + year)]
    {
        let out = dir.path(name);
        assert_eq!(finish(&mut train(&dir, &out, &[])).code, Some(0));
        let wanted = std::fs::read(out.join("adapter_model.safetensors")).unwrap();
        std::fs::remove_dir_all(out.join("checkpoint-4")).unwrap();
        set_times(&out, all);
        // By its time, the checkpoint to remove is the newest or the oldest.
        set_times(&out.join("checkpoint-3"), older);
        let done = finish(&mut train(&dir, &out, &["--resume", "--set", "checkpoint.keep_last=1"]));
        assert_eq!(done.code, Some(0), "{done:?}");
        assert!(std::fs::read(out.join("adapter_model.safetensors")).unwrap() == wanted);
        let (left, _) = checkpoint::newest(&out).unwrap();
        assert_eq!(left.unwrap().state.step, 4);
        assert!(!out.join("checkpoint-3").exists(), "{:?}", names(&out));
    }
}

#[cfg(unix)]
#[test]
fn links_lead_where_they_may() {
    use std::os::unix::fs::symlink;
    let dir = TestDir::new();
    // A link to a folder: the run uses that folder.
    std::fs::create_dir(dir.path("there")).unwrap();
    symlink("there", dir.path("link")).unwrap();
    done("fresh", &dir.path("link"));
    done("resume", &dir.path("link"));
    assert!(dir.path("there/adapter_config.json").exists() && dir.path("link").is_symlink());
    // A dangling link.
    symlink("nowhere", dir.path("loose")).unwrap();
    for job in ["fresh", "resume"] {
        let refused = finish(&mut command(job, &dir.path("loose")));
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(refused.errors.contains("it is a link to nowhere, which does not exist"), "{refused:?}");
    }
    assert!(!dir.path("nowhere").exists());
    // Links in the place of a run's state folder or lock: nothing is written through them.
    std::fs::create_dir(dir.path("theirs")).unwrap();
    dir.write("theirs/lock", "theirs");
    std::fs::create_dir(dir.path("new")).unwrap();
    symlink(dir.path("theirs"), dir.path("new/.finetune")).unwrap();
    for job in ["fresh", "resume"] {
        assert_eq!(finish(&mut command(job, &dir.path("new"))).code, Some(1));
    }
    let lock = dir.path("there/.finetune/lock");
    std::fs::remove_file(&lock).unwrap();
    symlink(dir.path("theirs/lock"), &lock).unwrap();
    let refused = finish(&mut command("resume", &dir.path("there")));
    assert!(refused.code == Some(1) && refused.errors.contains("it is a link"), "{refused:?}");
    assert_eq!(std::fs::read_to_string(dir.path("theirs/lock")).unwrap(), "theirs");
    assert_eq!(names(&dir.path("theirs")), ["lock"]);
    // An old checkpoint that is a link to elsewhere: the link is removed, its target stays.
    let out = dir.path("out");
    assert_eq!(finish(&mut train(&dir, &out, &[])).code, Some(0));
    std::fs::remove_dir_all(out.join("checkpoint-4")).unwrap();
    std::fs::rename(out.join("checkpoint-3"), dir.path("kept")).unwrap();
    symlink(dir.path("kept"), out.join("checkpoint-3")).unwrap();
    let before = tree(&dir.path("kept"));
    let went_on = finish(&mut train(&dir, &out, &["--resume", "--set", "checkpoint.keep_last=1"]));
    assert_eq!(went_on.code, Some(0), "{went_on:?}");
    assert!(!out.join("checkpoint-3").is_symlink() && out.join("checkpoint-4").exists());
    assert!(tree(&dir.path("kept")) == before);
    assert_tidy(&out, "links");
}

/// A read-only parent prevents a new folder, but an existing one works.
#[cfg(unix)]
#[test]
fn parents_that_cannot_be_written_to() {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
    use std::os::unix::process::CommandExt as _;
    let dir = tempfile::tempdir().unwrap();
    let mode = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    let output = dir.path().join("out");
    std::fs::create_dir(&output).unwrap();
    mode(&output, 0o777);
    mode(dir.path(), 0o555);
    let run = |output: &Path| {
        let mut run = command("fresh", output);
        if std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0) {
            // Root ignores permissions, so the user nobody runs it.
            run.uid(65534).gid(65534);
        }
        run.output().map(told)
    };
    let (new, there) = (run(&dir.path().join("new")), run(&output));
    mode(dir.path(), 0o755);
    let (Ok(new), Ok(there)) = (new, there) else {
        crate::skipped::skipped("a read-only parent", "nobody may not start the tests' program");
        return;
    };
    assert!(new.code == Some(74) && new.errors.contains("Permission denied"), "{new:?}");
    assert!(!dir.path().join("new").exists());
    assert!(there.code == Some(0) && there.said.contains("published\n"), "{there:?}");
}

/// Kills the binary between its lock and its mark: the same command begins anew, and resumes once
/// the mark exists.
#[test]
fn a_kill_between_lock_and_mark() {
    if library().is_none() {
        return;
    }
    for (ops, only) in [("m", "/result"), ("w", "run.json"), ("r", "run.json"), ("o", "recipe.toml")] {
        let dir = TestDir::new();
        let out = dir.path("out");
        let mut run = train(&dir, &out, &[]);
        Fault { at: 1, what: "kill".into(), ops, only, ..Fault::default() }.strike(&mut run, &out, None);
        assert_eq!(finish(&mut run).code, None);
        let marked = out.join(".finetune/run.json").exists();
        assert_eq!(marked, only == "recipe.toml", "{:?}", names(&out));
        let again = finish(&mut train(&dir, &out, if marked { &["--resume"] } else { &[] }));
        assert_eq!(again.code, Some(0), "{ops} {only}: {again:?}");
        assert!(out.join("adapter_model.safetensors").exists());
        assert_tidy(&out, only);
    }
}

/// A kill between renaming the old checkpoint and renaming the new one: the old one is restored.
#[test]
fn a_checkpoint_that_was_to_be_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    done("fresh", &output);
    let away = output.join(format!("checkpoint-4.tmp-{}-replaced", u32::MAX));
    std::fs::rename(output.join("checkpoint-4"), &away).unwrap();
    let said = done("resume", &output);
    assert!(!said.said.contains("saved"), "it went on from step 4: {said:?}");
    assert!(output.join("checkpoint-4").exists() && !away.exists());
    // If the new one exists, the old one is removed.
    std::fs::create_dir(&away).unwrap();
    done("resume", &output);
    assert!(output.join("checkpoint-4").exists() && !away.exists());
}

/// A file with a checkpoint's name is renamed when the name is needed, and kept.
#[test]
fn a_file_in_the_way_of_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    done("fresh", &output);
    std::fs::remove_dir_all(output.join("checkpoint-4")).unwrap();
    std::fs::write(output.join("checkpoint-4"), "mine").unwrap();
    std::fs::write(output.join("checkpoint-3"), "mine too").unwrap();
    let said = done("resume", &output);
    assert!(said.said.contains("checkpoint-4 is damaged: manifest.json: Not a directory"), "{said:?}");
    assert_eq!(checkpoint::newest(&output).unwrap().0.unwrap().state.step, 4);
    assert_eq!(std::fs::read(output.join("checkpoint-4.aside-1")).unwrap(), b"mine");
    assert_eq!(std::fs::read(output.join("checkpoint-3")).unwrap(), b"mine too");
}

/// Logs damaged by a power cut or a user are reported and kept, and the run continues.
#[test]
fn logs_stop_no_resume() {
    let dir = TestDir::new();
    let out = dir.path("out");
    assert_eq!(finish(&mut train(&dir, &out, &[])).code, Some(0));
    let wanted = std::fs::read(out.join("adapter_model.safetensors")).unwrap();
    std::fs::remove_dir_all(out.join("checkpoint-4")).unwrap();
    let path = out.join("metrics.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    let zeros = "\0".repeat(4096);
    lines[1] = &zeros;
    let damaged = lines.join("\n") + "\n{\"step\":4,\"ep";
    std::fs::write(&path, &damaged).unwrap();
    std::fs::remove_dir_all(out.join("tensorboard")).unwrap();
    std::fs::write(out.join("tensorboard"), "mine").unwrap();
    let done = finish(&mut train(&dir, &out, &["--resume"]));
    assert_eq!(done.code, Some(0), "{done:?}");
    for said in ["metrics.jsonl:2 is neither a step nor an evaluation", "warning: no TensorBoard events: "] {
        assert!(done.errors.contains(said), "{done:?}");
    }
    let steps: Vec<u64> =
        finetune::report::metrics::read(&path).unwrap().iter().map(|one| one.step()).collect();
    assert_eq!(steps, [1, 3, 4]);
    assert_eq!(std::fs::read_to_string(out.join("metrics.jsonl.aside-1")).unwrap(), damaged);
    assert_eq!(std::fs::read(out.join("tensorboard")).unwrap(), b"mine");
    assert!(std::fs::read(out.join("adapter_model.safetensors")).unwrap() == wanted);
}

/// A finished run without a checkpoint has nothing left to do. With another recipe, or after losing
/// a file, it is refused with the reason and a remedy.
#[test]
fn a_finished_folder_that_lost_a_file() {
    let dir = TestDir::new();
    let out = dir.path("out");
    assert_eq!(finish(&mut run(&dir, &out, &[])).code, Some(0));
    let whole = finish(&mut run(&dir, &out, &["--resume"]));
    assert!(whole.code == Some(0), "{whole:?}");
    let other = finish(&mut run(&dir, &out, &["--resume", "--set", "train.seed=8"]));
    let said = "the run has ended, and left no checkpoint to resume from\nhint: its result is complete; to train again, give a new folder with `--output`";
    assert!(other.code == Some(1) && other.errors.contains(said), "{other:?}");
    for lost in ["README.md", "adapter_config.json"] {
        std::fs::rename(out.join(lost), dir.path("kept")).unwrap();
        let before = tree(&out);
        let refused = finish(&mut run(&dir, &out, &["--resume"]));
        assert_eq!(refused.code, Some(1), "{refused:?}");
        let why = format!(
            "caused by: its result is incomplete, without {lost}\nhint: restore the missing files, or"
        );
        assert!(refused.errors.contains(&why), "{refused:?}");
        assert!(tree(&out) == before);
        std::fs::rename(dir.path("kept"), out.join(lost)).unwrap();
    }
}
