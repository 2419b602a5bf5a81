//! The same run however it is split and wherever its parts are kept. Every strategy on 2 to 4
//! ranks, with and without offload, is compared with one rank that has the same micro-batches and
//! keeps everything on the device. One run of the tests tries a third of the combinations.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use finetune::weights::ModelFiles;
use serde_json::Value;

use crate::exhaustive::third;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

type Tensors = BTreeMap<String, Vec<f32>>;

/// The method, the split of a step, and the strategy.
#[derive(Clone, Copy)]
struct Case<'a> {
    method: &'a str,
    /// Micro-batches of all ranks in a step.
    micro_batches: usize,
    ranks: usize,
    strategy: &'a str,
    shard_size: Option<usize>,
    /// `parallel.offload`, or "file" for parameters in a file.
    offload: &'a str,
    more: &'a [&'a str],
}

/// The default model; another one is given as `model=NAME` among the keys.
const MODEL: &str = "tiny-llama";

/// Steps unless a case sets `train.max_steps`. The second step is the first one that uses optimizer
/// state.
const STEPS: usize = 4;

impl Case<'_> {
    fn one_rank(self) -> Self {
        Case { ranks: 1, strategy: "single", shard_size: None, offload: "none", ..self }
    }

    fn train(self, output: &Path) {
        self.succeed(self.command(output));
    }

    fn resume(self, output: &Path) {
        let mut command = self.command(output);
        command.arg("--resume");
        self.succeed(command);
    }

    fn succeed(self, mut command: assert_cmd::Command) {
        let done = command.output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{} on {} ranks, {}: {said}", self.strategy, self.ranks, self.method);
    }

    fn command(self, output: &Path) -> assert_cmd::Command {
        let golden = golden();
        let named = self.more.iter().find_map(|key| key.strip_prefix("model="));
        let model = golden.join("models").join(named.unwrap_or(MODEL));
        let data = golden.join("data/sft_messages.jsonl");
        let mut set = vec![
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
        let adapter =
            ["adapter.r=4", "adapter.lora_alpha=8", "adapter.lora_dropout=0.1", "train.neftune_alpha=5"];
        match self.method {
            "full" => {}
            "lora" => set.extend(adapter.map(String::from)),
            _ => set.extend(adapter.iter().chain(&["quantization.kind=nf4"]).map(|key| (*key).to_owned())),
        }
        match self.offload {
            "none" => {}
            "file" => {
                let folder = output.parent().unwrap();
                set.extend([
                    "parallel.offload=params".into(),
                    format!("parallel.offload_folder={}", folder.display()),
                ]);
            }
            offload => set.push(format!("parallel.offload={offload}")),
        }
        set.extend(self.shard_size.map(|size| format!("parallel.shard_size={size}")));
        if !self.more.iter().any(|key| key.starts_with("train.max_steps=")) {
            set.push(format!("train.max_steps={STEPS}"));
        }
        let name = |key: &str| key.split_once('=').map(|(name, _)| name.to_owned());
        set.retain(|key| self.more.iter().all(|own| name(own) != name(key)));
        let keys = self.more.iter().filter(|key| !key.starts_with("model="));
        set.extend(keys.map(|key| (*key).to_owned()));
        let mut command = assert_cmd::Command::cargo_bin("finetune").unwrap();
        command.env("HF_HUB_OFFLINE", "1").env("RAYON_NUM_THREADS", "1").arg("--quiet");
        command.arg("--model").arg(model).arg("--dataset").arg(data).arg("--output").arg(output);
        if self.ranks > 1 {
            command.args(["--ranks", &self.ranks.to_string()]);
        }
        set.iter().for_each(|key| {
            command.args(["--set", key]);
        });
        command
    }
}

/// Returns all tensors of a run's result.
fn result(output: &Path) -> Tensors {
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

/// Trains `cases`, and the same on one rank; results must be equal to the bit.
fn equal_to_the_bit(cases: &[Case<'_>]) {
    let mut alone: BTreeMap<String, (Tensors, Vec<f64>)> = BTreeMap::new();
    for case in cases {
        let dir = tempfile::tempdir().unwrap();
        let key = format!("{} {} {:?}", case.method, case.micro_batches, case.more);
        let wanted = alone.entry(key).or_insert_with(|| {
            let output = dir.path().join("alone");
            case.one_rank().train(&output);
            (result(&output), losses(&output))
        });
        let output = dir.path().join("split");
        case.train(&output);
        let name = format!(
            "{} on {} ranks, {}, offload {}, {:?}",
            case.strategy, case.ranks, case.method, case.offload, case.more
        );
        assert_eq!(wanted.1.len(), STEPS);
        assert_eq!(losses(&output), wanted.1, "losses of {name}");
        let actual = result(&output);
        assert_eq!(actual.keys().collect::<Vec<_>>(), wanted.0.keys().collect::<Vec<_>>());
        for (tensor, values) in &wanted.0 {
            assert!(actual[tensor] == *values, "{tensor} of {name}");
        }
        let left = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(left.into_iter().all(|name| name == "alone" || name == "split"), "a file of {name} is left");
    }
}

/// Returns the Euclidean distance divided by the norm.
fn relative(actual: &Tensors, wanted: &Tensors) -> f64 {
    let (mut off, mut all) = (0f64, 0f64);
    for (tensor, values) in wanted {
        for (a, b) in actual[tensor].iter().zip(values) {
            off += (f64::from(*a) - f64::from(*b)).powi(2);
            all += f64::from(*b).powi(2);
        }
    }
    (off / all).sqrt()
}

fn near(actual: &[f64], wanted: &[f64], name: &str) {
    assert_eq!(actual.len(), wanted.len(), "{name}");
    for (step, (a, b)) in actual.iter().zip(wanted).enumerate() {
        assert!((a / b - 1.0).abs() < 1e-6, "{name}: loss {a} at step {step}, {b} on one rank");
    }
}

/// Tied tables, whole tables and single rows that train beside an adapter, values derived from the
/// base, 8-bit states: all cases where sharding could go wrong.
#[test]
fn every_kind_of_parameter_is_the_same_on_ranks() {
    let without_masters = ["model=tiny-qwen2", "model.dtype=bf16", "optimizer.master=none"];
    let in_8_bits = ["model=tiny-qwen3", "model.dtype=bf16", "optimizer.master=none", "optimizer.state=int8"];
    let kinds: [(&str, &[&str]); 11] = [
        ("full", &["model=tiny-gemma3"]),
        ("full", &["model=tiny-qwen3", "optimizer.state=int8"]),
        ("full", &["model=tiny-phi3", "optimizer.weight_decay=0.5"]),
        ("full", &without_masters),
        ("full", &in_8_bits),
        ("lora", &["model=tiny-qwen2", "adapter.modules_to_save=[\"embed_tokens\"]"]),
        ("qlora", &["adapter.modules_to_save=[\"lm_head\", \"norm\"]"]),
        ("qlora", &["model=tiny-qwen2", "model.new_tokens=[\"<a>\", \"<b>\"]"]),
        ("qlora", &["adapter.kind=dora"]),
        ("qlora", &["adapter.init=pissa", "optimizer.lora_plus_ratio=4.0"]),
        ("qlora", &["adapter.init=loftq", "model.dtype=bf16"]),
    ];
    let mut cases = Vec::new();
    for (method, more) in kinds {
        for strategy in ["ddp", "zero1", "zero2", "fsdp"] {
            cases.push(Case {
                method,
                micro_batches: 2,
                ranks: 2,
                strategy,
                shard_size: None,
                offload: "none",
                more,
            });
        }
        for (ranks, strategy, offload) in
            [(1, "single", "file"), (2, "ddp", "params"), (2, "zero2", "optimizer"), (2, "fsdp", "file")]
        {
            cases.push(Case { method, micro_batches: 2, ranks, strategy, shard_size: None, offload, more });
        }
        if more.contains(&"optimizer.master=none") {
            // Gradients that backward writes in bf16, and gradients that are rounded from f32.
            for offload in ["params", "file"] {
                let strategy = "single";
                cases.push(Case {
                    method,
                    micro_batches: 1,
                    ranks: 1,
                    strategy,
                    shard_size: None,
                    offload,
                    more,
                });
            }
        }
    }
    equal_to_the_bit(&third(cases, 8));
}

/// With several micro-batches a rank, sums have another order, and gradient clipping uses a norm of
/// parts.
#[test]
fn accumulated_and_clipped_steps_are_the_same_to_rounding() {
    for (method, ranks) in [("full", 2), ("full", 3), ("lora", 2)] {
        let dir = tempfile::tempdir().unwrap();
        let base = Case {
            method,
            micro_batches: 2 * ranks,
            ranks,
            strategy: "",
            shard_size: None,
            offload: "none",
            more: &["train.max_grad_norm=0.5"],
        };
        let alone = dir.path().join("alone");
        base.one_rank().train(&alone);
        for strategy in STRATEGIES {
            let output = dir.path().join(strategy);
            Case { strategy, ..base }.train(&output);
            let name = format!("{strategy} on {ranks} ranks, {method}");
            near(&losses(&output), &losses(&alone), &name);
            let distance = relative(&result(&output), &result(&alone));
            assert!(distance < 1e-6, "{name}: weights off by {distance}");
        }
    }
}

/// Gradients reduced in 16 bits change the run a little, and need fewer bytes.
#[test]
fn reduce_dtype_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let train = |more: &[&str]| {
        let case = Case {
            method: "full",
            micro_batches: 2,
            ranks: 2,
            strategy: "fsdp",
            shard_size: None,
            offload: "none",
            more,
        };
        let output = dir.path().join(more[0]);
        case.train(&output);
        result(&output)
    };
    let (f32s, bf16s) = (train(&["parallel.reduce_dtype=f32"]), train(&["parallel.reduce_dtype=bf16"]));
    let distance = relative(&bf16s, &f32s);
    assert!(distance > 1e-7 && distance < 1e-2, "{distance}");
}

/// A checkpoint of any number of ranks, strategy and offload resumes under another one: same
/// weights, same run.
#[test]
fn runs_go_on_with_other_ranks() {
    for (method, state) in [("full", "f32"), ("full", "int8"), ("qlora", "f32")] {
        let dir = tempfile::tempdir().unwrap();
        let state = format!("optimizer.state={state}");
        let more =
            [state.as_str(), "train.max_steps=10", "checkpoint.save_steps=2", "checkpoint.keep_last=9"];
        let case = |ranks, strategy, offload| Case {
            method,
            micro_batches: 12,
            ranks,
            strategy,
            shard_size: (strategy == "hsdp").then_some(2),
            offload,
            more: &more,
        };
        let alone = dir.path().join("alone");
        case(1, "single", "none").train(&alone);
        let (wanted, mut from) = (losses(&alone), alone.clone());
        let hops =
            [(2, "fsdp", "params"), (4, "hsdp", "optimizer"), (3, "zero2", "file"), (1, "single", "none")];
        for (hop, (ranks, strategy, offload)) in hops.into_iter().enumerate() {
            let output = dir.path().join(format!("hop-{hop}"));
            let step = 2 * (hop + 1);
            copy_folder(&from.join(format!("checkpoint-{step}")), &output.join(format!("checkpoint-{step}")));
            case(ranks, strategy, offload).resume(&output);
            let name = format!("{method} {state} from step {step} on {ranks} ranks, offload {offload}");
            near(&losses(&output), &wanted[step..], &name);
            // After the last step nothing is left to train: the loaded weights are written
            // unchanged.
            let again = dir.path().join(format!("again-{hop}"));
            copy_folder(&output.join("checkpoint-10"), &again.join("checkpoint-10"));
            case(5 - ranks.min(4), if ranks == 4 { "single" } else { "zero1" }, "none").resume(&again);
            assert!(result(&again) == result(&output), "weights of {name}, loaded again");
            from = output;
        }
    }
}

#[test]
fn ranks_that_do_not_divide_a_resumed_step() {
    let dir = tempfile::tempdir().unwrap();
    let case = |ranks, strategy| Case {
        method: "lora",
        micro_batches: 4,
        ranks,
        strategy,
        shard_size: None,
        offload: "none",
        more: &["checkpoint.save_steps=4"],
    };
    case(4, "ddp").train(dir.path());
    let said = case(3, "ddp").command(dir.path()).arg("--resume").output().unwrap();
    let text = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.status.code(), Some(1), "{text}");
    assert!(text.contains("which 3 ranks cannot share evenly"), "{text}");
    assert!(text.contains("use one of these numbers of ranks: 1, 2, 4"), "{text}");
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

const STRATEGIES: [&str; 5] = ["ddp", "zero1", "zero2", "fsdp", "hsdp"];

const RECOMPUTE: [&[&str]; 2] = [&["train.recompute=none"], &["train.recompute=block"]];

/// Every strategy with as many micro-batches a step as ranks; `ranks` include the group sizes of
/// hsdp.
fn matrix(method: &str, ranks: &[(usize, usize)], offloads: &[&str]) {
    let mut cases = Vec::new();
    for more in RECOMPUTE {
        for &(ranks, shard_size) in ranks {
            for strategy in STRATEGIES {
                for offload in offloads {
                    let shard_size = (strategy == "hsdp").then_some(shard_size);
                    cases.push(Case {
                        method,
                        micro_batches: ranks,
                        ranks,
                        strategy,
                        shard_size,
                        offload,
                        more,
                    });
                }
            }
        }
    }
    equal_to_the_bit(&third(cases, offloads.len()));
}

const RANKS: [(usize, usize); 3] = [(2, 2), (3, 1), (4, 2)];

const OFFLOADS: [&str; 3] = ["none", "optimizer", "params"];

#[test]
fn full_training_is_the_same_on_ranks() {
    matrix("full", &RANKS, &OFFLOADS);
}

#[test]
fn lora_is_the_same_on_ranks() {
    matrix("lora", &RANKS, &OFFLOADS);
}

#[test]
fn qlora_is_the_same_on_ranks() {
    matrix("qlora", &RANKS, &OFFLOADS);
}

/// One rank with one micro-batch a step and with two, and one parameter file for each rank.
#[test]
fn offload_changes_nothing_on_one_rank_and_with_files() {
    for method in ["full", "lora", "qlora"] {
        let (ranks, strategy, shard_size) = (1, "single", None);
        let mut cases = Vec::new();
        for more in RECOMPUTE {
            for (micro_batches, offload) in [(1, "optimizer"), (2, "params"), (1, "params"), (1, "file")] {
                cases.push(Case { method, micro_batches, ranks, strategy, shard_size, offload, more });
            }
        }
        equal_to_the_bit(&cases);
        matrix(method, &RANKS[..1], &["file"]);
    }
}

/// Every recomputing gives the losses and weights of none: for each method, with dropout, packed
/// rows and experts, on ranks that gather blocks, and with weights on the host. The models have 3
/// or 4 blocks.
#[test]
fn recomputing_changes_nothing() {
    let (one, two) = (Case { ranks: 1, ..RECOMPUTED }, Case { ranks: 2, strategy: "fsdp", ..RECOMPUTED });
    let settings = [
        Case { method: "full", ..one },
        Case { more: &["model=../families/models/tiny-qwen3-5", "data.packing=true"], ..one },
        Case { method: "qlora", more: &["model=../families/models/tiny-smollm3", "model.dtype=bf16"], ..one },
        Case { more: &["model=../families/models/tiny-olmo3", "adapter.kind=dora"], ..one },
        Case { more: &["model=../families/models/tiny-qwen3-moe", "adapter.lora_dropout=0"], ..one },
        Case { offload: "params", ..one },
        Case { method: "full", ..two },
        Case {
            offload: "file",
            more: &["model=../families/models/tiny-deepseek-v3", "adapter.lora_dropout=0"],
            ..two
        },
    ];
    for setting in settings {
        let run = |recompute: &str| {
            let dir = tempfile::tempdir().unwrap();
            let output = dir.path().join("out");
            let key = format!("train.recompute={recompute}");
            let more = [setting.more, &[&key]].concat();
            Case { more: &more, ..setting }.train(&output);
            (result(&output), losses(&output))
        };
        let wanted = run("none");
        for recompute in ["selective", "first:1", "every:2"] {
            let name = format!("{recompute}: {}, {:?}", setting.method, setting.more);
            let (tensors, losses) = run(recompute);
            assert_eq!(losses, wanted.1, "{name}");
            assert!(tensors == wanted.0, "weights of {name}");
        }
    }
}

/// LoRA of a model of 4 blocks with windows.
const RECOMPUTED: Case<'_> = Case {
    method: "lora",
    micro_batches: 2,
    ranks: 1,
    strategy: "single",
    shard_size: None,
    offload: "none",
    more: &["model=../families/models/tiny-cohere2"],
};
