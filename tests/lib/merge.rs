//! Merged models against PEFT: the golden runs' final logits, for every kind of adapter, and onto
//! quantized bases.

use std::fs;
use std::path::{Path, PathBuf};

use crate::logits::{distance, floats};
use candle_core::{Device, Tensor};
use finetune::adapter::{
    self, BaseValues, MERGE_FILE, MergeOptions, MergeRecord, MergeReport, SavedAdapter, WEIGHTS_FILE,
};
use finetune::error::{Error, ErrorCategory, Result};
use finetune::model::{self, ModelConfig, unstack_experts};
use finetune::quant::QuantFormat;
use finetune::recipe::enums::Dtype;
use finetune::weights::ModelFiles;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Difference from PEFT's logits that another order of sums causes.
const LIMIT: f32 = 1e-4;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

fn temp() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn config_of(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("config.json")).expect("there")).expect("JSON")
}

fn merge(model: &Path, adapter: &Path, output: &Path, base: BaseValues) -> Result<MergeReport> {
    let options =
        MergeOptions { dtype: Dtype::F32, base, skip: &[], requantize: false, verify: &|_| Ok(None) };
    let text = fs::read_to_string(model.join("config.json")).expect("there");
    let mut files = ModelFiles::open(model)?;
    unstack_experts(&ModelConfig::from_json(&text, "config.json")?, &mut files)?;
    adapter::merge(&files, adapter, output, &options)
}

/// Returns the difference between a merged golden run and its final logits.
fn merged_distance(run: &str, model: &str, base: BaseValues) -> (MergeReport, f32) {
    let (dir, run) = (temp(), golden(run));
    let output = dir.path().join("merged");
    let report = merge(&golden(model), &run.join("adapter_final"), &output, base).expect("merges");
    (report, distance(&run.join("final_logits.safetensors"), &output))
}

#[test]
fn every_kind_computes_what_peft_computes() {
    for (run, model, changed, untied) in [
        ("lora", "tiny-llama", 14, false),
        ("rslora", "tiny-llama", 4, false),
        ("lora_qwen2", "tiny-qwen2", 14, false),
        ("lora_phi3", "tiny-phi3", 8, false),
        ("dora", "tiny-llama", 14, false),
        ("lora_tables", "tiny-llama", 4, false),
        ("lora_tables_tied", "tiny-qwen2", 4, true),
        // Rows of a tied embedding also belong to the head.
        ("lora_tokens", "tiny-qwen2", 3, false),
        ("lora_tokens_untied", "tiny-llama", 4, false),
    ] {
        let (report, distance) =
            merged_distance(&format!("train/{run}"), &format!("models/{model}"), BaseValues::AsStored);
        assert!(distance < LIMIT, "{run}: {distance}");
        assert_eq!((report.merged, report.replaced, report.untied), (changed, 0, untied), "{run}");
    }
}

/// LoRA on the tensors of all experts of a layer (`target_parameters`).
#[test]
fn adapters_of_all_experts_compute_what_peft_computes() {
    for (family, changed) in [
        ("qwen3-moe", 60),
        ("mixtral", 32),
        ("deepseek-v3", 63),
        ("gemma4-moe", 47),
        ("gpt-oss", 36),
        ("llama4", 24),
    ] {
        let [run, model] = [format!("train/lora_experts_{family}"), format!("models/tiny-{family}")]
            .map(|path| format!("families/{path}"));
        let (report, distance) = merged_distance(&run, &model, BaseValues::AsStored);
        assert!(distance < LIMIT, "{run}: {distance}");
        assert_eq!(report.merged, changed, "{run}");
    }
}

/// Seven blocks of seven or five linear layers, with two for the per-layer input of each, and one
/// that makes these inputs; then a table, two layers of each block, and a norm that trained whole.
#[test]
fn adapters_of_per_layer_inputs_compute_what_peft_computes() {
    let layers = 3 * 7 + 4 * 5 + 7 * 2 + 1;
    for (run, merged, replaced) in [("lora_gemma4-e2b", layers, 0), ("lora_tables_gemma4-e2b", 1 + 2 * 7, 1)]
    {
        let path = format!("families/train/{run}");
        let (report, distance) =
            merged_distance(&path, "families/models/tiny-gemma4-e2b", BaseValues::AsStored);
        assert!(distance < LIMIT, "{run}: {distance}");
        assert_eq!((report.merged, report.replaced), (merged, replaced), "{run}");
    }
}

/// Other trainers also adapt keys and values that no block reads.
#[test]
fn an_adapter_of_keys_that_no_block_reads_merges_as_without_them() {
    let [model, run] = ["models/tiny-gemma4-e2b", "train/lora_gemma4-e2b/adapter_final"]
        .map(|at| golden("families").join(at));
    let dir = temp();
    let adapter = dir.path().join("adapter");
    fs::create_dir(&adapter).expect("made");
    fs::copy(run.join("adapter_config.json"), adapter.join("adapter_config.json")).expect("copied");
    let mut tensors = candle_core::safetensors::load(run.join(WEIGHTS_FILE), &Device::Cpu).expect("loads");
    let of_reader = |(name, tensor): (&String, &Tensor)| {
        let is_key = name.contains("layers.1.self_attn.k_proj") || name.contains("layers.1.self_attn.v_proj");
        is_key.then(|| (name.replace("layers.1.", "layers.3."), tensor.clone()))
    };
    let others: Vec<_> = tensors.iter().filter_map(of_reader).collect();
    assert_eq!(others.len(), 4);
    tensors.extend(others);
    candle_core::safetensors::save(&tensors, adapter.join(WEIGHTS_FILE)).expect("saved");

    let text = fs::read_to_string(model.join("config.json")).expect("there");
    let mut config = ModelConfig::from_json(&text, "config.json").expect("a model");
    let (unread, modules) = (model::unread_modules(&config), model::modules(&config));
    let read = || SavedAdapter::read(&adapter).expect("reads");
    let error = read().fitted(&modules).expect_err("block 3 has no keys").to_string();
    assert!(error.contains("layers.3.self_attn.k_proj"), "{error}");
    let without = read().without(&unread);
    assert!(without.warning().is_some_and(|note| note.starts_with("2 modules of the adapter")));
    assert_eq!(without.fitted(&modules).expect("fits").targets().len(), 3 * 7 + 4 * 5 + 7 * 2 + 1);
    let mut merged = |adapter: &Path| {
        let output = dir.path().join(adapter.file_name().expect("a name")).with_extension("merged");
        let mut files = ModelFiles::open(&model).expect("opens");
        model::settle(&mut config, &mut files).expect("settles");
        let options = MergeOptions {
            dtype: Dtype::F32,
            base: BaseValues::AsStored,
            skip: &[],
            requantize: false,
            verify: &|_| Ok(None),
        };
        adapter::merge(&files, adapter, &output, &options).expect("merges");
        fs::read(output.join("model.safetensors")).expect("weights")
    };
    assert!(merged(&adapter) == merged(&run));
}

#[test]
fn an_adapter_of_a_quantized_base_merges_onto_it() {
    for run in ["qlora", "qdora"] {
        let quantized = BaseValues::Quantized(QuantFormat::default());
        for (model, base) in
            [("models/tiny-llama", quantized), ("quant/tiny-llama-bnb-nf4", BaseValues::AsStored)]
        {
            let (report, distance) = merged_distance(&format!("train/{run}"), model, base);
            assert!(distance < LIMIT, "{run} onto {model}: {distance}");
            assert_eq!((report.merged, report.replaced), (14, 0));
        }
        let (_, distance) =
            merged_distance(&format!("train/{run}"), "models/tiny-llama", BaseValues::AsStored);
        assert!(distance > 100.0 * LIMIT, "{run}: the base makes a difference, {distance}");
    }
}

#[test]
fn only_linear_layers_of_blocks_are_quantized() {
    let dir = temp();
    let output = dir.path().join("merged");
    let adapter = golden("train/rslora/adapter_final");
    let quantized = BaseValues::Quantized(QuantFormat::default());
    merge(&golden("models/tiny-llama"), &adapter, &output, quantized).expect("merges");
    let (ours, stored) = (ModelFiles::open(&output), ModelFiles::open(&golden("models/tiny-llama")));
    let (ours, stored) = (ours.expect("opens"), stored.expect("opens"));
    let quantized = ModelFiles::open(&golden("quant/tiny-llama-bnb-nf4")).expect("opens");
    for name in stored.names().filter(|name| !name.contains("q_proj") && !name.contains("v_proj")) {
        let linear = name.contains("_proj");
        let (actual, original) = (floats(&ours, name), floats(&stored, name));
        if !linear {
            assert!(actual == original, "{name}");
            continue;
        }
        let expected = floats(&quantized, name);
        let equal = actual.iter().zip(&expected).filter(|(ours, theirs)| ours == theirs).count();
        assert!(equal * 100 > actual.len() * 95, "{name}: {equal} of {}", actual.len());
        let near = |(ours, theirs): (&f32, &f32)| (ours - theirs).abs() <= 0.02 * theirs.abs();
        assert!(actual.iter().zip(&expected).all(near), "{name}");
        assert!(actual != original, "{name}");
    }
}

#[test]
fn a_quantized_checkpoint_comes_out_plain() {
    let dir = temp();
    let output = dir.path().join("merged");
    let options = MergeOptions {
        dtype: Dtype::Bf16,
        base: BaseValues::AsStored,
        skip: &[],
        requantize: false,
        verify: &|_| Ok(None),
    };
    let base = ModelFiles::open(&golden("quant/tiny-llama-bnb-nf4")).expect("opens");
    adapter::merge(&base, &golden("train/qlora/adapter_final"), &output, &options).expect("merges");
    let ours = ModelFiles::open(&output).expect("opens");
    let plain = ModelFiles::open(&golden("models/tiny-llama")).expect("opens");
    assert_eq!(ours.names().collect::<Vec<_>>(), plain.names().collect::<Vec<_>>());
    let config = config_of(&output);
    assert_eq!((&config["quantization_config"], &config["dtype"]), (&Value::Null, &json!("bfloat16")));
}

#[test]
fn what_was_merged_is_on_record() {
    let dir = temp();
    let (first, second) = (dir.path().join("first"), dir.path().join("second"));
    let (lora, dora) = (golden("train/lora/adapter_final"), golden("train/dora/adapter_final"));
    let base = ModelFiles::open(&golden("models/tiny-llama")).expect("opens");
    let seen = |folder: &Path| {
        assert!(folder.join("config.json").exists() && !folder.join(MERGE_FILE).exists());
        Ok(Some(json!({"mean_kl": 0.5})))
    };
    let options = MergeOptions {
        dtype: Dtype::Auto,
        base: BaseValues::AsStored,
        skip: &[],
        requantize: false,
        verify: &seen,
    };
    adapter::merge(&base, &lora, &first, &options).expect("merges");
    let record = MergeRecord::read(&first).expect("reads").expect("is there");
    let digest = |adapter: &Path| {
        blake3::hash(&fs::read(adapter.join(WEIGHTS_FILE)).expect("there")).to_hex().to_string()
    };
    assert_eq!(record.adapter_blake3, digest(&lora));
    assert_eq!(record.base, golden("models/tiny-llama").display().to_string());
    assert_eq!((record.base_values.as_str(), record.dtype.as_deref()), ("as stored", Some("float32")));
    assert_eq!((record.certificate, record.earlier.len()), (Some(json!({"mean_kl": 0.5})), 0));

    merge(&first, &dora, &second, BaseValues::AsStored).expect("another adapter may follow");
    let record = MergeRecord::read(&second).expect("reads").expect("is there");
    assert_eq!(record.adapter_blake3, digest(&dora));
    assert_eq!(record.earlier.iter().map(|r| r.adapter_blake3.clone()).collect::<Vec<_>>(), [digest(&lora)]);
    assert_eq!(MergeRecord::read(&golden("models/tiny-llama")).expect("reads"), None);

    let third = dir.path().join("third");
    let shown = |error: Error| {
        assert_eq!(error.kind(), ErrorCategory::User);
        let root = golden("").parent().and_then(Path::parent).map(|root| root.display().to_string());
        let text = error.to_string().replace(&dir.path().display().to_string(), "<dir>");
        text.replace(&root.expect("the repository"), "<root>")
    };
    let twice = |base: &Path, adapter: &Path| {
        shown(merge(base, adapter, &third, BaseValues::AsStored).expect_err("merged already"))
    };
    let mut errors = vec![twice(&first, &lora), twice(&second, &lora), twice(&second, &dora)];
    fs::write(first.join(MERGE_FILE), "{}").expect("written");
    errors.push(twice(&first, &dora));
    assert!(!third.exists());
    insta::assert_snapshot!(errors.join("\n"), @"
    error: cannot merge adapter <root>/tests/golden/train/lora/adapter_final into <dir>/first
      caused by: the adapter is already merged: merge.json of the model names <root>/tests/golden/train/lora/adapter_final
    hint: use the model as it is, or give its base as `--model`: <root>/tests/golden/models/tiny-llama
    error: cannot merge adapter <root>/tests/golden/train/lora/adapter_final into <dir>/second
      caused by: the adapter is already merged: merge.json of the model names <root>/tests/golden/train/lora/adapter_final
    hint: use the model as it is, or give its base as `--model`: <root>/tests/golden/models/tiny-llama
    error: cannot merge adapter <root>/tests/golden/train/dora/adapter_final into <dir>/second
      caused by: the adapter is already merged: merge.json of the model names <root>/tests/golden/train/dora/adapter_final
    hint: use the model as it is, or give its base as `--model`: <dir>/first
    error: cannot read <dir>/first/merge.json
      caused by: missing field `base` at line 1 column 2
    hint: remove the file if no adapter was ever merged into this model
    ");
}

#[test]
fn a_check_that_fails_leaves_nothing() {
    let dir = temp();
    let output = dir.path().join("merged");
    let base = ModelFiles::open(&golden("models/tiny-llama")).expect("opens");
    let verify = |_: &Path| Err(Error::user("the merged model is another"));
    let options = MergeOptions {
        dtype: Dtype::Auto,
        base: BaseValues::AsStored,
        skip: &[],
        requantize: false,
        verify: &verify,
    };
    let merged = adapter::merge(&base, &golden("train/lora/adapter_final"), &output, &options);
    assert_eq!(merged.expect_err("refused").what(), "the merged model is another");
    assert_eq!(fs::read_dir(dir.path()).expect("folder").count(), 0);
}
