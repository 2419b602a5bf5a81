//! Seed-OSS: Llama with biases on q, k and v.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::{ModelSizes, key_heads_or};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig, GatedMlp};
use crate::model::config_reader::ConfigReader;

pub(super) static SEED_OSS: Architecture = Architecture {
    head_dim: Some(128),
    num_kv_heads: Some(key_heads_or::<8>),
    gguf: GgufFacts { mlp_norm: "post_attention_norm", ..GgufFacts::usual("seed_oss") },
    ..parts::architecture("seed_oss", &["seed_oss"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let mlp = GatedMlp { bias: keys.bool_or("mlp_bias", false)?, ..parts::gated_mlp(keys)? };
    let attention = AttentionMixer {
        qkv_bias: keys.bool_or("attention_bias", true)?,
        o_bias: keys.bool_or("attention_out_bias", false)?,
        ..parts::attention(keys, sizes)?
    };
    let block = BlockConfig::pre_norm(attention, mlp);
    parts::llama_like(keys, vec![block; sizes.num_layers], parts::plain_rope(keys, sizes)?)
}
