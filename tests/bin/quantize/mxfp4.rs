//! Checkpoints in MXFP4 that `finetune quantize` writes: with the bytes of compressed-tensors, or
//! as gpt-oss has its experts, and read again by every verb.

use std::path::Path;

use crate::logits::{base, floats};
use crate::test_dir::{TestDir, copy_folder, golden, lora, tiny_models};
use finetune::loading::Trains;
use finetune::weights::{ModelFiles, StoredDtype};
use insta::assert_snapshot;
use serde_json::{Value, json};

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn quantize(dir: &TestDir, model: &str, more: &[&str]) -> String {
    let args = ["quantize", "--model", model, "--kind", "mxfp4", "--output", "quantized"];
    dir.said(&[&args[..], more].concat())
}

/// The golden checkpoint has codes and layout of compressed-tensors 0.20.0, from the same weights,
/// and scales of the specification.
#[test]
fn mxfp4_is_written_as_compressed_tensors_writes_it() {
    let dir = TestDir::new();
    let said = quantize(&dir, "model", &[]);
    let first = "quantized 14 tensors to mxfp4, copied 7: ";
    assert!(said.starts_with(first), "{said}");
    let theirs = golden("qbases/models/tiny-ct-mxfp4");
    let raw = |folder: &Path| ModelFiles::open_file(&folder.join("model.safetensors")).unwrap();
    let (ours, wanted) = (raw(&dir.path("quantized")), raw(&theirs));
    assert!(ours.names().eq(wanted.names()));
    for (name, info) in wanted.tensors() {
        let actual = ours.info(name).unwrap();
        assert_eq!(actual.shape, info.shape, "{name}");
        if name.contains("_proj.") {
            assert_eq!(actual.dtype, StoredDtype::U8, "{name}");
            assert_eq!(ours.bytes(name).unwrap(), wanted.bytes(name).unwrap(), "{name}");
        }
    }
    let [ours, theirs] = [dir.path("quantized"), theirs].map(|folder| json_of(&folder.join("config.json")));
    let [ours, theirs] = [&ours, &theirs].map(|config| &config["quantization_config"]);
    for key in ["quant_method", "format", "ignore"] {
        assert_eq!(ours[key], theirs[key], "{key}");
    }
    let [ours, theirs] = [ours, theirs].map(|settings| &settings["config_groups"]["group_0"]);
    assert_eq!(ours["targets"], theirs["targets"]);
    for (key, value) in theirs["weights"].as_object().unwrap() {
        assert!(value.is_null() || ours["weights"][key] == *value, "{key}");
    }
}

/// Training, evaluation and export work as on the model that holds the dequantized values.
#[test]
fn the_verbs_read_what_quantize_wrote() {
    let dir = TestDir::new();
    quantize(&dir, "model", &["--skip", "down_proj"]);
    let said = dir.said(&["inspect", "quantized"]);
    assert!(said.contains("  compressed-tensors mxfp4 57.3K in 12 tensors"), "{said}");
    let export = ["export", "--model", "quantized", "--format", "hf", "--type", "f32", "--output", "plain"];
    dir.said(&export);
    let losses = |model: &str, output: &str| {
        let mut args = lora(&[]);
        (args[1], args[7]) = (model, output);
        dir.said(&args);
        let text = std::fs::read_to_string(dir.path(output).join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter_map(|line| line.get("loss").and_then(Value::as_f64)).collect::<Vec<f64>>()
    };
    let wanted = losses("plain", "of-plain");
    assert_eq!((losses("quantized", "out"), wanted.len()), (wanted, 4));
    let mut plan = lora(&["--dry-run"]);
    plan[1] = "quantized";
    dir.said(&plan);
    // An adapter of the quantized model fits the model that it was made from.
    let eval = ["eval", "--dataset", "rows.jsonl", "--adapter", "out", "--set", "data.max_seq_len=96"];
    for model in ["quantized", "model"] {
        dir.said(&[&eval[..], &["--model", model]].concat());
    }
    let gguf = ["export", "--model", "quantized", "--format", "gguf", "--type", "q8_0", "--output", "m.gguf"];
    dir.said(&gguf);
    let config = json_of(&dir.path("quantized/config.json"));
    let ignored = config["quantization_config"]["ignore"].as_array().unwrap();
    assert_eq!(ignored.len(), 3);
    assert!(ignored.contains(&json!("model.layers.1.mlp.down_proj")));
}

/// Every family: only linear layers change, by less than the widest gap of e2m1.
#[test]
fn every_family_is_written_in_mxfp4() {
    let mut models = tiny_models("models");
    models.extend(tiny_models("families/models"));
    let mut written = 0;
    'models: for model in models {
        let dir = TestDir::with_model(&model);
        // Rows of some layers are no whole blocks: the error names them.
        let mut skip: Vec<String> = Vec::new();
        loop {
            let args = ["quantize", "--model", "model", "--kind", "mxfp4", "--output", "quantized"];
            let output = dir.command(&args).args(&skip).output().unwrap();
            if output.status.success() {
                break;
            }
            let said = dir.told(&output.stderr);
            if said.contains("every linear layer is skipped") {
                continue 'models;
            }
            assert!(
                said.contains("accepted by MXFP4: multiples of 32") && skip.len() < 40,
                "{model}: {said}"
            );
            let (_, after) = said.split_once("`--skip ").expect(&said);
            let module = after.split('`').next().unwrap();
            skip.extend(["--skip".to_owned(), module.rsplit('.').next().unwrap().to_owned()]);
        }
        let folders = ["model", "quantized"].map(|name| dir.path(name));
        let opened = folders.each_ref().map(|folder| base(folder));
        opened[1].check(Trains::Nothing).unwrap();
        let [original, quantized] = opened.each_ref().map(|base| base.files.as_ref().unwrap());
        assert!(quantized.names().eq(original.names()), "{model}");
        let config = json_of(&dir.path("quantized/config.json"));
        let ignored = config["quantization_config"]["ignore"].as_array();
        let mut count = 0;
        for (name, info) in original.tensors() {
            let (ours, theirs) = (floats(quantized, name), floats(original, name));
            if quantized.stored_format(name).is_none() {
                // `targets` is every nn.Linear: the others are named.
                let is_linear =
                    info.shape.len() == 2 && name.ends_with(".weight") && !name.contains("embed_tokens");
                let class = opened[0].config.family.class_names;
                let module = json!(class.module(name.trim_end_matches(".weight")));
                let named = ignored.is_none_or(|names| names.contains(&module));
                assert!(!is_linear || named, "{model}: {name}");
                assert_eq!(ours, theirs, "{model}: {name}");
                continue;
            }
            count += 1;
            let columns = *info.shape.last().unwrap();
            assert_eq!((info.shape.len(), columns % 32), (2, 0), "{model}: {name}");
            for (ours, theirs) in ours.chunks(32).zip(theirs.chunks(32)) {
                let largest = theirs.iter().fold(0f32, |max, value| max.max(value.abs()));
                assert!(
                    ours.iter().zip(theirs).all(|(a, b)| (a - b).abs() <= largest / 3.9),
                    "{model}: {name}"
                );
            }
        }
        let method = if model == "tiny-gpt-oss" { "mxfp4" } else { "compressed-tensors" };
        assert_eq!(config["quantization_config"]["quant_method"], method);
        assert!(count > 1, "{model}: {count}");
        written += 1;
    }
    assert!(written > 30, "{written}");
}

/// The experts of gpt-oss keep the values that they had in MXFP4, in stacks of the same shapes.
#[test]
fn the_experts_of_gpt_oss_are_stacks() {
    let dir = TestDir::new();
    std::fs::remove_dir_all(dir.path("model")).unwrap();
    copy_folder(&golden("qbases/models/tiny-mxfp4"), &dir.path("model"));
    dir.said(&["export", "--model", "model", "--format", "hf", "--output", "plain"]);
    let said = quantize(&dir, "plain", &[]);
    assert!(said.contains("quantized 16 tensors to mxfp4, copied "), "{said}");
    let raw = |name: &str| ModelFiles::open_file(&dir.path(name).join("model.safetensors")).unwrap();
    let (ours, theirs) = (raw("quantized"), raw("model"));
    assert!(ours.names().eq(theirs.names()));
    for (name, info) in theirs.tensors() {
        let actual = ours.info(name).unwrap();
        assert_eq!((actual.dtype, &actual.shape), (info.dtype, &info.shape), "{name}");
        if !name.ends_with("_blocks") && !name.ends_with("_scales") {
            assert_eq!(ours.bytes(name).unwrap(), theirs.bytes(name).unwrap(), "{name}");
        }
    }
    let [quantized, model] = ["quantized", "model"].map(|name| base(&dir.path(name)));
    let [ours, theirs] = [&quantized, &model].map(|base| base.files.as_ref().unwrap());
    for name in theirs.names() {
        assert_eq!(floats(ours, name), floats(theirs, name), "{name}");
    }
    let [ours, theirs] = ["quantized", "model"].map(|name| json_of(&dir.path(name).join("config.json")));
    assert_eq!(ours["quantization_config"], theirs["quantization_config"]);
    let again = ["quantize", "--model", "plain", "--kind", "mxfp4", "--output", "again", "--skip", "q_proj"];
    let output = dir.command(&again).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert_snapshot!(dir.told(&output.stderr), @"
    error: cannot use `--skip q_proj` with `--kind mxfp4` for this model
      caused by: transformers and vLLM load gpt-oss only with all experts, and no other layer, in MXFP4
    hint: remove `--skip`
    ");
    assert!(!dir.path("again").exists());
}

/// Returns the error of a command that writes nothing.
fn refused(dir: &TestDir, code: i32, more: &[&str]) -> String {
    let args = ["quantize", "--model", "model", "--kind", "mxfp4", "--output", "quantized"];
    let output = dir.command(&[&args[..], more].concat()).output().unwrap();
    let said = dir.told(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(!dir.path("quantized").exists(), "{said}");
    said
}

#[test]
fn what_mxfp4_cannot_hold() {
    let dir = TestDir::new();
    assert_snapshot!(refused(&dir, 2, &["--block-size", "32"]), @"
    error: cannot use `--block-size` with `--kind mxfp4`
      caused by: MXFP4 has a scale of 8 bits for each 32 weights of a row
    hint: remove `--block-size`
    ");
    assert_snapshot!(refused(&dir, 2, &["--no-double-quant"]), @"
    error: cannot use `--no-double-quant` with `--kind mxfp4`
      caused by: MXFP4 has a scale of 8 bits for each 32 weights of a row
    hint: remove `--no-double-quant`
    ");
    assert_snapshot!(refused(&dir, 1, &["--skip", "lm_head"]), @"
    error: cannot skip `lm_head`
      caused by: no linear layer has this name; accepted: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, each also with the parts before it, as in `model.layers.0.self_attn.q_proj`
    ");
    // Widths of 48 are no whole blocks.
    let config = std::fs::read_to_string(dir.path("model/config.json")).unwrap();
    dir.write(
        "model/config.json",
        &config.replace("\"intermediate_size\": 128", "\"intermediate_size\": 48"),
    );
    let mut args = lora(&["--set", "model.init=random"]);
    let at = args.iter().position(|arg| *arg == "--recipe").unwrap();
    args[at + 1] = "full";
    dir.said(&args);
    std::fs::rename(dir.path("model"), dir.path("wide")).unwrap();
    std::fs::rename(dir.path("out"), dir.path("model")).unwrap();
    assert_snapshot!(refused(&dir, 1, &[]), @"
    error: cannot quantize tensor `model.layers.0.mlp.down_proj.weight`
      caused by: its rows have 48 values; accepted by MXFP4: multiples of 32
    hint: leave it as it is with `--skip model.layers.0.mlp.down_proj`, or write another `--kind`
    ");
    assert!(quantize(&dir, "model", &["--skip", "down_proj"]).contains("quantized 12 tensors"));
}
