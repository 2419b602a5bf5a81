//! Qwen3.5 and Qwen3.6 without experts: three layers of Gated DeltaNet, then one of attention with
//! gates on its output.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufDelta, GgufFacts};
use super::parts;
use super::sizes::{MOST_HEADS, ModelSizes, key_heads_or};
use crate::error::{Error, Result};
use crate::model::composition::{AttentionMixer, BlockConfig, DeltaMixer, QkNormWidth, TokenMixer};
use crate::model::config_reader::{ConfigReader, refused};
use crate::ops::gated_delta::DeltaHeads;
use crate::ops::glu::Activation;
use crate::ops::rms_norm::NormKind;

pub(super) static QWEN3_5: Architecture = Architecture {
    head_dim: Some(256),
    num_kv_heads: Some(key_heads_or::<4>),
    rotates_partly: true,
    gguf: GGUF,
    ..parts::architecture("qwen3_5", &["qwen3_5_text"], compose)
};

/// The architecture `qwen35` of llama.cpp; the others with Gated DeltaNet differ by experts.
pub(super) const GGUF: GgufFacts = GgufFacts {
    mlp_norm: "post_attention_norm",
    rotates_partly: true,
    delta: Some(GgufDelta { tiles_value_heads: true, has_sections: true }),
    ..GgufFacts::usual("qwen35")
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let mlp = parts::gated_mlp(keys)?;
    let mixers = token_mixers(keys, sizes, false)?;
    compose_of(keys, sizes, mixers.into_iter().map(|mixer| BlockConfig::pre_norm(mixer, mlp)).collect())
}

/// Composes a model of these blocks: norms whose gain is stored minus one, and a rope on a quarter
/// of each head.
pub(super) fn compose_of(
    keys: &ConfigReader<'_>,
    sizes: &ModelSizes,
    blocks: Vec<BlockConfig>,
) -> Result<Composition> {
    let composition = parts::llama_like(keys, blocks, parts::partial_rope(keys, sizes, 0.25)?)?;
    Ok(Composition { norm: NormKind { unit_offset: true, ..composition.norm }, ..composition })
}

/// Reads the token mixer of each layer. The projections of Gated DeltaNet are grouped
/// `by_key_head` or not.
pub(super) fn token_mixers(
    keys: &ConfigReader<'_>,
    sizes: &ModelSizes,
    by_key_head: bool,
) -> Result<Vec<TokenMixer>> {
    // The convolution of Gated DeltaNet has the activation of the MLP in transformers.
    if parts::activation(keys)? != Activation::Silu {
        let activation = keys.opt_str("hidden_act")?.unwrap_or_default();
        return Err(refused("hidden_act", format!("\"{activation}\""), "silu"));
    }
    let attention = AttentionMixer {
        qk_norm: Some(QkNormWidth::Head),
        has_gates: true,
        ..parts::attention(keys, sizes)?
    };
    let delta = DeltaMixer {
        heads: delta_heads(keys)?,
        conv_kernel: keys.opt_size("linear_conv_kernel_dim", 64)?.unwrap_or(4),
        by_key_head,
    };
    let period = keys.opt_size("full_attention_interval", 1 << 16)?.unwrap_or(4);
    let kinds = ["full_attention", "linear_attention"];
    let is_full = |layer: usize| usize::from(!(layer + 1).is_multiple_of(period));
    let of_kind = |kind: usize| if kind == 0 { attention.into() } else { delta.into() };
    Ok(parts::layer_kinds(keys, sizes, "layer_types", kinds, is_full)?.into_iter().map(of_kind).collect())
}

fn delta_heads(keys: &ConfigReader<'_>) -> Result<DeltaHeads> {
    let size = |key: &str, default| Ok::<usize, Error>(keys.opt_size(key, MOST_HEADS)?.unwrap_or(default));
    let heads = DeltaHeads {
        num_key_heads: size("linear_num_key_heads", 16)?,
        num_value_heads: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
    };
    if !heads.num_value_heads.is_multiple_of(heads.num_key_heads) {
        let accepted = format!("a multiple of the {} heads of `linear_num_key_heads`", heads.num_key_heads);
        return Err(refused("linear_num_value_heads", heads.num_value_heads, &accepted));
    }
    Ok(heads)
}
