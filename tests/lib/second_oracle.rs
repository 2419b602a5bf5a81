//! A second oracle of logits: the models of candle-transformers on the tiny models of every family
//! that it has, in f32, compared with the engine on the same weights. Other people wrote them from
//! transformers, independently of this engine.
//!
//! `DEVIATIONS` lists where candle's models differ from transformers. Both are then compared on a
//! config.json that hides the difference; the test fails if a deviation is new or gone.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3};
use finetune::data::{Batch, IGNORE, Sample};
use finetune::loading::{EngineOptions, Trains};
use finetune::model::AdapterSwitch;
use finetune::recipe::enums::Attention;
use serde_json::{Map, Value, json};

use crate::logits;

/// The largest difference of two logits that rounding explains; logits are of order one.
const TOLERANCE: f32 = 1e-4;
/// More tokens than the longest window of a tiny model.
const TOKENS: usize = 32;

/// A difference between candle's model and transformers.
struct Deviation {
    model: &'static str,
    reason: &'static str,
    /// Keys of config.json, for the engine and for candle, with which both models agree.
    both: fn() -> Value,
    /// Keys for candle only.
    candle: fn() -> Value,
}

const DEVIATIONS: [Deviation; 4] = [
    Deviation {
        model: "tiny-mistral",
        reason: "a window of w lets a token see itself and w keys before it: one too many",
        both: || json!({}),
        candle: || json!({ "sliding_window": 7 }),
    },
    Deviation {
        model: "tiny-gemma3",
        reason: "a window of w lets a token see itself and w keys before it: one too many",
        both: || json!({}),
        candle: || json!({ "sliding_window": 7 }),
    },
    Deviation {
        model: "tiny-gemma2",
        reason: "every layer has the window, not every second one; scores are scaled by head_dim, not by \
                 query_pre_attn_scalar",
        both: || json!({ "sliding_window": 64, "query_pre_attn_scalar": 32 }),
        candle: || json!({}),
    },
    Deviation {
        model: "tiny-phi3",
        reason: "there is no window",
        both: || json!({ "sliding_window": null }),
        candle: || json!({}),
    },
];

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models")
}

fn with(mut config: Map<String, Value>, keys: Value) -> Map<String, Value> {
    config.extend(keys.as_object().unwrap().clone());
    config
}

/// Converts config.json to candle's keys: those of transformers 4, with a single EOS id.
fn in_candles_keys(mut config: Map<String, Value>) -> Map<String, Value> {
    config.remove("eos_token_id");
    if let Some(ropes) = config.remove("rope_parameters") {
        let theta = |kind: &Value| kind["rope_theta"].clone();
        if ropes["full_attention"].is_object() {
            config.insert("rope_theta".into(), theta(&ropes["full_attention"]));
            config.insert("rope_local_base_freq".into(), theta(&ropes["sliding_attention"]));
        } else {
            config.insert("rope_theta".into(), theta(&ropes));
        }
    }
    if let Some(layers) = config.get("layer_types").and_then(Value::as_array) {
        let full = layers.iter().position(|kind| kind == "full_attention").unwrap();
        config.insert("sliding_window_pattern".into(), json!(full + 1));
    }
    config
}

/// A candle model: maps ids `[1, N]` to the logits after the last one.
type LastLogits = Box<dyn FnMut(&Tensor) -> candle_core::Result<Tensor>>;

/// Values of `model_type` that candle-transformers has a model for, in alphabetical order.
const KNOWN: [&str; 7] = ["gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"];

/// Returns candle's model for a `model_type`.
fn candle_model(config: Map<String, Value>, weights: VarBuilder<'_>) -> LastLogits {
    macro_rules! cached {
        ($config:ty, |$read:ident| $model:expr) => {{
            let $read: $config = serde_json::from_value(Value::Object(config)).unwrap();
            let mut model = $model.unwrap();
            Box::new(move |ids| {
                model.clear_kv_cache();
                model.forward(ids, 0)
            })
        }};
    }
    match config["model_type"].as_str().unwrap() {
        "llama" => {
            let config: llama::LlamaConfig = serde_json::from_value(Value::Object(config)).unwrap();
            let config = config.into_config(false);
            let model = llama::Llama::load(weights, &config).unwrap();
            Box::new(move |ids| {
                model.forward(ids, 0, &mut llama::Cache::new(false, DType::F32, &config, &Device::Cpu)?)
            })
        }
        "mistral" => cached!(mistral::Config, |config| mistral::Model::new(&config, weights)),
        "qwen2" => cached!(qwen2::Config, |config| qwen2::ModelForCausalLM::new(&config, weights)),
        "qwen3" => cached!(qwen3::Config, |config| qwen3::ModelForCausalLM::new(&config, weights)),
        "gemma2" => cached!(gemma2::Config, |config| gemma2::Model::new(false, &config, weights)),
        "gemma3_text" => cached!(gemma3::Config, |config| gemma3::Model::new(false, &config, weights)),
        "phi3" => cached!(phi3::Config, |config| phi3::Model::new(&config, weights)),
        other => panic!("no model of candle-transformers is named for {other}"),
    }
}

fn ids() -> Vec<u32> {
    (0..TOKENS as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) % 400 + 3).collect()
}

/// Returns the weight files of a model that end in `ending`, with their index.
fn weights_of(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let named = |file: &PathBuf| file.file_name().unwrap().to_string_lossy().into_owned();
    files.filter(|file| named(file).starts_with("model") && named(file).ends_with(ending)).collect()
}

/// Returns the engine's logits after each of the ids, one row of the vocabulary after another.
fn engine_logits(folder: &Path, config: &Map<String, Value>, ids: &[u32]) -> Vec<f32> {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("config.json"), serde_json::to_vec(config).unwrap()).unwrap();
    for file in weights_of(folder, "") {
        std::fs::copy(&file, place.path().join(file.file_name().unwrap())).unwrap();
    }
    let options = EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0);
    let engine = logits::base(place.path()).engine(Trains::Nothing, &options).unwrap();
    let batch = Batch {
        ids: ids.to_vec(),
        targets: vec![IGNORE; ids.len()],
        segments: vec![Sample { start: 0, len: ids.len() }],
        first_token: 0,
        rows: 1,
    };
    engine.logits(&batch, AdapterSwitch::On).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns candle's logits in the same form; candle gives the last row only, so it runs on every
/// prefix.
fn candle_logits(folder: &Path, config: Map<String, Value>, ids: &[u32]) -> Vec<f32> {
    let shards = weights_of(folder, "safetensors");
    let load = |shard| candle_core::safetensors::load(shard, &Device::Cpu).unwrap();
    let weights = shards.into_iter().flat_map(load).collect();
    let weights = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    let mut model = candle_model(in_candles_keys(config), weights);
    let beginnings = (1..=ids.len()).map(|len| Tensor::new(&ids[..len], &Device::Cpu)?.unsqueeze(0));
    beginnings
        .flat_map(|ids| model(&ids.unwrap()).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap())
        .collect()
}

/// Returns the largest difference between candle's and the engine's logits.
fn distance(folder: &Path, config: Map<String, Value>, candle: Value) -> f32 {
    let ids = ids();
    let ours = engine_logits(folder, &config, &ids);
    let theirs = candle_logits(folder, with(config, candle), &ids);
    assert_eq!(ours.len(), theirs.len());
    ours.iter().zip(&theirs).map(|(ours, theirs)| (ours - theirs).abs()).fold(0.0, f32::max)
}

#[test]
fn logits_equal_those_of_candles_own_models() {
    let mut families = std::collections::BTreeSet::new();
    for entry in std::fs::read_dir(models()).unwrap() {
        let folder = entry.unwrap().path();
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let config: Map<String, Value> = serde_json::from_str(&config).unwrap();
        let model_type = config["model_type"].as_str().unwrap();
        if !KNOWN.contains(&model_type) {
            continue;
        }
        families.insert(model_type.to_owned());

        let as_it_stands = distance(&folder, config.clone(), json!({}));
        match DEVIATIONS.iter().find(|deviation| deviation.model == name) {
            None => assert!(as_it_stands < TOLERANCE, "{name}: {as_it_stands}, and no deviation is listed"),
            Some(Deviation { reason, both, candle, .. }) => {
                let adapted = distance(&folder, with(config, both()), candle());
                assert!(adapted < TOLERANCE, "{name}: {adapted}, not only for: {reason}");
                assert!(as_it_stands > 10.0 * TOLERANCE, "{name}: {as_it_stands}; no longer so: {reason}");
            }
        }
    }
    assert!(families.iter().eq(&KNOWN), "tiny models of {families:?}");
}
