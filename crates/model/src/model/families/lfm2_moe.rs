//! LFM2 with experts (8B-A1B): LFM2 whose MLPs, except in the first layers, are experts that a
//! router of sigmoids chooses with a bias.

use super::architecture::{Architecture, Composition};
use super::sizes::{MOST_WIDE, ModelSizes};
use super::{lfm2, parts};
use crate::error::{Error, Result};
use crate::model::composition::{BlockConfig, Experts};
use crate::model::config_reader::{ConfigReader, refused};
use crate::ops::experts::{Router, RouterScores};

pub(super) static LFM2_MOE: Architecture = lfm2::architecture("lfm2_moe", &["lfm2_moe"], compose);

/// Added to the sum of a token's sigmoids (transformers 5.24, `Lfm2MoeTopKRouter`).
const SUM_OFFSET: f32 = 1e-6;

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    if keys.get("layer_types").is_none() {
        return Err(Error::user("`layer_types` is missing")
            .because("accepted: a list with \"conv\" or \"full_attention\" for each layer"));
    }
    let (mlp, experts) = (parts::gated_mlp(keys)?, experts(keys)?);
    let dense = keys.opt_usize("num_dense_layers")?.unwrap_or(2);
    let block = |(layer, mixer)| {
        if layer < dense { BlockConfig::pre_norm(mixer, mlp) } else { BlockConfig::pre_norm(mixer, experts) }
    };
    let mixers = lfm2::token_mixers(keys, sizes)?.into_iter();
    lfm2::compose_of(keys, sizes, mixers.enumerate().map(block).collect())
}

fn experts(keys: &ConfigReader<'_>) -> Result<Experts> {
    let count = parts::expert_count(keys, &["num_experts"], 32)?;
    let chosen = parts::chosen_experts(keys, &["num_experts_per_tok"], count, 4)?;
    let factor = keys.f64_or("routed_scaling_factor", 1.0)?;
    if !(factor > 0.0 && (factor as f32).is_finite()) {
        return Err(refused("routed_scaling_factor", factor, "above 0"));
    }
    let width = keys.opt_size("moe_intermediate_size", MOST_WIDE)?.unwrap_or(1792);
    Ok(Experts {
        router: Router {
            scores: RouterScores::Sigmoid,
            factor: factor as f32,
            sum_offset: SUM_OFFSET,
            ..Router::softmax(chosen, keys.bool_or("norm_topk_prob", true)?)
        },
        has_bias: keys.bool_or("use_expert_bias", true)?,
        ..parts::plain_experts(keys, [count, chosen], width)?
    })
}
