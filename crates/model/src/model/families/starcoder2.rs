//! StarCoder2: layer norms, biases everywhere, an MLP without a gate, and a sliding window.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::{ModelSizes, key_heads_or};
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{AttentionMixer, BlockConfig};
use crate::model::config_reader::ConfigReader;
use crate::ops::activation::PlainActivation;

pub(super) static STARCODER2: Architecture = Architecture {
    ties_embeddings: true,
    module_name,
    num_kv_heads: Some(key_heads_or::<2>),
    gguf: GgufFacts {
        plain_activations: &[PlainActivation::GeluTanh, PlainActivation::Gelu],
        heads_fill_hidden: true,
        needs_biases: true,
        reads_o_bias: true,
        reads_mlp_biases: true,
        ..GgufFacts::usual("starcoder2")
    },
    ..parts::architecture("starcoder2", &["starcoder2"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let bias = keys.bool_or("use_bias", true)?;
    let (window, plain) = (parts::window(keys, None)?, parts::attention(keys, sizes)?);
    let attention = AttentionMixer { window, qkv_bias: bias, o_bias: bias, ..plain };
    let block = BlockConfig::pre_norm(attention, parts::plain_mlp(keys, "gelu_pytorch_tanh", bias)?);
    let composition =
        parts::llama_like(keys, vec![block; sizes.num_layers], parts::plain_rope(keys, sizes)?)?;
    parts::with_layer_norms(keys, composition, "norm_epsilon", true)
}

fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::UpProj => "mlp.c_fc",
        BlockPart::DownProj => "mlp.c_proj",
        other => parts::llama_name(other),
    }
}
