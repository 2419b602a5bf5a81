//! The keys of a model's mixers: heads, latents, recurrences and experts.
//!
//! Key names are from gguf-py/gguf/constants.py; src/models/*.cpp has the keys that each
//! architecture reads, and its fixed choices.

use super::description::{count, refused};
use super::writer::{GgufMetadata, MetadataValue};
use crate::error::Result;
use crate::model::{
    DeltaMixer, Experts, GgufExperts, HiddenNorm, LatentMixer, ModelConfig, ResidualPlan, TokenMixer,
};
use crate::ops::experts::RouterScores;

/// llama.cpp's numbers of the functions of a router's logits.
pub(super) const SOFTMAX: u32 = 1;
pub(super) const SIGMOID: u32 = 2;

/// Sets the keys of heads, norms and recurrences.
///
/// # Errors
/// User: llama.cpp cannot compute them.
pub(super) fn describe(config: &ModelConfig, arch: &str, metadata: &mut GgufMetadata) -> Result<()> {
    let latent = config.blocks.iter().find_map(|block| match block.token_mixer {
        TokenMixer::Latent(mixer) => Some(mixer),
        _ => None,
    });
    match latent {
        Some(mixer) => latents(config, &mixer, arch, metadata)?,
        None => heads(config, arch, metadata)?,
    }
    let is_rms = config.hidden_norm == HiddenNorm::Rms;
    let eps = if is_rms { "layer_norm_rms_epsilon" } else { "layer_norm_epsilon" };
    metadata.set(format!("{arch}.attention.{eps}"), MetadataValue::F32(config.norm.eps as f32));
    if config.family.gguf.names_parallel {
        let is_parallel = config.blocks.iter().all(|block| block.residual.is_parallel());
        metadata.set(format!("{arch}.use_parallel_residual"), MetadataValue::Bool(is_parallel));
    }
    let conv = config.blocks.iter().find_map(|block| match block.token_mixer {
        TokenMixer::ShortConv(mixer) => Some(mixer),
        _ => None,
    });
    if let Some(conv) = conv {
        if conv.bias {
            return Err(refused(
                "its convolutions have biases (`conv_bias`), which llama.cpp does not read".into(),
            ));
        }
        set(arch, metadata, &[("shortconv.l_cache", conv.kernel)])?;
    }
    match config.gated_deltas().next() {
        Some(mixer) => delta(config, mixer, arch, metadata),
        None => Ok(()),
    }
}

/// Sets sizes by their keys after `arch`.
fn set(arch: &str, metadata: &mut GgufMetadata, sizes: &[(&str, usize)]) -> Result<()> {
    for (key, size) in sizes {
        metadata.set(format!("{arch}.{key}"), count(key, *size)?);
    }
    Ok(())
}

/// Sets the counts and widths of heads. In some models layers with a window have others.
fn heads(config: &ModelConfig, arch: &str, metadata: &mut GgufMetadata) -> Result<()> {
    let own = config.family.gguf.own_heads;
    let of = |slides: bool| config.attentions().find(|mixer| mixer.window.is_some() == slides);
    let full = of(false).filter(|_| own).map_or(config.heads, |mixer| mixer.heads);
    set(arch, metadata, &[("attention.head_count", full.num_heads)])?;
    // A layer without key heads is a convolution.
    let key_heads = |mixer: &TokenMixer| mixer.attention().map_or(0, |mixer| mixer.heads.num_kv_heads as i32);
    if own || config.family.gguf.has_short_convs {
        let counts = config.blocks.iter().map(|block| key_heads(&block.token_mixer)).collect();
        metadata.set(format!("{arch}.attention.head_count_kv"), MetadataValue::I32s(counts));
    } else {
        set(arch, metadata, &[("attention.head_count_kv", full.num_kv_heads)])?;
    }
    let width = full.head_dim;
    set(arch, metadata, &[("attention.key_length", width), ("attention.value_length", width)])?;
    if !own {
        return Ok(());
    }
    let sliding = of(true).map_or(full, |mixer| mixer.heads).head_dim;
    let shared = config.attentions().filter(|mixer| mixer.reads_from().is_some()).count();
    set(
        arch,
        metadata,
        &[
            ("attention.key_length_swa", sliding),
            ("attention.value_length_swa", sliding),
            ("attention.shared_kv_layers", shared),
            ("embedding_length_per_layer_input", config.per_layer_width(1)),
        ],
    )
}

/// Sets the keys of latent attention, which llama.cpp computes as if all heads shared one key: the
/// latent beside the rotated columns.
fn latents(config: &ModelConfig, mixer: &LatentMixer, arch: &str, metadata: &mut GgufMetadata) -> Result<()> {
    let layers = config.num_layers();
    let is_lite = [26, 27].contains(&layers) || layers == 48 && config.vocab_size == 128_256;
    if is_lite && mixer.q_rank.is_some() {
        return Err(refused(format!(
            "it has `q_lora_rank` and {layers} layers; llama.cpp's {arch} takes a model of so many layers for one without"
        )));
    }
    let key = mixer.plain + mixer.rotated;
    set(
        arch,
        metadata,
        &[
            ("attention.head_count", mixer.attention.heads.num_heads),
            ("attention.head_count_kv", 1),
            ("attention.key_length", mixer.kv_rank + mixer.rotated),
            ("attention.value_length", mixer.kv_rank),
            ("attention.key_length_mla", key),
            ("attention.value_length_mla", mixer.value),
            ("attention.q_lora_rank", mixer.q_rank.unwrap_or(0)),
            ("attention.kv_lora_rank", mixer.kv_rank),
        ],
    )
}

/// Sets the keys of Gated DeltaNet.
fn delta(config: &ModelConfig, mixer: &DeltaMixer, arch: &str, metadata: &mut GgufMetadata) -> Result<()> {
    let heads = mixer.heads;
    if heads.key_dim != heads.value_dim {
        return Err(refused(format!(
            "its linear attention has keys of {} and values of {} columns; accepted: equal widths",
            heads.key_dim, heads.value_dim
        )));
    }
    set(
        arch,
        metadata,
        &[
            ("ssm.conv_kernel", mixer.conv_kernel),
            ("ssm.state_size", heads.key_dim),
            ("ssm.group_count", heads.num_key_heads),
            ("ssm.time_step_rank", heads.num_value_heads),
            ("ssm.inner_size", heads.value_width()),
        ],
    )?;
    let recurs: Vec<bool> =
        config.blocks.iter().map(|block| block.token_mixer.attention().is_none()).collect();
    let period = recurs.iter().position(|recurs| !recurs).map_or(recurs.len() + 1, |full| full + 1);
    let is_periodic = recurs.iter().enumerate().all(|(i, recurs)| *recurs != (i + 1).is_multiple_of(period));
    if is_periodic {
        set(arch, metadata, &[("full_attention_interval", period)])?;
    } else {
        metadata.set(format!("{arch}.attention.recurrent_layers"), MetadataValue::Bools(recurs));
    }
    if config.family.gguf.delta.is_some_and(|delta| delta.has_sections) {
        // Pairs take three axes in turns. Text has the same position on each of these, and 0 on the
        // fourth, which a pair beyond its axis would take.
        let pairs = config.ropes.first().map_or(0, |rope| rope.inv_freq.len()) as i32;
        let sections = vec![(pairs + 2) / 3, (pairs + 1) / 3, pairs / 3, 0];
        metadata.set(format!("{arch}.rope.dimension_sections"), MetadataValue::I32s(sections));
    }
    Ok(())
}

/// Sets the keys of experts.
///
/// # Errors
/// User: a size does not fit into 32 bits.
pub(super) fn experts(config: &ModelConfig, arch: &str, metadata: &mut GgufMetadata) -> Result<()> {
    let Some((experts, facts)) = config.experts().next().zip(config.family.gguf.experts) else {
        return Ok(());
    };
    let shared = experts.shared.map_or(0, |shared| shared.width);
    let dense = config.blocks.iter().take_while(|block| block.channel_mixer.experts().is_none()).count();
    let step = if facts.has_dense_layers { 1 } else { dense + 1 };
    let sizes = [
        ("expert_count", Some(experts.count)),
        ("expert_used_count", Some(experts.router.chosen)),
        ("expert_feed_forward_length", Some(experts.width).filter(|_| facts.has_width)),
        (
            "expert_shared_feed_forward_length",
            experts.shared.map(|shared| shared.width).filter(|_| !facts.has_shared_count),
        ),
        ("expert_shared_count", facts.has_shared_count.then_some(shared / experts.width.max(1))),
        ("leading_dense_block_count", facts.has_dense_layers.then_some(dense)),
        ("interleave_moe_layer_step", facts.has_step.then_some(step)),
        ("expert_group_count", experts.router.groups.map(|groups| groups.count)),
        ("expert_group_used_count", experts.router.groups.map(|groups| groups.chosen)),
    ];
    let sizes: Vec<(&str, usize)> =
        sizes.into_iter().filter_map(|(key, size)| size.map(|size| (key, size))).collect();
    set(arch, metadata, &sizes)?;
    if facts.renormalizes.is_none() {
        let flag = MetadataValue::Bool(experts.router.renormalize);
        metadata.set(format!("{arch}.expert_weights_norm"), flag);
    }
    if facts.has_scores {
        let function = if experts.router.scores == RouterScores::Sigmoid { SIGMOID } else { SOFTMAX };
        metadata.set(format!("{arch}.expert_gating_func"), MetadataValue::U32(function));
        metadata.set(format!("{arch}.expert_weights_scale"), MetadataValue::F32(experts.router.factor));
    }
    Ok(())
}

/// Returns the difference of a model's mixers from those of its architecture in llama.cpp.
pub(super) fn fault(config: &ModelConfig) -> Option<String> {
    let facts = &config.family.gguf;
    if facts.always_parallel && config.blocks.iter().any(|block| block.residual == ResidualPlan::PreNorm) {
        return Some("mixers one after the other".to_owned());
    }
    if facts.needs_biases && config.attentions().any(|attention| !attention.o_bias) {
        return Some("no bias in o_proj".to_owned());
    }
    sharing_fault(config).or_else(|| norms_fault(config)).or_else(|| experts_fault(config))
}

/// Returns the sharing of keys and values that llama.cpp does not have: layers that read those of
/// others read the last two before them, a sliding layer the first.
fn sharing_fault(config: &ModelConfig) -> Option<String> {
    let all = || config.attentions().enumerate();
    let first = all().find_map(|(layer, attention)| attention.reads_from().map(|_| layer))?;
    // llama.cpp stops at an assertion.
    if first < 2 {
        return Some(format!(
            "layer {first} without keys and values of its own, after less than two layers with some"
        ));
    }
    let wrong = all().find(|(_, attention)| {
        let wanted = first.checked_sub(if attention.window.is_some() { 2 } else { 1 });
        attention.reads_from().is_some_and(|owner| Some(owner) != wanted)
    });
    let owner = wrong.and_then(|(layer, attention)| Some((layer, attention.reads_from()?)));
    owner.map(|(layer, owner)| format!("keys and values of layer {owner} in layer {layer}"))
}

/// Returns the norms of q and k that differ from those by the number of experts.
fn norms_fault(config: &ModelConfig) -> Option<String> {
    let (at, count) = (config.family.gguf.unnormed_at?, config.experts().next()?.count);
    let mut rotated = config.attentions().filter(|attention| config.ropes[attention.rope].has_positions());
    let is_other = rotated.any(|attention| attention.qk_norm.is_some() == (count == at));
    is_other.then(|| format!("`use_qk_norm` {} with {count} experts", count == at))
}

fn experts_fault(config: &ModelConfig) -> Option<String> {
    let facts = config.family.gguf.experts?;
    let has: Vec<bool> = config.blocks.iter().map(|block| block.channel_mixer.experts().is_some()).collect();
    let Some(first) = has.iter().position(|has| *has) else {
        return (!facts.has_mlp).then(|| "layers without experts".to_owned());
    };
    let wanted = |layer: usize| match facts {
        GgufExperts { has_dense_layers: true, .. } => layer >= first,
        GgufExperts { has_step: true, .. } => (layer + 1).is_multiple_of(first + 1),
        _ => true,
    };
    if has.iter().enumerate().any(|(layer, has)| *has != wanted(layer)) {
        return Some("layers without experts".to_owned());
    }
    let experts: &Experts = config.experts().next()?;
    let router = &experts.router;
    if experts.activation != config.family.gguf.activation {
        return Some(format!("the activation {:?}", experts.activation));
    }
    if facts.renormalizes.is_some_and(|renormalizes| renormalizes != router.renormalize) {
        return Some(format!("`norm_topk_prob` {}", router.renormalize));
    }
    if facts.needs_bias && !experts.has_bias {
        return Some("no bias in the choice of experts".to_owned());
    }
    let is_other = !facts.has_scores && router.scores != facts.scores;
    (is_other || !facts.reads_factor && router.factor != 1.0)
        .then(|| format!("scores by {:?} with a factor of {}", router.scores, router.factor))
}
