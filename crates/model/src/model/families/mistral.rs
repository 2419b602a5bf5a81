//! Mistral 7B and its descendants: Llama with a sliding window.

use super::architecture::{Architecture, Composition};
use super::sizes::ModelSizes;
use super::{llama, parts};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig};
use crate::model::config_reader::ConfigReader;

pub(super) static MISTRAL: Architecture = Architecture {
    name: "mistral",
    model_types: &["mistral"],
    head_dim: None,
    ties_embeddings: false,
    compose,
    module_name: parts::llama_name,
    gguf: llama::GGUF,
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let window = parts::window(keys, Some(4096))?;
    let attention = AttentionMixer { window, ..parts::attention(keys, sizes)? };
    let block = BlockConfig::pre_norm(attention, parts::gated_mlp(keys)?);
    parts::llama_like(keys, sizes, vec![block; sizes.num_layers])
}
