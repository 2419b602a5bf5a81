//! config.json of each family → [`ModelConfig`], of either transformers generation (`torch_dtype`/`dtype`, `rope_theta` +
//! `rope_scaling`/`rope_parameters`). Defaults are those of transformers' configuration classes.
//!
//! A feature that the engine does not compute is refused here, by name, before any weight is read.

use serde_json::Value;

use super::config::{Family, LayerKind, ModelConfig};
use super::config_reader::ConfigReader;
use super::rope::{Rope, RopeContext};
use crate::error::{Error, ErrorContext as _, Result};
use crate::ops::attention::Heads;
use crate::ops::glu::Activation;
use crate::ops::rms_norm::NormKind;

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
        let config =
            read(&ConfigReader::new(&value)?).during(|| format!("cannot use the model of {file}"))?;
        config.check().during(|| format!("cannot use the model of {file}"))?;
        Ok(config)
    }
}

fn read(keys: &ConfigReader<'_>) -> Result<ModelConfig> {
    let family = family(keys)?;
    refuse_unsupported(keys)?;
    refuse_unknown_quantization(keys)?;
    let gemma = matches!(family, Family::Gemma2 | Family::Gemma3);
    let hidden_size = keys.usize("hidden_size")?;
    let heads = heads(keys, family, hidden_size)?;
    let num_layers = keys.usize("num_hidden_layers")?;
    let max_position_embeddings = keys.opt_usize("max_position_embeddings")?.unwrap_or(2048);
    let (ropes, sliding_rope) = ropes(keys, family, heads.head_dim, max_position_embeddings)?;
    let attention_bias = keys.bool_or("attention_bias", false)? && family != Family::Phi3;
    let scalar = if gemma { keys.f64_or("query_pre_attn_scalar", 256.0)? } else { heads.head_dim as f64 };
    let caps = family == Family::Gemma2;
    Ok(ModelConfig {
        family,
        vocab_size: keys.usize("vocab_size")?,
        hidden_size,
        intermediate_size: keys.usize("intermediate_size")?,
        heads,
        layers: layers(keys, family, num_layers, sliding_rope)?,
        ropes,
        max_position_embeddings,
        norm: NormKind { eps: keys.f64_or("rms_norm_eps", 1e-6)?, unit_offset: gemma },
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
        pad_token_id: keys.opt_usize("pad_token_id")?.and_then(|id| u32::try_from(id).ok()),
        initializer_range: keys.f64_or("initializer_range", 0.02)?,
        dtype: keys.opt_str("dtype")?.or(keys.opt_str("torch_dtype")?).map(str::to_string),
    })
}

fn family(keys: &ConfigReader<'_>) -> Result<Family> {
    let known = || FAMILIES.map(|(name, _)| name).join(", ");
    let Some(model_type) = keys.opt_str("model_type")? else {
        return Err(Error::user("`model_type` is missing").because(format!("accepted: {}", known())));
    };
    let hint = match model_type {
        "gemma3" => {
            "this is the vision model; its text part is published as `gemma3_text` (the 1B and 270M models)"
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
    let num_heads = keys.usize("num_attention_heads")?;
    let derived = match family {
        Family::Gemma2 | Family::Gemma3 => 256,
        Family::Qwen3 => 128,
        _ => hidden_size / num_heads.max(1),
    };
    Ok(Heads {
        num_heads,
        num_kv_heads: keys.opt_usize("num_key_value_heads")?.unwrap_or(num_heads),
        head_dim: keys.opt_usize("head_dim")?.unwrap_or(derived),
    })
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
    if keys.mentions(key) { keys.opt_f64(key) } else { Ok(default) }
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
