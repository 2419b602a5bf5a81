//! Hunyuan V1, dense (0.5B to 7B): Llama with norms of queries and keys after their rotation, and a
//! base of rotary frequencies that `alpha` stretches.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{AttentionMixer, BlockConfig, QkNormWidth};
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::{Rope, RopeContext};

pub(super) static HUNYUAN: Architecture = Architecture {
    module_name,
    gguf: GgufFacts::usual("hunyuan-dense"),
    ..parts::architecture("hunyuan_v1_dense", &["hunyuan_v1_dense"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let block = BlockConfig::pre_norm(attention(keys, sizes)?, parts::gated_mlp(keys)?);
    compose_of(keys, sizes, block)
}

/// Composes a model of these blocks.
pub(super) fn compose_of(
    keys: &ConfigReader<'_>,
    sizes: &ModelSizes,
    block: BlockConfig,
) -> Result<Composition> {
    let composition = parts::llama_like(keys, vec![block; sizes.num_layers], rope(keys, sizes)?)?;
    parts::with_eps(keys, composition, 1e-5)
}

/// Reads the attention. Refuses values with which config.json asks for another model; transformers
/// reads none of these keys.
pub(super) fn attention(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<AttentionMixer> {
    let flags =
        [("use_qk_norm", true), ("use_rotary_pos_emb", true), ("use_cla", false), ("mlp_bias", false)];
    for (key, accepted) in flags {
        if keys.bool_or(key, accepted)? != accepted {
            return Err(refused(key, !accepted, &format!("{accepted}, null, no such key")));
        }
    }
    Ok(AttentionMixer { qk_norm: Some(QkNormWidth::HeadAfterRope), ..parts::attention(keys, sizes)? })
}

/// Reads the rope. With `alpha`, type "dynamic" has one base for all lengths.
fn rope(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Rope> {
    let context = parts::rope_context(keys, sizes, 1e4)?;
    let Some(scaling) = parts::rope_scaling(keys)? else { return parts::rope(keys, &context) };
    let alpha = scaling.opt_f64("alpha")?.filter(|alpha| *alpha != 0.0);
    let Some(alpha) = alpha else { return parts::rope(keys, &context) };
    let kind = scaling.opt_str("rope_type")?.or(scaling.opt_str("type")?).unwrap_or("default");
    if kind != "dynamic" || alpha < 0.0 || context.head_dim == 2 {
        return Err(refused(
            "alpha",
            alpha,
            "a number above 0 with a rope of type dynamic, null, no such key",
        ));
    }
    let width = context.head_dim as f64;
    let theta = scaling.f64_or("rope_theta", context.theta)? * alpha.powf(width / (width - 2.0));
    Rope::read(None, &RopeContext { theta, ..context })
}

/// Returns the name of a module.
pub(super) fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::QNorm => "self_attn.query_layernorm",
        BlockPart::KNorm => "self_attn.key_layernorm",
        other => parts::llama_name(other),
    }
}
