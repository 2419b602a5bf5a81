//! MiniMax-M2: OLMoE's attention with a rope on half of each head, and experts that a router of
//! sigmoids chooses with a bias.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufExperts, GgufFacts};
use super::parts::{self, ExpertKeys};
use super::sizes::{self, ModelSizes};
use super::{mixtral, olmo2};
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{BlockConfig, Experts};
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::RopeContext;
use crate::ops::experts::{Router, RouterScores};

const EXPERTS: ExpertKeys =
    ExpertKeys { chosen: 8, count: 256, width: "intermediate_size", renormalize: true, aux_coefficient: 0.0 };

pub(super) static MINIMAX_M2: Architecture = Architecture {
    head_dim: Some(128),
    num_kv_heads: Some(sizes::key_heads_or::<8>),
    module_name,
    rotates_partly: true,
    gguf: GgufFacts {
        tied_head: Some(false),
        rotates_partly: true,
        experts: Some(GgufExperts { has_scores: true, ..GgufExperts::USUAL }),
        ..GgufFacts::usual("minimax-m2")
    },
    ..parts::architecture("minimax_m2", &["minimax_m2"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    refuse_variants(keys)?;
    let experts = parts::experts(keys, &EXPERTS)?;
    let router = Router { scores: RouterScores::Sigmoid, ..experts.router };
    // transformers computes a loss of balance from the softmax of logits that are no softmax's.
    let experts = Experts { router, has_bias: true, aux_coefficient: 0.0, ..experts };
    let block = BlockConfig::pre_norm(olmo2::attention(keys, sizes)?, experts);
    let head_dim = sizes.heads.head_dim;
    let rotated = keys.opt_size("rotary_dim", head_dim)?.unwrap_or(head_dim);
    let partial = keys.f64_or("partial_rotary_factor", rotated as f64 / head_dim as f64)?;
    let context = parts::rope_context(keys, sizes, 5e6)?;
    let rope = parts::rope(keys, &RopeContext { partial, ..context })?;
    parts::llama_like(keys, vec![block; sizes.num_layers], rope)
}

/// Refuses values with which config.json asks for another model. transformers reads none of these
/// keys but the noise.
fn refuse_variants(keys: &ConfigReader<'_>) -> Result<()> {
    if let Some(noise) = keys.opt_f64("router_jitter_noise")?.filter(|noise| *noise != 0.0) {
        return Err(refused("router_jitter_noise", noise, "0 or null: the engine adds no noise"));
    }
    for key in ["use_qk_norm", "use_routing_bias"] {
        if !keys.bool_or(key, true)? {
            return Err(refused(key, false, "true"));
        }
    }
    for (key, accepted) in [("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")] {
        if let Some(value) = keys.opt_str(key)?.filter(|value| *value != accepted) {
            return Err(refused(key, format!("\"{value}\""), accepted));
        }
    }
    if let Some(width) = keys.opt_usize("shared_intermediate_size")?.filter(|width| *width != 0) {
        return Err(refused("shared_intermediate_size", width, "0: no shared expert"));
    }
    let mut kinds = keys.opt_list("attn_type_list")?.into_iter().flatten();
    match kinds.find(|kind| kind.as_u64() != Some(1)) {
        Some(kind) => Err(refused("attn_type_list", kind, "1 in each layer: attention by a softmax")),
        None => Ok(()),
    }
}

fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::RouterBias => "block_sparse_moe.e_score_correction_bias",
        other => mixtral::module_name(other),
    }
}
