//! Granite 3: Llama with factors on embeddings, attention scores, mixers and logits.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig, GatedMlp};
use crate::model::config_reader::ConfigReader;
use crate::model::rope::Rope;

pub(super) static GRANITE: Architecture =
    Architecture { gguf: GgufFacts::NONE, ..parts::architecture("granite", &["granite"], compose) };

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let mlp = GatedMlp { bias: keys.bool_or("mlp_bias", false)?, ..parts::gated_mlp(keys)? };
    compose_of(keys, sizes, mlp, parts::plain_rope(keys, sizes)?)
}

/// Composes a model with the factors of Granite.
pub(super) fn compose_of(
    keys: &ConfigReader<'_>,
    sizes: &ModelSizes,
    mlp: GatedMlp,
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
