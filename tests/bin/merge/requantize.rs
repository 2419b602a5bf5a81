//! `merge --requantize`: an adapter merged into the quantized format of its base, with the share of
//! its effect that survived.

use std::path::Path;

use crate::logits::floats;
use crate::test_dir::{TestDir, copy_folder, golden, lora};
use finetune::weights::ModelFiles;
use half::bf16;
use insta::assert_snapshot;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;

/// A base and a golden adapter of it; "" stands for one that is trained here.
struct Case {
    model: &'static str,
    adapter: &'static str,
    /// The least share of the adapter's effect that survives.
    least: f64,
}

const PACKED: &str = "qbases/models";

/// Every format that can be written. 8 bits with a scale for few weights keep almost all; the runs
/// that changed the weights by less than a step of 4 bits lose almost all.
const CASES: [Case; 16] = [
    Case { model: "qbases/models/tiny-fp8-block", adapter: "qbases/train/lora_fp8_block", least: 0.9 },
    Case { model: "qbases/models/tiny-modelopt-fp8", adapter: "train/lora", least: 0.6 },
    Case { model: "quant/tiny-llama-bnb-int8", adapter: "train/lora", least: 0.95 },
    Case { model: "qbases/models/tiny-hqq-8", adapter: "train/lora", least: 0.95 },
    Case { model: "qbases/models/tiny-ct-int8-channel", adapter: "", least: 0.9 },
    Case { model: "qbases/models/tiny-ct-w8a8", adapter: "", least: 0.9 },
    Case { model: "qbases/models/tiny-gptq-8-g32-asym", adapter: "", least: 0.9 },
    Case { model: "quant/tiny-llama-bnb-nf4", adapter: "train/qlora", least: 0.01 },
    Case { model: "qbases/models/tiny-ct-int4-g32-asym", adapter: "qbases/train/lora_ct_int4", least: 0.5 },
    Case { model: "qbases/models/tiny-gptq-4-g32-act", adapter: "qbases/train/lora_gptq", least: 0.5 },
    Case { model: "qbases/models/tiny-awq-4-g32", adapter: "qbases/train/lora_awq", least: 0.6 },
    Case { model: "qbases/models/tiny-hqq-4", adapter: "train/lora", least: -0.01 },
    Case { model: "qbases/models/tiny-ct-mxfp4", adapter: "train/lora", least: 0.0 },
    Case { model: "qbases/models/tiny-ct-nvfp4", adapter: "train/lora", least: 0.0 },
    Case { model: "qbases/models/tiny-modelopt-nvfp4", adapter: "train/lora", least: 0.0 },
    Case { model: "qbases/models/tiny-mxfp4", adapter: "qbases/train/lora_mxfp4", least: 0.9 },
];

fn test_dir(model: &str, adapter: &str) -> TestDir {
    let dir = TestDir::new();
    let tokenizer = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];
    let originals = tokenizer.map(|name| std::fs::read(dir.path("model").join(name)).unwrap());
    std::fs::remove_dir_all(dir.path("model")).unwrap();
    copy_folder(&golden(model), &dir.path("model"));
    for (name, bytes) in tokenizer.iter().zip(originals) {
        let path = dir.path("model").join(name);
        if !path.exists() {
            std::fs::write(path, bytes).unwrap();
        }
    }
    if adapter.is_empty() {
        train(&dir, &[]);
    } else {
        copy_folder(&golden(adapter).join("adapter_final"), &dir.path("adapter"));
    }
    dir
}

/// Trains an adapter of the model that changes its weights by more than rounding.
fn train(dir: &TestDir, more: &[&str]) {
    let mut args = lora(&[&["--set", "optimizer.learning_rate=0.02"], more].concat());
    args[7] = "adapter";
    dir.said(&args);
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn merge<'a>(output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let args = ["merge", "--model", "model", "--adapter", "adapter", "--output", output];
    [&args[..], more].concat()
}

fn distance(one: &[f32], other: &[f32]) -> f64 {
    one.iter().zip(other).map(|(a, b)| f64::from(a - b).powi(2)).sum()
}

/// The files keep their names, sizes and every tensor that the adapter does not change; changed
/// weights are closer to the merged ones than those of the base, and no farther than the codes
/// allow.
#[test]
fn every_format_is_written_again() {
    for Case { model, adapter, least } in CASES {
        let dir = test_dir(model, adapter);
        // bitsandbytes' formats get the codes that they get from the merged model in f32.
        let kind = model.strip_prefix("quant/tiny-llama-bnb-");
        written_again(&dir, model, least, kind);
        let generate = ["generate", "--model", "merged", "--prompt", "a", "--max-new-tokens", "2"];
        dir.said(&generate);
    }
}

/// Checks a merge of `adapter` into the format of `model`, which keeps at least the share `least`
/// of its effect; `kind` is a format of bitsandbytes.
fn written_again(dir: &TestDir, model: &str, least: f64, kind: Option<&str>) {
    let measured = ["--requantize", "--verify-on", "rows.jsonl", "--max-kl", "10"];
    let said = dir.said(&merge("merged", &measured));
    let share = json_of(&dir.path("merged/merge.json"))["certificate"]["effect_kept"].as_f64().unwrap();
    assert!((least..1.2).contains(&share), "{model}: {share}\n{said}");
    let line = format!("{:.1} % of the adapter's effect on the logits survived", 100.0 * share);
    assert!(said.contains(&line), "{said}");
    assert_eq!(said.contains("warning: the merged model has lost most"), share < 0.5, "{said}");
    dir.said(&merge("exact", &["--dtype", "f32"]));
    let [before, after, exact] = ["model", "merged", "exact"].map(|name| opened(&dir.path(name)));
    assert!(after.names().eq(before.names()), "{model}");
    let again = kind.map(|kind| {
        dir.said(&["quantize", "--model", "exact", "--kind", kind, "--output", "again"]);
        opened(&dir.path("again"))
    });
    let (mut changed, mut other) = (0, 0);
    for (name, info) in before.tensors() {
        let [old, new, wanted] = [&before, &after, &exact].map(|files| floats(files, name));
        let what = format!("{model}: {name}");
        assert_eq!(after.stored_format(name), before.stored_format(name), "{what}");
        assert_eq!(after.info(name).unwrap().range, info.range, "{what}");
        if old == wanted {
            assert_eq!(old, new, "{what}");
            other += 1;
        } else {
            let codes = |files: &ModelFiles| Some(files.quantized(name).unwrap()?.codes().to_vec());
            let nearer = distance(&new, &wanted) <= distance(&old, &wanted);
            let quantized = again.as_ref().map(codes);
            assert!(quantized.map_or(nearer, |codes_of_plain| codes_of_plain == codes(&after)), "{what}");
            changed += usize::from(new != old);
        }
    }
    assert!(changed > 3 && other > 3, "{model}: {changed}, {other}");
    let [ours, theirs] = ["merged", "model"].map(|name| json_of(&dir.path(name).join("config.json")));
    assert_eq!(ours, theirs, "{model}");
    assert_eq!(json_of(&dir.path("merged/merge.json"))["requantized"], true);
}

/// A tensor of a safetensors file.
type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

fn read_tensors(path: &Path) -> Vec<Tensor> {
    let bytes = std::fs::read(path).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let own = |(name, view): (&str, TensorView<'_>)| {
        (name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec())
    };
    let mut tensors: Vec<Tensor> = all.iter().map(own).collect();
    tensors.sort_by(|one, other| one.0.cmp(&other.0));
    tensors
}

fn write_tensors(path: &Path, tensors: &[Tensor]) {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// Codes and scales of one weight may be in two files.
#[test]
fn models_in_several_files_are_written_again() {
    for model in ["tiny-fp8-block", "tiny-gptq-8-g32-asym", "tiny-ct-mxfp4"] {
        let dir = test_dir(&format!("{PACKED}/{model}"), "");
        let whole = dir.path("model/model.safetensors");
        let tensors = read_tensors(&whole);
        std::fs::remove_file(whole).unwrap();
        let mut map = serde_json::Map::new();
        for file in 0..3 {
            let name = format!("model-0000{}-of-00003.safetensors", file + 1);
            let of_file: Vec<Tensor> = tensors.iter().skip(file).step_by(3).cloned().collect();
            map.extend(of_file.iter().map(|(tensor, ..)| (tensor.clone(), name.clone().into())));
            write_tensors(&dir.path("model").join(name), &of_file);
        }
        let index = serde_json::json!({"metadata": {}, "weight_map": map}).to_string();
        std::fs::write(dir.path("model/model.safetensors.index.json"), &index).unwrap();
        written_again(&dir, model, -0.01, None);
        let copied = std::fs::read_to_string(dir.path("merged/model.safetensors.index.json")).unwrap();
        assert_eq!(copied, index, "{model}");
        assert_eq!(opened(&dir.path("merged")).files().len(), 3);
    }
}

/// The text part of an image-text model in 8 bits: towers, names and settings stay.
#[test]
fn image_text_models_are_written_again() {
    for model in ["tiny-gemma3-mm", "tiny-qwen3-5-mm"] {
        let dir = test_dir(&format!("wrappers/{model}"), "train/lora");
        std::fs::remove_dir_all(dir.path("adapter")).unwrap();
        let path = dir.path("model/model.safetensors");
        let tensors = read_tensors(&path);
        let is_tower =
            |name: &str| name.contains("vision") || name.contains("visual") || name.contains("mtp");
        let mut packed = Vec::new();
        for tensor in &tensors {
            let (name, dtype, shape, data) = tensor;
            if !name.ends_with("_proj.weight") || is_tower(name) {
                packed.push(tensor.clone());
                continue;
            }
            let floats: Vec<f32> = match dtype {
                Dtype::F32 => data.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
                _ => data.chunks(2).map(|b| bf16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect(),
            };
            let rows = floats.chunks(shape[1]);
            let scales: Vec<f32> = rows
                .map(|row| row.iter().fold(1e-6f32, |most, value| most.max(value.abs())) / 127.0)
                .collect();
            let code = |(at, value): (usize, &f32)| (value / scales[at / shape[1]]).round() as i8 as u8;
            let codes = floats.iter().enumerate().map(code).collect();
            let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            packed.push((name.clone(), Dtype::I8, shape.clone(), codes));
            packed.push((format!("{name}_scale"), Dtype::F32, vec![shape[0], 1], scales));
        }
        assert!(packed.len() > tensors.len() + 6, "{model}");
        write_tensors(&path, &packed);
        let config = dir.path("model/config.json");
        let mut settings = json_of(&config);
        settings["quantization_config"] = serde_json::json!({
            "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights":
                {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": true, "group_size": null}}},
        });
        std::fs::write(config, settings.to_string()).unwrap();
        train(&dir, &[]);
        written_again(&dir, model, 0.9, None);
        let ours = read_tensors(&dir.path("merged/model.safetensors"));
        let towers =
            |all: &[Tensor]| all.iter().filter(|tensor| is_tower(&tensor.0)).cloned().collect::<Vec<_>>();
        assert_eq!(towers(&ours).len(), towers(&packed).len());
        assert!(towers(&ours) == towers(&packed) && !towers(&ours).is_empty(), "{model}");
        assert!(ours.iter().map(|tensor| &tensor.0).eq(read_tensors(&path).iter().map(|tensor| &tensor.0)));
    }
}

/// Opens a model as runs do: parts of stacks by their own names.
fn opened(folder: &Path) -> ModelFiles {
    crate::logits::base(folder).files.unwrap()
}

/// An adapter without effect gives the values of the base, and the bytes of its files: only a zero
/// of e4m3 may lose its sign.
#[test]
fn an_adapter_without_effect_changes_no_value() {
    for model in ["tiny-fp8-block", "tiny-gptq-4-g32-act", "tiny-awq-4-g32", "tiny-ct-int4-g32-asym"] {
        let dir = test_dir(&format!("{PACKED}/{model}"), "train/lora");
        dir.said(&lora(&["--set", "optimizer.learning_rate=1e-30"]));
        std::fs::remove_dir_all(dir.path("adapter")).unwrap();
        std::fs::rename(dir.path("out"), dir.path("adapter")).unwrap();
        let said = dir.said(&merge("merged", &["--requantize"]));
        assert!(said.contains("`--verify-on DATASET` measures it"), "{said}");
        let [ours, theirs] =
            ["merged", "model"].map(|name| std::fs::read(dir.path(name).join("model.safetensors")).unwrap());
        assert!(ours == theirs || model == "tiny-fp8-block", "{model}");
        let [ours, theirs] = ["merged", "model"].map(|name| opened(&dir.path(name)));
        assert!(theirs.names().all(|name| floats(&ours, name) == floats(&theirs, name)), "{model}");
    }
}

/// Experts of gpt-oss are parts of stacks: their blocks and scales change, and nothing else does.
#[test]
fn experts_in_stacks_are_written_again() {
    let dir = test_dir("qbases/models/tiny-mxfp4", "train/lora");
    std::fs::remove_dir_all(dir.path("adapter")).unwrap();
    let rate = ["--set", "optimizer.learning_rate=0.1"];
    let mut args = lora(&[&rate[..], &["--set", "adapter.target_modules=\".*experts.*\""]].concat());
    args[7] = "adapter";
    dir.said(&args);
    dir.said(&merge("merged", &["--requantize", "--verify-on", "rows.jsonl", "--max-kl", "10"]));
    dir.said(&merge("exact", &["--dtype", "f32"]));
    let [before, after, exact] = ["model", "merged", "exact"].map(|name| opened(&dir.path(name)));
    let mut experts = 0;
    for name in before.names() {
        let [old, new, wanted] = [&before, &after, &exact].map(|files| floats(files, name));
        if before.stored_format(name).is_none() {
            assert_eq!(new, old, "{name}");
            continue;
        }
        assert!(distance(&new, &wanted) < distance(&old, &wanted), "{name}");
        experts += 1;
    }
    assert_eq!(experts, 16);
    let share = json_of(&dir.path("merged/merge.json"))["certificate"]["effect_kept"].as_f64().unwrap();
    assert!((0.5..1.5).contains(&share), "{share}");
}

/// A run with `[quantization]` on a packed base trains on weights that its files do not hold.
#[test]
fn an_adapter_of_other_weights_is_refused() {
    let dir = test_dir("qbases/models/tiny-gptq-4-g32-act", "train/lora");
    std::fs::remove_dir_all(dir.path("adapter")).unwrap();
    let mut args = lora(&["--set", "quantization.kind=nf4"]);
    args[7] = "adapter";
    dir.said(&args);
    let said = refused(&dir, &[]);
    assert_snapshot!(said[said.find("error: ").unwrap()..], @"
    error: cannot merge into the format of [DIR]/model
      caused by: the adapter was trained over nf4 in blocks of 64 with double-quantized scales, made from the weights that the files hold
    hint: merge without `--requantize`; `--base original` adds the adapter to the weights in the files
    ");
    let said = dir.said(&merge("merged", &["--requantize", "--base", "original"]));
    assert!(said.contains("merging onto the unquantized weights, as asked"), "{said}");
}

/// A merged checkpoint of `finetune quantize` is no copy of the model that it was made from: an
/// adapter of that model is refused.
#[test]
fn a_merged_model_is_another_one() {
    let dir = TestDir::new();
    for kind in ["nf4", "mxfp4"] {
        dir.said(&["quantize", "--model", "model", "--kind", kind, "--output", kind]);
        let mut args = lora(&[]);
        let adapter = format!("adapter-{kind}");
        (args[1], args[7]) = (kind, &adapter);
        dir.said(&args);
        let output = format!("merged-{kind}");
        let args = ["merge", "--model", kind, "--adapter", &adapter, "--output", &output, "--requantize"];
        dir.said(&args);
        let files = ModelFiles::open(&dir.path(&output)).unwrap();
        let record = |files: &ModelFiles| files.metadata("finetune.quantized_from").is_some();
        assert_eq!([record(&opened(&dir.path(kind))), record(&files)], [true, false]);
        let sizes = [kind, &output]
            .map(|name| std::fs::metadata(dir.path(name).join("model.safetensors")).unwrap().len());
        assert_eq!(sizes[0], sizes[1]);
        let eval = ["eval", "--model", &output, "--adapter", &adapter, "--dataset", "rows.jsonl"];
        let said = dir.refused(&eval);
        assert!(said.contains("error: cannot use adapter"), "{said}");
    }
}

/// Returns the error of a merge that writes nothing.
fn refused(dir: &TestDir, more: &[&str]) -> String {
    let args = merge("merged", &[&["--requantize"], more].concat());
    let output = dir.command(&args).output().unwrap();
    let said = dir.told(&output.stderr);
    assert!(!output.status.success() && !dir.path("merged").exists(), "{said}");
    let lines: Vec<&str> = said.lines().filter(|line| !line.starts_with("warning: ")).collect();
    format!("exit {}\n{}", output.status.code().unwrap(), lines.join("\n"))
}

#[test]
fn bases_without_a_format_to_write() {
    let plain = test_dir("models/tiny-llama", "train/lora");
    assert_snapshot!(refused(&plain, &[]), @"
    exit 1
    adapter [DIR]/adapter does not record the model it was trained on: the check against `model` (digest 5934c55b60627656) is skipped
    merging onto the weights in the model's files
    error: cannot merge into the format of [DIR]/model
      caused by: it is not quantized
    hint: merge without `--requantize`; `finetune quantize` quantizes the merged model
    ");
    assert_snapshot!(refused(&plain, &["--dtype", "bf16"]), @"
    exit 2
    error: the argument '--requantize' cannot be used with '--dtype <DTYPE>'

    Usage: finetune merge --adapter <ADAPTER> --output <DIR> --model <MODEL> --requantize

    For more information, try '--help'.
    ");
    let cause = |said: String| said[said.find("error: ").unwrap()..].to_owned();
    let tied = TestDir::with_model("tiny-qwen2");
    std::fs::rename(tied.path("model"), tied.path("original")).unwrap();
    tied.said(&["quantize", "--model", "original", "--kind", "nf4", "--output", "model"]);
    copy_folder(&golden("train/lora_tables_tied/adapter_final"), &tied.path("adapter"));
    assert_snapshot!(cause(refused(&tied, &[])), @"
    error: cannot merge into the format of [DIR]/model
      caused by: the adapter separates its embedding from its head
    hint: merge without `--requantize`
    ");
    let tokens = test_dir("quant/tiny-llama-bnb-nf4", "train/lora");
    std::fs::remove_dir_all(tokens.path("adapter")).unwrap();
    let mut args = lora(&["--set", "model.new_tokens=[\"<new>\"]"]);
    args[7] = "adapter";
    tokens.said(&args);
    assert_snapshot!(cause(refused(&tokens, &[])), @"
    error: cannot merge into the format of [DIR]/model
      caused by: the adapter adds tokens: `lm_head.weight` becomes [481, 64], and quantized files keep their sizes
    hint: merge without `--requantize`
    ");
    let limited = test_dir("qbases/models/tiny-ct-mxfp4", "train/lora");
    assert_snapshot!(cause(refused(&limited, &["--verify-on", "rows.jsonl", "--max-kl", "1e-9"])), @"
    error: the merged model differs too much from base and adapter
      caused by: KL divergence 0.1488 nats a token on 64 rows of [DIR]/rows.jsonl (largest 0.375, same likeliest token at 39.9 %); accepted: up to 0.000000001
      caused by: 0.9 % of the adapter's effect on the logits survived the quantization of the merged weights
      caused by: nothing was written
    hint: merge without `--requantize`, into plain weights; `--max-kl` accepts more
    ");
}
