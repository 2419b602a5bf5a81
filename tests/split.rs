//! The same run however it is split: every strategy on 2 to 4 ranks against one rank that takes the same micro-batches.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use finetune::weights::ModelFiles;
use serde_json::Value;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// What is trained, how a step is cut, who keeps what.
#[derive(Clone, Copy)]
struct Case<'a> {
    method: &'a str,
    /// Micro-batches of all ranks in a step.
    micro_batches: usize,
    ranks: usize,
    strategy: &'a str,
    shard_size: Option<usize>,
    more: &'a [&'a str],
}

const STEPS: usize = 20;

impl Case<'_> {
    fn one_rank(self) -> Self {
        Case { ranks: 1, strategy: "single", shard_size: None, ..self }
    }

    fn train(self, output: &Path) -> std::process::Output {
        let golden = golden();
        let (model, data) = (golden.join("models/tiny-llama"), golden.join("data/sft_messages.jsonl"));
        let mut set = vec![
            format!("train.max_steps={STEPS}"),
            format!("train.gradient_accumulation_steps={}", self.micro_batches / self.ranks),
            format!("parallel.strategy={}", self.strategy),
            "data.packing=false".into(),
            "data.train_on=\"all\"".into(),
            "data.max_seq_len=128".into(),
            "train.micro_batch_size=1".into(),
            "train.max_grad_norm=0".into(),
            "optimizer.learning_rate=1e-3".into(),
            "optimizer.weight_decay=0.1".into(),
            "log.tensorboard=false".into(),
        ];
        let adapter = ["adapter.r=4", "adapter.lora_alpha=8", "adapter.lora_dropout=0.1"];
        match self.method {
            "full" => {}
            "lora" => set.extend(adapter.map(String::from)),
            _ => set.extend(adapter.iter().chain(&["quantization.kind=nf4"]).map(|key| (*key).to_owned())),
        }
        set.extend(self.shard_size.map(|size| format!("parallel.shard_size={size}")));
        set.extend(self.more.iter().map(|key| (*key).to_owned()));
        let mut command = assert_cmd::Command::cargo_bin("finetune").unwrap();
        command.env("HF_HUB_OFFLINE", "1").env("RAYON_NUM_THREADS", "1").arg("--quiet");
        command.arg("--model").arg(model).arg("--dataset").arg(data).arg("--output").arg(output);
        if self.ranks > 1 {
            command.args(["--ranks", &self.ranks.to_string()]);
        }
        set.iter().for_each(|key| {
            command.args(["--set", key]);
        });
        let done = command.output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{} on {} ranks, {}: {said}", self.strategy, self.ranks, self.method);
        done
    }
}

/// All tensors of a run's result.
fn result(output: &Path) -> BTreeMap<String, Vec<f32>> {
    let files = match output.join("adapter_model.safetensors") {
        adapter if adapter.exists() => ModelFiles::open_file(&adapter).unwrap(),
        _ => ModelFiles::open(output).unwrap(),
    };
    let read = |(name, info): (&str, &finetune::weights::TensorInfo)| {
        let mut values = vec![0f32; info.elements()];
        files.read_f32(name, &mut values).unwrap();
        (name.to_owned(), values)
    };
    files.tensors().map(read).collect()
}

fn losses(output: &Path) -> Vec<f64> {
    let text = std::fs::read_to_string(output.join("metrics.jsonl")).unwrap();
    let steps = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    steps.filter_map(|step| step["loss"].as_f64()).collect()
}

/// Trains `cases` and the same on one rank; each must end equal to the bit.
fn equal_to_the_bit(cases: &[Case<'_>]) {
    let mut alone: BTreeMap<String, (BTreeMap<String, Vec<f32>>, Vec<f64>)> = BTreeMap::new();
    for case in cases {
        let place = tempfile::tempdir().unwrap();
        let key = format!("{} {:?}", case.micro_batches, case.more);
        let wanted = alone.entry(key).or_insert_with(|| {
            let output = place.path().join("alone");
            case.one_rank().train(&output);
            (result(&output), losses(&output))
        });
        let output = place.path().join("split");
        case.train(&output);
        let name = format!("{} on {} ranks, {}, {:?}", case.strategy, case.ranks, case.method, case.more);
        assert_eq!(wanted.1.len(), STEPS);
        assert_eq!(losses(&output), wanted.1, "losses of {name}");
        let found = result(&output);
        assert_eq!(found.keys().collect::<Vec<_>>(), wanted.0.keys().collect::<Vec<_>>());
        for (tensor, values) in &wanted.0 {
            assert!(found[tensor] == *values, "{tensor} of {name}");
        }
    }
}

const STRATEGIES: [&str; 5] = ["ddp", "zero1", "zero2", "fsdp", "hsdp"];

fn matrix(method: &str) {
    let mut cases = Vec::new();
    for recompute in [&["train.recompute=none"], &["train.recompute=block"]] {
        for (ranks, shard_size) in [(2, 2), (3, 1), (4, 2)] {
            for strategy in STRATEGIES {
                let shard_size = (strategy == "hsdp").then_some(shard_size);
                cases.push(Case { method, micro_batches: ranks, ranks, strategy, shard_size, more: recompute });
            }
        }
    }
    equal_to_the_bit(&cases);
}

#[test]
fn full_training_is_the_same_on_ranks() {
    matrix("full");
}

#[test]
fn lora_is_the_same_on_ranks() {
    matrix("lora");
}

#[test]
fn qlora_is_the_same_on_ranks() {
    matrix("qlora");
}
