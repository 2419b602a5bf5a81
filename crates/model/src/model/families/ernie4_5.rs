//! ERNIE 4.5, dense: Llama with a rope that rotates neighbours.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::{ModelSizes, key_heads_or};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig, GatedMlp};
use crate::model::config_reader::ConfigReader;
use crate::model::rope::Rope;

pub(super) static ERNIE4_5: Architecture = Architecture {
    head_dim: Some(128),
    ties_embeddings: true,
    num_kv_heads: Some(key_heads_or::<2>),
    gguf: GgufFacts { reads_o_bias: true, ..GgufFacts::usual("ernie4_5") },
    ..parts::architecture("ernie4_5", &["ernie4_5"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let bias = keys.bool_or("use_bias", false)?;
    let attention = AttentionMixer { qkv_bias: bias, o_bias: bias, ..parts::attention(keys, sizes)? };
    let block = BlockConfig::pre_norm(attention, GatedMlp { bias, ..parts::gated_mlp(keys)? });
    let rope = parts::rope(keys, &parts::rope_context(keys, sizes, 5e5)?)?;
    let rope = Rope { interleaved: true, ..rope };
    parts::with_eps(keys, parts::llama_like(keys, vec![block; sizes.num_layers], rope)?, 1e-5)
}
