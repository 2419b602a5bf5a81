//! Kills at random instants: runs that are killed and restarted until they end.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::child::{assert_goes_on, assert_sound, command, last_saved};
use crate::test_dir::{TestDir, lora};
use crate::{Done, Random, assert_tidy, finish, told};

/// Returns the number of kills to try.
fn wanted() -> u64 {
    let set = std::env::var("FINETUNE_CRASH_KILLS").ok();
    set.map_or(200, |text| text.parse().expect("FINETUNE_CRASH_KILLS is a number"))
}

/// Runs `command`, and kills it after `after` if it still runs.
fn killed(command: &mut Command, after: Duration) -> Done {
    let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(after);
    run.kill().unwrap();
    told(run.wait_with_output().unwrap())
}

/// Returns the shortest of three durations of `command`.
fn shortest(mut run: impl FnMut() -> Command) -> Duration {
    let time = |_| {
        let started = Instant::now();
        let done = finish(&mut run());
        assert_eq!(done.code, Some(0), "{done:?}");
        started.elapsed()
    };
    (0..3).map(time).min().unwrap()
}

/// Returns an instant during a run that takes `whole`, or shortly after its end.
fn instant(random: &mut Random, whole: Duration) -> Duration {
    Duration::from_micros(random.below(whole.as_micros() as u64 * 11 / 10))
}

#[test]
fn kills_at_random_instants() {
    let dir = tempfile::tempdir().unwrap();
    let mut number = 0;
    let mut whole = shortest(|| {
        number += 1;
        command("fresh", &dir.path().join(format!("timed-{number}")))
    });
    let (mut random, mut kills, mut folders) = (Random(13), 0, 0);
    while kills < wanted() {
        folders += 1;
        let output = dir.path().join(format!("out-{folders}"));
        let mut saved = 0;
        // After enough kills to tear something the run may end.
        for attempt in 0..8 {
            let what = format!("kill {kills} of folder {folders}");
            let job = if attempt == 0 { "fresh" } else { "resume" };
            let after = instant(&mut random, whole);
            let done = killed(&mut command(job, &output), after);
            saved = saved.max(last_saved(&done));
            assert_sound(&output, saved, &what);
            if let Some(code) = done.code {
                assert_eq!(code, 0, "{what}: {done:?}");
                // The machine was busier when the run was timed.
                whole = whole.min(after);
                break;
            }
            kills += 1;
        }
        assert_goes_on(&output, &format!("folder {folders}"));
        std::fs::remove_dir_all(&output).unwrap();
    }
    println!("{kills} kills of a run of {whole:?} in {folders} folders");
}

/// A short training run of the binary, which saves every step.
fn train(dir: &TestDir, output: &Path) -> Command {
    let output = output.display().to_string();
    let keys = ["checkpoint.save_steps=1", "checkpoint.keep_last=2", "log.tensorboard=false"];
    let keys = keys.map(|key| ["--set", key]).concat();
    let args = lora(&[&keys[..], &["--quiet", "--resume"]].concat());
    let args: Vec<&str> = args.into_iter().map(|arg| if arg == "out" { &output } else { arg }).collect();
    let mut command = dir.command(&args);
    command.env("RAYON_NUM_THREADS", "1");
    command
}

#[test]
fn kills_of_the_binary() {
    let dir = TestDir::new();
    let adapter = |name: &str| std::fs::read(dir.path(name).join("adapter_model.safetensors")).unwrap();
    let mut number = 0;
    let mut whole = shortest(|| {
        number += 1;
        train(&dir, &dir.path(&format!("timed-{number}")))
    });
    let (mut random, mut kills, mut folders) = (Random(14), 0, 0);
    while kills < wanted() / 10 {
        folders += 1;
        let (name, begun) = (format!("out-{folders}"), kills);
        let output = dir.path(&name);
        // Folders of many runs killed in a row, and folders of none.
        while kills < begun + 5 {
            let after = instant(&mut random, whole);
            let done = killed(&mut train(&dir, &output), after);
            if let Some(code) = done.code {
                assert_eq!(code, 0, "{done:?}");
                whole = whole.min(after);
                break;
            }
            kills += 1;
        }
        let done = finish(&mut train(&dir, &output));
        assert_eq!(done.code, Some(0), "{done:?}");
        assert!(!done.errors.contains("damaged"), "{done:?}");
        assert!(adapter(&name) == adapter("timed-1"), "folder {folders} after {kills} kills");
        assert_tidy(&output, &name);
    }
    println!("{kills} kills of a run of {whole:?} in {folders} folders");
}
