//! Nemotron-4 and Minitron: layer norms whose gain is stored minus one, an MLP without a gate,
//! activated by the square of ReLU, and a rope on a part of each head.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::composition::BlockConfig;
use crate::model::config_reader::ConfigReader;
use crate::ops::activation::PlainActivation;
use crate::ops::rms_norm::NormKind;

pub(super) static NEMOTRON: Architecture = Architecture {
    rotates_partly: true,
    gguf: GgufFacts {
        plain_activations: &[PlainActivation::Relu2],
        heads_fill_hidden: true,
        reads_o_bias: true,
        reads_mlp_biases: true,
        tied_head: Some(false),
        rotates_partly: true,
        ..GgufFacts::usual("nemotron")
    },
    ..parts::architecture("nemotron", &["nemotron"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let mlp = parts::plain_mlp(keys, "relu2", keys.bool_or("mlp_bias", false)?)?;
    let block = BlockConfig::pre_norm(parts::attention(keys, sizes)?, mlp);
    let rope = parts::partial_rope(keys, sizes, 0.5)?;
    let composition = parts::llama_like(keys, vec![block; sizes.num_layers], rope)?;
    let composition = parts::with_layer_norms(keys, composition, "norm_eps", true)?;
    Ok(Composition { norm: NormKind { unit_offset: true, ..composition.norm }, ..composition })
}
