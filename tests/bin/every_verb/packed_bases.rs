//! Bases that other tools packed (FP8, GPTQ, AWQ, compressed-tensors, MXFP4), through the verbs:
//! each works as with the dequantized model, and no output keeps the old `quantization_config`. The
//! golden runs on them are in the module `train`, the formats themselves in
//! tests/lib/packed_bases.rs.

use std::path::Path;

use crate::logits::{base, floats};
use crate::test_dir::{TestDir, copy_folder, golden, lora};
use finetune::loading::Trains;
use finetune::weights::{ModelFiles, StoredDtype};
use insta::assert_snapshot;
use safetensors::tensor::SafeTensors;
use serde_json::{Value, json};

const GPTQ: &str = "tiny-gptq-4-g32-act";
const MODELS: [&str; 4] = [GPTQ, "tiny-awq-4-g32", "tiny-ct-int4-g32-asym", "tiny-fp8-block"];
const DOWN: &str = "model.layers.0.mlp.down_proj.weight";

/// A folder in which `model` is a packed model.
fn test_dir(model: &str) -> TestDir {
    let dir = TestDir::new();
    std::fs::remove_dir_all(dir.path("model")).unwrap();
    copy_folder(&golden("qbases/models").join(model), &dir.path("model"));
    dir
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Checks that a folder is a model without a quantized weight, of this dtype.
fn is_plain(folder: &Path, dtype: StoredDtype) -> ModelFiles {
    let config = json_of(&folder.join("config.json"));
    assert!(config.get("quantization_config").is_none(), "{config}");
    assert_eq!(config["torch_dtype"].as_str(), dtype.config_name());
    let files = ModelFiles::open(folder).unwrap();
    assert!(files.tensors().all(|(name, info)| info.dtype == dtype && files.stored_format(name).is_none()));
    base(folder).check(Trains::Nothing).unwrap();
    files
}

#[test]
fn inspect_names_the_format() {
    assert_snapshot!(test_dir(GPTQ).said(&["inspect", "model"]), @"
    architecture  LlamaForCausalLM
    model_type    llama
    parameters    103K in 21 tensors, 119 KiB
      F16         41.3K in 7 tensors, 80.6 KiB
      gptq int4   61.4K in 14 tensors, 38.4 KiB
    tensors by group
      embedding   20.5K in 1 tensor, 40.0 KiB
      attention   24.6K in 8 tensors, 15.9 KiB
      mlp         36.9K in 6 tensors, 22.6 KiB
      norm        320 in 5 tensors, 640 B
      head        20.5K in 1 tensor, 40.0 KiB
    files
      model.safetensors  119 KiB
    ");
    for (model, format) in MODELS.iter().zip(["gptq int4", "awq int4", "compressed-tensors int4", "fp8"]) {
        let said = test_dir(model).said(&["inspect", "model"]);
        assert!(said.contains(&format!("  {format} ")), "{said}");
    }
}

/// The same values in plain tensors, and from there the same codes as from the packed ones.
#[test]
fn export_and_quantize_read_the_dequantized_values() {
    for model in MODELS {
        let dir = test_dir(model);
        let said =
            dir.said(&["export", "--model", "model", "--format", "hf", "--type", "f32", "--output", "plain"]);
        assert!(said.contains(" weights stored as ") && said.contains("warning: "), "{said}");
        let packed = ModelFiles::open(&dir.path("model")).unwrap();
        let plain = is_plain(&dir.path("plain"), StoredDtype::F32);
        assert!(plain.names().eq(packed.names()), "{model}");
        for name in packed.names() {
            assert_eq!(floats(&plain, name), floats(&packed, name), "{model}: {name}");
        }
        let stored = packed.info(DOWN).unwrap().dtype;
        dir.said(&["export", "--model", "model", "--format", "hf", "--output", "stored"]);
        is_plain(&dir.path("stored"), stored);
        dir.said(&[
            "export",
            "--model",
            "model",
            "--format",
            "gguf",
            "--type",
            "q8_0",
            "--output",
            "model.gguf",
        ]);
        for kind in ["nf4", "int8"] {
            let quantized = |from: &str| {
                let output = format!("{from}-{kind}");
                dir.said(&["quantize", "--model", from, "--kind", kind, "--output", &output]);
                let config = json_of(&dir.path(&output).join("config.json"));
                assert_eq!(config["quantization_config"]["quant_method"], "bitsandbytes");
                ModelFiles::open(&dir.path(&output)).unwrap()
            };
            let (ours, theirs) = (quantized("model"), quantized("plain"));
            for name in ours.names().filter(|name| name.contains("proj.weight")) {
                let codes = |files: &ModelFiles| files.quantized(name).unwrap().unwrap().codes().to_vec();
                assert_eq!(codes(&ours), codes(&theirs), "{model} {kind}: {name}");
                // The type before quantization is that of the packed model.
                assert_eq!(
                    ours.info(name).unwrap().dtype,
                    if kind == "nf4" { stored } else { StoredDtype::F16 }
                );
            }
        }
    }
}

/// Layers that `quantize` skips are written dequantized.
#[test]
fn skipped_layers_are_dequantized() {
    let dir = test_dir(GPTQ);
    dir.said(&["quantize", "--model", "model", "--kind", "nf4", "--skip", "down_proj", "--output", "out"]);
    let (ours, packed) =
        (ModelFiles::open(&dir.path("out")).unwrap(), ModelFiles::open(&dir.path("model")).unwrap());
    assert_eq!((ours.stored_format(DOWN), ours.info(DOWN).unwrap().dtype), (None, StoredDtype::F16));
    let rounded: Vec<f32> =
        floats(&packed, DOWN).into_iter().map(|value| half::f16::from_f32(value).to_f32()).collect();
    assert_eq!(floats(&ours, DOWN), rounded);
}

/// Adds the golden adapter of each base to the dequantized weights, rounded once.
#[test]
fn merge_gives_a_plain_model() {
    for (model, run) in MODELS.iter().zip(["lora_gptq", "lora_awq", "lora_ct_int4", "lora_fp8_block"]) {
        let dir = test_dir(model);
        copy_folder(&golden("qbases/train").join(run).join("adapter_final"), &dir.path("adapter"));
        let merge = ["merge", "--model", "model", "--adapter", "adapter", "--output", "merged"];
        let said = dir.said(&[&merge[..], &["--verify-on", "rows.jsonl"]].concat());
        assert!(said.contains(" weights stored as ") && said.contains("verified on 64 rows"), "{said}");
        let dtype = ModelFiles::open(&dir.path("model")).unwrap().info(DOWN).unwrap().dtype;
        let merged = is_plain(&dir.path("merged"), dtype);
        dir.said(&["export", "--model", "model", "--format", "hf", "--type", "f32", "--output", "plain"]);
        let of_plain = ["merge", "--model", "plain", "--adapter", "adapter", "--output", "wanted"];
        let kind = if dtype == StoredDtype::F16 { "f16" } else { "bf16" };
        dir.said(&[&of_plain[..], &["--dtype", kind]].concat());
        let wanted = ModelFiles::open(&dir.path("wanted")).unwrap();
        assert!(
            merged.names().all(|name| merged.bytes(name).unwrap() == wanted.bytes(name).unwrap()),
            "{model}"
        );
    }
}

/// The experts of gpt-oss, whose plain form is a transposed stack.
#[test]
fn stacks_in_mxfp4_become_plain() {
    let dir = test_dir("tiny-mxfp4");
    let said = dir.said(&["inspect", "model"]);
    assert!(said.contains("  mxfp4 "), "{said}");
    dir.said(&["export", "--model", "model", "--format", "hf", "--output", "plain"]);
    let plain = is_plain(&dir.path("plain"), StoredDtype::BF16);
    assert_eq!(plain.info("model.layers.0.mlp.experts.gate_up_proj").unwrap().shape, [4, 64, 64]);
    assert_eq!(plain.info("model.layers.0.mlp.experts.down_proj").unwrap().shape, [4, 32, 64]);
    copy_folder(&golden("qbases/train/lora_mxfp4/adapter_final"), &dir.path("adapter"));
    for (model, output) in [("model", "merged"), ("plain", "wanted")] {
        let merge = ["merge", "--model", model, "--adapter", "adapter", "--output", output];
        let said = dir.said(&[&merge[..], &["--verify-on", "rows.jsonl"]].concat());
        assert!(said.contains("verified on 64 rows"), "{said}");
    }
    let merged = is_plain(&dir.path("merged"), StoredDtype::BF16);
    let wanted = ModelFiles::open(&dir.path("wanted")).unwrap();
    assert!(merged.names().eq(wanted.names()));
    assert!(merged.names().all(|name| merged.bytes(name).unwrap() == wanted.bytes(name).unwrap()));
    let cases: [(&str, &[&str]); 2] =
        [("lora", &["--set", "quantization.kind=nf4"]), ("full", &["--set", "optimizer.learning_rate=1e-4"])];
    for (recipe, more) in cases {
        let of = |model: &str| {
            let output = format!("{recipe}-{model}");
            let mut args = lora(more);
            for (flag, value) in [("--model", model), ("--recipe", recipe), ("--output", &output)] {
                let at = args.iter().position(|arg| *arg == flag).unwrap();
                args[at + 1] = value;
            }
            dir.said(&args);
            losses(&dir, &output)
        };
        assert_eq!(of("model"), of("plain"), "{recipe}");
    }
    is_plain(&dir.path("full-model"), StoredDtype::BF16);
}

fn losses(dir: &TestDir, output: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(dir.path(output).join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| line.get("loss").and_then(Value::as_f64)).collect()
}

/// Runs on a packed model, and on its dequantized copy in f32, have the same losses: over NF4, on
/// ranks with shards, with offloaded weights, and of all weights. The output is a plain model.
#[test]
fn runs_equal_those_on_the_dequantized_model() {
    let dir = test_dir(GPTQ);
    dir.said(&["export", "--model", "model", "--format", "hf", "--type", "f32", "--output", "plain"]);
    std::fs::create_dir(dir.path("off")).unwrap();
    let cases: [(&str, &str, &[&str]); 4] = [
        ("nf4", "qlora", &["--set", "quantization.kind=nf4"]),
        ("fsdp", "lora", &["--ranks", "2", "--set", "parallel.strategy=fsdp"]),
        ("offload", "lora", &["--set", "parallel.offload=params", "--set", "parallel.offload_folder=off"]),
        ("full", "full", &["--set", "optimizer.learning_rate=1e-4"]),
    ];
    for (name, recipe, more) in cases {
        for model in ["model", "plain"] {
            let output = format!("{name}-{model}");
            let mut args = lora(more);
            for (flag, value) in [("--model", model), ("--recipe", recipe), ("--output", &output)] {
                let at = args.iter().position(|arg| *arg == flag).unwrap();
                args[at + 1] = value;
            }
            dir.said(&args);
        }
        let ours = losses(&dir, &format!("{name}-model"));
        assert_eq!(ours, losses(&dir, &format!("{name}-plain")), "{name}");
        assert_eq!(ours.len(), 4);
    }
    is_plain(&dir.path("full-model"), StoredDtype::F16);
}

/// The weights count as dequantized, without reading them.
#[test]
fn a_plan_counts_the_dequantized_weights() {
    let dir = test_dir(GPTQ);
    dir.said(&["export", "--model", "model", "--format", "hf", "--type", "f32", "--output", "plain"]);
    let plan = |model: &str| {
        let mut args = lora(&["--dry-run"]);
        args[1] = model;
        let said = dir.said(&args);
        let memory = said.lines().find(|line| line.starts_with("memory of a step: ")).expect(&said);
        // The process itself is measured, and with it the sum.
        let (_, parts) = memory.split_once(" = ").expect(memory);
        parts.split(" + ").filter(|part| !part.starts_with("the process")).collect::<Vec<_>>().join(" + ")
    };
    assert_eq!(plan("model"), plan("plain"));
}

/// Returns the error of verbs that read the weights, each without an output.
fn refused(dir: &TestDir) -> String {
    let verbs: [&[&str]; 3] = [
        &["export", "--model", "model", "--format", "hf", "--output", "out"],
        &["quantize", "--model", "model", "--kind", "nf4", "--output", "out"],
        &["inspect", "model"],
    ];
    let said = verbs.map(|args| {
        let said = dir.refused(args);
        assert!(!dir.path("out").exists(), "{said}");
        assert_eq!(said.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{said}");
        said
    });
    let train = dir.refused(&lora(&[]));
    assert!(!dir.path("out").exists(), "{train}");
    said[2].clone()
}

#[test]
fn a_checkpoint_that_contradicts_itself() {
    let dir = test_dir(GPTQ);
    let path = dir.path("model/model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let remaining =
        tensors.tensors().into_iter().filter(|(name, _)| !name.ends_with("0.mlp.down_proj.scales"));
    safetensors::serialize_to_file(remaining, None, &path).unwrap();
    assert_snapshot!(refused(&dir), @"
    error: cannot read weights [DIR]/model/model.safetensors
      caused by: tensor `model.layers.0.mlp.down_proj.weight`, quantized by gptq: scales is missing
    hint: download the model again, or give the model that was not quantized
    ");
    std::fs::write(&path, &bytes).unwrap();
    let config = dir.path("model/config.json");
    let mut keys = json_of(&config);
    keys["quantization_config"]["bits"] = json!(3);
    std::fs::write(&config, keys.to_string()).unwrap();
    assert_snapshot!(refused(&dir), @"
    error: cannot read a model from [DIR]/model
      caused by: the model is quantized in a way that this program does not read
      caused by: `quantization_config.bits` is 3; accepted: 4, 8
    hint: give the model that was not quantized
    ");
    keys["quantization_config"]["bits"] = json!(8);
    std::fs::write(&config, keys.to_string()).unwrap();
    assert_snapshot!(refused(&dir), @"
    error: cannot read weights [DIR]/model/model.safetensors
      caused by: tensor `model.layers.0.mlp.down_proj.weight`, quantized by gptq: scales has shape [3, 64]; accepted: [2, 64]
    hint: download the model again, or give the model that was not quantized
    ");
    // Without the settings, the tensors belong to no model.
    keys.as_object_mut().unwrap().remove("quantization_config");
    std::fs::write(&config, keys.to_string()).unwrap();
    assert_snapshot!(dir.refused(&lora(&[])), @"
    error: cannot read weights in [DIR]/model
      caused by: tensor `model.layers.0.self_attn.q_proj.weight` is missing; the nearest is `model.layers.0.self_attn.q_proj.qweight`
    hint: give config.json and weights of one and the same model
    ");
}

/// Earlier checkpoints of ModelOpt have their settings in hf_quant_config.json alone. Outputs with
/// plain weights do not get the file, those in the format of the base do.
#[test]
fn settings_beside_config_json() {
    let dir = test_dir("tiny-modelopt-fp8");
    let model = dir.path("model");
    let wanted = dir.said(&["inspect", "model"]);
    let mut config = json_of(&model.join("config.json"));
    let settings = config.as_object_mut().unwrap().remove("quantization_config").unwrap();
    std::fs::write(model.join("config.json"), config.to_string()).unwrap();
    // Returns the cause of a refusal that names the file.
    let cause = || {
        let said = dir.refused(&["inspect", "model"]);
        let lines: Vec<&str> = said.lines().collect();
        assert!(lines[0].ends_with("cannot read [DIR]/model/hf_quant_config.json"), "{said}");
        lines[1].trim_start_matches("  caused by: ").to_owned()
    };
    assert_ne!(dir.said(&["inspect", "model"]), wanted);
    let write =
        |value: &Value| std::fs::write(model.join("hf_quant_config.json"), value.to_string()).unwrap();
    let algorithm = &settings["quant_algo"];
    write(&json!({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}));
    assert_eq!(dir.said(&["inspect", "model"]), wanted);
    let [ours, theirs] = [&model, &golden("qbases/models/tiny-modelopt-fp8")].map(|folder| base(folder));
    for name in ours.files.as_ref().unwrap().names() {
        let [ours, theirs] = [&ours, &theirs].map(|base| floats(base.files.as_ref().unwrap(), name));
        assert_eq!(ours, theirs, "{name}");
    }
    copy_folder(&golden("train/lora/adapter_final"), &dir.path("adapter"));
    for (output, more, copied) in [("plain", None, false), ("again", Some("--requantize"), true)] {
        let args = ["merge", "--model", "model", "--adapter", "adapter", "--output", output];
        dir.said(&[&args[..], more.as_slice()].concat());
        assert_eq!(dir.path(output).join("hf_quant_config.json").exists(), copied, "{output}");
        assert!(json_of(&dir.path(output).join("config.json")).get("quantization_config").is_none());
        dir.said(&["inspect", output]);
    }
    is_plain(&dir.path("plain"), StoredDtype::BF16);
    write(&json!({"quantization": {"quant_algo": "W4A8_AWQ"}}));
    assert_snapshot!(cause(), @r#"`quantization.quant_algo` is "W4A8_AWQ"; accepted: null, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4""#);
    write(&json!({"quantization": {}}));
    assert_snapshot!(cause(), @r#"`quantization.quant_algo` is missing; accepted: null, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4""#);
    write(&json!({"quant_algo": "FP8"}));
    assert_snapshot!(cause(), @"it has no object `quantization`, which describes the weights");
}
