//! Qwen3.5 and Qwen3.6 with experts (35B-A3B, 122B-A10B): Qwen3.5's token mixers, and experts
//! beside a shared one in every layer. The files of the hub stack the experts of a layer.

use super::architecture::{Architecture, Composition, StackedExperts};
use super::gguf_facts::{GgufExperts, GgufFacts};
use super::parts::{self, ExpertKeys};
use super::qwen3_5;
use super::sizes::{MOST_WIDE, ModelSizes, key_heads_or};
use crate::error::Result;
use crate::model::composition::{BlockConfig, Experts, SharedExpert};
use crate::model::config_reader::ConfigReader;

const EXPERTS: ExpertKeys = ExpertKeys {
    chosen: 8,
    count: 256,
    width: "moe_intermediate_size",
    renormalize: true,
    aux_coefficient: 0.001,
};

pub(super) static QWEN3_5_MOE: Architecture = Architecture {
    head_dim: Some(256),
    intermediate_size: EXPERTS.width,
    stacked_experts: Some(StackedExperts {
        gate_up: "mlp.experts.gate_up_proj",
        down: "mlp.experts.down_proj",
    }),
    num_kv_heads: Some(key_heads_or::<2>),
    rotates_partly: true,
    gguf: GgufFacts { architecture: "qwen35moe", experts: Some(GgufExperts::USUAL), ..qwen3_5::GGUF },
    ..parts::architecture("qwen3_5_moe", &["qwen3_5_moe_text"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let experts = experts(keys, &EXPERTS)?;
    let mixers = qwen3_5::token_mixers(keys, sizes, false)?;
    let block = |mixer| BlockConfig::pre_norm(mixer, experts);
    qwen3_5::compose_of(keys, sizes, mixers.into_iter().map(block).collect())
}

/// Reads the experts of a block beside a shared one with a factor.
pub(super) fn experts(keys: &ConfigReader<'_>, family: &ExpertKeys) -> Result<Experts> {
    let width = keys.opt_size("shared_expert_intermediate_size", MOST_WIDE)?.unwrap_or(512);
    let shared = Some(SharedExpert { width, has_gate: true });
    Ok(Experts { shared, ..parts::experts(keys, family)? })
}
