//! Arcee (AFM 4.5B): Llama with an MLP without a gate, activated by the square of ReLU.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::composition::BlockConfig;
use crate::model::config_reader::ConfigReader;
use crate::ops::activation::PlainActivation;

pub(super) static ARCEE: Architecture = Architecture {
    gguf: GgufFacts {
        plain_activations: &[PlainActivation::Relu2],
        interleaves_heads: true,
        rope_types: &["yarn", "llama3"],
        ..GgufFacts::usual("arcee")
    },
    ..parts::architecture("arcee", &["arcee"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let mlp = parts::plain_mlp(keys, "relu2", keys.bool_or("mlp_bias", false)?)?;
    let block = BlockConfig::pre_norm(parts::attention(keys, sizes)?, mlp);
    let composition =
        parts::llama_like(keys, vec![block; sizes.num_layers], parts::plain_rope(keys, sizes)?)?;
    parts::with_eps(keys, composition, 1e-5)
}
