//! Parts that several families share: Llama's declaration and names, and readers of config.json,
//! each of which makes one part of a model.

use serde_json::Value;

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::sizes::{MOST_WIDE, ModelSizes};
use crate::error::{Error, Result};
use crate::model::block_part::BlockPart;
use crate::model::composition::{
    AttentionMixer, BlockConfig, Experts, GatedMlp, HiddenNorm, MlpActivation, PlainMlp, Sharing, Values,
};
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::{Rope, RopeContext};
use crate::ops::activation::PlainActivation;
use crate::ops::attention::Heads;
use crate::ops::experts::{MOST_CHOSEN, MOST_EXPERTS, Router};
use crate::ops::glu::Activation;
use crate::ops::rms_norm::NormKind;
use crate::weights::ClassNames;

/// Declares a family with Llama's defaults and names of tensors, and the usual facts of GGUF.
pub(super) const fn architecture(
    name: &'static str,
    model_types: &'static [&'static str],
    compose: fn(&ConfigReader<'_>, &ModelSizes) -> Result<Composition>,
) -> Architecture {
    Architecture {
        name,
        model_types,
        head_dim: None,
        has_latents: false,
        ties_embeddings: false,
        intermediate_size: "intermediate_size",
        compose,
        module_name: llama_name,
        stacked_experts: None,
        transposes_stacks: false,
        stacks_in_mxfp4: false,
        router_bias_is_row: false,
        may_be_dense: false,
        class_names: &ClassNames::USUAL,
        rotates_partly: false,
        num_kv_heads: None,
        default_inner_width: None,
        inner_width: None,
        tie_key: None,
        gguf: GgufFacts::usual(name),
    }
}

/// Composes a model like Llama's around `blocks`: one rope, RMS norms, plain embeddings.
pub(super) fn llama_like(
    keys: &ConfigReader<'_>,
    blocks: Vec<BlockConfig>,
    rope: Rope,
) -> Result<Composition> {
    Ok(Composition {
        blocks,
        ropes: vec![rope],
        norm: rms_norm(keys)?,
        hidden_norm: HiddenNorm::Rms,
        embedding_factor: 1.0,
        logit_factor: 1.0,
        logit_softcap: softcap(keys, "final_logit_softcapping", None)?,
    })
}

/// Reads attention to all previous tokens, with biases if `attention_bias` is true.
pub(super) fn attention(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<AttentionMixer> {
    let bias = keys.bool_or("attention_bias", false)?;
    Ok(AttentionMixer {
        heads: sizes.heads,
        window: None,
        chunk: None,
        rope: 0,
        scale: 1.0 / (sizes.heads.head_dim as f64).sqrt(),
        softcap: softcap(keys, "attn_logit_softcapping", None)?,
        qkv_bias: bias,
        o_bias: bias,
        qk_norm: None,
        values: Values::Projected,
        fused: None,
        has_gates: false,
        has_sinks: false,
        sharing: Sharing::Own,
    })
}

/// Reads a gated MLP without biases.
pub(super) fn gated_mlp(keys: &ConfigReader<'_>) -> Result<GatedMlp> {
    Ok(GatedMlp {
        activation: activation(keys)?,
        bias: false,
        fused: false,
        own_width: None,
        gate_deviations: None,
    })
}

/// Reads an MLP without a gate; `default` is the family's activation.
pub(super) fn plain_mlp(keys: &ConfigReader<'_>, default: &str, bias: bool) -> Result<PlainMlp> {
    plain_mlp_by(keys, "hidden_act", default, bias)
}

/// Works like [`plain_mlp`] with the activation of `key`.
pub(super) fn plain_mlp_by(
    keys: &ConfigReader<'_>,
    key: &str,
    default: &str,
    bias: bool,
) -> Result<PlainMlp> {
    let activation = match keys.opt_str(key)?.unwrap_or(default) {
        "relu2" => PlainActivation::Relu2,
        "gelu" => PlainActivation::Gelu,
        "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => PlainActivation::GeluTanh,
        other => {
            return Err(refused(
                key,
                format!("\"{other}\""),
                "relu2, gelu, gelu_pytorch_tanh, gelu_new, gelu_fast",
            ));
        }
    };
    Ok(PlainMlp { activation: MlpActivation::Fixed(activation), bias })
}

/// The keys of a family for its experts, and its defaults.
pub(super) struct ExpertKeys {
    /// The default of `num_experts_per_tok`.
    pub(super) chosen: usize,
    /// The default of the number of experts.
    pub(super) count: usize,
    /// The key of their inner width.
    pub(super) width: &'static str,
    /// True if their weights always sum to 1; otherwise `norm_topk_prob` says so.
    pub(super) renormalize: bool,
    /// The default of `router_aux_loss_coef`.
    pub(super) aux_coefficient: f64,
}

/// Reads the experts of a block.
pub(super) fn experts(keys: &ConfigReader<'_>, family: &ExpertKeys) -> Result<Experts> {
    // transformers reads both names of the number.
    let count = expert_count(keys, &["num_experts", "num_local_experts"], family.count)?;
    let chosen = chosen_experts(keys, &["num_experts_per_tok"], count, family.chosen)?;
    let aux_coefficient = keys.f64_or("router_aux_loss_coef", family.aux_coefficient)?;
    if aux_coefficient < 0.0 {
        return Err(refused("router_aux_loss_coef", aux_coefficient, "0 or above"));
    }
    let renormalize = family.renormalize || keys.bool_or("norm_topk_prob", false)?;
    let plain = plain_experts(keys, [count, chosen], keys.size(family.width, MOST_WIDE)?)?;
    Ok(Experts { router: Router::softmax(chosen, renormalize), aux_coefficient, ..plain })
}

/// Reads the number of experts, by the first of `names` that config.json has.
pub(super) fn expert_count(keys: &ConfigReader<'_>, names: &[&str], default: usize) -> Result<usize> {
    let key = names.iter().find(|name| keys.get(name).is_some());
    Ok(key.map(|name| keys.size(name, MOST_EXPERTS)).transpose()?.unwrap_or(default))
}

/// Reads the number of experts of a token out of `count`, by the first of `names` that config.json
/// has.
pub(super) fn chosen_experts(
    keys: &ConfigReader<'_>,
    names: &[&str],
    count: usize,
    default: usize,
) -> Result<usize> {
    let (most, key) = (count.min(MOST_CHOSEN), names.iter().find(|name| keys.get(name).is_some()));
    let Some(name) = key else {
        let missing = || {
            Error::user(format!("`{}` is missing", names[0]))
                .because(format!("its default {default} is above the accepted 1 to {most}"))
        };
        return if default <= most { Ok(default) } else { Err(missing()) };
    };
    match size_of_layers(keys, name)?.unwrap_or(default) {
        chosen if (1..=most).contains(&chosen) => Ok(chosen),
        other => Err(refused(name, other, &format!("1 to {most}"))),
    }
}

/// Reads a number, or a list with the same number for each layer.
pub(super) fn size_of_layers(keys: &ConfigReader<'_>, key: &str) -> Result<Option<usize>> {
    let Some(list) = keys.get(key).and_then(Value::as_array) else { return keys.opt_usize(key) };
    let same = list.first().filter(|first| list.iter().all(|one| one == *first)).and_then(Value::as_u64);
    let same = same.and_then(|size| usize::try_from(size).ok());
    let values = || list.iter().map(Value::to_string).collect::<Vec<_>>().join(", ");
    same.map(Some).ok_or_else(|| refused(key, format!("[{}]", values()), "one number for all layers"))
}

/// Returns as many experts as the first of `sizes`, of which a softmax chooses as many as the
/// second; their weights sum to 1, and no loss balances them.
pub(super) fn plain_experts(
    keys: &ConfigReader<'_>,
    [count, chosen]: [usize; 2],
    width: usize,
) -> Result<Experts> {
    Ok(Experts {
        count,
        router: Router::softmax(chosen, true),
        has_bias: false,
        has_f32_logits: false,
        layer_biases: false,
        width,
        activation: activation(keys)?,
        has_one_gate_up: false,
        weighs_inputs: false,
        aux_coefficient: 0.0,
        shared: None,
    })
}

/// Refuses heads that do not fill the hidden states, in a family that has no key for their width.
pub(super) fn refuse_other_heads(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<()> {
    let Heads { num_heads, head_dim, .. } = sizes.heads;
    if num_heads * head_dim == sizes.hidden_size {
        return Ok(());
    }
    if keys.get("head_dim").is_some() {
        let accepted = format!("{} / num_attention_heads {num_heads}, no such key", sizes.hidden_size);
        return Err(refused("head_dim", head_dim, &accepted));
    }
    Err(refused("num_attention_heads", num_heads, &format!("a divisor of hidden_size {}", sizes.hidden_size)))
}

/// Returns for each layer whether it has experts: those of `decoder_sparse_step` that
/// `mlp_only_layers` does not list.
pub(super) fn sparse_layers(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Vec<bool>> {
    let step = keys.opt_size("decoder_sparse_step", 1 << 16)?.unwrap_or(1);
    let mut sparse: Vec<bool> = (1..=sizes.num_layers).map(|layer| layer.is_multiple_of(step)).collect();
    if let Some(dense) = listed_layers(keys, "mlp_only_layers", sizes.num_layers)? {
        sparse.iter_mut().zip(dense).for_each(|(sparse, dense)| *sparse &= !dense);
    }
    Ok(sparse)
}

/// Returns for each of `count` layers whether the list `key` has its number, if there is a list.
/// Numbers of further layers count as little as in transformers.
pub(super) fn listed_layers(keys: &ConfigReader<'_>, key: &str, count: usize) -> Result<Option<Vec<bool>>> {
    let Some(numbers) = keys.opt_list(key)? else { return Ok(None) };
    let mut listed = vec![false; count];
    for number in numbers {
        let layer = number.as_u64().ok_or_else(|| refused(key, number, "numbers of layers, from 0 on"))?;
        if let Some(listed) = usize::try_from(layer).ok().and_then(|layer| listed.get_mut(layer)) {
            *listed = true;
        }
    }
    Ok(Some(listed))
}

/// Reads the RMS norm whose gain is the stored weight.
pub(super) fn rms_norm(keys: &ConfigReader<'_>) -> Result<NormKind> {
    Ok(NormKind { eps: epsilon(keys, "rms_norm_eps", 1e-6)?, unit_offset: false })
}

pub(super) fn epsilon(keys: &ConfigReader<'_>, key: &str, default: f64) -> Result<f64> {
    match keys.f64_or(key, default)? {
        eps if (0.0..1.0).contains(&eps) => Ok(eps),
        other => Err(refused(key, other, "from 0 to below 1")),
    }
}

/// Makes the norms of hidden states layer norms, with the epsilon of `key`.
pub(super) fn with_layer_norms(
    keys: &ConfigReader<'_>,
    composition: Composition,
    key: &str,
    bias: bool,
) -> Result<Composition> {
    let norm = NormKind { eps: epsilon(keys, key, 1e-5)?, ..composition.norm };
    Ok(Composition { norm, hidden_norm: HiddenNorm::Layer { bias }, ..composition })
}

/// Reads the only rope of a model; it rotates the first part of each head, by default `partial`.
pub(super) fn partial_rope(keys: &ConfigReader<'_>, sizes: &ModelSizes, partial: f64) -> Result<Rope> {
    let partial = keys.f64_or("partial_rotary_factor", partial)?;
    rope(keys, &RopeContext { partial, ..rope_context(keys, sizes, 1e4)? })
}

/// Sets the epsilon of the norms to the family's default, unless config.json has the key.
pub(super) fn with_eps(keys: &ConfigReader<'_>, composition: Composition, eps: f64) -> Result<Composition> {
    let eps = if keys.mentions("rms_norm_eps") { composition.norm.eps } else { eps };
    Ok(Composition { norm: NormKind { eps, ..composition.norm }, ..composition })
}

pub(super) fn activation(keys: &ConfigReader<'_>) -> Result<Activation> {
    activation_of(keys, "hidden_act", "silu")
}

/// Reads the activation `key`; `default` is the family's.
pub(super) fn activation_of(keys: &ConfigReader<'_>, key: &str, default: &str) -> Result<Activation> {
    match keys.opt_str(key)?.unwrap_or(default) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        other => Err(refused(key, format!("\"{other}\""), "silu, gelu_pytorch_tanh")),
    }
}

/// Reads the cap `key`: the family's default if absent, none if null.
pub(super) fn softcap(keys: &ConfigReader<'_>, key: &str, default: Option<f64>) -> Result<Option<f64>> {
    if keys.mentions(key) { keys.above_zero(key) } else { Ok(default) }
}

/// Reads the width of the sliding window: the family's default if absent, none if null.
pub(super) fn window(keys: &ConfigReader<'_>, default: Option<usize>) -> Result<Option<usize>> {
    let window = if keys.mentions("sliding_window") { keys.opt_usize("sliding_window")? } else { default };
    if window == Some(0) {
        return Err(refused("sliding_window", 0, "a whole number above 0, or null for full attention"));
    }
    Ok(window)
}

/// Returns for each layer whether its attention slides, by `layer_types` or else by `default` of
/// its index.
pub(super) fn sliding_layers(
    keys: &ConfigReader<'_>,
    sizes: &ModelSizes,
    default: impl Fn(usize) -> bool,
) -> Result<Vec<bool>> {
    let kinds = ["full_attention", "sliding_attention"];
    let kinds = layer_kinds(keys, sizes, "layer_types", kinds, |layer| usize::from(default(layer)))?;
    Ok(kinds.into_iter().map(|kind| kind == 1).collect())
}

/// Returns for each layer the position of its kind in `kinds`, by the list `key` or else by
/// `default` of its index.
pub(super) fn layer_kinds(
    keys: &ConfigReader<'_>,
    sizes: &ModelSizes,
    key: &str,
    kinds: [&str; 2],
    default: impl Fn(usize) -> usize,
) -> Result<Vec<usize>> {
    let count = sizes.num_layers;
    let Some(named) = keys.opt_list(key)? else { return Ok((0..count).map(default).collect()) };
    if named.len() != count {
        return Err(Error::user(format!("`{key}` has {} entries", named.len()))
            .because(format!("num_hidden_layers is {count}")));
    }
    let kind = |name: &Value| {
        let index = kinds.iter().position(|kind| name.as_str() == Some(kind));
        index.ok_or_else(|| {
            Error::user(format!("`{key}` names {name}")).because(format!("accepted: {}", kinds.join(", ")))
        })
    };
    named.iter().map(kind).collect()
}

/// Reads the settings of a rope outside `rope_scaling`; `theta` is the family's default.
pub(super) fn rope_context(keys: &ConfigReader<'_>, sizes: &ModelSizes, theta: f64) -> Result<RopeContext> {
    Ok(RopeContext {
        head_dim: sizes.heads.head_dim,
        theta: keys.f64_or("rope_theta", theta)?,
        partial: keys.f64_or("partial_rotary_factor", 1.0)?,
        max_positions: sizes.max_position_embeddings,
        original_max_positions: keys.opt_usize("original_max_position_embeddings")?,
    })
}

/// Reads the scaling object of a rope: `rope_parameters` of transformers 5, or `rope_scaling` of
/// older ones.
pub(super) fn rope_scaling<'a>(keys: &ConfigReader<'a>) -> Result<Option<ConfigReader<'a>>> {
    match keys.opt_keys("rope_parameters")? {
        Some(parameters) => Ok(Some(parameters)),
        None => keys.opt_keys("rope_scaling"),
    }
}

/// Reads the only rope of a model, with Llama's default of theta.
pub(super) fn plain_rope(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Rope> {
    rope(keys, &rope_context(keys, sizes, 1e4)?)
}

/// Reads the only rope of a model.
pub(super) fn rope(keys: &ConfigReader<'_>, context: &RopeContext) -> Result<Rope> {
    Rope::read(rope_scaling(keys)?.as_ref(), context)
}

/// Reads the ropes of full and of sliding attention.
pub(super) fn ropes_by_layer_type(
    keys: &ConfigReader<'_>,
    full: &RopeContext,
    sliding: &RopeContext,
) -> Result<Vec<Rope>> {
    let scaling = rope_scaling(keys)?;
    // transformers 5 nests one object per layer type; in older files `rope_scaling` is for full
    // attention only.
    if let Some(nested) = &scaling {
        let (of_full, of_sliding) =
            (nested.opt_keys("full_attention")?, nested.opt_keys("sliding_attention")?);
        if of_full.is_some() || of_sliding.is_some() {
            return Ok(vec![Rope::read(of_full.as_ref(), full)?, Rope::read(of_sliding.as_ref(), sliding)?]);
        }
    }
    Ok(vec![Rope::read(scaling.as_ref(), full)?, Rope::read(None, sliding)?])
}

/// Returns the name of a module in Llama's checkpoints, which most families share.
#[expect(clippy::too_many_lines, reason = "a table with a line for each part")]
pub(super) fn llama_name(part: BlockPart) -> &'static str {
    use BlockPart as P;
    match part {
        BlockPart::QProj => "self_attn.q_proj",
        BlockPart::KProj => "self_attn.k_proj",
        BlockPart::VProj => "self_attn.v_proj",
        BlockPart::QkvProj => "self_attn.qkv_proj",
        BlockPart::OProj => "self_attn.o_proj",
        BlockPart::LatentQ => "self_attn.q_a_proj",
        BlockPart::LatentKv => "self_attn.kv_a_proj_with_mqa",
        BlockPart::LatentQUp => "self_attn.q_b_proj",
        BlockPart::LatentKvUp => "self_attn.kv_b_proj",
        BlockPart::LatentQNorm => "self_attn.q_a_layernorm",
        BlockPart::LatentKvNorm => "self_attn.kv_a_layernorm",
        BlockPart::QNorm => "self_attn.q_norm",
        BlockPart::KNorm => "self_attn.k_norm",
        BlockPart::Sinks => "self_attn.sinks",
        BlockPart::GateProj => "mlp.gate_proj",
        BlockPart::UpProj => "mlp.up_proj",
        BlockPart::GateUpProj => "mlp.gate_up_proj",
        BlockPart::DownProj => "mlp.down_proj",
        BlockPart::Router => "mlp.gate",
        BlockPart::RouterBias => "mlp.gate.e_score_correction_bias",
        BlockPart::ExpertGate(_) => "mlp.experts.{}.gate_proj",
        BlockPart::ExpertUp(_) => "mlp.experts.{}.up_proj",
        BlockPart::ExpertGateUp(_) => "mlp.experts.{}.gate_up_proj",
        BlockPart::ExpertDown(_) => "mlp.experts.{}.down_proj",
        BlockPart::ExpertGateUpBias => "mlp.experts.gate_up_proj_bias",
        BlockPart::ExpertDownBias => "mlp.experts.down_proj_bias",
        BlockPart::SharedGate => "mlp.shared_expert.gate_proj",
        BlockPart::SharedUp => "mlp.shared_expert.up_proj",
        BlockPart::SharedDown => "mlp.shared_expert.down_proj",
        BlockPart::SharedFactor => "mlp.shared_expert_gate",
        BlockPart::DeltaQkv => "linear_attn.in_proj_qkv",
        BlockPart::DeltaZ => "linear_attn.in_proj_z",
        BlockPart::DeltaB => "linear_attn.in_proj_b",
        BlockPart::DeltaA => "linear_attn.in_proj_a",
        BlockPart::DeltaQkvz => "linear_attn.in_proj_qkvz",
        BlockPart::DeltaBa => "linear_attn.in_proj_ba",
        BlockPart::DeltaOut => "linear_attn.out_proj",
        BlockPart::DeltaConv => "linear_attn.conv1d",
        BlockPart::DeltaRate => "linear_attn.A_log",
        BlockPart::DeltaStep => "linear_attn.dt_bias",
        BlockPart::DeltaNorm => "linear_attn.norm",
        BlockPart::XieluPositive => "mlp.act_fn.alpha_p",
        BlockPart::XieluNegative => "mlp.act_fn.alpha_n",
        BlockPart::XieluBeta => "mlp.act_fn.beta",
        BlockPart::XieluEps => "mlp.act_fn.eps",
        BlockPart::ConvIn => "conv.in_proj",
        BlockPart::ConvTaps => "conv.conv",
        BlockPart::ConvOut => "conv.out_proj",
        BlockPart::AttnNorm | BlockPart::ParallelAttnNorm => "input_layernorm",
        // The second norm of a block has this name in all of its roles.
        P::AttnPostNorm | P::MlpNorm | P::ParallelMlpNorm => "post_attention_layernorm",
        BlockPart::MlpPostNorm => "post_feedforward_layernorm",
        BlockPart::MlpOutNorm => "post_feedforward_layernorm_1",
        BlockPart::ExpertsNorm => "pre_feedforward_layernorm_2",
        BlockPart::ExpertsOutNorm => "post_feedforward_layernorm_2",
        BlockPart::RouterScale => "router.scale",
        BlockPart::ExpertFactors => "router.per_expert_scale",
        BlockPart::OutputFactor => "layer_scalar",
        BlockPart::PerLayerGate => "per_layer_input_gate",
        BlockPart::PerLayerProjection => "per_layer_projection",
        BlockPart::PerLayerNorm => "post_per_layer_input_norm",
        BlockPart::PerLayerModel => "per_layer_model_projection",
        BlockPart::PerLayerModelNorm => "per_layer_projection_norm",
        BlockPart::AltUpRouter => "altup.modality_router",
        BlockPart::AltUpRouterNorm => "altup.router_norm",
        BlockPart::AltUpPrediction => "altup.prediction_coefs",
        BlockPart::AltUpCorrection => "altup.correction_coefs",
        BlockPart::AltUpOutputScale => "altup.correct_output_scale",
        BlockPart::LaurelLeft => "laurel.linear_left",
        BlockPart::LaurelRight => "laurel.linear_right",
        BlockPart::LaurelNorm => "laurel.post_laurel_norm",
        BlockPart::StreamProjection(_) => "altup_projections.{}",
        BlockPart::StreamUnprojection(_) => "altup_unembed_projections.{}",
    }
}
