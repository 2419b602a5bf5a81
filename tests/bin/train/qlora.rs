//! Quantized bases and adapters over them, through the binary: properties beyond the golden
//! trajectories of the module `train`.

use std::path::{Path, PathBuf};
use std::process::Output;

use finetune::weights::ModelFiles;
use serde_json::Value;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn finetune(args: &[String]) -> Output {
    let mut command = assert_cmd::Command::cargo_bin("finetune").unwrap();
    command.env("HF_HUB_OFFLINE", "1").args(args).output().unwrap()
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// A run on `model` (below tests/golden) with given settings, its losses and its evaluations.
struct Run {
    output: PathBuf,
    said: String,
}

impl Run {
    fn train(dir: &Path, name: &str, model: &str, settings: &str) -> Self {
        let output = dir.join(name);
        let data = golden().join("data/sft_messages.jsonl").display().to_string();
        let model = golden().join(model).display().to_string();
        let mut args = vec!["--model".to_owned(), model, "--dataset".into(), data.clone()];
        args.extend(["--eval-dataset".into(), data, "--output".into(), output.display().to_string()]);
        let defaults = "data.max_seq_len=96 data.packing=false data.shuffle=false log.tensorboard=false \
                        optimizer.learning_rate=2e-3 train.micro_batch_size=2 scheduler.kind=constant adapter.r=4";
        for setting in words(defaults).into_iter().chain(words(settings)) {
            if setting.starts_with("--") {
                args.push(setting);
            } else {
                args.extend(["--set".into(), setting]);
            }
        }
        let run = finetune(&args);
        assert!(run.status.success(), "{settings}\n{}", told(&run));
        Run { output, said: told(&run) }
    }

    fn metrics(&self, key: &str) -> Vec<f64> {
        let text = std::fs::read_to_string(self.output.join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter_map(|line| line.get(key).and_then(Value::as_f64)).collect()
    }

    fn losses(&self) -> Vec<f64> {
        self.metrics("loss")
    }

    fn adapter(&self) -> Vec<u8> {
        std::fs::read(self.output.join("adapter_model.safetensors")).unwrap()
    }
}

fn close(a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert!((a / b - 1.0).abs() < tolerance, "{a} {b}");
    }
}

#[test]
fn a_base_stored_in_16_bits_stays_so_and_trains_as_in_32() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden().join("models/tiny-qwen3").display().to_string();
    let wide = dir.path().join("wide").display().to_string();
    let export = ["export", "--model", &model, "--output", &wide, "--format", "hf", "--type", "f32"];
    assert!(finetune(&export.map(str::to_owned)).status.success());
    let settings = "train.max_steps=5 train.max_grad_norm=0 model.dtype=\"f32\" adapter.kind=\"lora\" \
                    train.micro_batch_size=1";
    let train = |name: &str, model: &str, more: &str| {
        Run::train(dir.path(), name, model, &format!("{settings} {more}"))
    };
    let [narrow, wide] =
        [("narrow", &model), ("wide-run", &wide)].map(|(name, model)| train(name, model, ""));
    close(&narrow.losses(), &wide.losses(), 1e-6);
    // Matrices take 2 bytes a value instead of 4; norms and adapters still take 4.
    let [mut matrices, mut norms] = [0, 0];
    let base = ModelFiles::open(Path::new(&model)).unwrap();
    for shape in base.names().map(|name| &base.info(name).unwrap().shape) {
        *(if shape.len() == 2 { &mut matrices } else { &mut norms }) += shape.iter().product::<usize>();
    }
    let adapter = ModelFiles::open_file(&narrow.output.join("adapter_model.safetensors")).unwrap();
    let adapters: usize = adapter.names().map(|name| adapter.info(name).unwrap().elements()).sum();
    for (run, value) in [(&narrow, 2), (&wide, 4)] {
        let planned = finetune::units::bytes((value * matrices + 4 * (norms + adapters)) as u64);
        assert!(run.said.contains(&format!("= weights {planned}")), "{planned}: {}", run.said);
    }
    // Ranks gather the base in its 16 bits.
    let one = train("one", &model, "train.gradient_accumulation_steps=2");
    let two = train("two", &model, "parallel.strategy=\"fsdp\" --ranks=2");
    let away = train("away", &model, "train.gradient_accumulation_steps=2 parallel.offload=\"params\"");
    for other in [two, away] {
        assert_eq!(one.losses(), other.losses());
        assert!(one.adapter() == other.adapter());
    }
}

#[test]
fn a_stored_4_bit_checkpoint_trains_like_its_quantized_original() {
    let dir = tempfile::tempdir().unwrap();
    let settings = "train.max_steps=5 adapter.kind=\"lora\"";
    let original = format!("{settings} quantization.kind=\"nf4\"");
    let original = Run::train(dir.path(), "original", "models/tiny-llama", &original);
    // The stored checkpoint has no tokenizer, so combine both folders.
    let stored = dir.path().join("stored");
    std::fs::create_dir(&stored).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"] {
        let from = golden().join("models/tiny-llama").join(name);
        if from.exists() {
            std::fs::copy(from, stored.join(name)).unwrap();
        }
    }
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden().join("quant/tiny-llama-bnb-nf4").join(name), stored.join(name)).unwrap();
    }
    let stored = Run::train(dir.path(), "from-stored", &stored.display().to_string(), settings);
    assert_eq!(stored.losses(), original.losses());
}

#[test]
fn every_format_trains() {
    let dir = tempfile::tempdir().unwrap();
    let plain =
        Run::train(dir.path(), "plain", "models/tiny-qwen3", "train.max_steps=12 adapter.kind=\"lora\"");
    for (i, format) in [
        "quantization.kind=\"nf4\" quantization.double_quant=false",
        "quantization.kind=\"fp4\" quantization.block_size=128",
        "quantization.kind=\"int8\"",
        "quantization.kind=\"int8\" quantization.block_size=256 quantization.double_quant=false",
    ]
    .iter()
    .enumerate()
    {
        let settings = format!("train.max_steps=12 adapter.kind=\"lora\" {format}");
        let run = Run::train(dir.path(), &format!("run-{i}"), "models/tiny-qwen3", &settings);
        let (losses, wanted) = (run.losses(), plain.losses());
        assert!(losses[11] < losses[0], "{format}: {losses:?}");
        // The base differs slightly: 8 bits are closer than 4.
        let far = (losses[0] / wanted[0] - 1.0).abs();
        assert!(far > 0.0 && far < if format.contains("int8") { 0.005 } else { 0.05 }, "{format}: {far}");
    }
}

/// Half a run, a stop and the other half leave the same bytes as one whole run.
#[test]
fn resumed_runs_equal_unbroken_ones_with_every_kind_of_state() {
    let dir = tempfile::tempdir().unwrap();
    for (name, settings) in [
        (
            "dora",
            "adapter.kind=\"dora\" quantization.kind=\"nf4\" optimizer.state=\"int8\" adapter.r=64 adapter.lora_dropout=0.1",
        ),
        ("pissa", "adapter.init=\"pissa\" quantization.kind=\"nf4\" optimizer.lora_plus_ratio=4"),
        ("pissa-plain", "adapter.init=\"pissa\" adapter.use_rslora=true adapter.kind=\"dora\""),
        ("loftq", "adapter.init=\"loftq\" quantization.kind=\"fp4\""),
        ("tables", "adapter.target_modules=[\"q_proj\",\"embed_tokens\",\"lm_head\"]"),
    ] {
        let settings = format!("{settings} checkpoint.save_steps=3 train.max_steps=6");
        let whole = Run::train(dir.path(), &format!("{name}-whole"), "models/tiny-llama", &settings);
        let halves = Run::train(dir.path(), &format!("{name}-halves"), "models/tiny-llama", &settings);
        std::fs::remove_dir_all(halves.output.join("checkpoint-6")).unwrap();
        for file in ["adapter_model.safetensors", "adapter_config.json"] {
            std::fs::remove_file(halves.output.join(file)).unwrap();
        }
        let resumed = Run::train(
            dir.path(),
            &format!("{name}-halves"),
            "models/tiny-llama",
            &format!("{settings} --resume"),
        );
        assert_eq!(resumed.adapter(), whole.adapter(), "{name}");
    }
}

/// PiSSA starts as the base itself, and saves an ordinary adapter of the original base.
#[test]
fn pissa_starts_at_the_base_and_fits_it_when_saved() {
    let dir = tempfile::tempdir().unwrap();
    let train = |name: &str, settings: &str| {
        let settings = format!("train.max_steps=8 eval.at_end=true {settings}");
        Run::train(dir.path(), name, "models/tiny-llama", &settings)
    };
    let (plain, pissa) =
        (train("plain", "adapter.init=\"default\""), train("pissa", "adapter.init=\"pissa\""));
    close(&pissa.losses()[..1], &plain.losses()[..1], 1e-5);
    assert!((pissa.losses()[7] / plain.losses()[7] - 1.0).abs() > 1e-4, "they learn differently");
    let config = std::fs::read_to_string(pissa.output.join("adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!((&config["r"], &config["init_lora_weights"]), (&Value::from(8), &Value::from(true)));
    let model = golden().join("models/tiny-llama").display().to_string();
    let data = golden().join("data/sft_messages.jsonl").display().to_string();
    let adapter = pissa.output.display().to_string();
    let mut args = words("eval --json --set data.max_seq_len=96 --model");
    args.extend([model, "--adapter".into(), adapter, "--dataset".into(), data]);
    let evaluated = finetune(&args);
    assert!(evaluated.status.success(), "{}", told(&evaluated));
    let evaluated: Value = serde_json::from_slice(&evaluated.stdout).unwrap();
    let last = *pissa.metrics("eval_loss").last().unwrap();
    close(&[evaluated["loss"].as_f64().unwrap()], &[last], 1e-5);
}

/// LoftQ's initial adapter compensates part of the quantization error.
#[test]
fn loftq_starts_nearer_to_the_unquantized_base() {
    let dir = tempfile::tempdir().unwrap();
    let first = |name: &str, settings: &str| {
        let settings = format!("train.max_steps=1 adapter.r=16 {settings}");
        Run::train(dir.path(), name, "models/tiny-qwen2", &settings).metrics("eval_loss")[0]
    };
    let exact = first("exact", "adapter.init=\"default\"");
    let plain = first("plain", "quantization.kind=\"fp4\"");
    let loftq = first("loftq", "quantization.kind=\"fp4\" adapter.init=\"loftq\"");
    assert!((loftq - exact).abs() < (plain - exact).abs(), "{exact} {plain} {loftq}");
}

/// Adam's first update moves every entry by the learning rate; B's entries move by the ratio times
/// that.
#[test]
fn lora_plus_moves_b_faster() {
    let dir = tempfile::tempdir().unwrap();
    for ratio in [1.0, 8.0] {
        let settings = format!("train.max_steps=1 train.max_grad_norm=0 optimizer.lora_plus_ratio={ratio}");
        let run = Run::train(dir.path(), &format!("ratio-{ratio}"), "models/tiny-llama", &settings);
        let files = ModelFiles::open_file(&run.output.join("adapter_model.safetensors")).unwrap();
        for (name, info) in files.tensors().filter(|(name, _)| name.contains("lora_B")) {
            let mut values = vec![0f32; info.elements()];
            files.read_f32(name, &mut values).unwrap();
            let largest = values.iter().fold(0f32, |max, value| max.max(value.abs()));
            assert!((f64::from(largest) / (ratio * 2e-3) - 1.0).abs() < 1e-3, "{name}: {largest}");
        }
    }
}

fn merge(model: &str, adapter: &Path, output: &Path, flags: &str) -> Output {
    let model = golden().join(model).display().to_string();
    let data = golden().join("data/sft_messages.jsonl").display().to_string();
    let mut args = vec!["merge".to_owned(), "--model".into(), model, "--adapter".into()];
    args.extend([adapter.display().to_string(), "--output".into(), output.display().to_string()]);
    args.extend(["--verify-on".into(), data]);
    args.extend(words(flags));
    finetune(&args)
}

#[test]
fn a_merge_is_certified_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (name, kind) in [("lora", "lora"), ("dora", "dora")] {
        let settings = format!("train.max_steps=6 quantization.kind=\"nf4\" adapter.kind={kind:?}");
        let run = Run::train(dir.path(), name, "models/tiny-llama", &settings);
        let certificate = |output: &Path| -> Value {
            let text = std::fs::read_to_string(output.join("merge.json")).unwrap();
            serde_json::from_str::<Value>(&text).unwrap()["certificate"].clone()
        };
        // Merged onto the base it was trained on, only rounding is lost.
        let output = dir.path().join(format!("{name}-merged"));
        let merged = merge("models/tiny-llama", &run.output, &output, "--dtype f32");
        assert!(merged.status.success(), "{}", told(&merged));
        assert!(told(&merged).contains("the adapter was trained on these"), "{}", told(&merged));
        let exact = certificate(&output)["mean_kl"].as_f64().unwrap();
        assert!(exact < 1e-7, "{exact}");
        assert_eq!(certificate(&output)["top1_agreement"], Value::from(1.0));
        // Merged onto the original model, the result differs by the loss of 4 bits.
        let output = dir.path().join(format!("{name}-original"));
        let other =
            merge("models/tiny-llama", &run.output, &output, "--dtype f32 --base original --max-kl 1");
        assert!(other.status.success(), "{}", told(&other));
        let lost = certificate(&output)["mean_kl"].as_f64().unwrap();
        assert!(lost > 1e-5, "{lost}");
        // Above the accepted difference finetune writes no output.
        let output = dir.path().join(format!("{name}-refused"));
        let refused = merge("models/tiny-llama", &run.output, &output, "--base original --max-kl 1e-7");
        assert_eq!(refused.status.code(), Some(1), "{}", told(&refused));
        assert!(told(&refused).contains("the merged model differs too much from base and adapter"));
        assert!(!output.exists());
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().map(|e| e.file_name()).collect();
        assert!(!left.iter().any(|file| file.to_string_lossy().contains("refused")), "{left:?}");
    }
}

/// Beside a quantized base, embedding and head stay in their stored 16 bits, also if the run
/// computes in f32.
#[test]
fn tables_in_16_bits_generate_and_evaluate() {
    let dir = tempfile::tempdir().unwrap();
    // Stored in bf16, tied.
    let settings = "train.max_steps=2 quantization.kind=\"nf4\" model.dtype=\"f32\"";
    let run = Run::train(dir.path(), "run", "models/tiny-llama3", settings);
    let recipe = run.output.join("recipe.toml").display().to_string();
    let model = golden().join("models/tiny-llama3").display().to_string();
    let adapter = run.output.display().to_string();
    let mut args = words("generate --prompt word --max-new-tokens 5 --temperature 0 --recipe");
    args.extend([recipe, "--model".into(), model, "--adapter".into(), adapter]);
    let generated = finetune(&args);
    assert!(generated.status.success(), "{}", told(&generated));
    assert!(!generated.stdout.is_empty());
}

/// Only the linear layers of Gated DeltaNet with many outputs are quantized: a merged model has the
/// convolution and the gates of its base.
#[test]
fn a_recurrence_keeps_its_values() {
    let dir = tempfile::tempdir().unwrap();
    let model = "families/models/tiny-qwen3-5";
    let run = Run::train(dir.path(), "out", model, "--recipe=qlora train.max_steps=2");
    let (base, merged) = (golden().join(model), dir.path().join("merged"));
    let text = |path: &Path| path.display().to_string();
    let args =
        ["merge", "--model", &text(&base), "--adapter", &text(&run.output), "--output", &text(&merged)];
    let done = finetune(&args.map(str::to_owned));
    assert!(done.status.success(), "{}", told(&done));
    let [base, merged] = [base, merged].map(|folder| ModelFiles::open(&folder).unwrap());
    let same = |name: &str| {
        let name = format!("model.layers.0.linear_attn.{name}");
        base.bytes(&name).unwrap() == merged.bytes(&name).unwrap()
    };
    for name in ["conv1d.weight", "A_log", "dt_bias", "norm.weight"] {
        assert!(same(name), "{name}");
    }
    assert!(!same("in_proj_qkv.weight"));
}
