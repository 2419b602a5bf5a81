//! Qwen3 with experts (Qwen3-30B-A3B, Qwen3-Coder): Qwen3 whose MLPs are experts in all or some
//! layers.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufExperts, GgufFacts};
use super::parts::{self, ExpertKeys};
use super::sizes::{ModelSizes, key_heads_or};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig, QkNormWidth};
use crate::model::config_reader::ConfigReader;

const EXPERTS: ExpertKeys = ExpertKeys {
    chosen: 8,
    count: 128,
    width: "moe_intermediate_size",
    renormalize: false,
    aux_coefficient: 0.001,
};

pub(super) static QWEN3_MOE: Architecture = Architecture {
    may_be_dense: true,
    num_kv_heads: Some(key_heads_or::<4>),
    gguf: GgufFacts { experts: Some(GgufExperts::USUAL), ..GgufFacts::usual("qwen3moe") },
    ..parts::architecture("qwen3_moe", &["qwen3_moe"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let slides = keys.bool_or("use_sliding_window", false)?;
    let window = if slides { parts::window(keys, Some(4096))? } else { None };
    let qk_norm = Some(QkNormWidth::Head);
    let attention = AttentionMixer { window, qk_norm, ..parts::attention(keys, sizes)? };
    let (mlp, experts) = (parts::gated_mlp(keys)?, parts::experts(keys, &EXPERTS)?);
    let block = |sparse: bool| {
        if sparse { BlockConfig::pre_norm(attention, experts) } else { BlockConfig::pre_norm(attention, mlp) }
    };
    let blocks = parts::sparse_layers(keys, sizes)?.into_iter().map(block).collect();
    parts::llama_like(keys, blocks, parts::plain_rope(keys, sizes)?)
}
