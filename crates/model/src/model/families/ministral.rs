//! Ministral 8B (2024): Mistral with a sliding window on the layers that `layer_types` names, by
//! default on all.

use super::architecture::{Architecture, Composition};
use super::sizes::{ModelSizes, key_heads_or};
use super::{llama, parts};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig};
use crate::model::config_reader::ConfigReader;

pub(super) static MINISTRAL: Architecture = Architecture {
    gguf: llama::GGUF,
    num_kv_heads: Some(key_heads_or::<8>),
    ..parts::architecture("ministral", &["ministral"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let window = parts::window(keys, Some(4096))?;
    let (attention, mlp) = (parts::attention(keys, sizes)?, parts::gated_mlp(keys)?);
    let block = |slides: bool| {
        BlockConfig::pre_norm(AttentionMixer { window: window.filter(|_| slides), ..attention }, mlp)
    };
    let blocks = parts::sliding_layers(keys, sizes, |_| true)?.into_iter().map(block).collect();
    parts::llama_like(keys, blocks, parts::plain_rope(keys, sizes)?)
}
