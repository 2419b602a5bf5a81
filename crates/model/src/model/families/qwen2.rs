//! Qwen2 and Qwen2.5, dense: Llama with biases on q, k and v, and windows on the upper layers.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufFacts, GgufSeventyB};
use super::parts;
use super::sizes::{ModelSizes, key_heads_or};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig};
use crate::model::config_reader::ConfigReader;

pub(super) static QWEN2: Architecture = Architecture {
    num_kv_heads: Some(key_heads_or::<32>),
    gguf: GgufFacts { heads_fill_hidden: true, seventy_b: GgufSeventyB::Always, ..GgufFacts::usual("qwen2") },
    ..parts::architecture("qwen2", &["qwen2"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let attention = AttentionMixer { qkv_bias: true, ..parts::attention(keys, sizes)? };
    upper_windows(keys, sizes, attention)
}

/// Composes blocks with `attention`. If `use_sliding_window` is true, layers from
/// `max_window_layers` on slide.
pub(super) fn upper_windows(
    keys: &ConfigReader<'_>,
    sizes: &ModelSizes,
    attention: AttentionMixer,
) -> Result<Composition> {
    let window = if keys.bool_or("use_sliding_window", false)? { parts::window(keys, None)? } else { None };
    let first_sliding = keys.opt_usize("max_window_layers")?.unwrap_or(28);
    let mlp = parts::gated_mlp(keys)?;
    let block = |slides: bool| {
        BlockConfig::pre_norm(AttentionMixer { window: window.filter(|_| slides), ..attention }, mlp)
    };
    let sliding = parts::sliding_layers(keys, sizes, |layer| layer >= first_sliding)?;
    parts::llama_like(keys, sliding.into_iter().map(block).collect(), parts::plain_rope(keys, sizes)?)
}
