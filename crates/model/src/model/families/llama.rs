//! Llama 1–3.x and its namesakes (TinyLlama, SmolLM, Yi, …).

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufFacts, GgufSeventyB};
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::composition::{BlockConfig, GatedMlp};
use crate::model::config_reader::ConfigReader;

pub(super) static LLAMA: Architecture =
    Architecture { gguf: GGUF, ..parts::architecture("llama", &["llama"], compose) };

/// The architecture `llama` of llama.cpp, which other families may also use.
pub(super) const GGUF: GgufFacts = GgufFacts {
    interleaves_heads: true,
    reads_o_bias: true,
    reads_mlp_biases: true,
    rope_types: &["yarn", "llama3", "longrope", "su"],
    seventy_b: GgufSeventyB::Grouped,
    ..GgufFacts::usual("llama")
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let mlp = GatedMlp { bias: keys.bool_or("mlp_bias", false)?, ..parts::gated_mlp(keys)? };
    let block = BlockConfig::pre_norm(parts::attention(keys, sizes)?, mlp);
    parts::llama_like(keys, vec![block; sizes.num_layers], parts::plain_rope(keys, sizes)?)
}
