//! GLM-4.5, GLM-4.5-Air and GLM-4.6: a rope on half of each head, and the experts of DeepSeek-V3.

use super::architecture::{Architecture, Composition};
use super::deepseek_v3::{self, RouterDefaults};
use super::gguf_facts::{GgufExperts, GgufFacts};
use super::parts;
use super::sizes::{ModelSizes, key_heads_or};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, QkNormWidth};
use crate::model::config_reader::ConfigReader;
use crate::ops::experts::RouterScores;

pub(super) static GLM4_MOE: Architecture = Architecture {
    module_name: deepseek_v3::module_name,
    num_kv_heads: Some(key_heads_or::<8>),
    rotates_partly: true,
    gguf: GgufFacts {
        mlp_norm: "post_attention_norm",
        rotates_partly: true,
        experts: Some(GgufExperts::DEEPSEEK),
        ..GgufFacts::usual("glm4moe")
    },
    ..parts::architecture("glm4_moe", &["glm4_moe"], compose)
};

const ROUTER: RouterDefaults =
    RouterDefaults { chosen: 8, scores: RouterScores::Sigmoid, factor: 1.0, groups: [1, 1], dense_layers: 1 };

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let qk_norm = keys.bool_or("use_qk_norm", false)?.then_some(QkNormWidth::Head);
    let attention = AttentionMixer { o_bias: false, qk_norm, ..parts::attention(keys, sizes)? };
    let blocks = deepseek_v3::blocks(keys, sizes, attention.into(), &ROUTER)?;
    let rope = parts::partial_rope(keys, sizes, 0.5)?;
    parts::with_eps(keys, parts::llama_like(keys, blocks, rope)?, 1e-5)
}
