//! LFM2 (350M to 2.6B): short convolutions between gates in most layers, attention with normed
//! heads in the others.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::{MOST_HEADS, MOST_WIDE, ModelSizes};
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{AttentionMixer, BlockConfig, QkNormWidth, ShortConvMixer, TokenMixer};
use crate::model::config_reader::{ConfigReader, refused};
use crate::ops::rms_norm::NormKind;
use crate::weights::{ClassNames, TIE_EMBEDDING};

/// The facts of LFM2; one with experts has others besides.
pub(super) const GGUF: GgufFacts = GgufFacts {
    heads_fill_hidden: true,
    final_norm: "token_embd_norm",
    has_short_convs: true,
    ..GgufFacts::usual("lfm2")
};

pub(super) static LFM2: Architecture =
    Architecture { inner_width: Some(inner_width), ..architecture("lfm2", &["lfm2"], compose) };

/// Declares a family with the defaults and names that LFM2's share.
pub(super) const fn architecture(
    name: &'static str,
    model_types: &'static [&'static str],
    compose: fn(&ConfigReader<'_>, &ModelSizes) -> Result<Composition>,
) -> Architecture {
    Architecture {
        ties_embeddings: true,
        tie_key: Some(TIE_EMBEDDING),
        num_kv_heads: Some(num_kv_heads),
        module_name,
        class_names: &ClassNames::LFM2,
        gguf: GGUF,
        ..parts::architecture(name, model_types, compose)
    }
}

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let mlp = parts::gated_mlp(keys)?;
    let mixers = token_mixers(keys, sizes)?.into_iter();
    compose_of(keys, sizes, mixers.map(|mixer| BlockConfig::pre_norm(mixer, mlp)).collect())
}

/// Composes a model of these blocks.
pub(super) fn compose_of(
    keys: &ConfigReader<'_>,
    sizes: &ModelSizes,
    blocks: Vec<BlockConfig>,
) -> Result<Composition> {
    let rope = parts::rope(keys, &parts::rope_context(keys, sizes, 1e6)?)?;
    let composition = parts::llama_like(keys, blocks, rope)?;
    let eps = parts::epsilon(keys, "norm_eps", 1e-5)?;
    Ok(Composition { norm: NormKind { eps, ..composition.norm }, ..composition })
}

/// Reads the token mixer of each layer: by `layer_types`, or else attention in the layers that
/// `full_attn_idxs` lists, and in all layers without such a list.
pub(super) fn token_mixers(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Vec<TokenMixer>> {
    let kernel = keys.opt_usize("conv_L_cache")?.unwrap_or(3);
    if !(2..=64).contains(&kernel) {
        return Err(refused("conv_L_cache", kernel, "2 to 64"));
    }
    let conv =
        ShortConvMixer { channels: sizes.hidden_size, kernel, bias: keys.bool_or("conv_bias", false)? };
    let attention = AttentionMixer { qk_norm: Some(QkNormWidth::Head), ..parts::attention(keys, sizes)? };
    let attends = match keys.get("layer_types") {
        Some(_) => None,
        None => parts::listed_layers(keys, "full_attn_idxs", sizes.num_layers)?,
    };
    let convolves = |layer: usize| usize::from(attends.as_ref().is_some_and(|attends| !attends[layer]));
    let kinds = parts::layer_kinds(keys, sizes, "layer_types", ["full_attention", "conv"], convolves)?;
    Ok(kinds.into_iter().map(|kind| if kind == 0 { attention.into() } else { conv.into() }).collect())
}

fn num_kv_heads(keys: &ConfigReader<'_>, _: usize) -> Result<usize> {
    Ok(keys.opt_size("num_key_value_heads", MOST_HEADS)?.unwrap_or(8))
}

/// Reads the inner width of the MLPs, which other keys scale and round (transformers 5.24,
/// `Lfm2MLP`).
fn inner_width(keys: &ConfigReader<'_>) -> Result<usize> {
    let given = match keys.opt_size("block_ff_dim", MOST_WIDE)? {
        Some(width) => width,
        None => keys.size("intermediate_size", MOST_WIDE)?,
    };
    if !keys.bool_or("block_auto_adjust_ff_dim", true)? {
        return Ok(given);
    }
    let width = (2 * given / 3) as f64;
    let key = "block_ffn_dim_multiplier";
    let factor = if keys.mentions(key) { keys.opt_f64(key)? } else { Some(1.0) };
    let Some(factor) = factor else { return Ok(width as usize) };
    let multiple = keys.opt_size("block_multiple_of", MOST_WIDE)?.unwrap_or(256);
    if !(factor > 0.0 && factor * width >= 1.0 && factor * width <= MOST_WIDE as f64) {
        return Err(refused(key, factor, "a number above 0, null"));
    }
    Ok(((factor * width) as usize).next_multiple_of(multiple))
}

/// Returns the name of a module.
pub(super) fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::OProj => "self_attn.out_proj",
        BlockPart::QNorm => "self_attn.q_layernorm",
        BlockPart::KNorm => "self_attn.k_layernorm",
        BlockPart::GateProj => "feed_forward.w1",
        BlockPart::UpProj => "feed_forward.w3",
        BlockPart::DownProj => "feed_forward.w2",
        BlockPart::AttnNorm => "operator_norm",
        BlockPart::MlpNorm => "ffn_norm",
        BlockPart::Router => "feed_forward.gate",
        BlockPart::RouterBias => "feed_forward.expert_bias",
        BlockPart::ExpertGate(_) => "feed_forward.experts.{}.w1",
        BlockPart::ExpertUp(_) => "feed_forward.experts.{}.w3",
        BlockPart::ExpertDown(_) => "feed_forward.experts.{}.w2",
        other => parts::llama_name(other),
    }
}
