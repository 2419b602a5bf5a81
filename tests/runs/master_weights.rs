//! Full training in bf16 without f32 master weights learns as well as with them, and loses no small
//! update.

use std::collections::BTreeMap;

use finetune::weights::{ModelFiles, StoredDtype};
use serde_json::Value;

use crate::test_dir::{TestDir, copy_folder};

const NONE: &str = "optimizer.master=none";

/// Trains all weights of `dir`'s model in bf16.
fn train(dir: &TestDir, output: &str, keys: &[&str]) {
    train_with(dir, output, keys, &[]);
}

fn train_with(dir: &TestDir, output: &str, keys: &[&str], more: &[&str]) {
    let mut args = vec!["--model", "model", "--dataset", "rows.jsonl", "--output", output, "--quiet"];
    let always = ["model.dtype=bf16", "data.max_seq_len=96", "data.packing=false", "log.tensorboard=false"];
    for key in always.iter().chain(["train.micro_batch_size=1", "scheduler.kind=constant"].iter()).chain(keys)
    {
        args.extend(["--set", key]);
    }
    args.extend(more);
    let done = dir.command(&args).output().unwrap();
    assert!(done.status.success(), "{}", dir.told(&done.stderr));
}

/// Returns the mean loss of the last `count` steps.
fn last_losses(dir: &TestDir, output: &str, count: usize) -> f64 {
    let text = std::fs::read_to_string(dir.path(output).join("metrics.jsonl")).unwrap();
    let entries = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let losses: Vec<f64> = entries.filter_map(|entry| entry["loss"].as_f64()).collect();
    losses[losses.len() - count..].iter().sum::<f64>() / count as f64
}

/// Returns the values of a model and their stored dtypes.
fn weights(dir: &TestDir, folder: &str) -> BTreeMap<String, (StoredDtype, Vec<f32>)> {
    let files = ModelFiles::open(&dir.path(folder)).unwrap();
    let read = |(name, info): (&str, &finetune::weights::TensorInfo)| {
        let mut values = vec![0f32; info.elements()];
        files.read_f32(name, &mut values).unwrap();
        (name.to_owned(), (info.dtype, values))
    };
    files.tensors().map(read).collect()
}

#[test]
fn it_learns_as_with_masters() {
    let dir = TestDir::new();
    let keys =
        |more: &[&'static str]| [&["optimizer.learning_rate=1e-3", "train.max_steps=60"], more].concat();
    for (number, more) in
        [&[][..], &["optimizer.state=int8"], &["train.gradient_accumulation_steps=2"]].into_iter().enumerate()
    {
        let [masters, none] = ["masters", "none"].map(|name| format!("{name} {number}"));
        train(&dir, &masters, &keys(more));
        train(&dir, &none, &keys(&[more, &[NONE]].concat()));
        let [wanted, actual] = [masters, none].map(|output| last_losses(&dir, &output, 20));
        assert!((actual / wanted - 1.0).abs() < 0.01, "{more:?}: {actual}, with masters {wanted}");
    }
}

/// Each update is at most a tenth of the distance between two bf16 numbers: rounding to nearest
/// would lose all of them.
#[test]
fn small_updates_are_not_lost() {
    // Stored in bf16, so both runs start from the same numbers.
    let dir = TestDir::with_model("tiny-qwen3");
    let keys = ["optimizer.learning_rate=1e-5", "train.max_steps=40", "checkpoint.output_dtype=f32"];
    train(&dir, "masters", &keys);
    train(&dir, "none", &[&keys[..], &[NONE]].concat());
    let (before, masters, none) = (weights(&dir, "model"), weights(&dir, "masters"), weights(&dir, "none"));
    let (mut along, mut all, mut moved) = (0f64, 0f64, 0);
    for (name, (_, before)) in &before {
        for ((b, m), n) in before.iter().zip(&masters[name].1).zip(&none[name].1) {
            let (with, without) = (f64::from(m - b), f64::from(n - b));
            along += with * without;
            all += with * with;
            moved += usize::from(without != 0.0);
        }
    }
    assert!(moved > 1000, "{moved} weights changed");
    let share = along / all;
    assert!((0.9..1.1).contains(&share), "the weights went {share:.3} of the way");
}

/// Checkpoints hold the bf16 weights themselves, two bytes each.
#[test]
fn checkpoints_hold_bf16_weights() {
    let dir = TestDir::new();
    let keys = ["optimizer.learning_rate=1e-3", "train.max_steps=2", "checkpoint.save_steps=2", NONE];
    train(&dir, "out", &keys);
    let (saved, output) = (weights(&dir, "out/checkpoint-2"), weights(&dir, "out"));
    for (name, (dtype, values)) in saved {
        assert_eq!(dtype, StoredDtype::BF16, "{name}");
        assert!(values == output[&name].1, "{name}");
    }
}

#[test]
fn weights_in_f32_have_no_masters_to_leave_out() {
    let dir = TestDir::new();
    let keys = ["--set", NONE, "--set", "optimizer.learning_rate=1e-3"];
    let args = ["--model", "model", "--dataset", "rows.jsonl", "--output", "out"];
    let refused = dir.command(&[&args[..], &keys].concat()).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let text = dir.told(&refused.stderr);
    assert!(
        text.contains("this run computes in f32")
            && text.contains("write `dtype = \"bf16\"` under `[model]`"),
        "{text}"
    );
}

/// With masters the checkpoint is in f32; the resumed run still stores its result in the base's
/// dtypes.
#[test]
fn a_resumed_run_leaves_the_dtypes_of_its_base() {
    let dir = TestDir::with_model("tiny-qwen3");
    for (name, more) in [("masters", None), ("none", Some(NONE))] {
        let keys = ["optimizer.learning_rate=1e-3", "train.max_steps=3", "checkpoint.save_steps=2"];
        let keys: Vec<&str> = keys.into_iter().chain(more).collect();
        train(&dir, name, &keys);
        let again = format!("{name} again");
        std::fs::create_dir(dir.path(&again)).unwrap();
        let checkpoint = |output: &str| dir.path(output).join("checkpoint-2");
        copy_folder(&checkpoint(name), &checkpoint(&again));
        train_with(&dir, &again, &keys, &["--resume"]);
        let [whole, resumed] = [name, &again].map(|output| weights(&dir, output));
        assert!(whole.values().all(|(dtype, _)| *dtype == StoredDtype::BF16));
        assert!(whole == resumed, "{name}");
    }
}

/// Weights that do not move have the same gradients in each step, also those of parameters that are
/// no matrix of a linear layer: nothing is left of the step before.
#[test]
fn gradients_begin_anew_in_each_step() {
    let with_experts =
        ["tiny-gpt-oss", "tiny-gemma4-moe", "tiny-deepseek-v3", "tiny-llama4", "tiny-lfm2-moe"];
    let others = ["tiny-llama", "tiny-qwen3-5", "tiny-gemma3n", "tiny-gemma4-e2b", "tiny-apertus"];
    for model in others.into_iter().chain(with_experts) {
        let dir = TestDir::with_model(model);
        let rows = std::fs::read_to_string(dir.path("rows.jsonl")).unwrap();
        dir.write("rows.jsonl", rows.lines().next().unwrap());
        train(&dir, "out", &[NONE, "optimizer.learning_rate=1e-12", "train.max_steps=4"]);
        let text = std::fs::read_to_string(dir.path("out/metrics.jsonl")).unwrap();
        let entries = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let norms: Vec<f64> = entries.filter_map(|entry| entry["grad_norm"].as_f64()).collect();
        assert_eq!(norms.len(), 4);
        assert!(norms.iter().all(|norm| (norm / norms[0] - 1.0).abs() < 1e-4), "{model}: {norms:?}");
    }
}
