//! OLMo 2: Llama with norms on the outputs of its mixers instead of their inputs, and norms of q
//! and k over all heads together.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufFacts, GgufLocalRope, GgufSliding, GgufWindows};
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig, GatedMlp, QkNormWidth, ResidualPlan};
use crate::model::config_reader::ConfigReader;

pub(super) static OLMO2: Architecture =
    Architecture { gguf: GGUF, ..parts::architecture("olmo2", &["olmo2"], compose) };

/// The architecture `olmo2` of llama.cpp, which is also that of OLMo 3.
pub(super) const GGUF: GgufFacts = GgufFacts {
    heads_fill_hidden: true,
    tied_head: Some(false),
    windows: Some(GgufWindows { period: 4, models: GgufSliding::WithKey }),
    local_rope: Some(GgufLocalRope::SameBase),
    ..GgufFacts::usual("olmo2")
};

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
