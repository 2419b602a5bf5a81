//! Kills between the last step of a run and its end: the result exists, or the next start completes
//! it.
//!
//! The runs keep no checkpoint, so only the result itself preserves what was trained.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use finetune::checkpoint::KillPoint;

use crate::exhaustive::third;
use crate::test_dir::{TestDir, lora};
use crate::{Done, Random, assert_tidy, finish, told};

/// The log line of the last step contains this.
const STEPS: &str = "\"step\":4,";
/// Kills at random instants, if every case is tried; else a third of them.
const RANDOM_KILLS: usize = 51;

/// A run of four steps that evaluates before and after them; `more` are further flags, and `full`
/// among them replaces the recipe.
fn run(dir: &TestDir, output: &Path, more: &[&str]) -> Command {
    let output = output.display().to_string();
    let is_full = more.contains(&"full");
    let more: Vec<&str> = more.iter().copied().filter(|arg| *arg != "full").collect();
    let args =
        lora(&[&["--eval-dataset", "rows.jsonl", "--set", "log.tensorboard=false"], &more[..]].concat());
    let replaced = |arg| match arg {
        "out" => &output,
        "lora" if is_full => "full",
        _ => arg,
    };
    let args: Vec<&str> = args.into_iter().map(replaced).collect();
    let mut command = dir.command(&args);
    command.env("RAYON_NUM_THREADS", "1");
    command
}

/// The files that hold trained weights.
fn trained(output: &Path) -> BTreeMap<&'static str, Option<Vec<u8>>> {
    ["adapter_model.safetensors", "adapter_config.json", "model.safetensors", "config.json"]
        .map(|name| (name, std::fs::read(output.join(name)).ok()))
        .into()
}

/// Resumes the killed run in `output`, whose result must then equal `wanted`.
fn assert_resumes(
    dir: &TestDir,
    output: &Path,
    more: &[&str],
    wanted: &BTreeMap<&'static str, Option<Vec<u8>>>,
    what: &str,
) -> Done {
    let done = finish(&mut run(dir, output, &[more, &["--resume"]].concat()));
    assert_eq!(done.code, Some(0), "{what}: {done:?}");
    assert!(trained(output) == *wanted, "{what}: another result: {done:?}");
    for name in ["README.md", "recipe.toml", "metrics.jsonl"] {
        assert!(output.join(name).exists(), "{what}: no {name}: {done:?}");
    }
    assert_tidy(output, what);
    done
}

/// Kills at each named point, for an adapter, for one that two ranks train, or for a model whose
/// ranks write one shard each; exhaustively for all three.
#[test]
fn kills_at_every_named_moment_of_the_end() {
    let dir = TestDir::new();
    let fsdp = ["full", "--ranks", "2", "--set", "parallel.strategy=fsdp"];
    let methods = [("alone", &[][..]), ("two", &["--ranks", "2"]), ("full", &fsdp)];
    let cases = (0..methods.len()).flat_map(|method| KillPoint::ALL.map(|point| (method, point)));
    let cases = third(cases.collect(), KillPoint::ALL.len());
    for (method, (name, more)) in methods.into_iter().enumerate() {
        let undisturbed = dir.path(&format!("{name}-whole"));
        assert_eq!(finish(&mut run(&dir, &undisturbed, more)).code, Some(0));
        let wanted = trained(&undisturbed);
        for &(_, point) in cases.iter().filter(|case| case.0 == method) {
            let what = format!("{name}, killed at {}", point.name());
            let output = dir.path(&format!("{name}-{}", point.name()));
            let killed = finish(run(&dir, &output, more).env("FINETUNE_KILL_AT", point.name()));
            assert_eq!(killed.code, None, "{what}: {killed:?}");
            let is_safe = !matches!(point, KillPoint::LastStep | KillPoint::Written);
            let is_there = is_safe && !matches!(point, KillPoint::Sealed | KillPoint::Committed);
            if is_there {
                assert!(trained(&output) == wanted, "{what}: it was published: {killed:?}");
            }
            let again = assert_resumes(&dir, &output, more, &wanted, &what);
            let trains = again.errors.contains("starting from the beginning");
            assert_eq!(trains, !is_safe, "{what}: {again:?}");
            let adopts =
                again.errors.contains("written its whole result when its process ended: published in");
            assert_eq!(adopts, point == KillPoint::Sealed, "{what}: {again:?}");
            // The run then has ended, whatever was repeated.
            let last = assert_resumes(&dir, &output, more, &wanted, &what);
            assert!(last.errors.contains("nothing is left to do"), "{what}: {last:?}");
        }
    }
}

/// A run with checkpoints survives each kill, too.
#[test]
fn kills_at_the_end_of_a_run_with_checkpoints() {
    let dir = TestDir::new();
    let more = ["--set", "checkpoint.save_steps=3", "--set", "checkpoint.async_save=false"];
    let undisturbed = dir.path("whole");
    assert_eq!(finish(&mut run(&dir, &undisturbed, &more)).code, Some(0));
    let wanted = trained(&undisturbed);
    for point in KillPoint::ALL {
        let output = dir.path(point.name());
        let killed = finish(run(&dir, &output, &more).env("FINETUNE_KILL_AT", point.name()));
        assert_eq!(killed.code, None, "{killed:?}");
        let again = assert_resumes(&dir, &output, &more, &wanted, point.name());
        assert!(again.errors.contains("resuming from"), "{again:?}");
    }
}

/// The final checkpoint follows the result, and a kill between the two loses neither.
#[test]
fn kills_at_the_end_of_a_run_with_default_checkpoints() {
    let dir = TestDir::new();
    let more = ["--set", "checkpoint.save_steps=auto"];
    let undisturbed = dir.path("whole");
    assert_eq!(finish(&mut run(&dir, &undisturbed, &more)).code, Some(0));
    assert!(undisturbed.join("checkpoint-4").is_dir());
    let wanted = trained(&undisturbed);
    for point in KillPoint::ALL {
        let output = dir.path(point.name());
        let killed = finish(run(&dir, &output, &more).env("FINETUNE_KILL_AT", point.name()));
        assert_eq!(killed.code, None, "{killed:?}");
        let has_ended = matches!(point, KillPoint::Evaluated | KillPoint::Described | KillPoint::Measured);
        assert_eq!(output.join("checkpoint-4").is_dir(), has_ended, "{point:?}: {killed:?}");
        let is_published = has_ended || point == KillPoint::Published;
        assert_eq!(trained(&output) == wanted, is_published, "{point:?}: {killed:?}");
        assert_resumes(&dir, &output, &more, &wanted, point.name());
    }
}

/// A result that differs from its seal is not published: the run starts again.
#[test]
fn a_sealed_result_that_was_damaged_is_not_published() {
    let dir = TestDir::new();
    let undisturbed = dir.path("whole");
    assert_eq!(finish(&mut run(&dir, &undisturbed, &[])).code, Some(0));
    let output = dir.path("out");
    let killed = finish(run(&dir, &output, &[]).env("FINETUNE_KILL_AT", KillPoint::Sealed.name()));
    assert_eq!(killed.code, None, "{killed:?}");
    let weights = output.join(".finetune/result/adapter_model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    let again = assert_resumes(&dir, &output, &[], &trained(&undisturbed), "a damaged result");
    assert!(again.errors.contains("starting from the beginning"), "{again:?}");
    let message = "result.aside-1: adapter_model.safetensors is not what was written: its digest differs";
    assert!(again.errors.contains(message) && output.join("result.aside-1").is_dir(), "{again:?}");
}

/// Without run.json the owner of a sealed result is unknown, so it is kept.
#[test]
fn a_sealed_result_without_a_record_is_kept() {
    let dir = TestDir::new();
    let output = dir.path("out");
    let more = ["--set", "checkpoint.save_steps=2", "--set", "checkpoint.async_save=false"];
    let killed = finish(run(&dir, &output, &more).env("FINETUNE_KILL_AT", KillPoint::Sealed.name()));
    assert_eq!(killed.code, None, "{killed:?}");
    std::fs::remove_file(output.join(".finetune/run.json")).unwrap();
    let again = finish(&mut run(&dir, &output, &[&more[..], &["--resume"]].concat()));
    assert!(again.errors.contains("result.aside-1: no record tells which run wrote it"), "{again:?}");
    assert_eq!(again.code, Some(0), "{again:?}");
    assert!(output.join("result.aside-1/adapter_model.safetensors").exists());
}

/// A result published in a separate folder is found there: nothing is trained again.
#[test]
fn a_result_in_a_folder_of_its_own_ends_the_run() {
    let dir = TestDir::new();
    let output = dir.path("out");
    let killed = finish(run(&dir, &output, &[]).env("FINETUNE_KILL_AT", KillPoint::Sealed.name()));
    assert_eq!(killed.code, None, "{killed:?}");
    std::fs::write(output.join("README.md"), "mine").unwrap();
    for _ in 0..2 {
        let again = finish(&mut run(&dir, &output, &["--resume"]));
        assert!(again.code == Some(0) && again.errors.contains("nothing is left to do"), "{again:?}");
    }
    assert_eq!(std::fs::read_to_string(output.join("README.md")).unwrap(), "mine");
    assert!(output.join("result/adapter_model.safetensors").exists());
}

/// Another program's file at the path of a sealed result stays, and the result is published in a
/// separate folder.
#[test]
fn a_sealed_result_replaces_no_file_of_others() {
    let dir = TestDir::new();
    let output = dir.path("out");
    let killed = finish(run(&dir, &output, &[]).env("FINETUNE_KILL_AT", KillPoint::Sealed.name()));
    assert_eq!(killed.code, None, "{killed:?}");
    std::fs::write(output.join("adapter_config.json"), "mine").unwrap();
    let again = finish(&mut run(&dir, &output, &["--resume"]));
    assert!(again.errors.contains("published in "), "{again:?}");
    assert_eq!(std::fs::read_to_string(output.join("adapter_config.json")).unwrap(), "mine");
    let result = output.join("result");
    assert!(result.join("adapter_model.safetensors").exists() && !result.join("manifest.json").exists());
}

/// `--max-restarts` succeeds after a kill in the last evaluation, for the result was published
/// before.
#[test]
fn a_restart_after_the_result_ends_well() {
    let dir = TestDir::new();
    let output = dir.path("out");
    let mut command = run(&dir, &output, &["--max-restarts", "1"]);
    let done = finish(command.env("FINETUNE_KILL_AT", KillPoint::Evaluated.name()));
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(done.errors.contains("nothing is left to do"), "{done:?}");
}

/// Kills `command` when its last step is logged and `after` more has passed. Also returns how long
/// it continued after that step.
fn killed_after_last_step(mut command: Command, output: &Path, after: Duration) -> (Done, Duration) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let log = output.join("metrics.jsonl");
    let is_logged = || std::fs::read_to_string(&log).is_ok_and(|text| text.contains(STEPS));
    while !is_logged() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_micros(200));
    }
    let logged = Instant::now();
    while logged.elapsed() < after && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_micros(100));
    }
    let went_on = logged.elapsed();
    // The process may have ended by itself; the kill then fails harmlessly.
    drop(child.kill());
    (told(child.wait_with_output().unwrap()), went_on)
}

#[test]
fn kills_at_random_moments_of_the_end() {
    let dir = TestDir::new();
    let (whole, timed) = (dir.path("whole"), Duration::from_secs(300));
    let (done, tail) = killed_after_last_step(run(&dir, &whole, &["--quiet"]), &whole, timed);
    assert_eq!(done.code, Some(0), "{done:?}");
    let wanted = trained(&whole);
    let (mut random, mut kills) = (Random(36), 0);
    let numbers = third((0..RANDOM_KILLS).collect(), RANDOM_KILLS);
    for number in &numbers {
        let output = dir.path(&format!("out-{number}"));
        let after = Duration::from_micros(random.below(tail.as_micros() as u64));
        let (done, _) = killed_after_last_step(run(&dir, &output, &["--quiet"]), &output, after);
        kills += usize::from(done.code.is_none());
        assert!(done.code.is_none_or(|code| code == 0), "{done:?}");
        assert_resumes(&dir, &output, &["--quiet"], &wanted, &format!("{after:?} after the last step"));
        std::fs::remove_dir_all(&output).unwrap();
    }
    assert!(kills > 0, "no run was killed in the {tail:?} after its last step");
    println!("{kills} of {} runs killed within {tail:?} of their last step", numbers.len());
}
