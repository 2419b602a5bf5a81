//! The settings of heads, latents, recurrences and experts from the keys: the reverse of `mixers`
//! above.

use serde_json::{Map, Value, json};

use super::super::mixers::{SIGMOID, SOFTMAX};
use super::keys::{ArchKeys, is_set};
use crate::error::Result;
use crate::model::Architecture;
use crate::ops::activation::PlainActivation;
use crate::ops::experts::RouterScores;
use crate::ops::glu::Activation;
use crate::weights::{GgufFile, GgufTensor, GgufValue};

/// The settings of heads, and the columns of a head that a rope counts.
pub(super) struct HeadSettings {
    pub(super) json: Map<String, Value>,
    pub(super) head_dim: usize,
}

/// Reads the counts and widths of heads; `layers` is the number of blocks.
///
/// # Errors
/// User: a key is missing or mistyped, or has a value that finetune does not compute.
pub(super) fn heads(keys: &ArchKeys<'_>, family: &Architecture, layers: usize) -> Result<HeadSettings> {
    let facts = &family.gguf;
    let count = keys.required("attention.head_count")?;
    let hidden = keys.required("embedding_length")?;
    let mut json = Map::new();
    json.insert("num_attention_heads".to_owned(), count.into());
    if facts.has_latents {
        return latents(keys, json, count);
    }
    let head_dim = keys.size("attention.key_length")?.unwrap_or(hidden / count.max(1));
    let value_length = keys.size("attention.value_length")?.unwrap_or(head_dim);
    if value_length != head_dim {
        let cause = format!("its heads have keys of {head_dim} and values of {value_length} columns");
        return Err(keys.file.refused(format!("{cause}; accepted: equal widths")));
    }
    if facts.own_heads {
        return own_heads(keys, json, head_dim, layers);
    }
    if facts.has_short_convs {
        return convolutions(keys, json, head_dim, layers);
    }
    let of_keys = keys.size("attention.head_count_kv")?.unwrap_or(count);
    json.insert("num_key_value_heads".to_owned(), of_keys.into());
    json.insert("num_kv_heads".to_owned(), of_keys.into());
    json.insert("head_dim".to_owned(), head_dim.into());
    Ok(HeadSettings { json, head_dim })
}

/// Returns a size.
fn size(value: &GgufValue) -> Option<usize> {
    match value {
        GgufValue::Integer(number) => usize::try_from(*number).ok(),
        _ => None,
    }
}

/// Returns the number of key heads of each layer.
fn key_heads(keys: &ArchKeys<'_>, layers: usize) -> Result<Vec<usize>> {
    let value = keys.get("attention.head_count_kv");
    let counts = match value {
        Some(GgufValue::List(_)) => keys.of_layers(value, layers, size)?,
        other => other.and_then(size).map(|count| vec![count; layers]),
    };
    counts.ok_or_else(|| {
        let actual = value.cloned().unwrap_or(GgufValue::Integer(0));
        keys.refused("attention.head_count_kv", &actual, "a number for each layer")
    })
}

/// Reads the layers that have attention, and the convolution of the others.
fn convolutions(
    keys: &ArchKeys<'_>,
    mut json: Map<String, Value>,
    head_dim: usize,
    layers: usize,
) -> Result<HeadSettings> {
    let counts = key_heads(keys, layers)?;
    let kind = |count: &usize| if *count == 0 { "conv" } else { "full_attention" };
    let kernel = keys.required("shortconv.l_cache")?;
    for (key, value) in [
        // Layers with other numbers of heads are refused with the keys of the composed model.
        ("num_key_value_heads", json!(counts.iter().max().filter(|most| **most > 0))),
        ("layer_types", counts.iter().map(kind).collect()),
        ("conv_L_cache", kernel.into()),
        ("block_auto_adjust_ff_dim", false.into()),
    ] {
        json.insert(key.to_owned(), value);
    }
    Ok(HeadSettings { json, head_dim })
}

/// Reads the inner width of MLPs. Where blocks read keys of others, it may be twice as wide.
///
/// # Errors
/// User: the key is mistyped, or a list of it is not one of the `layers` blocks.
pub(super) fn inner_widths(
    keys: &ArchKeys<'_>,
    family: &Architecture,
    layers: usize,
) -> Result<Map<String, Value>> {
    let key = "feed_forward_length";
    let mut json = Map::new();
    let (width, differ) = match keys.get(key) {
        Some(list @ GgufValue::List(_)) if family.gguf.own_heads => {
            let widths = keys.of_layers(Some(list), layers, size)?;
            let accepted = || format!("a number, or one for each of the {layers} layers");
            let widths = widths.ok_or_else(|| keys.refused(key, list, &accepted()))?;
            (widths.first().copied(), widths.iter().any(|width| *width != widths[0]))
        }
        _ => (keys.size(key)?, false),
    };
    json.extend(width.map(|width| (family.intermediate_size.to_owned(), width.into())));
    if family.gguf.own_heads {
        json.insert("use_double_wide_mlp".to_owned(), differ.into());
    }
    Ok(json)
}

/// Reads the heads of layers with a window and of the others.
fn own_heads(
    keys: &ArchKeys<'_>,
    mut json: Map<String, Value>,
    full: usize,
    layers: usize,
) -> Result<HeadSettings> {
    let sliding = keys.size("attention.key_length_swa")?.unwrap_or(full);
    let slides = flags(keys, "attention.sliding_window_pattern", layers)?;
    let counts = key_heads(keys, layers)?;
    let of = |kind: bool| {
        let mut counts_of_kind = slides.iter().zip(&counts).filter(|(slides, _)| **slides == kind);
        counts_of_kind.next().map(|(_, count)| *count)
    };
    let readers = keys.size("attention.shared_kv_layers")?.unwrap_or(0);
    let inputs = keys.size("embedding_length_per_layer_input")?.unwrap_or(0);
    let rows = keys.file.tensor("token_embd.weight").and_then(|table| table.shape.first());
    // The values of full attention, of which the last layers may have none of their own.
    let last = slides.iter().take(layers.saturating_sub(readers)).rposition(|slides| !slides);
    let shares = last.is_some_and(|layer| keys.file.tensor(&format!("blk.{layer}.attn_v.weight")).is_none());
    let count = of(true).or(of(false));
    for (key, value) in [
        ("head_dim", sliding.into()),
        ("global_head_dim", full.into()),
        ("num_key_value_heads", json!(count)),
        ("num_global_key_value_heads", json!(of(false))),
        ("attention_k_eq_v", shares.into()),
        ("hidden_size_per_layer_input", inputs.into()),
        ("vocab_size_per_layer_input", json!(rows)),
        ("num_kv_shared_layers", readers.into()),
    ] {
        json.insert(key.to_owned(), value);
    }
    Ok(HeadSettings { json, head_dim: full })
}

/// Reads the widths of latent attention.
fn latents(keys: &ArchKeys<'_>, mut json: Map<String, Value>, count: usize) -> Result<HeadSettings> {
    let rotated = keys.required("rope.dimension_count")?;
    let key = keys.size("attention.key_length_mla")?;
    let Some(plain) = key.and_then(|key| key.checked_sub(rotated)).filter(|plain| *plain > 0) else {
        return Err(keys.file.refused(format!(
            "its key `{}.attention.key_length_mla` is {key:?}; accepted: above `rope.dimension_count`, {rotated}",
            keys.arch
        )));
    };
    let rank = keys.size("attention.q_lora_rank")?.filter(|rank| *rank > 0);
    for (key, value) in [
        ("num_key_value_heads", json!(count)),
        ("qk_nope_head_dim", plain.into()),
        ("qk_rope_head_dim", rotated.into()),
        ("v_head_dim", keys.required("attention.value_length_mla")?.into()),
        ("kv_lora_rank", keys.required("attention.kv_lora_rank")?.into()),
        ("q_lora_rank", json!(rank)),
        ("rope_interleave", true.into()),
    ] {
        json.insert(key.to_owned(), value);
    }
    Ok(HeadSettings { json, head_dim: rotated })
}

/// Reads the settings of norms, activations, mixers in parallel and recurrences.
///
/// # Errors
/// User: a key is missing or mistyped.
pub(super) fn others(
    keys: &ArchKeys<'_>,
    family: &Architecture,
    layers: usize,
) -> Result<Map<String, Value>> {
    let (facts, file) = (&family.gguf, keys.file);
    let mut json = Map::new();
    let mut set = |key: &str, value: Value| json.insert(key.to_owned(), value);
    let act = match (facts.plain_activations.first(), facts.activation) {
        _ if facts.has_xielu => "xielu",
        (Some(PlainActivation::Relu2), _) => "relu2",
        (Some(PlainActivation::Gelu), _) => "gelu",
        (Some(_), _) | (None, Activation::GeluTanh) => "gelu_pytorch_tanh",
        (None, _) => "silu",
    };
    set("hidden_act", act.into());
    set("activation", act.into());
    if facts.activation == Activation::GeluTanh {
        set("hidden_activation", act.into());
    }
    if let Some(eps) = keys.float("attention.layer_norm_rms_epsilon")? {
        set("rms_norm_eps", eps.into());
        set("norm_eps", eps.into());
    }
    if let Some(eps) = keys.float("attention.layer_norm_epsilon")? {
        for key in ["layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"] {
            set(key, eps.into());
        }
    }
    let is_parallel = keys.flag("use_parallel_residual")?.filter(|_| !facts.parallel_by_norm);
    if is_parallel.is_some() || facts.names_parallel {
        let is_parallel = is_parallel.unwrap_or_else(|| !has(file, "ffn_norm.weight"));
        set("use_parallel_residual", is_parallel.into());
    }
    if facts.always_parallel {
        keys.text("tensor_data_layout")?;
        let norms = 1 + usize::from(has(file, "attn_norm_2.weight"));
        set("num_ln_in_parallel_attn", norms.into());
        set("new_decoder_architecture", true.into());
    }
    if facts.unnormed_at.is_none() {
        set("use_qk_norm", has(file, "attn_q_norm.weight").into());
    }
    set("use_qkv_bias", has(file, "attn_q.bias").into());
    if facts.reads_logit_factor {
        // llama.cpp takes 0 for no factor.
        let factor = keys.float("logit_scale")?.filter(|factor| *factor != 0.0);
        set("logit_scale", factor.unwrap_or(1.0).into());
    }
    if facts.delta.is_some() {
        json.extend(delta(keys, layers)?);
    }
    Ok(json)
}

/// Returns whether the first block has this tensor.
fn has(file: &GgufFile, name: &str) -> bool {
    file.tensor(&format!("blk.0.{name}")).is_some()
}

/// Reads a list of flags, one for each layer.
fn flags(keys: &ArchKeys<'_>, key: &str, layers: usize) -> Result<Vec<bool>> {
    let value = keys.get(key);
    keys.of_layers(value, layers, is_set)?.ok_or_else(|| {
        let actual = value.cloned().unwrap_or(GgufValue::Integer(0));
        keys.refused(key, &actual, &format!("true or false for each of the {layers} layers"))
    })
}

fn delta(keys: &ArchKeys<'_>, layers: usize) -> Result<Map<String, Value>> {
    let mut json = Map::new();
    let values = keys.required("ssm.time_step_rank")?;
    let width = keys.required("ssm.state_size")?;
    for (key, value) in [
        ("linear_conv_kernel_dim", keys.required("ssm.conv_kernel")?),
        ("linear_num_key_heads", keys.required("ssm.group_count")?),
        ("linear_num_value_heads", values),
        ("linear_key_head_dim", width),
        ("linear_value_head_dim", width),
    ] {
        json.insert(key.to_owned(), value.into());
    }
    keys.size("ssm.inner_size")?;
    let period = keys.size("full_attention_interval")?.filter(|period| *period > 0).unwrap_or(4);
    let recurs = match keys.get("attention.recurrent_layers") {
        Some(_) => flags(keys, "attention.recurrent_layers", layers)?,
        None => (1..=layers).map(|layer| !layer.is_multiple_of(period)).collect(),
    };
    let kind = |recurs: bool| if recurs { "linear_attention" } else { "full_attention" };
    json.insert("layer_types".to_owned(), recurs.into_iter().map(kind).collect());
    Ok(json)
}

/// Reads numbers, widths and scores of experts.
///
/// # Errors
/// User: a key is missing or mistyped, does not fit the tensors, or has a value that finetune does
/// not compute.
pub(super) fn experts(keys: &ArchKeys<'_>, family: &Architecture) -> Result<Map<String, Value>> {
    let (file, mut json) = (keys.file, Map::new());
    let Some(facts) = family.gguf.experts else { return Ok(json) };
    let mut dense = keys.size("leading_dense_block_count")?.unwrap_or(0);
    if facts.has_step && !facts.has_dense_layers {
        let step = keys.required("interleave_moe_layer_step")?;
        json.insert("interleave_moe_layer_step".to_owned(), step.into());
        dense = step.saturating_sub(1);
    }
    let named = |name: &str| format!("blk.{dense}.{name}.weight");
    let mut set = |key: &str, value: Value| json.insert(key.to_owned(), value);
    let count = keys.size("expert_count")?.filter(|count| *count > 0);
    let Some(count) = count else {
        if facts.has_mlp {
            set("enable_moe_block", false.into());
            return Ok(json);
        }
        return keys.required("expert_count").map(|_| json);
    };
    // Before a model of so many experts is composed.
    let first = named("ffn_down_exps");
    let stored = file.tensor(&first).and_then(|tensor| tensor.shape.first());
    if stored != Some(&count) {
        let stored = stored.map_or_else(|| "is missing".to_owned(), |stored| format!("has {stored}"));
        let cause =
            format!("its key `{}.expert_count` is {count}, and its tensor `{first}` {stored}", keys.arch);
        return Err(file.refused(cause));
    }
    let used = keys.required("expert_used_count")?;
    for key in ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"] {
        set(key, count.into());
    }
    for key in ["num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"] {
        set(key, used.into());
    }
    set("enable_moe_block", facts.has_mlp.into());
    set("decoder_sparse_step", 1.into());
    for key in ["first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"] {
        set(key, dense.into());
    }
    set("use_expert_bias", facts.needs_bias.into());
    if let Some(at) = family.gguf.unnormed_at {
        set("use_qk_norm", (count != at).into());
    }
    json.extend(widths(keys, family, dense)?);
    json.extend(scores(keys, family)?);
    Ok(json)
}

/// Reads the widths of experts from the tensors of block `dense`, the first that has some.
fn widths(keys: &ArchKeys<'_>, family: &Architecture, dense: usize) -> Result<Map<String, Value>> {
    let (file, mut json) = (keys.file, Map::new());
    let named = |name: &str| format!("blk.{dense}.{name}.weight");
    let size = |name: &str, from_last: usize| {
        file.tensor(&named(name)).and_then(|tensor: &GgufTensor| tensor.shape.iter().rev().nth(from_last))
    };
    let mut set = |key: &str, value: Value| json.insert(key.to_owned(), value);
    keys.size("expert_feed_forward_length")?;
    keys.size("expert_shared_feed_forward_length")?;
    keys.size("expert_shared_count")?;
    let inner = size("ffn_down_exps", 0).copied();
    if let Some(width) = inner {
        set("moe_intermediate_size", width.into());
        // Llama 4 has the width of its MLPs under another key.
        if family.intermediate_size != "intermediate_size" {
            set("intermediate_size", width.into());
        }
        if keys.get("feed_forward_length").is_none() {
            set(family.intermediate_size, width.into());
        }
    }
    let shared = size("ffn_up_shexp", 1).copied();
    if let Some(width) = shared {
        set("shared_expert_intermediate_size", width.into());
    }
    let shared = shared.unwrap_or(0) / inner.unwrap_or(1).max(1);
    for key in ["n_shared_experts", "moe_num_shared_experts"] {
        set(key, shared.into());
    }
    Ok(json)
}

/// Reads the settings of a router's scores.
fn scores(keys: &ArchKeys<'_>, family: &Architecture) -> Result<Map<String, Value>> {
    let mut json = Map::new();
    let Some(facts) = family.gguf.experts else { return Ok(json) };
    let mut set = |key: &str, value: Value| json.insert(key.to_owned(), value);
    let groups = keys.size("expert_group_count")?.filter(|count| *count > 1);
    let chosen = keys.size("expert_group_used_count")?.filter(|_| groups.is_some());
    set("n_group", groups.unwrap_or(1).into());
    set("topk_group", chosen.unwrap_or(1).into());
    let flag = keys.flag("expert_weights_norm")?;
    set("norm_topk_prob", facts.renormalizes.or(flag).unwrap_or(false).into());
    // Newer files name what the architecture always does.
    if let Some((flag, always)) = flag.zip(facts.renormalizes).filter(|(flag, always)| flag != always) {
        return Err(keys.refused("expert_weights_norm", &GgufValue::Bool(flag), &always.to_string()));
    }
    let function = keys.size("expert_gating_func")?;
    if !facts.has_scores {
        let (number, named) = match facts.scores {
            RouterScores::Softmax => (SOFTMAX, "a softmax"),
            RouterScores::Sigmoid => (SIGMOID, "a sigmoid"),
        };
        if let Some(other) = function.filter(|function| *function != number as usize) {
            let actual = GgufValue::Integer(other as i64);
            return Err(keys.refused("expert_gating_func", &actual, &format!("{number}, {named}")));
        }
        return Ok(json);
    }
    // llama.cpp takes a file without the key for DeepSeek-V2.
    if function.is_none() && keys.arch == "deepseek2" {
        return Err(keys.file.refused(format!(
            "its key `{}.expert_gating_func` is missing, so its experts are chosen by a softmax; accepted: 2, a sigmoid",
            keys.arch
        )));
    }
    let factor = keys.float("expert_weights_scale")?.filter(|factor| *factor != 0.0).unwrap_or(1.0);
    set("routed_scaling_factor", factor.into());
    Ok(json)
}
