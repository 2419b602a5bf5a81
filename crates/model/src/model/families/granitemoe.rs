//! Granite 3 with experts (1B-A400M, 3B-A800M): Granite's factors, and experts that checkpoints
//! stack.

use super::architecture::{Architecture, Composition, StackedExperts};
use super::gguf_facts::{GgufExperts, GgufFacts};
use super::granite;
use super::parts::{self, ExpertKeys};
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::config_reader::ConfigReader;

/// A softmax over the chosen logits alone is one over all, renormalized.
const EXPERTS: ExpertKeys =
    ExpertKeys { chosen: 2, count: 8, width: "intermediate_size", renormalize: true, aux_coefficient: 0.001 };

pub(super) static GRANITEMOE: Architecture = Architecture {
    module_name,
    stacked_experts: Some(StackedExperts {
        gate_up: "block_sparse_moe.input_linear.weight",
        down: "block_sparse_moe.output_linear.weight",
    }),
    gguf: GgufFacts {
        architecture: "granitemoe",
        experts: Some(GgufExperts { has_width: false, ..GgufExperts::USUAL }),
        ..granite::GGUF
    },
    ..parts::architecture("granitemoe", &["granitemoe"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    granite::compose_of(keys, sizes, parts::experts(keys, &EXPERTS)?, parts::plain_rope(keys, sizes)?)
}

fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::Router => "block_sparse_moe.router.layer",
        BlockPart::ExpertGate(_) => "block_sparse_moe.experts.{}.gate_proj",
        BlockPart::ExpertUp(_) => "block_sparse_moe.experts.{}.up_proj",
        BlockPart::ExpertDown(_) => "block_sparse_moe.experts.{}.down_proj",
        other => parts::llama_name(other),
    }
}
