//! Granite 3: Llama with factors on embeddings, attention scores, mixers and logits.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufFacts, GgufNoPositions, GgufSeventyB};
use super::sizes::ModelSizes;
use super::{llama, parts};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig, ChannelMixer, GatedMlp};
use crate::model::config_reader::ConfigReader;
use crate::model::rope::Rope;

pub(super) static GRANITE: Architecture =
    Architecture { gguf: GGUF, ..parts::architecture("granite", &["granite"], compose) };

/// The architecture `granite` of llama.cpp, which is also that of Granite 4 without experts and
/// Mamba layers.
pub(super) const GGUF: GgufFacts = GgufFacts {
    architecture: "granite",
    splits_gate_up: true,
    reads_factors: true,
    no_positions: GgufNoPositions::AllByKey,
    seventy_b: GgufSeventyB::Never,
    ..llama::GGUF
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let mlp = GatedMlp { bias: keys.bool_or("mlp_bias", false)?, ..parts::gated_mlp(keys)? };
    compose_of(keys, sizes, mlp, parts::plain_rope(keys, sizes)?)
}

/// Composes a model with the factors of Granite.
pub(super) fn compose_of(
    keys: &ConfigReader<'_>,
    sizes: &ModelSizes,
    mlp: impl Into<ChannelMixer>,
    rope: Rope,
) -> Result<Composition> {
    let factor = |key| Ok(keys.above_zero(key)?.unwrap_or(1.0));
    let scale: Result<f64> = factor("attention_multiplier");
    let attention = AttentionMixer { scale: scale?, ..parts::attention(keys, sizes)? };
    let residual_factor = factor("residual_multiplier")?;
    let block = BlockConfig { residual_factor, ..BlockConfig::pre_norm(attention, mlp) };
    Ok(Composition {
        embedding_factor: factor("embedding_multiplier")?,
        logit_factor: 1.0 / factor("logits_scaling")?,
        ..parts::llama_like(keys, vec![block; sizes.num_layers], rope)?
    })
}
