//! Hunyuan V1 with experts (A13B): Hunyuan whose MLPs are experts beside a shared one of the same
//! width.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufExperts, GgufFacts};
use super::sizes::{MOST_WIDE, ModelSizes};
use super::{hunyuan, parts};
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{BlockConfig, Experts, SharedExpert};
use crate::model::config_reader::{ConfigReader, refused};

pub(super) static HUNYUAN_MOE: Architecture = Architecture {
    module_name,
    gguf: GgufFacts { experts: Some(GgufExperts::USUAL), ..GgufFacts::usual("hunyuan-moe") },
    ..parts::architecture("hunyuan_v1_moe", &["hunyuan_v1_moe"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let width = keys.size("intermediate_size", MOST_WIDE)?;
    let variants = [("num_shared_expert", 1), ("moe_intermediate_size", width), ("moe_layer_num_skipped", 0)];
    for (key, accepted) in variants {
        if let Some(given) = parts::size_of_layers(keys, key)?.filter(|given| *given != accepted) {
            return Err(refused(key, given, &format!("{accepted}, null, no such key")));
        }
    }
    if !keys.bool_or("use_mixed_mlp_moe", true)? {
        return Err(refused("use_mixed_mlp_moe", false, "true, null, no such key"));
    }
    let count = parts::expert_count(keys, &["num_experts", "num_local_experts"], 1)?;
    let chosen = parts::chosen_experts(keys, &["moe_topk", "num_experts_per_tok"], count, 1)?;
    let experts = Experts {
        has_f32_logits: true,
        shared: Some(SharedExpert { width, has_gate: false }),
        ..parts::plain_experts(keys, [count, chosen], width)?
    };
    hunyuan::compose_of(keys, sizes, BlockConfig::pre_norm(hunyuan::attention(keys, sizes)?, experts))
}

fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::Router => "mlp.gate.wg",
        BlockPart::SharedGate => "mlp.shared_mlp.gate_proj",
        BlockPart::SharedUp => "mlp.shared_mlp.up_proj",
        BlockPart::SharedDown => "mlp.shared_mlp.down_proj",
        other => hunyuan::module_name(other),
    }
}
