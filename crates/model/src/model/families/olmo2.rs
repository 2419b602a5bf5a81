//! OLMo 2: Llama with norms on the outputs of its mixers instead of their inputs, and norms of q
//! and k over all heads together.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig, GatedMlp, QkNormWidth, ResidualPlan};
use crate::model::config_reader::ConfigReader;

pub(super) static OLMO2: Architecture =
    Architecture { gguf: GgufFacts::NONE, ..parts::architecture("olmo2", &["olmo2"], compose) };

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let block = block(attention(keys, sizes)?, parts::gated_mlp(keys)?);
    let composition =
        parts::llama_like(keys, vec![block; sizes.num_layers], parts::plain_rope(keys, sizes)?)?;
    parts::with_eps(keys, composition, 1e-5)
}

/// Reads attention with norms of q and k over all heads together.
pub(super) fn attention(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<AttentionMixer> {
    Ok(AttentionMixer { qk_norm: Some(QkNormWidth::Whole), ..parts::attention(keys, sizes)? })
}

/// Returns a block with norms after its mixers alone.
pub(super) fn block(attention: AttentionMixer, mlp: GatedMlp) -> BlockConfig {
    BlockConfig { residual: ResidualPlan::PostNorm, ..BlockConfig::pre_norm(attention, mlp) }
}
