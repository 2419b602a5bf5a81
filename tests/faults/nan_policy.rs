//! Steps with a NaN loss: a run stops, skips the step or rolls back. The resulting run does not
//! depend on how it got there.

use std::process::Output;

use serde_json::{Value, json};

use crate::faulty_run::{TILDE, changed_model, set_column};
use crate::test_dir::TestDir;

/// Steps of a run, with one row for each rank.
const STEPS: usize = 8;

/// A model whose embedding is NaN for token `~`, and `STEPS` rows for each of `ranks`; the rows of
/// the steps `bad` (from 1) hold that token.
fn test_dir(ranks: usize, bad: &[usize]) -> TestDir {
    let dir = TestDir::new();
    changed_model(&dir.path("model"), |tensors| {
        let table = tensors.get_mut("model.embed_tokens.weight").unwrap();
        *table = set_column(table, TILDE..TILDE + 1, 5, f32::NAN);
    });
    let row = |i: usize| {
        let is_bad = bad.contains(&(i / ranks + 1)) && i.is_multiple_of(ranks);
        json!({ "text": format!("row {i} of a {} of some length", if is_bad { "~" } else { "text" }) })
            .to_string()
            + "\n"
    };
    dir.write("rows.jsonl", &(0..STEPS * ranks).map(row).collect::<String>());
    dir
}

fn train(dir: &TestDir, output: &str, sets: &[&str], more: &[&str]) -> Output {
    let always = ["data.packing=false", "data.shuffle=false", "data.train_on=all", "data.max_seq_len=64"];
    let one_row = ["train.gradient_accumulation_steps=1", "train.epochs=1", "log.tensorboard=false"];
    let mut args = vec!["--model", "model", "--dataset", "rows.jsonl", "--output", output];
    for set in always.iter().chain(&one_row).chain(sets) {
        args.extend(["--set", set]);
    }
    args.extend(more);
    dir.command(&args).output().unwrap()
}

/// Returns the output of a run that must end with exit code `code`.
fn ends(dir: &TestDir, done: &Output, code: i32) -> String {
    let said = dir.told(&done.stderr);
    assert_eq!(done.status.code(), Some(code), "{said}");
    said
}

fn weights(dir: &TestDir, output: &str) -> Vec<Vec<u8>> {
    let mut names: Vec<_> = std::fs::read_dir(dir.path(output))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "safetensors"))
        .collect();
    names.sort();
    assert!(!names.is_empty());
    names.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

fn metrics(dir: &TestDir, output: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.path(output).join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

const SKIP: &str = "train.on_nan=skip";
const ROLL_BACK: &str = "train.on_nan=rollback";

#[test]
fn a_run_stops_at_the_first_unless_it_is_told_otherwise() {
    let dir = test_dir(1, &[3, 4]);
    let stopped = ends(&dir, &train(&dir, "out", &["checkpoint.save_steps=2"], &["--recipe", "lora"]), 4);
    assert!(stopped.contains("error: the numbers diverged at step 3\n"), "{stopped}");
    assert_eq!(metrics(&dir, "out").len(), 2);
    // `train.on_nan` may change on resume.
    let sets = ["checkpoint.save_steps=2", SKIP, "train.nan_limit=2"];
    let resumed = ends(&dir, &train(&dir, "out", &sets, &["--recipe", "lora", "--resume"]), 0);
    let first = "warning: step 3 diverged: loss NaN, gradient norm NaN; the first bad value is in the weight \
                 model.embed_tokens.weight; skipped without an update (1 of 2 in a row, `train.nan_limit`)";
    assert!(resumed.contains(first) && resumed.contains("(2 of 2 in a row"), "{resumed}");
    let lines = metrics(&dir, "out");
    assert_eq!(lines.len(), STEPS);
    for (line, step) in lines.iter().zip(1..) {
        assert_eq!(line["step"], step);
        assert_eq!(line.get("skipped").is_some(), step == 3 || step == 4, "{line}");
        assert_eq!(line.get("loss").is_some(), step != 3 && step != 4, "{line}");
    }
    // One uninterrupted run, and one resumed after the skipped steps, are the same.
    ends(&dir, &train(&dir, "whole", &sets, &["--recipe", "lora"]), 0);
    assert!(weights(&dir, "out") == weights(&dir, "whole"), "resumed: other bytes");
    let fork = train(&dir, "fork", &sets, &["--recipe", "lora", "--resume", "whole/checkpoint-6"]);
    ends(&dir, &fork, 0);
    assert!(weights(&dir, "fork") == weights(&dir, "whole"), "resumed after skipped steps: other bytes");
}

#[test]
fn enough_is_enough() {
    let dir = test_dir(1, &[3, 4, 6]);
    let lora = ["--recipe", "lora"];
    let skipped = ends(&dir, &train(&dir, "skip", &[SKIP, "train.nan_limit=1"], &lora), 4);
    assert!(skipped.contains("error: the numbers diverged at step 4\n"), "{skipped}");
    assert!(skipped.contains("1 skipped step before this step: `train.nan_limit` is 1"), "{skipped}");
    let early = ends(&dir, &train(&dir, "early", &[ROLL_BACK, "checkpoint.save_steps=4"], &lora), 4);
    assert!(early.contains("error: the numbers diverged at step 3\n"), "{early}");
    assert!(early.contains("this run has no checkpoint yet to roll back to"), "{early}");
    let sets = [ROLL_BACK, "checkpoint.save_steps=2", "train.nan_limit=1"];
    let back = ends(&dir, &train(&dir, "back", &sets, &lora), 4);
    assert!(
        back.contains("step 3 diverged")
            && back.contains("rolled back to checkpoint-2, continues with the rows"),
        "{back}"
    );
    assert!(back.contains("error: the numbers diverged at step 4\n"), "{back}");
    assert!(dir.path("back/checkpoint-2").is_dir());
}

/// Steps since the checkpoint are undone: the run equals, to the bit, one that skipped them all.
#[test]
fn a_rolled_back_run_is_one_that_skipped_what_came_after_the_checkpoint() {
    for (ranks, recipe, sets) in [
        (1, "lora", &["optimizer.weight_decay=0.1"][..]),
        (2, "lora", &["parallel.strategy=zero1", "adapter.kind=dora"][..]),
        (2, "full", &["parallel.strategy=fsdp", "model.dtype=bf16", "optimizer.state=int8"][..]),
        (1, "full", &["model.dtype=bf16", "optimizer.master=none"][..]),
    ] {
        let number = ranks.to_string();
        let mut more = vec!["--recipe", recipe];
        if ranks > 1 {
            more.extend(["--ranks", number.as_str()]);
        }
        let run = |bad: &[usize], policy: &[&str]| {
            let dir = test_dir(ranks, bad);
            let done = train(&dir, "out", &[&["checkpoint.save_steps=2"], sets, policy].concat(), &more);
            let said = ends(&dir, &done, 0);
            (weights(&dir, "out"), said)
        };
        let (skipped, _) = run(&[3, 4], &[SKIP]);
        let (rolled_back, said) = run(&[4], &[ROLL_BACK]);
        assert!(said.contains("rolled back to checkpoint-2, continues with the rows after step 4"), "{said}");
        assert!(skipped == rolled_back, "{ranks} ranks, {recipe}: other bytes");
        let (plain, _) = run(&[], &[SKIP]);
        assert!(plain != skipped, "{recipe}: skipped steps count");
    }
}
