//! Phi-3, Phi-3.5, Phi-4-mini: Llama with fused projections and a partial rope with two sets of
//! divisors.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig, FusedQkv, GatedMlp};
use crate::model::config_reader::ConfigReader;
use crate::model::rope::RopeContext;

/// Default of `original_max_position_embeddings`, which has priority over the key of
/// `rope_scaling`.
const ORIGINAL_POSITIONS: usize = 4096;

pub(super) static PHI3: Architecture = Architecture {
    rotates_partly: true,
    gguf: GgufFacts {
        heads_fill_hidden: true,
        rotates_partly: true,
        rope_types: &["yarn", "longrope", "su"],
        stripping_names: &["phi-3", "phi3"],
        ..GgufFacts::usual("phi3")
    },
    ..parts::architecture("phi3", &["phi3"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let context = parts::rope_context(keys, sizes, 1e4)?;
    let original = context.original_max_positions.unwrap_or(ORIGINAL_POSITIONS);
    let rope = parts::rope(keys, &RopeContext { original_max_positions: Some(original), ..context })?;
    let window = parts::window(keys, None)?;
    let (plain, fused) = (parts::attention(keys, sizes)?, Some(FusedQkv::SideBySide));
    let attention = AttentionMixer { window, qkv_bias: false, o_bias: false, fused, ..plain };
    let block = BlockConfig::pre_norm(attention, GatedMlp { fused: true, ..parts::gated_mlp(keys)? });
    parts::llama_like(keys, vec![block; sizes.num_layers], rope)
}
