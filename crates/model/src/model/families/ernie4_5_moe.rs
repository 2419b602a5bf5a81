//! ERNIE 4.5 with experts (21B-A3B, 300B-A47B): ERNIE 4.5 whose later layers have experts, chosen
//! by a softmax with a bias, and a shared expert.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufExperts, GgufFacts};
use super::sizes::{self, MOST_WIDE, ModelSizes};
use super::{deepseek_v3, parts};
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{BlockConfig, Experts, SharedExpert};
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::Rope;

/// The largest accepted `moe_norm_min`: the weights of a token's experts are above it together.
const LEAST_SUM: f64 = 1e-6;

pub(super) static ERNIE4_5_MOE: Architecture = Architecture {
    ties_embeddings: true,
    num_kv_heads: Some(sizes::key_heads_or::<4>),
    module_name,
    router_bias_is_row: true,
    gguf: GgufFacts {
        reads_o_bias: true,
        experts: Some(GgufExperts { has_dense_layers: true, has_step: true, ..GgufExperts::USUAL }),
        ..GgufFacts::usual("ernie4_5-moe")
    },
    ..parts::architecture("ernie4_5_moe", &["ernie4_5_moe"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    for (key, accepted) in [("use_bias", false), ("moe_use_aux_free", true)] {
        if keys.bool_or(key, accepted)? != accepted {
            return Err(refused(key, !accepted, &format!("{accepted}, null, no such key")));
        }
    }
    let (attention, mlp, experts) = (parts::attention(keys, sizes)?, parts::gated_mlp(keys)?, experts(keys)?);
    let block = |sparse| {
        if sparse { BlockConfig::pre_norm(attention, experts) } else { BlockConfig::pre_norm(attention, mlp) }
    };
    let blocks = sparse_layers(keys, sizes)?.into_iter().map(block).collect();
    let rope = parts::rope(keys, &parts::rope_context(keys, sizes, 5e5)?)?;
    parts::with_eps(keys, parts::llama_like(keys, blocks, Rope { interleaved: true, ..rope })?, 1e-5)
}

/// Returns for each layer whether it has experts: each of an interval between two of them.
fn sparse_layers(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Vec<bool>> {
    let interval = keys.opt_size("moe_layer_interval", 1 << 16)?.unwrap_or(1);
    let start = keys.opt_usize("moe_layer_start_index")?.unwrap_or(1);
    let last = sizes.num_layers - 1;
    let end = match keys.f64_or("moe_layer_end_index", -1.0)? {
        -1.0 => last,
        end if end >= 0.0 && end.fract() == 0.0 => (end as usize).min(last),
        other => return Err(refused("moe_layer_end_index", other, "-1 for the last layer, or its number")),
    };
    Ok((0..=last)
        .map(|layer| (layer + 1).is_multiple_of(interval) && (start..=end).contains(&layer))
        .collect())
}

fn experts(keys: &ConfigReader<'_>) -> Result<Experts> {
    let least = keys.f64_or("moe_norm_min", 1e-12)?;
    if !(0.0..=LEAST_SUM).contains(&least) {
        return Err(refused("moe_norm_min", least, &format!("0 to {LEAST_SUM:e}")));
    }
    let count = parts::expert_count(keys, &["moe_num_experts", "num_experts"], 64)?;
    let chosen = parts::chosen_experts(keys, &["moe_k", "num_experts_per_tok"], count, 6)?;
    let width = keys.opt_size("moe_intermediate_size", MOST_WIDE)?.unwrap_or(1536);
    let shared = keys.opt_usize("moe_num_shared_experts")?.unwrap_or(2);
    if shared > MOST_WIDE / width {
        return Err(refused("moe_num_shared_experts", shared, &format!("0 to {}", MOST_WIDE / width)));
    }
    Ok(Experts {
        has_bias: true,
        has_f32_logits: true,
        shared: (shared > 0).then_some(SharedExpert { width: shared * width, has_gate: false }),
        ..parts::plain_experts(keys, [count, chosen], width)?
    })
}

fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::RouterBias => "mlp.moe_statics.e_score_correction_bias",
        other => deepseek_v3::module_name(other),
    }
}
