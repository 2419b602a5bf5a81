//! Qwen2 with experts (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): Qwen2 whose MLPs are experts, with a
//! shared one.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufExperts, GgufFacts};
use super::parts::{self, ExpertKeys};
use super::sizes::{MOST_WIDE, ModelSizes, key_heads_or};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig, Experts, SharedExpert};
use crate::model::config_reader::ConfigReader;

const EXPERTS: ExpertKeys = ExpertKeys {
    chosen: 4,
    count: 60,
    width: "moe_intermediate_size",
    renormalize: false,
    aux_coefficient: 0.001,
};

pub(super) static QWEN2_MOE: Architecture = Architecture {
    may_be_dense: true,
    num_kv_heads: Some(key_heads_or::<16>),
    gguf: GgufFacts {
        heads_fill_hidden: true,
        tied_head: Some(false),
        experts: Some(GgufExperts { renormalizes: Some(false), ..GgufExperts::USUAL }),
        ..GgufFacts::usual("qwen2moe")
    },
    ..parts::architecture("qwen2_moe", &["qwen2_moe"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let slides = keys.bool_or("use_sliding_window", false)?;
    let window = if slides { parts::window(keys, Some(4096))? } else { None };
    let most = keys.opt_usize("max_window_layers")?.unwrap_or(28);
    // transformers lets every second layer of the lower ones slide.
    let sliding = parts::sliding_layers(keys, sizes, |layer| layer % 2 == 0 && layer < most)?;
    let qkv_bias = keys.bool_or("qkv_bias", true)?;
    let attention = AttentionMixer { qkv_bias, ..parts::attention(keys, sizes)? };
    let shared =
        SharedExpert { width: keys.size("shared_expert_intermediate_size", MOST_WIDE)?, has_gate: true };
    let experts = Experts { shared: Some(shared), ..parts::experts(keys, &EXPERTS)? };
    let mlp = parts::gated_mlp(keys)?;
    let block = |(sparse, slides): (bool, bool)| {
        let attention = AttentionMixer { window: window.filter(|_| slides), ..attention };
        if sparse { BlockConfig::pre_norm(attention, experts) } else { BlockConfig::pre_norm(attention, mlp) }
    };
    let blocks = parts::sparse_layers(keys, sizes)?.into_iter().zip(sliding).map(block).collect();
    parts::llama_like(keys, blocks, parts::plain_rope(keys, sizes)?)
}
