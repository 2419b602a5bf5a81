//! Bases of other tools that a run keeps packed (`model.dequantize = false`), through the verbs:
//! each works as with the dequantized base, to the bit. The golden runs are in the module `train`.

use std::path::Path;

use crate::exhaustive::each_third;
use crate::planned_run::{between, bytes, peak, resized, train, write_text};
use crate::test_dir::{TestDir, copy_folder, golden, lora};
use finetune::model::{ModelConfig, parameters};
use finetune::weights::ModelFiles;
use insta::assert_snapshot;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

const GPTQ: &str = "tiny-gptq-4-g32-act";
const MODELS: [&str; 5] = [GPTQ, "tiny-awq-4-g32", "tiny-ct-int4-g32-asym", "tiny-fp8-block", "tiny-mxfp4"];
const OTHERS: [&str; 7] = [
    "tiny-gguf-q4_k",
    "tiny-gguf-q4_0",
    "tiny-gguf-q8_0",
    "tiny-ct-nvfp4",
    "tiny-modelopt-nvfp4",
    "tiny-modelopt-fp8",
    "tiny-hqq-4",
];
const KEPT: [&str; 2] = ["--set", "model.dequantize=false"];

/// A folder in which `model` is a packed model.
fn test_dir(model: &str) -> TestDir {
    let dir = TestDir::new();
    std::fs::remove_dir_all(dir.path("model")).unwrap();
    let from = golden("qbases/models").join(model);
    if from.join("model.gguf").exists() {
        std::fs::create_dir(dir.path("model")).unwrap();
        std::fs::copy(from.join("model.gguf"), dir.path("model/model.gguf")).unwrap();
    } else {
        copy_folder(&from, &dir.path("model"));
    }
    dir
}

/// The flags of a run to `output`.
fn run<'a>(output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = lora(more);
    let at = args.iter().position(|arg| *arg == "--output").unwrap();
    args[at + 1] = output;
    args
}

fn losses(dir: &TestDir, output: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(dir.path(output).join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| line.get("loss").and_then(Value::as_f64)).collect()
}

fn adapter(dir: &TestDir, output: &str) -> Vec<u8> {
    std::fs::read(dir.path(output).join("adapter_model.safetensors")).unwrap()
}

/// Trains on the packed base. Returns the losses and the texts.
fn packed(dir: &TestDir, output: &str, more: &[&str]) -> (Vec<f64>, String) {
    let said = dir.said(&run(output, &[more, &KEPT].concat()));
    assert!(said.contains(" packed in memory"), "{said}");
    (losses(dir, output), said)
}

/// Compares losses with those of a run on the dequantized base. In f32 the first is the same
/// number; gradients of q, k and v are summed in another order, because their weights are not side
/// by side. In bf16 small products read the values of a packed base in f32.
fn compare(dir: &TestDir, name: &str, more: &[&str], packed: &[f64], tolerance: f64) {
    dir.said(&run(name, more));
    let plain = losses(dir, name);
    assert_eq!(packed.len(), 4, "{name}");
    assert!(packed[0] == plain[0] || tolerance > 1e-5, "{name}: {packed:?}, {plain:?}");
    for (ours, wanted) in packed.iter().zip(plain) {
        assert!((ours / wanted - 1.0).abs() < tolerance, "{name}: {ours}, {wanted}");
    }
}

#[test]
fn a_packed_base_trains_as_the_dequantized_one() {
    for model in each_third(MODELS.into_iter().chain(OTHERS), 1) {
        let dir = test_dir(model);
        let (wide, _) = packed(&dir, "f32-packed", &[]);
        compare(&dir, "f32", &[], &wide, 1e-6);
        let bf16 = ["--set", "model.dtype=bf16"];
        let (narrow, _) = packed(&dir, "bf16-packed", &bf16);
        compare(&dir, "bf16", &bf16, &narrow, 2e-3);
    }
}

/// Ranks with shards and with copies, parameters on the host and in a file give the same bits. DoRA
/// needs the norms of the weights.
#[test]
fn every_strategy_keeps_a_base_packed() {
    for model in
        each_third([GPTQ, "tiny-fp8-block", "tiny-mxfp4", "tiny-gguf-q4_k", "tiny-ct-nvfp4", "tiny-hqq-4"], 0)
    {
        let dir = test_dir(model);
        std::fs::create_dir(dir.path("off")).unwrap();
        let [one, two] = [1, 2].map(|turns| format!("train.gradient_accumulation_steps={turns}"));
        let rows = ["--set", "train.micro_batch_size=1", "--set"];
        let (wanted, _) = packed(&dir, "alone", &[&rows[..], &[&two]].concat());
        let cases: [(&str, &str, &[&str]); 4] = [
            ("fsdp", &one, &["--ranks", "2", "--set", "parallel.strategy=fsdp"]),
            ("ddp", &one, &["--ranks", "2", "--set", "parallel.strategy=ddp"]),
            ("host", &two, &["--set", "parallel.offload=params"]),
            ("file", &two, &["--set", "parallel.offload=params", "--set", "parallel.offload_folder=off"]),
        ];
        for (name, turns, more) in cases {
            let (actual, _) = packed(&dir, name, &[&rows[..], &[turns], more].concat());
            assert_eq!(actual, wanted, "{model}: {name}");
            assert!(adapter(&dir, name) == adapter(&dir, "alone"), "{model}: {name}");
        }
        let dora = ["--set", "adapter.kind=dora"];
        let (actual, _) = packed(&dir, "dora-packed", &dora);
        compare(&dir, "dora", &dora, &actual, 1e-6);
    }
}

/// `generate` and `eval` give the same results with a packed and with a dequantized base; `merge`
/// dequantizes. A resumed run keeps the base packed.
#[test]
fn outputs_do_not_depend_on_it() {
    let dir = test_dir(GPTQ);
    let saved = |output: &'static str| -> Vec<&'static str> {
        let args = run(output, &[&KEPT[..], &["--set", "checkpoint.async_save=false"]].concat());
        let of = |arg| if arg == "checkpoint.save_steps=never" { "checkpoint.save_steps=2" } else { arg };
        args.into_iter().map(of).collect()
    };
    dir.said(&saved("whole"));
    // The process ends in the fourth step, which has 8 micro-batches as the others.
    let cut = dir.command(&saved("cut")).env("FINETUNE_FAULT", "0:backward:30:exit").output().unwrap();
    assert!(!cut.status.success() && dir.path("cut/checkpoint-2").exists(), "{}", dir.told(&cut.stderr));
    let said = dir.said(&["--resume", "--output", "cut"]);
    assert!(said.contains(" packed in memory"), "{said}");
    assert!(adapter(&dir, "whole") == adapter(&dir, "cut"));
    // The other choice has other last bits.
    let other = ["--resume", "--output", "cut", "--set", "model.dequantize=true"];
    let said = dir.refused(&other);
    assert_snapshot!(said[said.find("error: ").unwrap()..], @"
    error: cannot resume cut/checkpoint-4
      caused by: model.dequantize: false in the checkpoint, true now
    hint: resume with the recipe, model and data of the first run, or start anew with another --output
    ");
    // Returns the results with the packed base, and with the dequantized one.
    dir.write("kept.toml", "[model]\ndequantize = false\n");
    let both = |args: &[&str]| {
        [&["--recipe", "kept.toml"][..], &[]].map(|more| {
            let done = dir.command(&[args, more].concat()).output().unwrap();
            let said = dir.told(&done.stderr);
            assert!(done.status.success(), "{said}");
            assert_eq!(said.contains(" packed in memory"), !more.is_empty(), "{said}");
            dir.told(&done.stdout)
        })
    };
    let base = ["--model", "model", "--adapter", "whole"];
    let asked = ["--prompt", "a b", "--max-new-tokens", "8"];
    let [ours, wanted] = both(&[&["generate"], &base[..], &asked].concat());
    assert_eq!(ours, wanted);
    let [ours, wanted] = both(&[&["eval"], &base[..], &["--dataset", "rows.jsonl", "--json"]].concat());
    let loss = |text: &str| serde_json::from_str::<Value>(text).unwrap()["loss"].clone();
    assert_eq!(loss(&ours), loss(&wanted));
    assert!(loss(&ours).is_number(), "{ours}");
    let merge = [&["merge"], &base[..], &["--output", "merged", "--verify-on", "rows.jsonl"]].concat();
    let said = dir.said(&merge);
    assert!(said.contains("verified on 64 rows"), "{said}");
    let merged = ModelFiles::open(&dir.path("merged")).unwrap();
    assert!(merged.names().all(|name| merged.stored_format(name).is_none()));
}

#[test]
fn the_choice_is_refused_where_it_has_no_meaning() {
    let dir = test_dir(GPTQ);
    assert_snapshot!(dir.refused(&run("out", &[&KEPT[..], &["--set", "quantization.kind=nf4"]].concat())), @"
    error: cannot use these settings
      caused by: --set model.dequantize=false: `model.dequantize` is false, which keeps packed weights as they are; `[quantization]` changes them
    hint: remove `dequantize` or `[quantization]`
    ");
    let mut full = run("out", &KEPT);
    let at = full.iter().position(|arg| *arg == "lora").unwrap();
    full[at] = "full";
    assert_snapshot!(dir.refused(&full), @"
    warning: finetune keeps 14 weights stored as gptq int4 packed in memory
    error: cannot train all weights of a quantized model
      caused by: its linear layers are kept in int4 in groups of 32 (scales in f16), as stored, which takes no updates; the recipe has no `[adapter]`
    hint: add `[adapter]` to train an adapter on it, or remove `model.dequantize`
    ");
    assert_snapshot!(dir.refused(&run("out", &[&KEPT[..], &["--set", "adapter.init=pissa"]].concat())), @r#"
    warning: finetune keeps 14 weights stored as gptq int4 packed in memory
    error: cannot start the adapter from this model's weights
      caused by: `adapter.init` is "pissa" or "loftq", which factor the weights before they are quantized; the model is stored in int4 in groups of 32 (scales in f16), as stored
    hint: remove `model.dequantize`, or write `init = "default"`
    "#);
    assert!(!dir.path("out").exists());
    // A model without packed weights.
    let plain = TestDir::new();
    let said = plain.said(&run("out", &KEPT));
    assert!(said.contains("`model.dequantize = false` has no effect"), "{said}");
}

/// Codes of 8 bits instead of f32: the peak of the process falls by 3 bytes a weight, as the plan
/// says.
#[test]
#[cfg(target_os = "linux")]
fn a_packed_base_saves_the_planned_memory() {
    let dir = resized(&[
        ("hidden_size", 512),
        ("num_key_value_heads", 2),
        ("intermediate_size", 1536),
        ("num_hidden_layers", 8),
    ]);
    let codes = write_fp8(&dir.path("model"));
    write_text(&dir);
    let keys = ["adapter.r=4", "log.tensorboard=false", "train.max_steps=2", "checkpoint.save_steps=never"];
    let more = ["--set", "train.micro_batch_size=2"];
    // Returns the peak, and the plan that the run reports at its end.
    let run = |output: &str, more: &[&str]| {
        let (peak, done) = peak(&mut train(&dir, output, &keys, more));
        let said = dir.told(&done.stderr);
        assert!(done.status.success(), "{said}");
        [peak, bytes(between(between(&said, "\npeak memory ", "\n"), " (", " planned"))]
    };
    let (packed, plain) = (run("packed", &[&more[..], &KEPT].concat()), run("plain", &more));
    for at in [0, 1] {
        let saved = (plain[at] - packed[at]) / (3 * codes) as f64;
        assert!((saved - 1.0).abs() < 0.05, "{plain:?} {packed:?} {codes}: {saved}");
    }
}

/// Writes weights whose linear layers are in FP8 with one scale each, all codes 1/16. Returns the
/// number of codes.
fn write_fp8(model: &Path) -> usize {
    let config = model.join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let parameters = parameters(&ModelConfig::from_json(&text, "config.json").unwrap());
    let mut keys: Value = serde_json::from_str(&text).unwrap();
    keys["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": null});
    std::fs::write(config, keys.to_string()).unwrap();
    let is_packed = |name: &str| name.ends_with("proj.weight");
    let mut tensors = Vec::new();
    for spec in &parameters {
        if is_packed(&spec.name) {
            tensors.push((spec.name.clone(), Dtype::F8_E4M3, spec.shape.clone(), vec![0x18; spec.len()]));
            let scale = spec.name.replace(".weight", ".weight_scale");
            tensors.push((scale, Dtype::F32, vec![1], 0.1f32.to_le_bytes().to_vec()));
        } else {
            let values = [0.01f32.to_le_bytes()].into_iter().cycle().take(spec.len()).flatten();
            tensors.push((spec.name.clone(), Dtype::F32, spec.shape.clone(), values.collect()));
        }
    }
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, &model.join("model.safetensors")).unwrap();
    parameters.iter().filter(|spec| is_packed(&spec.name)).map(|spec| spec.len()).sum()
}
