//! `--sweep`: one run for each value of a key.

use std::process::Stdio;
use std::time::Duration;

use insta::assert_snapshot;
use serde_json::Value;

use crate::faulty_run::watched;
use crate::golden_run::metrics;
use crate::test_dir::{TestDir, into, lora};

/// Time limit of a sweep, so that a hang fails the test.
const PATIENCE: Duration = Duration::from_secs(500);

/// Short runs, with the axes of a sweep.
fn sweep<'a>(axes: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    let mut args = lora(&["--set", "train.max_steps=2", "--set", "train.gradient_accumulation_steps=1"]);
    axes.iter().for_each(|axis| args.extend(["--sweep", axis]));
    args.extend(more);
    args
}

#[test]
fn a_sweep_trains_every_combination() {
    let dir = TestDir::new();
    let axes = ["adapter.r=2,4", "data.train_on=[\"assistant\"],\"all\""];
    let args = sweep(&axes, &["--eval-dataset", "rows.jsonl"]);
    let output = dir.command(&[&["train"], &args[..]].concat()).output().unwrap();
    let (table, said) = (dir.told(&output.stdout), dir.told(&output.stderr));
    assert!(output.status.success(), "{said}");
    let names = ["r2-train_on_assistant", "r2-train_on_all", "r4-train_on_assistant", "r4-train_on_all"];
    for (name, (rank, turns)) in
        names.iter().zip([(2, "assistant"), (2, "all"), (4, "assistant"), (4, "all")])
    {
        let recipe = std::fs::read_to_string(dir.path("out").join(name).join("recipe.toml")).unwrap();
        let recipe: toml::Table = recipe.parse().unwrap();
        assert_eq!(recipe["adapter"]["r"].as_integer(), Some(rank), "{name}");
        assert!(recipe["data"]["train_on"].to_string().contains(turns), "{name}: {recipe}");
        assert!(table.lines().any(|line| line.starts_with(name)), "{table}");
    }
    assert!(
        said.contains("run 1 of 4: adapter.r=2 data.train_on=[\"assistant\"] -> out/r2-train_on_assistant\n"),
        "{said}"
    );
    assert!(
        said.contains("run 4 of 4: adapter.r=4 data.train_on=\"all\" -> out/r4-train_on_all\n"),
        "{said}"
    );
    // The best run has the lowest held-out loss, and the table is the one of `compare`.
    let folders = names.map(|name| format!("out/{name}"));
    let words: Vec<&str> = ["compare"].into_iter().chain(folders.iter().map(String::as_str)).collect();
    let compared = dir.command(&words).output().unwrap();
    let (same, best) = table.split_once("best by held-out loss: ").unwrap();
    assert_eq!(same, dir.told(&compared.stdout));
    let json = dir.command(&[&words[..], &["--json"]].concat()).output().unwrap();
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    let is_best = |run: &&Value| run["best"] == true;
    let marked = json["runs"].as_array().unwrap().iter().find(is_best).unwrap();
    assert!(best.starts_with(&format!("{} (", marked["folder"].as_str().unwrap())), "{table}");
}

/// Without held-out rows the sweep compares training losses, and prints that.
#[test]
fn a_sweep_without_held_out_rows_says_by_what_it_chose() {
    let dir = TestDir::new();
    let table = dir
        .command(&sweep(&["optimizer.learning_rate=1e-2,1e-9"], &["-q", "--set", "train.max_steps=4"]))
        .output()
        .unwrap();
    let said = dir.told(&table.stderr);
    assert!(table.status.success() && !said.contains("run 1 of 2"), "{said}");
    let table = dir.told(&table.stdout);
    let names = ["learning_rate1e-2", "learning_rate1e-9"];
    let losses = names.map(|name| metrics(&dir.path("out").join(name), "step")[3]["loss"].as_f64().unwrap());
    let name = if losses[1] < losses[0] { names[1] } else { names[0] };
    let best = format!("best by training loss, because no run has a held-out loss: out/{name} (");
    assert!(losses[0] != losses[1] && table.contains(&best), "{table}");
}

/// The folder that a sweep names holds the best weights. A run's lower loss on the way counts only
/// if the run keeps those weights.
#[test]
fn a_sweep_names_the_folder_with_the_best_weights() {
    let dir = TestDir::new();
    let axes = ["optimizer.learning_rate=1e-3,1e-1"];
    for keeps in ["false", "true"] {
        let keep = format!("eval.keep_best={keeps}");
        let more = ["--eval-dataset", "rows.jsonl", "--set", "eval.steps=1", "--set", &keep];
        let more = [&more[..], &["--set", "checkpoint.save_steps=1", "--set", "train.max_steps=6"]].concat();
        let output = if keeps == "true" { "kept" } else { "last" };
        let done = dir.command(&into(output, sweep(&axes, &more))).output().unwrap();
        assert!(done.status.success(), "{}", dir.told(&done.stderr));
        let table = dir.told(&done.stdout);
        let names = ["learning_rate1e-3", "learning_rate1e-1"].map(|name| format!("{output}/{name}"));
        let evals = names.each_ref().map(|name| {
            let lines = metrics(&dir.path(name), "step");
            lines[1..].iter().filter_map(|line| line["eval_loss"].as_f64()).collect::<Vec<_>>()
        });
        let lowest = evals.each_ref().map(|losses| losses.iter().copied().fold(f64::MAX, f64::min));
        let last = evals.each_ref().map(|losses| *losses.last().unwrap());
        // The run with the high rate is best on the way and worst at the end.
        assert!(lowest[1] < lowest[0] && last[1] > last[0], "{table}");
        let (best, loss) = if keeps == "true" { (1, lowest[1]) } else { (0, last[0]) };
        assert!(
            table.contains(&format!("best by held-out loss: {} ({loss:.4} at step ", names[best])),
            "{table}"
        );
        let lost = format!("{} had {:.4} at step ", names[1], lowest[1]);
        assert_eq!(table.contains(&lost), keeps == "false", "{table}");
    }
}

/// An invalid run of a sweep is one error before the first run.
#[test]
fn a_sweep_is_checked_before_its_first_run() {
    let dir = TestDir::new();
    let refused = |axes: &[&str], more: &[&str]| dir.refused(&sweep(axes, more));
    assert_snapshot!(refused(&["adapter.r=4,none"], &[]), @r#"
    error: cannot start the sweep: run 2 of 2, adapter.r=none
      caused by: cannot use these settings
      caused by: --set adapter.r=none: `adapter.r` is "none"; accepted: a whole number from 1 to 65536
    hint: `finetune recipes show reference` documents every key
    "#);
    let unknown = refused(&["adapter.rang=4,8"], &[]);
    assert!(unknown.contains("run 1 of 2, adapter.rang=4\n"), "{unknown}");
    assert!(unknown.contains("unknown key `adapter.rang`; nearest: `adapter.r`"), "{unknown}");
    assert_snapshot!(refused(&["adapter.r=4,8", "adapter.r=16"], &[]), @"
    error: cannot start the sweep
      caused by: two `--sweep` give adapter.r; accepted: one for each key
    hint: put all values of a key into one `--sweep`, separated by commas
    ");
    assert_snapshot!(refused(&["adapter.r=4,4"], &[]), @"
    error: cannot start the sweep
      caused by: two runs would have the folder out/r4, the second with adapter.r=4
    hint: give each value once; a folder's name keeps only letters, digits and . _ + - of a value, so those must differ
    ");
    assert_snapshot!(refused(&["adapter.r=1,2,3,4,5,6,7,8", "train.seed=1,2,3,4,5,6,7,8,9"], &[]), @"
    error: cannot start the sweep
      caused by: it has 72 runs; accepted: 1 to 64
    hint: give fewer values, or sweep one key after another
    ");
    assert_snapshot!(refused(&["adapter.r=4,8"], &["--resume", "elsewhere"]), @"
    error: cannot start the sweep
      caused by: `--resume elsewhere` names one checkpoint for all runs; accepted: `--resume` without a folder
    hint: each run goes on in its own folder; to start from an adapter, `--set adapter.path=DIR`
    ");
    assert!(!dir.path("out").exists(), "nothing is trained");
    std::fs::create_dir_all(dir.path("out/r8")).unwrap();
    dir.write("out/r8/mine", "");
    assert_snapshot!(refused(&["adapter.r=4,8"], &[]), @"
    error: cannot start the sweep: cannot write to out/r8
      caused by: the folder is not empty
    hint: give a new folder with `--output`, or `--resume` to go on with the sweep in this one
    ");
    assert!(!dir.path("out/r4").exists(), "nothing is trained");
    for (axis, more) in
        [("adapter.r=4,8", "--dry-run"), ("adapter.r=4,8", "--ui"), ("adapter.r=4,", "-v"), ("r=4", "-v")]
    {
        let done = dir.command(&sweep(&[axis], &[more])).output().unwrap();
        assert_eq!(done.status.code(), Some(2), "{axis} {more}: {}", dir.told(&done.stderr));
    }
    let mut several = dir.command(&sweep(&["adapter.r=4,16"], &[]));
    several.envs([
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29999"),
    ]);
    let several = several.output().unwrap();
    assert_eq!(several.status.code(), Some(1));
    assert_snapshot!(dir.told(&several.stderr), @"
    error: cannot sweep over several processes
      caused by: the world size is 2, from RANK and WORLD_SIZE (torchrun); a sweep starts its processes itself
    hint: start the sweep outside of the launcher, with `--gpus` or `--ranks`; or start each run by itself with `--set`
    ");
    assert!(!dir.path("out/r4").exists(), "nothing is trained");
}

/// A failed run is named, the others are trained, and the sweep ends with its exit code.
#[test]
fn a_sweep_goes_on_after_a_run_that_fails() {
    let dir = TestDir::new();
    let args = sweep(
        &["optimizer.learning_rate=1e38,1e-3"],
        &["--set", "train.max_grad_norm=0", "--set", "train.max_steps=4"],
    );
    let done = dir.command(&args).output().unwrap();
    let (table, said) = (dir.told(&done.stdout), dir.told(&done.stderr));
    assert_eq!(done.status.code(), Some(4), "{said}");
    assert!(
        said.contains("run 1 of 2 ended with exit code 4; the sweep goes on with the next run"),
        "{said}"
    );
    assert!(said.contains("error: 1 of 2 runs of the sweep failed\n  caused by: run 1, optimizer.learning_rate=1e38, ended with exit code 4\n"), "{said}");
    assert!(dir.path("out/learning_rate1e-3/adapter_model.safetensors").exists());
    assert!(table.contains(": out/learning_rate1e-3 ("), "the best is a run that ended well: {table}");
}

/// A signal reaches the run, which saves; the sweep starts no further run. `--resume` then produces
/// the same files as an undisturbed sweep.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only builds with debug assertions plant faults")]
fn a_sweep_that_was_stopped_goes_on() {
    let dir = TestDir::new();
    let saving = ["--set", "train.max_steps=40", "--set", "checkpoint.save_steps=1"];
    let mut slow = dir.command(&sweep(&["adapter.r=2,4"], &saving));
    // Slow enough to be stopped on the way, also on a busy machine.
    slow.env("FINETUNE_FAULT", "0:data:slow=500ms").stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut run = slow.spawn().unwrap();
    while !dir.path("out/r2/checkpoint-1").exists() {
        assert!(run.try_wait().unwrap().is_none(), "the sweep ended before it saved");
        std::thread::sleep(Duration::from_millis(20));
    }
    // SAFETY: a signal to a process that this test started and has not waited for.
    unsafe { libc::kill(libc::pid_t::try_from(run.id()).unwrap(), libc::SIGTERM) };
    let done = watched(run, PATIENCE);
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(85), "{said}");
    assert!(said.contains("the sweep stopped in run 1 of 2; the next run was not started"), "{said}");
    assert!(!dir.path("out/r4").exists() && !dir.path("out/r2/adapter_model.safetensors").exists(), "{said}");
    let resumed = [&saving[..], &["--resume"]].concat();
    let said = dir.said(&sweep(&["adapter.r=2,4"], &resumed));
    assert!(said.contains("resuming from out/r2/checkpoint-"), "{said}");
    assert!(said.contains("run 2 of 2: adapter.r=4 -> out/r4\n"), "{said}");
    dir.said(&into("whole", sweep(&["adapter.r=2,4"], &saving)));
    let weights = |folder: &str| std::fs::read(dir.path(folder).join("adapter_model.safetensors")).unwrap();
    for name in ["r2", "r4"] {
        assert!(weights(&format!("out/{name}")) == weights(&format!("whole/{name}")), "{name}");
    }
    // Finished runs stay unchanged.
    let log = dir.path("out/r2/metrics.jsonl");
    let before = (std::fs::read(&log).unwrap(), log.metadata().unwrap().modified().unwrap());
    let said = dir.said(&sweep(&["adapter.r=2,4"], &resumed));
    assert_eq!(said.matches("nothing is left to do").count(), 2, "{said}");
    assert!((std::fs::read(&log).unwrap(), log.metadata().unwrap().modified().unwrap()) == before);
}
