//! StableLM 3B, Zephyr 3B and StableLM 2 1.6B: Llama with layer norms, a rope on a quarter of each
//! head, and, if config.json asks for it, mixers in parallel.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::{ModelSizes, key_heads_or};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig, ResidualPlan};
use crate::model::config_reader::{ConfigReader, refused};

pub(super) static STABLELM: Architecture = Architecture {
    num_kv_heads: Some(key_heads_or::<32>),
    rotates_partly: true,
    gguf: GgufFacts {
        heads_fill_hidden: true,
        tied_head: Some(false),
        names_parallel: true,
        parallel_by_norm: true,
        rotates_partly: true,
        ..GgufFacts::usual("stablelm")
    },
    ..parts::architecture("stablelm", &["stablelm"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    if keys.bool_or("qk_layernorm", false)? {
        return Err(refused("qk_layernorm", true, "false, null, no such key"));
    }
    let qkv_bias = keys.bool_or("use_qkv_bias", false)?;
    let attention = AttentionMixer { qkv_bias, o_bias: false, ..parts::attention(keys, sizes)? };
    let mut block = BlockConfig::pre_norm(attention, parts::gated_mlp(keys)?);
    if keys.bool_or("use_parallel_residual", false)? {
        block.residual = ResidualPlan::Parallel;
    }
    let rope = parts::partial_rope(keys, sizes, 0.25)?;
    let composition = parts::llama_like(keys, vec![block; sizes.num_layers], rope)?;
    parts::with_layer_norms(keys, composition, "layer_norm_eps", true)
}
