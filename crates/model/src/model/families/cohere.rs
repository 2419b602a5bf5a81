//! Command R and Aya 23: mixers in parallel after one layer norm without a bias, a rope that
//! rotates neighbours, and a factor on logits.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig, ResidualPlan};
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::Rope;

pub(super) static COHERE: Architecture = Architecture {
    ties_embeddings: true,
    gguf: GgufFacts {
        heads_fill_hidden: true,
        tied_head: Some(true),
        reads_logit_factor: true,
        ..GgufFacts::usual("command-r")
    },
    ..parts::architecture("cohere", &["cohere"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    if keys.bool_or("use_qk_norm", false)? {
        return Err(refused("use_qk_norm", true, "false, null, no such key"));
    }
    let rope = parts::rope(keys, &parts::rope_context(keys, sizes, 5e5)?)?;
    let attention = parts::attention(keys, sizes)?;
    compose_of(keys, vec![attention; sizes.num_layers], rope)
}

/// Composes a model of Cohere with this attention of its blocks.
pub(super) fn compose_of(
    keys: &ConfigReader<'_>,
    attentions: Vec<AttentionMixer>,
    rope: Rope,
) -> Result<Composition> {
    let mlp = parts::gated_mlp(keys)?;
    let residual = ResidualPlan::Parallel;
    let block = |attention| BlockConfig { residual, ..BlockConfig::pre_norm(attention, mlp) };
    let blocks = attentions.into_iter().map(block).collect();
    let composition = parts::llama_like(keys, blocks, Rope { interleaved: true, ..rope })?;
    let logit_factor = keys.above_zero("logit_scale")?.unwrap_or(0.0625);
    parts::with_layer_norms(keys, Composition { logit_factor, ..composition }, "layer_norm_eps", false)
}
