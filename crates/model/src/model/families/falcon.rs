//! Falcon 7B, 40B, 180B and Falcon 2 11B: layer norms, mixers in parallel, queries beside the key
//! and the value that they attend to in one projection, and an MLP without a gate.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::{MOST_HEADS, ModelSizes};
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{AttentionMixer, BlockConfig, FusedQkv, ResidualPlan};
use crate::model::config_reader::{ConfigReader, refused};
use crate::ops::activation::PlainActivation;
use crate::weights::ClassNames;

pub(super) static FALCON: Architecture = Architecture {
    ties_embeddings: true,
    intermediate_size: "ffn_hidden_size",
    default_inner_width: Some(4),
    num_kv_heads: Some(num_kv_heads),
    class_names: &ClassNames::FALCON,
    module_name,
    gguf: GgufFacts {
        plain_activations: &[PlainActivation::Gelu, PlainActivation::GeluTanh],
        heads_fill_hidden: true,
        always_parallel: true,
        parallel_norms: ["attn_norm_2", "attn_norm"],
        ..GgufFacts::usual("falcon")
    },
    ..parts::architecture("falcon", &["falcon"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    parts::refuse_other_heads(keys, sizes)?;
    // transformers 5.24 takes it for the width, whatever `hidden_size` is.
    if let Some(width) = keys.opt_usize("n_embed")?.filter(|width| *width != sizes.hidden_size) {
        return Err(refused(
            "n_embed",
            width,
            &format!("hidden_size, {}, or no such key", sizes.hidden_size),
        ));
    }
    if keys.bool_or("alibi", false)? {
        return Err(refused("alibi", true, "false, null, no such key"));
    }
    let bias = keys.bool_or("bias", false)?;
    let plain = parts::attention(keys, sizes)?;
    let attention =
        AttentionMixer { qkv_bias: bias, o_bias: bias, fused: Some(FusedQkv::ByKeyHead), ..plain };
    let mlp = parts::plain_mlp_by(keys, "activation", "gelu", bias)?;
    let block = BlockConfig { residual: residual_plan(keys)?, ..BlockConfig::pre_norm(attention, mlp) };
    let composition =
        parts::llama_like(keys, vec![block; sizes.num_layers], parts::plain_rope(keys, sizes)?)?;
    parts::with_layer_norms(keys, composition, "layer_norm_epsilon", true)
}

/// Reads the number of key-value heads: in the older architecture one, or as many as heads.
fn num_kv_heads(keys: &ConfigReader<'_>, num_heads: usize) -> Result<usize> {
    if is_new(keys)? {
        return Ok(keys.opt_size("num_kv_heads", MOST_HEADS)?.unwrap_or(num_heads));
    }
    Ok(if keys.bool_or("multi_query", true)? { 1 } else { num_heads })
}

fn is_new(keys: &ConfigReader<'_>) -> Result<bool> {
    keys.bool_or("new_decoder_architecture", false)
}

fn residual_plan(keys: &ConfigReader<'_>) -> Result<ResidualPlan> {
    let (is_new, is_parallel) = (is_new(keys)?, keys.bool_or("parallel_attn", true)?);
    if is_new && !is_parallel {
        return Err(refused("parallel_attn", false, "true with `new_decoder_architecture`"));
    }
    let norms = keys.opt_usize("num_ln_in_parallel_attn")?;
    match norms.unwrap_or(if is_new { 2 } else { 1 }) {
        _ if !is_parallel => Ok(ResidualPlan::PreNorm),
        1 => Ok(ResidualPlan::Parallel),
        2 if is_new => Ok(ResidualPlan::ParallelTwoNorms),
        other => {
            let accepted = if is_new { "1, 2" } else { "1 without `new_decoder_architecture`" };
            Err(refused("num_ln_in_parallel_attn", other, accepted))
        }
    }
}

fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::QkvProj => "self_attention.query_key_value",
        BlockPart::OProj => "self_attention.dense",
        BlockPart::UpProj => "mlp.dense_h_to_4h",
        BlockPart::DownProj => "mlp.dense_4h_to_h",
        BlockPart::ParallelAttnNorm => "ln_attn",
        BlockPart::ParallelMlpNorm => "ln_mlp",
        other => parts::llama_name(other),
    }
}
