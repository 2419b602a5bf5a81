//! Qwen3 without mixture of experts: Qwen2 with norms on q and k instead of biases.

use super::architecture::{Architecture, Composition};
use super::sizes::{ModelSizes, key_heads_or};
use super::{parts, qwen2};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, QkNormWidth};
use crate::model::config_reader::ConfigReader;

pub(super) static QWEN3: Architecture = Architecture {
    head_dim: Some(128),
    num_kv_heads: Some(key_heads_or::<32>),
    ..parts::architecture("qwen3", &["qwen3"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let attention = AttentionMixer { qk_norm: Some(QkNormWidth::Head), ..parts::attention(keys, sizes)? };
    qwen2::upper_windows(keys, sizes, attention)
}
