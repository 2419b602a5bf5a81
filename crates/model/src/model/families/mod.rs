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
mod gemma3n;
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
    GgufDelta, GgufExperts, GgufFacts, GgufGrowth, GgufLocalRope, GgufNoPositions, GgufSeventyB, GgufSliding,
    GgufSoftcap, GgufWindows,
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
    &gemma3n::GEMMA3N,
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
pub fn families() -> impl Iterator<Item = &'static Architecture> {
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
    if !family.rotates_partly {
        refusals::refuse_partial_rope(keys)?;
    }
    if let Some(settings) = keys.opt_keys("quantization_config")? {
        readers::refuse_unknown(settings.object())?;
    }
    let sizes = ModelSizes::read(keys, family.head_dim, family.num_kv_heads, family.has_latents)?;
    let parts = (family.compose)(keys, &sizes)?;
    let is_dense = parts.blocks.iter().all(|block| block.channel_mixer.experts().is_none());
    if is_dense && !family.may_be_dense {
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
        "gemma3" | "gemma3n" | "gemma4" | "gemma4_unified" | "llama4" | "mistral3" | "qwen2_5_vl"
        | "qwen3_vl" | "qwen3_5" | "qwen3_5_moe" => {
            "this model also takes images; use a text-only model of the family in its `text_config`"
        }
        _ => "choose a model of one of these families",
    };
    let family = FAMILIES.iter().find(|family| family.model_types.contains(&model_type));
    family.copied().ok_or_else(|| {
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

    /// A model of 64 heads of this type.
    fn of_type(model_type: &str, changes: &[(&str, Value)]) -> Result<ModelConfig> {
        let sizes = json!({ "model_type": model_type, "vocab_size": 8, "hidden_size": 512, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 64, "head_dim": 8, "hidden_size_per_layer_input": 0,
            "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "intermediate_size_mlp": 24,
            "num_experts_per_tok": 1, "n_routed_experts": 4, "block_ff_dim": 24 });
        let mut keys: Map<String, Value> = sizes.as_object().cloned().unwrap_or_default();
        let others = match model_type {
            "granitemoehybrid" => json!({ "layer_types": ["attention", "attention"], "num_local_experts": 0,
                "shared_intermediate_size": 24 }),
            "hunyuan_v1_moe" => json!({ "moe_intermediate_size": null }),
            "gemma3n_text" => json!({ "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 8,
                "num_kv_shared_layers": 0 }),
            "lfm2_moe" => json!({ "layer_types": ["conv", "full_attention"] }),
            _ => json!({}),
        };
        keys.extend(others.as_object().cloned().unwrap_or_default());
        keys.extend(changes.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        ModelConfig::from_json(&Value::Object(keys).to_string(), "config.json")
    }

    /// The defaults of transformers 5.24's configuration classes.
    #[test]
    fn key_heads_have_their_familys_default() {
        let counts = |types: &str, count: usize| {
            for model_type in types.split(' ') {
                let of = |changes| of_type(model_type, changes).expect(model_type).heads.num_kv_heads;
                assert_eq!(of(&[]), count, "{model_type}");
                // Its reader takes null for a missing key.
                if !model_type.starts_with("lfm2") {
                    assert_eq!(of(&[("num_key_value_heads", Value::Null)]), 64, "{model_type}");
                }
            }
        };
        counts("gemma3n_text glm4 ernie4_5 starcoder2 qwen3_next qwen3_5_moe_text", 2);
        counts(
            "ernie4_5_moe gemma2 gemma3_text gemma4_text gemma4_unified_text qwen3_moe qwen3_5_text smollm3",
            4,
        );
        counts("llama4_text mistral ministral ministral3 mixtral gpt_oss glm4_moe seed_oss minimax_m2", 8);
        counts("lfm2 lfm2_moe", 8);
        counts("qwen2_moe", 16);
        counts("qwen2 qwen3 stablelm exaone4", 32);
        counts("llama arcee apertus cohere cohere2 granite granitemoe granitemoehybrid nemotron", 64);
        counts("hunyuan_v1_dense hunyuan_v1_moe olmo2 olmo3 olmoe phi3", 64);
    }

    /// The families whose code in transformers 5.24 reads the key, and all others.
    #[test]
    fn a_part_of_heads_rotates_in_the_families_that_read_the_key() {
        let reads = "gemma4_text gemma4_unified_text glm4 glm4_moe glm4_moe_lite gpt_neox minimax_m2 mistral4 \
                     nemotron phi3 qwen3_5_moe_text qwen3_5_text qwen3_next stablelm";
        let mut names: Vec<&str> = families()
            .filter(|family| family.rotates_partly)
            .flat_map(|family| family.model_types)
            .copied()
            .collect();
        names.sort_unstable();
        assert_eq!(names.join(" "), reads);
        let types = families().filter(|family| !family.rotates_partly && !family.has_latents);
        for model_type in types.flat_map(|family| family.model_types) {
            let with = |keys: Value| {
                let keys = keys.as_object().cloned().unwrap_or_default();
                let keys: Vec<(&str, Value)> =
                    keys.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
                of_type(model_type, &keys)
            };
            with(json!({ "partial_rotary_factor": 1.0 })).expect(model_type);
            let part = json!({ "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5 });
            for keys in [
                json!({ "partial_rotary_factor": 0.5 }),
                json!({ "rope_parameters": part }),
                json!({ "rope_scaling": part }),
                json!({ "rope_parameters": { "full_attention": part } }),
            ] {
                let refused = with(keys).expect_err("transformers rotates whole heads").to_string();
                assert!(refused.contains("partial_rotary_factor"), "{refused}");
            }
        }
    }

    /// Falcon's file has the width of its hidden states under two keys.
    #[test]
    fn widths_of_falcon_agree() {
        let falcon = |width: usize| of_type("falcon", &[("n_embed", json!(width))]);
        assert!(falcon(512).is_ok());
        let refused = falcon(256).expect_err("another width").to_string();
        assert!(refused.contains("n_embed"), "{refused}");
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
            ("lfm2", "conv_bias", json!(1)),
            ("lfm2", "conv_L_cache", json!(1)),
            ("lfm2", "full_attn_idxs", json!(["1"])),
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

    /// Numbers of layers beyond the last one count as little as in transformers.
    #[test]
    fn lists_of_layers_and_models_without_their_experts_are_those_of_transformers() {
        let attentions = |changes: &[(&str, Value)]| {
            let config = config(&[&[("model_type", json!("lfm2"))], changes].concat()).expect("a model");
            config.blocks.iter().map(|b| b.token_mixer.attention().is_some()).collect::<Vec<_>>()
        };
        assert_eq!(attentions(&[("full_attn_idxs", json!([1, 2, 5]))]), [false, true]);
        let kinds = ("layer_types", json!(["full_attention", "conv"]));
        assert_eq!(attentions(&[("full_attn_idxs", json!(["none"])), kinds.clone()]), [true, false]);
        let experts = |changes: &[(&str, Value)]| config(changes).expect("a model").experts().count();
        let qwen = [("num_experts", json!(8)), ("num_experts_per_tok", json!(2))];
        for family in ["qwen3_moe", "qwen2_moe"] {
            let sparse = |dense: Value| {
                let widths = ["moe_intermediate_size", "shared_expert_intermediate_size"];
                let widths = widths.map(|key| (key, json!(8)));
                let keys = [("model_type", json!(family)), ("mlp_only_layers", dense)];
                experts(&[&keys[..], &widths, &qwen].concat())
            };
            assert_eq!([json!([]), json!([1, 7]), json!([0, 1])].map(sparse), [2, 1, 0], "{family}");
        }
        let lfm2 = [("model_type", json!("lfm2_moe")), ("num_experts", json!(8)), kinds];
        assert_eq!(experts(&lfm2), 0);
        assert_eq!(experts(&[&lfm2[..], &[("num_dense_layers", json!(1))]].concat()), 1);
    }

    /// The default rope of transformers 5.24 has a theta, which `rope_theta` beside it leaves.
    #[test]
    fn the_theta_of_apertus_is_that_of_its_scaling() {
        let theta = |changes: &[(&str, Value)]| {
            let config = config(&[&[("model_type", json!("apertus"))], changes].concat()).expect("a model");
            config.ropes[0].theta
        };
        let own = ("rope_theta", json!(5e5));
        let scaling = ("rope_scaling", json!({"rope_type": "linear", "factor": 2.0}));
        assert_eq!(theta(&[]), 1.2e7);
        assert_eq!(theta(std::slice::from_ref(&own)), 1.2e7);
        assert_eq!(theta(std::slice::from_ref(&scaling)), 1.2e7);
        assert_eq!(theta(&[own, scaling]), 5e5);
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
        let golden_models: BTreeSet<&str> = models(&golden).chain(models(&golden.join("families"))).collect();
        let families: BTreeSet<&str> = FAMILIES.iter().map(|family| family.name).collect();
        assert_eq!(golden_models, families, "families with a model and numbers in tests/golden");
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
