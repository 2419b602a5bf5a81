//! config.json of each family → [`ModelConfig`], in the notations of both transformers generations
//! (`torch_dtype`/`dtype`, `rope_theta` + `rope_scaling`/`rope_parameters`).
//!
//! A family is one file here: an [`Architecture`] that declares its names, defaults, parts and GGUF
//! facts. `parts` holds the readers that families share. If config.json needs a feature that
//! finetune does not compute, finetune names and refuses it before it reads any weight.

mod apertus;
mod arcee;
mod architecture;
mod cohere;
mod cohere2;
mod deepseek_v3;
mod ernie4_5;
mod ernie4_5_moe;
mod exaone4;
mod falcon;
mod gemma;
mod gemma2;
mod gemma3;
mod gemma4;
mod gguf_facts;
mod glm4;
mod glm4_moe;
mod glm4_moe_lite;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod granitemoe;
mod granitemoehybrid;
mod hunyuan;
mod hunyuan_moe;
mod lfm2;
mod lfm2_moe;
mod llama;
mod llama4;
mod minimax_m2;
mod ministral;
mod ministral3;
mod mistral;
mod mistral4;
mod mixtral;
mod nemotron;
mod olmo2;
mod olmo3;
mod olmoe;
mod parts;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod refusals;
mod seed_oss;
mod sizes;
mod smollm3;
mod stablelm;
mod starcoder2;

use serde_json::Value;

pub use architecture::Architecture;
pub use gguf_facts::{
    GgufExperts, GgufFacts, GgufLocalRope, GgufNoPositions, GgufSeventyB, GgufSliding, GgufSoftcap,
    GgufWindows,
};

use super::config::ModelConfig;
use super::config_reader::ConfigReader;
use crate::error::{Error, ErrorContext as _, Result};
use crate::weights::readers;
use crate::weights::text_config::text_part;
use sizes::{MOST_TOKENS, MOST_WIDE, ModelSizes};

/// All families; the only registry.
static FAMILIES: &[&Architecture] = &[
    &llama::LLAMA,
    &mistral::MISTRAL,
    &qwen2::QWEN2,
    &qwen3::QWEN3,
    &gemma2::GEMMA2,
    &gemma3::GEMMA3,
    &gemma4::GEMMA4,
    &phi3::PHI3,
    &granite::GRANITE,
    &granitemoehybrid::GRANITEMOEHYBRID,
    &smollm3::SMOLLM3,
    &seed_oss::SEED_OSS,
    &ministral::MINISTRAL,
    &ministral3::MINISTRAL3,
    &olmo2::OLMO2,
    &olmo3::OLMO3,
    &exaone4::EXAONE4,
    &glm4::GLM4,
    &ernie4_5::ERNIE4_5,
    &arcee::ARCEE,
    &starcoder2::STARCODER2,
    &nemotron::NEMOTRON,
    &stablelm::STABLELM,
    &cohere::COHERE,
    &cohere2::COHERE2,
    &mixtral::MIXTRAL,
    &qwen2_moe::QWEN2_MOE,
    &qwen3_moe::QWEN3_MOE,
    &olmoe::OLMOE,
    &qwen3_5::QWEN3_5,
    &qwen3_5_moe::QWEN3_5_MOE,
    &qwen3_next::QWEN3_NEXT,
    &granitemoe::GRANITEMOE,
    &glm4_moe::GLM4_MOE,
    &deepseek_v3::DEEPSEEK_V3,
    &glm4_moe_lite::GLM4_MOE_LITE,
    &mistral4::MISTRAL4,
    &minimax_m2::MINIMAX_M2,
    &gpt_oss::GPT_OSS,
    &gpt_neox::GPT_NEOX,
    &falcon::FALCON,
    &ernie4_5_moe::ERNIE4_5_MOE,
    &hunyuan::HUNYUAN,
    &hunyuan_moe::HUNYUAN_MOE,
    &llama4::LLAMA4,
    &lfm2::LFM2,
    &lfm2_moe::LFM2_MOE,
    &apertus::APERTUS,
];

/// Returns all families.
pub(crate) fn families() -> impl Iterator<Item = &'static Architecture> {
    FAMILIES.iter().copied()
}

impl ModelConfig {
    /// Reads the text of a config.json; `file` names it in errors.
    ///
    /// # Errors
    /// Not JSON, a missing or mistyped key, an unknown `model_type`, an unsupported feature.
    pub fn from_json(text: &str, file: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text).map_err(|e| {
            Error::user(format!("cannot read {file}"))
                .because(format!("it is not JSON: {e}"))
                .hint("download or save the model again")
        })?;
        let (value, text_of) = match value.as_object().and_then(text_part) {
            Some((text, whole)) => (Value::Object(text), Some(whole)),
            None => (value, None),
        };
        let config =
            read(&ConfigReader::new(&value)?).during(|| format!("cannot use the model of {file}"))?;
        Ok(ModelConfig { text_of, ..config })
    }
}

fn read(keys: &ConfigReader<'_>) -> Result<ModelConfig> {
    let family = family(keys)?;
    refusals::refuse_unsupported(keys)?;
    if let Some(settings) = keys.opt_keys("quantization_config")? {
        readers::refuse_unknown(settings.object())?;
    }
    let sizes = ModelSizes::read(keys, family.head_dim, family.num_kv_heads, family.has_latents)?;
    let parts = (family.compose)(keys, &sizes)?;
    if parts.blocks.iter().all(|block| block.channel_mixer.experts().is_none()) {
        refusals::refuse_experts(keys)?;
    }
    let config = ModelConfig {
        family,
        vocab_size: keys.size("vocab_size", MOST_TOKENS)?,
        hidden_size: sizes.hidden_size,
        intermediate_size: inner_width(keys, family, &sizes)?,
        heads: sizes.heads,
        blocks: parts.blocks,
        ropes: parts.ropes,
        max_position_embeddings: sizes.max_position_embeddings,
        norm: parts.norm,
        hidden_norm: parts.hidden_norm,
        embedding_factor: parts.embedding_factor,
        logit_factor: parts.logit_factor,
        logit_softcap: parts.logit_softcap,
        tie_word_embeddings: ties_embeddings(keys, family)?,
        pad_token_id: keys.opt_token("pad_token_id")?,
        initializer_range: keys.f64_or("initializer_range", 0.02)?,
        dtype: keys.opt_str("dtype")?.or(keys.opt_str("torch_dtype")?).map(str::to_string),
        text_of: None,
        dropouts: refusals::dropouts(keys)?,
    };
    refusals::refuse_too_large(&config)?;
    Ok(config)
}

fn ties_embeddings(keys: &ConfigReader<'_>, family: &Architecture) -> Result<bool> {
    let key = family.tie_key.filter(|key| keys.get(key).is_some());
    keys.bool_or(key.unwrap_or("tie_word_embeddings"), family.ties_embeddings)
}

fn inner_width(keys: &ConfigReader<'_>, family: &Architecture, sizes: &ModelSizes) -> Result<usize> {
    if let Some(read) = family.inner_width {
        return read(keys);
    }
    match (keys.opt_size(family.intermediate_size, MOST_WIDE)?, family.default_inner_width) {
        (None, Some(times)) => Ok(times * sizes.hidden_size),
        _ => keys.size(family.intermediate_size, MOST_WIDE),
    }
}

fn family(keys: &ConfigReader<'_>) -> Result<&'static Architecture> {
    let known =
        || FAMILIES.iter().flat_map(|family| family.model_types).copied().collect::<Vec<_>>().join(", ");
    let Some(model_type) = keys.opt_str("model_type")? else {
        return Err(Error::user("`model_type` is missing").because(format!("accepted: {}", known())));
    };
    let hint = match model_type {
        "gemma3" | "gemma4" | "gemma4_unified" | "llama4" | "mistral3" | "qwen2_5_vl" | "qwen3_vl"
        | "qwen3_5" | "qwen3_5_moe" => {
            "this model also takes images; use a text-only model of the family in its `text_config`"
        }
        _ => "choose a model of one of these families",
    };
    let found = FAMILIES.iter().find(|family| family.model_types.contains(&model_type));
    found.copied().ok_or_else(|| {
        Error::user(format!("`model_type` is \"{model_type}\""))
            .because(format!("accepted: {}", known()))
            .hint(hint)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use serde_json::{Map, json};

    use super::*;

    fn config(changes: &[(&str, Value)]) -> Result<ModelConfig> {
        let plain = json!({ "model_type": "mistral", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4 });
        let mut keys: Map<String, Value> = plain.as_object().cloned().unwrap_or_default();
        keys.extend(changes.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        ModelConfig::from_json(&Value::Object(keys).to_string(), "config.json")
    }

    /// Each would exhaust memory or train another model.
    #[test]
    fn what_no_model_is_is_refused() {
        assert!(config(&[]).is_ok());
        let sizes = [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        ];
        let sizes = sizes
            .into_iter()
            .flat_map(|key| [json!(0), json!(1_u64 << 40), json!(u64::MAX)].map(|value| (key, value)));
        let others = [
            ("head_dim", json!(5)),
            ("num_key_value_heads", json!(3)),
            ("sliding_window", json!(0)),
            ("partial_rotary_factor", json!(2.0)),
            ("partial_rotary_factor", json!(-1.0)),
            ("partial_rotary_factor", json!(0.1)),
            ("rope_theta", json!(0.0)),
            ("rope_theta", json!(1e-300)),
            ("rms_norm_eps", json!(-1e-6)),
            ("max_position_embeddings", json!(0)),
        ];
        for (key, value) in sizes.chain(others) {
            let refused = config(&[(key, value.clone())]).expect_err("no model is so");
            assert!(refused.to_string().contains("cannot use the model"), "{refused}");
            assert!(
                refused.causes().iter().any(|cause| cause.contains(key) || cause.contains("head")),
                "{key} {value}: {refused:?}"
            );
        }
    }

    /// transformers takes layers without a kind for Mamba layers.
    #[test]
    fn mamba_layers_are_refused_and_a_pattern_counts_with_a_window_alone() {
        let granite = |changes: &[(&str, Value)]| {
            let dense = [("model_type", json!("granitemoehybrid")), ("num_local_experts", json!(0))];
            let width = [("shared_intermediate_size", json!(24))];
            config(&[&dense[..], &width, changes].concat())
        };
        assert!(granite(&[("layer_types", json!(["attention", "full_attention"]))]).is_ok());
        for (changes, named) in [
            (vec![], "`layer_types` is missing"),
            (vec![("layer_types", json!(["mamba", "attention"]))], "names \"mamba\""),
        ] {
            let refused = granite(&changes).expect_err("Mamba layers");
            assert!(refused.to_string().contains(named), "{refused}");
        }
        let exaone = |window: Value, pattern: Value| {
            let keys = [("sliding_window", window), ("sliding_window_pattern", pattern)];
            config(&[&[("model_type", json!("exaone4"))], &keys[..]].concat())
        };
        let windows = |config: ModelConfig| config.attentions().map(|a| a.window).collect::<Vec<_>>();
        assert_eq!(exaone(Value::Null, json!(0)).map(windows).expect("no window"), [None, None]);
        assert_eq!(exaone(json!(8), json!("LG")).map(windows).expect("a pattern"), [Some(8), None]);
        assert_eq!(exaone(json!(8), json!(4)).map(windows).expect("a period"), [Some(8), Some(8)]);
        assert!(exaone(json!(8), json!(0)).is_err());
    }

    /// Each would train another model than config.json describes.
    #[test]
    fn settings_that_a_family_does_not_compute_are_refused_by_key() {
        for (family, key, value) in [
            ("arcee", "hidden_act", json!("relu")),
            ("nemotron", "hidden_act", json!("silu")),
            ("nemotron", "norm_eps", json!(-1e-5)),
            ("starcoder2", "norm_epsilon", json!(1.0)),
            ("starcoder2", "sliding_window", json!(0)),
            ("stablelm", "qk_layernorm", json!(true)),
            ("stablelm", "hidden_act", json!("gelu")),
            ("stablelm", "partial_rotary_factor", json!(2.0)),
            ("cohere", "use_qk_norm", json!(true)),
            ("cohere", "logit_scale", json!(0.0)),
            ("cohere2", "sliding_window_pattern", json!(0)),
            ("cohere2", "layer_types", json!(["sliding_attention"])),
            ("hunyuan_v1_dense", "use_qk_norm", json!(false)),
            ("hunyuan_v1_dense", "use_cla", json!(true)),
            ("lfm2", "conv_bias", json!(true)),
            ("lfm2", "conv_L_cache", json!(1)),
            ("lfm2", "full_attn_idxs", json!([2])),
            ("lfm2", "layer_types", json!(["mamba", "conv"])),
            ("lfm2", "block_ffn_dim_multiplier", json!(0.0)),
            ("lfm2", "norm_eps", json!(-1.0)),
            ("apertus", "hidden_act", json!("silu")),
            ("apertus", "mlp_bias", json!(true)),
        ] {
            let model = |changes: &[(&str, Value)]| {
                let family = [("model_type", json!(family)), ("head_dim", json!(8))];
                config(&[&family[..], changes].concat())
            };
            assert!(model(&[]).is_ok(), "{family}");
            let refused = model(&[(key, value.clone())]).expect_err("another model");
            let is_named = refused.causes().iter().any(|cause| cause.contains(&format!("`{key}`")));
            assert!(is_named, "{family} {key} {value}: {refused:?}");
        }
    }

    /// Keys of some families only, and values that only together are invalid.
    #[test]
    fn what_makes_numbers_of_nothing_is_refused() {
        let gemma = |key: &str, value: Value| config(&[("model_type", json!("gemma2")), (key, value)]);
        for (key, value) in [
            ("query_pre_attn_scalar", json!(0)),
            ("query_pre_attn_scalar", json!(-256)),
            ("attn_logit_softcapping", json!(0.0)),
            ("final_logit_softcapping", json!(-30.0)),
        ] {
            let refused = gemma(key, value).expect_err("no model is so");
            assert!(refused.causes()[0].contains(key), "{refused}");
        }
        assert!(gemma("attn_logit_softcapping", Value::Null).is_ok());
        let longrope = |factor: f64| {
            let scaling =
                json!({ "type": "longrope", "short_factor": [factor, 1.0], "long_factor": [1.0, 1.0] });
            config(&[("rope_scaling", scaling)])
        };
        assert!(longrope(1.0).is_ok());
        for factor in [0.0, -1.0] {
            assert!(longrope(factor).expect_err("no angle").to_string().contains("short_factor"));
        }
        let wide = ["vocab_size", "hidden_size", "intermediate_size"].map(|key| (key, json!(1 << 18)));
        let large: Vec<_> = wide.into_iter().chain([("num_hidden_layers", json!(1 << 16))]).collect();
        let refused = config(&large).expect_err("too large").to_string();
        assert!(refused.contains("parameters") && refused.contains("num_hidden_layers 65536"), "{refused}");
    }

    /// `tests/lib/model.rs` compares the goldens with transformers.
    #[test]
    fn every_family_has_a_golden() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let models = |set: &Path| {
            let (forward, models) = (set.join("forward"), std::fs::read_dir(set.join("models")));
            models.expect("the golden models").filter_map(move |entry| {
                let folder = entry.expect("a folder").path();
                let text = std::fs::read_to_string(folder.join("config.json")).expect("a config.json");
                let config = ModelConfig::from_json(&text, "config.json").expect("a model");
                let numbers = forward.join(folder.file_name()?).with_extension("safetensors");
                numbers.exists().then_some(config.family.name)
            })
        };
        let found: BTreeSet<&str> = models(&golden).chain(models(&golden.join("families"))).collect();
        let families: BTreeSet<&str> = FAMILIES.iter().map(|family| family.name).collect();
        assert_eq!(found, families, "families with a model and numbers in tests/golden");
    }

    #[test]
    fn every_model_type_and_every_name_stands_once() {
        let types: Vec<&str> = FAMILIES.iter().flat_map(|family| family.model_types).copied().collect();
        let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
        for all in [types, names] {
            let different: BTreeSet<&str> = all.iter().copied().collect();
            assert_eq!(different.len(), all.len(), "{all:?}");
        }
    }
}
