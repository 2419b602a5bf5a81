//! DeepSeek-V3, R1 and Kimi K2: latent attention, and experts that a router of sigmoids chooses
//! with a bias and in groups.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufExperts, GgufFacts};
use super::parts;
use super::sizes::{MOST_HEADS, MOST_WIDE, ModelSizes};
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{
    AttentionMixer, BlockConfig, Experts, LatentMixer, SharedExpert, TokenMixer,
};
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::{Rope, RopeContext};
use crate::ops::experts::{
    ExpertGroups, MOST_CHOSEN, MOST_EXPERTS, MOST_GROUPS, Router, RouterScores, SUM_OFFSET,
};
use crate::ops::rms_norm::NormKind;

pub(super) static DEEPSEEK_V3: Architecture = Architecture {
    has_latents: true,
    module_name,
    gguf: GGUF,
    ..parts::architecture("deepseek_v3", &["deepseek_v3", "kimi_k2"], compose)
};

/// The architecture `deepseek2` of llama.cpp.
pub(super) const GGUF: GgufFacts = GgufFacts {
    has_latents: true,
    scales_latents_freely: true,
    rotates_partly: true,
    reads_yarn_ramp: true,
    experts: Some(GgufExperts::DEEPSEEK),
    ..GgufFacts::usual("deepseek2")
};

/// The defaults of DeepSeek-V3 in transformers.
const ROUTER: RouterDefaults =
    RouterDefaults { chosen: 8, scores: RouterScores::Sigmoid, factor: 2.5, groups: [8, 4], dense_layers: 3 };

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    compose_of(keys, sizes, &ROUTER, 1e-6)
}

/// A family's defaults for its experts.
pub(super) struct RouterDefaults {
    pub(super) chosen: usize,
    /// Sigmoids have a bias for the choice.
    pub(super) scores: RouterScores,
    pub(super) factor: f64,
    /// The groups, and those of a token.
    pub(super) groups: [usize; 2],
    /// The number of first layers without experts.
    pub(super) dense_layers: usize,
}

/// Composes a model of latent attention and experts; `eps` is the default of the norms' epsilon.
pub(super) fn compose_of(
    keys: &ConfigReader<'_>,
    sizes: &ModelSizes,
    defaults: &RouterDefaults,
    eps: f64,
) -> Result<Composition> {
    let scaling = parts::rope_scaling(keys)?;
    let head_dim = keys.size("qk_rope_head_dim", MOST_HEADS)?;
    let context = RopeContext { head_dim, ..parts::rope_context(keys, sizes, 1e4)? };
    let rope = Rope::read(scaling.as_ref(), &context)?;
    let mixer = latent_mixer(keys, sizes, scaling.as_ref())?;
    let blocks = blocks(keys, sizes, mixer.into(), defaults)?;
    let rope = latent_rope(keys, rope)?;
    parts::with_eps(keys, parts::llama_like(keys, blocks, rope)?, eps)
}

/// Returns the rope with the pairs of latent attention.
pub(super) fn latent_rope(keys: &ConfigReader<'_>, rope: Rope) -> Result<Rope> {
    let (rotated, actual) = (keys.size("qk_rope_head_dim", MOST_HEADS)?, 2 * rope.inv_freq.len());
    if actual != rotated {
        return Err(refused(
            "qk_rope_head_dim",
            rotated,
            &format!("{actual}, the columns that the rope rotates"),
        ));
    }
    Ok(Rope { interleaved: keys.bool_or("rope_interleave", true)?, ..rope })
}

/// Reads latent attention with the rope's settings `scaling`.
pub(super) fn latent_mixer(
    keys: &ConfigReader<'_>,
    sizes: &ModelSizes,
    scaling: Option<&ConfigReader<'_>>,
) -> Result<LatentMixer> {
    let [plain, rotated] =
        [keys.size("qk_nope_head_dim", MOST_HEADS)?, keys.size("qk_rope_head_dim", MOST_HEADS)?];
    let width = (plain + rotated) as f64;
    let mut scale = 1.0 / width.sqrt();
    if let Some(scaling) = scaling {
        let kind = scaling.opt_str("rope_type")?.or(scaling.opt_str("type")?).unwrap_or("default");
        let all = scaling.f64_or("mscale_all_dim", 0.0)?;
        if kind != "default" && all != 0.0 {
            let factor = scaling.opt_f64("factor")?;
            let factor = factor
                .ok_or_else(|| refused("factor", "missing", "a number, which `mscale_all_dim` scales"))?;
            if factor > 1.0 {
                scale *= (0.1 * all * factor.ln() + 1.0).powi(2);
            }
        }
    }
    Ok(LatentMixer {
        attention: AttentionMixer { scale, ..parts::attention(keys, sizes)? },
        q_rank: keys.opt_size("q_lora_rank", MOST_WIDE)?,
        kv_rank: keys.size("kv_lora_rank", MOST_WIDE)?,
        plain,
        rotated,
        value: keys.size("v_head_dim", MOST_HEADS)?,
        // transformers creates both norms without the epsilon of config.json.
        norm: NormKind { eps: 1e-6, unit_offset: false },
    })
}

/// Reads the blocks around `mixer`: the first ones are dense, the others have experts.
pub(super) fn blocks(
    keys: &ConfigReader<'_>,
    sizes: &ModelSizes,
    mixer: TokenMixer,
    defaults: &RouterDefaults,
) -> Result<Vec<BlockConfig>> {
    let (mlp, experts) = (parts::gated_mlp(keys)?, experts(keys, defaults)?);
    let dense = keys.opt_usize("first_k_dense_replace")?.unwrap_or(defaults.dense_layers);
    // transformers names the kind of each layer in newer families.
    let kinds = parts::layer_kinds(keys, sizes, "mlp_layer_types", ["dense", "sparse"], |layer| {
        usize::from(layer >= dense)
    })?;
    let block = |kind: usize| {
        if kind == 0 { BlockConfig::pre_norm(mixer, mlp) } else { BlockConfig::pre_norm(mixer, experts) }
    };
    Ok(kinds.into_iter().map(block).collect())
}

fn experts(keys: &ConfigReader<'_>, defaults: &RouterDefaults) -> Result<Experts> {
    let is_sigmoid = defaults.scores == RouterScores::Sigmoid;
    let scores = if is_sigmoid { "sigmoid" } else { "softmax" };
    for (key, accepted) in [("topk_method", "noaux_tc"), ("scoring_func", scores)] {
        if let Some(value) = keys.opt_str(key)?.filter(|value| *value != accepted) {
            return Err(refused(key, format!("\"{value}\""), accepted));
        }
    }
    if let Some(step) = keys.opt_usize("moe_layer_freq")?.filter(|step| *step != 1) {
        return Err(refused("moe_layer_freq", step, "1"));
    }
    let count = keys.size("n_routed_experts", MOST_EXPERTS)?;
    let most = count.min(MOST_CHOSEN);
    let chosen = keys.opt_size("num_experts_per_tok", most)?.unwrap_or(defaults.chosen.min(most));
    let groups = keys.opt_size("n_group", MOST_GROUPS)?.unwrap_or(defaults.groups[0]);
    if !count.is_multiple_of(groups) || count / groups < 2 {
        let accepted = format!("a number that divides n_routed_experts {count} into two or more each");
        return Err(refused("n_group", groups, &accepted));
    }
    let of_token = keys.opt_size("topk_group", groups)?.unwrap_or(defaults.groups[1].min(groups));
    if of_token * (count / groups) < chosen {
        let accepted =
            format!("enough groups of {} experts for num_experts_per_tok {chosen}", count / groups);
        return Err(refused("topk_group", of_token, &accepted));
    }
    let factor = keys.f64_or("routed_scaling_factor", defaults.factor)?;
    if !(factor > 0.0 && (factor as f32).is_finite()) {
        return Err(refused("routed_scaling_factor", factor, "above 0"));
    }
    let width = keys.size("moe_intermediate_size", MOST_WIDE)?;
    let shared = keys.opt_usize("n_shared_experts")?.unwrap_or(1);
    if shared > MOST_WIDE / width {
        return Err(refused("n_shared_experts", shared, &format!("0 to {}", MOST_WIDE / width)));
    }
    Ok(Experts {
        count,
        router: Router {
            chosen,
            scores: defaults.scores,
            renormalize: keys.bool_or("norm_topk_prob", true)?,
            groups: (of_token < groups).then_some(ExpertGroups { count: groups, chosen: of_token }),
            factor: factor as f32,
            sum_offset: SUM_OFFSET,
        },
        has_bias: is_sigmoid,
        has_f32_logits: is_sigmoid,
        layer_biases: false,
        width,
        activation: parts::activation(keys)?,
        has_one_gate_up: false,
        weighs_inputs: false,
        aux_coefficient: 0.0,
        shared: (shared > 0).then_some(SharedExpert { width: shared * width, has_gate: false }),
    })
}

/// Returns the name of a module: those of shared experts are plural.
pub(super) fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::SharedGate => "mlp.shared_experts.gate_proj",
        BlockPart::SharedUp => "mlp.shared_experts.up_proj",
        BlockPart::SharedDown => "mlp.shared_experts.down_proj",
        other => parts::llama_name(other),
    }
}
