//! Mistral 7B and its descendants: Llama with a sliding window.

use super::architecture::{Architecture, Composition};
use super::sizes::{ModelSizes, key_heads_or};
use super::{llama, parts};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig};
use crate::model::config_reader::ConfigReader;

pub(super) static MISTRAL: Architecture = Architecture {
    gguf: llama::GGUF,
    num_kv_heads: Some(key_heads_or::<8>),
    ..parts::architecture("mistral", &["mistral"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let window = parts::window(keys, Some(4096))?;
    let attention = AttentionMixer { window, ..parts::attention(keys, sizes)? };
    let block = BlockConfig::pre_norm(attention, parts::gated_mlp(keys)?);
    parts::llama_like(keys, vec![block; sizes.num_layers], parts::plain_rope(keys, sizes)?)
}
