//! config.json of each family → [`ModelConfig`], of either transformers generation (`torch_dtype`/`dtype`, `rope_theta` +
//! `rope_scaling`/`rope_parameters`). Defaults are those of transformers' configuration classes.
//!
//! A feature that the engine does not compute is refused here, by name, before any weight is read.

use serde_json::Value;

use super::config::{Family, LayerKind, ModelConfig};
use super::config_reader::ConfigReader;
use super::layout::{BlockLayout, WeightShape};
use super::rope::{Rope, RopeContext};
use crate::error::{Error, ErrorContext as _, Result};
use crate::ops::attention::Heads;
use crate::ops::glu::Activation;
use crate::ops::rms_norm::NormKind;
use crate::weights::text_config::text_part;

/// `model_type` → family; the one registry.
const FAMILIES: [(&str, Family); 7] = [
    ("llama", Family::Llama),
    ("mistral", Family::Mistral),
    ("qwen2", Family::Qwen2),
    ("qwen3", Family::Qwen3),
    ("gemma2", Family::Gemma2),
    ("gemma3_text", Family::Gemma3),
    ("phi3", Family::Phi3),
];

/// The widest that the activations of a model may be.
const MOST_WIDE: usize = 1 << 22;
/// The most blocks of a model.
const MOST_LAYERS: usize = 1 << 16;
/// The most tokens of a vocabulary.
const MOST_TOKENS: usize = 1 << 27;
/// The most heads of attention, and the widest that one may be.
const MOST_HEADS: usize = 1 << 14;
/// The most positions of a sequence.
const MOST_POSITIONS: usize = 1 << 32;
/// The most parameters: a thousand times those of the largest models. Memory for each of them is counted in 64 bits.
const MOST_PARAMETERS: u128 = 1 << 50;

/// Keys whose non-zero (non-false) value asks for something the engine does not compute.
const UNSUPPORTED: [&str; 6] = [
    "attention_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "use_bidirectional_attention",
    "num_local_experts",
    "num_experts",
];

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
    refuse_unsupported(keys)?;
    refuse_unknown_quantization(keys)?;
    let gemma = matches!(family, Family::Gemma2 | Family::Gemma3);
    let hidden_size = keys.size("hidden_size", MOST_WIDE)?;
    let heads = heads(keys, family, hidden_size)?;
    let num_layers = keys.size("num_hidden_layers", MOST_LAYERS)?;
    let max_position_embeddings = keys.opt_size("max_position_embeddings", MOST_POSITIONS)?.unwrap_or(2048);
    let (ropes, sliding_rope) = ropes(keys, family, heads.head_dim, max_position_embeddings)?;
    let attention_bias = keys.bool_or("attention_bias", false)? && family != Family::Phi3;
    let scalar = if gemma {
        keys.above_zero("query_pre_attn_scalar")?.unwrap_or(256.0)
    } else {
        heads.head_dim as f64
    };
    let caps = family == Family::Gemma2;
    let config = ModelConfig {
        family,
        vocab_size: keys.size("vocab_size", MOST_TOKENS)?,
        hidden_size,
        intermediate_size: keys.size("intermediate_size", MOST_WIDE)?,
        heads,
        layers: layers(keys, family, num_layers, sliding_rope)?,
        ropes,
        max_position_embeddings,
        norm: NormKind { eps: norm_eps(keys)?, unit_offset: gemma },
        activation: activation(keys)?,
        fused: family == Family::Phi3,
        qkv_bias: attention_bias || family == Family::Qwen2,
        o_bias: attention_bias,
        mlp_bias: keys.bool_or("mlp_bias", false)? && family == Family::Llama,
        qk_norm: matches!(family, Family::Qwen3 | Family::Gemma3),
        post_norms: gemma,
        embedding_factor: if gemma { (hidden_size as f64).sqrt() } else { 1.0 },
        attention_scale: 1.0 / scalar.sqrt(),
        attention_softcap: softcap(keys, "attn_logit_softcapping", caps.then_some(50.0))?,
        logit_softcap: softcap(keys, "final_logit_softcapping", caps.then_some(30.0))?,
        tie_word_embeddings: keys.bool_or("tie_word_embeddings", gemma)?,
        pad_token_id: keys.opt_token("pad_token_id")?,
        initializer_range: keys.f64_or("initializer_range", 0.02)?,
        dtype: keys.opt_str("dtype")?.or(keys.opt_str("torch_dtype")?).map(str::to_string),
        text_of: None,
    };
    refuse_too_large(&config)?;
    Ok(config)
}

/// Each size may be possible and their product not: shapes are multiplied in 64 bits, and memory is planned by them.
fn refuse_too_large(config: &ModelConfig) -> Result<()> {
    let elements = |weight: WeightShape| weight.dims().iter().map(|dim| *dim as u128).product::<u128>();
    let block: u128 = BlockLayout::new(config).modules().iter().map(|module| elements(module.weight)).sum();
    let tables = 2 * config.vocab_size as u128 * config.hidden_size as u128;
    let all = config.num_layers() as u128 * block + tables;
    if all <= MOST_PARAMETERS {
        return Ok(());
    }
    Err(Error::user(format!("the sizes make {all} parameters"))
        .because(format!("num_hidden_layers {}, {}", config.num_layers(), config.dimensions()))
        .because(format!("accepted: up to {MOST_PARAMETERS}")))
}

fn family(keys: &ConfigReader<'_>) -> Result<Family> {
    let known = || FAMILIES.map(|(name, _)| name).join(", ");
    let Some(model_type) = keys.opt_str("model_type")? else {
        return Err(Error::user("`model_type` is missing").because(format!("accepted: {}", known())));
    };
    let hint = match model_type {
        "gemma3" | "mistral3" | "qwen2_5_vl" | "qwen3_vl" => {
            "this is a model for images, whose text part (`text_config` in config.json) is of another family; give the text model alone"
        }
        _ => "choose a model of one of these families",
    };
    FAMILIES.iter().find(|(name, _)| *name == model_type).map(|(_, family)| *family).ok_or_else(|| {
        Error::user(format!("`model_type` is \"{model_type}\""))
            .because(format!("accepted: {}", known()))
            .hint(hint)
    })
}

fn refuse_unsupported(keys: &ConfigReader<'_>) -> Result<()> {
    for key in UNSUPPORTED {
        let asks = keys.get(key).is_some_and(|v| v.as_f64() != Some(0.0) && v.as_bool() != Some(false));
        if asks {
            let found = keys.get(key).map(ToString::to_string).unwrap_or_default();
            let hint = match key {
                "num_local_experts" | "num_experts" => "choose a model without experts".to_owned(),
                "use_bidirectional_attention" => "choose a causal model".to_owned(),
                _ => format!("write `\"{key}\": 0.0` into config.json to train without it"),
            };
            return Err(Error::user(format!("`{key}` is {found}"))
                .because("this engine does not compute it; accepted: no such key, null, 0, false")
                .hint(hint));
        }
    }
    Ok(())
}

/// bitsandbytes' formats are read by `weights`; the first configurations of its kind did not name it.
fn refuse_unknown_quantization(keys: &ConfigReader<'_>) -> Result<()> {
    let Some(config) = keys.opt_keys("quantization_config")? else { return Ok(()) };
    let method = match config.opt_str("quant_method")? {
        Some("bitsandbytes") => return Ok(()),
        None if config.mentions("load_in_4bit") || config.mentions("load_in_8bit") => return Ok(()),
        Some(other) => format!("\"{other}\""),
        None => "missing".into(),
    };
    Err(Error::user("the model is quantized in a format that this program does not read")
        .because(format!("`quantization_config.quant_method` is {method}; accepted: \"bitsandbytes\""))
        .hint("give the model that was not quantized"))
}

fn heads(keys: &ConfigReader<'_>, family: Family, hidden_size: usize) -> Result<Heads> {
    let num_heads = keys.size("num_attention_heads", MOST_HEADS)?;
    let derived = match family {
        Family::Gemma2 | Family::Gemma3 => 256,
        Family::Qwen3 => 128,
        _ => hidden_size / num_heads.max(1),
    };
    let heads = Heads {
        num_heads,
        num_kv_heads: keys.opt_size("num_key_value_heads", MOST_HEADS)?.unwrap_or(num_heads),
        head_dim: keys.opt_size("head_dim", MOST_HEADS)?.unwrap_or(derived),
    };
    let Heads { num_kv_heads, head_dim, .. } = heads;
    if !num_heads.is_multiple_of(num_kv_heads) {
        return Err(Error::user("the head counts do not fit each other").because(format!(
            "num_attention_heads is {num_heads}, num_key_value_heads {num_kv_heads}; the first must be a multiple of the second"
        )));
    }
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(
            Error::user(format!("`head_dim` is {head_dim}")).because("rotary positions need an even width")
        );
    }
    Ok(heads)
}

fn norm_eps(keys: &ConfigReader<'_>) -> Result<f64> {
    match keys.f64_or("rms_norm_eps", 1e-6)? {
        eps if (0.0..1.0).contains(&eps) => Ok(eps),
        other => {
            Err(Error::user(format!("`rms_norm_eps` is {other}")).because("accepted: from 0 to below 1"))
        }
    }
}

fn activation(keys: &ConfigReader<'_>) -> Result<Activation> {
    let name = match keys.opt_str("hidden_activation")? {
        Some(name) => name,
        None => keys.opt_str("hidden_act")?.unwrap_or("silu"),
    };
    match name {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        other => {
            Err(Error::user(format!("`hidden_act` is \"{other}\""))
                .because("accepted: silu, gelu_pytorch_tanh"))
        }
    }
}

/// A cap that is absent takes the class's default; one that is null is off.
fn softcap(keys: &ConfigReader<'_>, key: &str, default: Option<f64>) -> Result<Option<f64>> {
    if keys.mentions(key) { keys.above_zero(key) } else { Ok(default) }
}

fn layers(
    keys: &ConfigReader<'_>,
    family: Family,
    count: usize,
    sliding_rope: usize,
) -> Result<Vec<LayerKind>> {
    let window = match (keys.mentions("sliding_window"), family) {
        (true, _) => keys.opt_usize("sliding_window")?,
        (false, Family::Mistral | Family::Gemma2 | Family::Gemma3) => Some(4096),
        (false, _) => None,
    };
    let qwen = matches!(family, Family::Qwen2 | Family::Qwen3);
    let window = if family == Family::Llama || (qwen && !keys.bool_or("use_sliding_window", false)?) {
        None
    } else {
        window
    };
    if window == Some(0) {
        return Err(Error::user("`sliding_window` is 0")
            .because("accepted: a whole number above 0, or null for attention to all that came before"));
    }
    let named = match family {
        Family::Llama | Family::Mistral | Family::Phi3 => None,
        _ => keys.opt_list("layer_types")?,
    };
    if let Some(named) = named.filter(|named| named.len() != count) {
        return Err(Error::user(format!("`layer_types` has {} entries", named.len()))
            .because(format!("num_hidden_layers is {count}")));
    }
    let first_sliding = keys.opt_usize("max_window_layers")?.unwrap_or(28);
    let pattern = match keys.opt_usize("sliding_window_pattern")? {
        Some(pattern) => pattern,
        None => keys.opt_usize("_sliding_window_pattern")?.unwrap_or(6),
    };
    (0..count)
        .map(|i| {
            let slides = match named.and_then(|named| named.get(i)) {
                Some(name) => match name.as_str() {
                    Some("sliding_attention") => true,
                    Some("full_attention") => false,
                    _ => {
                        return Err(Error::user(format!("`layer_types` names {name}"))
                            .because("accepted: full_attention, sliding_attention"));
                    }
                },
                None => match family {
                    Family::Gemma2 => i % 2 == 0,
                    Family::Gemma3 => pattern == 0 || (i + 1) % pattern != 0,
                    Family::Qwen2 | Family::Qwen3 => i >= first_sliding,
                    _ => true,
                },
            };
            Ok(LayerKind { window: window.filter(|_| slides), rope: if slides { sliding_rope } else { 0 } })
        })
        .collect()
}

/// transformers' default, which stands whatever `rope_scaling` says.
const PHI3_ORIGINAL_POSITIONS: usize = 4096;

/// The ropes of a model, and which of them its sliding layers use.
fn ropes(
    keys: &ConfigReader<'_>,
    family: Family,
    head_dim: usize,
    max_positions: usize,
) -> Result<(Vec<Rope>, usize)> {
    let default_theta = if family == Family::Gemma3 { 1e6 } else { 1e4 };
    let context = RopeContext {
        head_dim,
        theta: keys.f64_or("rope_theta", default_theta)?,
        partial: keys.f64_or("partial_rotary_factor", 1.0)?,
        max_positions,
        original_max_positions: keys
            .opt_usize("original_max_position_embeddings")?
            .or((family == Family::Phi3).then_some(PHI3_ORIGINAL_POSITIONS)),
    };
    let parameters = keys.opt_keys("rope_parameters")?;
    let scaling = match parameters {
        Some(parameters) => Some(parameters),
        None => keys.opt_keys("rope_scaling")?,
    };
    if family != Family::Gemma3 {
        return Ok((vec![Rope::read(scaling.as_ref(), &context)?], 0));
    }
    let local = RopeContext { theta: keys.f64_or("rope_local_base_freq", 1e4)?, ..context };
    // transformers 5 nests one object per layer type; before, `rope_scaling` was for full attention alone.
    if let Some(nested) = &scaling {
        let (full, sliding) = (nested.opt_keys("full_attention")?, nested.opt_keys("sliding_attention")?);
        if full.is_some() || sliding.is_some() {
            return Ok((
                vec![Rope::read(full.as_ref(), &context)?, Rope::read(sliding.as_ref(), &local)?],
                1,
            ));
        }
    }
    Ok((vec![Rope::read(scaling.as_ref(), &context)?, Rope::read(None, &local)?], 1))
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    fn config(changes: &[(&str, Value)]) -> Result<ModelConfig> {
        let plain = json!({ "model_type": "mistral", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4 });
        let mut keys: Map<String, Value> = plain.as_object().cloned().unwrap_or_default();
        keys.extend(changes.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        ModelConfig::from_json(&Value::Object(keys).to_string(), "config.json")
    }

    /// Each would end the process for want of memory, or train something else than the model.
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

    /// Keys that not all families have, and what only together is no model.
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
}
