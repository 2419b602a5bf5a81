//! GLM-4 (0414): norms around each mixer, fused gate and up, and a rope on half of each head that
//! rotates neighbours.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::{ModelSizes, key_heads_or};
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{AttentionMixer, BlockConfig, GatedMlp, ResidualPlan};
use crate::model::config_reader::ConfigReader;
use crate::model::rope::Rope;

pub(super) static GLM4: Architecture = Architecture {
    head_dim: Some(128),
    module_name,
    num_kv_heads: Some(key_heads_or::<2>),
    rotates_partly: true,
    gguf: GgufFacts { rotates_partly: true, ..GgufFacts::usual("glm4") },
    ..parts::architecture("glm4", &["glm4"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let qkv_bias = keys.bool_or("attention_bias", true)?;
    let attention = AttentionMixer { qkv_bias, o_bias: false, ..parts::attention(keys, sizes)? };
    let mlp = GatedMlp { fused: true, ..parts::gated_mlp(keys)? };
    let block =
        BlockConfig { residual: ResidualPlan::PreAndPostNorm, ..BlockConfig::pre_norm(attention, mlp) };
    let rope = Rope { interleaved: true, ..parts::partial_rope(keys, sizes, 0.5)? };
    parts::with_eps(keys, parts::llama_like(keys, vec![block; sizes.num_layers], rope)?, 1.5625e-7)
}

fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::AttnPostNorm => "post_self_attn_layernorm",
        BlockPart::MlpPostNorm => "post_mlp_layernorm",
        other => parts::llama_name(other),
    }
}
