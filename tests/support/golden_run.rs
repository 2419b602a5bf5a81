//! A run of transformers + PEFT repeated through the binary, on any number of ranks, and compared
//! with the original.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use finetune::weights::ModelFiles;
use serde_json::Value;

use crate::golden_files::{golden_of_family, names_in_checkpoint, sample};

/// The split of a golden run's steps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Split {
    pub(crate) ranks: usize,
    pub(crate) strategy: &'static str,
    /// Shard size of hsdp.
    pub(crate) shard_size: Option<usize>,
}

pub(crate) const ONE_RANK: Split = Split { ranks: 1, strategy: "single", shard_size: None };

pub(crate) fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// Returns the objects of metrics.jsonl that have `key`.
pub(crate) fn metrics(output: &Path, key: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(output.join("metrics.jsonl")).unwrap();
    text.lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|v| v.get(key).is_some())
        .collect()
}

pub(crate) fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("no {key} in {value}"))
}

fn trajectory(folder: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(folder.join("trajectory.json")).unwrap()).unwrap()
}

/// Returns rows of a micro-batch and micro-batches of a rank, such that `ranks` share the rows of a
/// golden step equally.
fn cut(run: &Value, ranks: usize) -> (u64, u64) {
    let (rows, turns) = (run["micro_batch"].as_u64().unwrap(), run["accum"].as_u64().unwrap());
    let ranks = ranks as u64;
    assert!((rows * turns).is_multiple_of(ranks), "{} rows over {ranks} ranks", rows * turns);
    // Whole micro-batches if every rank gets one, else single rows.
    if turns.is_multiple_of(ranks) { (rows, turns / ranks) } else { (1, rows * turns / ranks) }
}

/// The flags that repeat a golden run.
fn flags(trajectory: &Value, folder: &Path, output: &Path, split: Split) -> Vec<String> {
    let run = &trajectory["run"];
    let model = golden_of_family(&format!("models/{}", run["model"].as_str().unwrap()));
    let mut flags = vec![
        "--model".to_owned(),
        model.display().to_string(),
        "--dataset".into(),
        golden().join("data/sft_messages.jsonl").display().to_string(),
        "--output".into(),
        output.display().to_string(),
    ];
    if split.ranks > 1 {
        flags.extend(["--ranks".to_owned(), split.ranks.to_string()]);
    }
    let mut set = |key: &str, value: String| flags.extend(["--set".to_owned(), format!("{key}={value}")]);
    let (rows, turns) = cut(run, split.ranks);
    set("parallel.strategy", split.strategy.into());
    if let Some(size) = split.shard_size {
        set("parallel.shard_size", size.to_string());
    }
    set("data.shuffle", "false".into());
    set("data.packing", "false".into());
    set("data.max_seq_len", run["max_len"].to_string());
    set("train.max_steps", run["steps"].to_string());
    set("train.micro_batch_size", rows.to_string());
    set("train.gradient_accumulation_steps", turns.to_string());
    set("train.max_grad_norm", run["clip"].to_string());
    set("optimizer.learning_rate", run["lr"].to_string());
    set("optimizer.weight_decay", run["weight_decay"].to_string());
    set("optimizer.betas", run["betas"].to_string());
    set("optimizer.eps", run["eps"].to_string());
    set("scheduler.kind", run["schedule"].to_string());
    set("scheduler.warmup_steps", run["warmup"].to_string());
    if let Some(kind) = run["quant"].as_str() {
        set("quantization.kind", format!("{kind:?}"));
        set("quantization.double_quant", run["double_quant"].to_string());
    }
    if run["method"] == "full" {
        set("checkpoint.output_dtype", "f32".into());
    } else {
        set("adapter.path", format!("{:?}", folder.join("adapter_step0").display().to_string()));
    }
    flags
}

/// Returns whether a tensor has values beside the weights that no optimizer updates.
fn is_buffer(name: &&str) -> bool {
    [".e_score_correction_bias", ".expert_bias", ".layer_scalar", ".act_fn.beta", ".act_fn.eps"]
        .iter()
        .any(|end| name.ends_with(end))
}

/// Asserts that a trained model has the values of its base that no optimizer updates.
fn assert_same_buffers(ours: &ModelFiles, base: &Path) {
    let base = ModelFiles::open(base).unwrap();
    for name in base.names().filter(is_buffer) {
        assert_eq!(ours.info(name).unwrap().dtype, base.info(name).unwrap().dtype, "{name}");
        assert_eq!(ours.bytes(name).unwrap(), base.bytes(name).unwrap(), "{name}");
    }
}

/// Returns the largest absolute difference over all tensors of two models or adapters with the same
/// names. Of a larger model only tensors with one of `selected` in their names are stored.
fn weights_difference(ours: &ModelFiles, theirs: &ModelFiles, selected: Option<&Vec<Value>>) -> f32 {
    let is_kept = |name: &&str| {
        selected.is_none_or(|parts| parts.iter().any(|part| name.contains(part.as_str().unwrap())))
    };
    let parts = |name: &str| names_in_checkpoint(name, |name| ours.info(name).is_some());
    let wanted: BTreeSet<String> = theirs.names().flat_map(parts).collect();
    // Goldens have no buffers.
    let trained = ours.names().filter(|name| !is_buffer(name)).filter(is_kept);
    assert_eq!(trained.map(str::to_owned).collect::<BTreeSet<_>>(), wanted);
    let mut largest = 0f32;
    for (name, info) in theirs.tensors() {
        let read = |files: &ModelFiles, name: &str| {
            let mut values = vec![0f32; files.info(name).unwrap().elements()];
            files.read_f32(name, &mut values).unwrap();
            values
        };
        let all = parts(name).iter().flat_map(|part| read(ours, part)).collect();
        let (ours, theirs) = (sample(all, &info.shape), read(theirs, name));
        assert_eq!(ours.len(), theirs.len(), "{name}");
        let pairs = ours.into_iter().zip(theirs);
        largest = pairs.map(|(a, b)| (a - b).abs()).fold(largest, f32::max);
    }
    largest
}

/// Compares the golden run `name`, with this split, step by step and in its final weights.
pub(crate) fn follows(name: &str, split: Split) {
    follows_with(name, split, &[]);
}

/// Like [`follows`], with `variables` in the environment.
pub(crate) fn follows_with(name: &str, split: Split, variables: &[(&str, &str)]) {
    follows_as(name, split, &[], variables);
}

/// Like [`follows`], with `more` flags and `variables` in the environment.
pub(crate) fn follows_as(name: &str, split: Split, more: &[&str], variables: &[(&str, &str)]) {
    let (folder, dir) = (golden_of_family(&format!("train/{name}")), tempfile::tempdir().unwrap());
    let output = dir.path().join("out");
    steps_follow(name, split, more, variables, &output, [2e-5, 2e-4]);
    let trajectory = trajectory(&folder);
    let name = format!("{name}, {split:?}");
    let (ours, theirs) = if trajectory["run"]["method"] == "full" {
        let whole = folder.join("final/model.safetensors");
        let stored = if whole.exists() { whole } else { folder.join("final_samples.safetensors") };
        // Several ranks write several files.
        let ours = ModelFiles::open(&output).unwrap();
        let model = trajectory["run"]["model"].as_str().unwrap();
        assert_same_buffers(&ours, &golden_of_family(&format!("models/{model}")));
        (ours, ModelFiles::open_file(&stored).unwrap())
    } else {
        let open = |folder: &Path| ModelFiles::open_file(&folder.join("adapter_model.safetensors"));
        (open(&output).unwrap(), open(&folder.join("adapter_final")).unwrap())
    };
    let difference = weights_difference(&ours, &theirs, trajectory["run"]["save_final"].as_array());
    // AdamW divides by the roots of tiny gradients, so that rounding moves some biases of
    // query_key_value; all other tensors of this run are the same within 2e-7 with each set of
    // instructions.
    let most = if name.starts_with("full_gpt-neox,") { 1.2e-4 } else { 1e-4 };
    assert!(difference < most, "{name}: final weights differ by {difference}");
}

/// Repeats the golden run `name` with `more` flags and compares its steps: losses and gradient
/// norms within these relative differences.
fn steps_follow(
    name: &str,
    split: Split,
    more: &[&str],
    variables: &[(&str, &str)],
    output: &Path,
    [loss, norm]: [f64; 2],
) {
    let folder = golden_of_family(&format!("train/{name}"));
    let trajectory = trajectory(&folder);
    let mut command = assert_cmd::Command::cargo_bin("finetune").unwrap();
    command.env("HF_HUB_OFFLINE", "1").envs(variables.iter().copied());
    let done = command.args(flags(&trajectory, &folder, output, split)).args(more).output().unwrap();
    let name = format!("{name}, {split:?}, {more:?}");
    assert!(done.status.success(), "{name}\n{}", String::from_utf8_lossy(&done.stderr));
    let wanted = trajectory["steps"].as_array().unwrap();
    let steps = metrics(output, "loss");
    assert_eq!(steps.len(), wanted.len());
    for (ours, theirs) in steps.iter().zip(wanted) {
        let relative = |key: &str, reference: &str| {
            let wanted = number(theirs, reference);
            (number(ours, key) - wanted).abs() / wanted.abs().max(1e-30)
        };
        let step = &theirs["step"];
        assert!(relative("loss", "loss_f64") < loss, "{name} step {step}: {ours} {theirs}");
        assert!(relative("grad_norm", "grad_norm_f64") < norm, "{name} step {step}: {ours} {theirs}");
        let rate = (number(ours, "learning_rate") - number(theirs, "lr")).abs();
        assert!(rate < 1e-9, "{name} step {step}: {ours} {theirs}");
    }
}

/// Repeats the golden run `name` on one rank in bf16, once for each environment variable, with the
/// recipe text beside it. Losses are within 1 % of the original's, and the bits are the same each
/// time.
pub(crate) fn follows_in_bf16(name: &str, runs: &[((&str, &str), Option<&str>)]) {
    let dir = tempfile::tempdir().unwrap();
    let losses = |&(variable, more): &((&str, &str), Option<&str>)| {
        let output = dir.path().join(variable.1);
        let keys = std::iter::once("model.dtype=bf16").chain(more);
        let flags: Vec<_> = keys.flat_map(|key| ["--set", key]).collect();
        steps_follow(name, ONE_RANK, &flags, &[variable], &output, [1e-2, 1e-1]);
        let bits = |step: &Value| [number(step, "loss"), number(step, "grad_norm")].map(f64::to_bits);
        metrics(&output, "loss").iter().map(bits).collect::<Vec<_>>()
    };
    let runs: Vec<_> = runs.iter().map(losses).collect();
    assert!(runs.windows(2).all(|pair| pair[0] == pair[1]), "{name}: {runs:x?}");
}

/// Repeats the golden run `name` on one rank in bf16 with the frozen weights multiplied in fp8, and
/// without. Losses and gradient norms are within these relative differences of the original's.
/// Losses have the same bits if the weights are copied from the host for each use and blocks are
/// recomputed, and others without fp8.
pub(crate) fn follows_in_fp8(name: &str, limits: [f64; 2], variables: &[(&str, &str)]) {
    let dir = tempfile::tempdir().unwrap();
    let losses = |more: &[&str]| {
        let output = dir.path().join(format!("out{}", more.len()));
        let flags: Vec<_> = ["model.dtype=bf16"].iter().chain(more).flat_map(|key| ["--set", key]).collect();
        steps_follow(name, ONE_RANK, &flags, variables, &output, limits);
        metrics(&output, "loss").iter().map(|step| number(step, "loss").to_bits()).collect::<Vec<_>>()
    };
    let fp8 = "train.base_products=fp8";
    let fp8_losses = losses(&[fp8]);
    assert_eq!(losses(&[fp8, "parallel.offload=params", "train.recompute=block"]), fp8_losses, "{name}");
    assert_ne!(losses(&[]), fp8_losses, "{name}: the key has no effect");
}
