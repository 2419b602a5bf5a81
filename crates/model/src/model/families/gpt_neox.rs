//! GPT-NeoX-20B and Pythia: layer norms, biases everywhere, queries, keys and values side by side
//! in each head, a rope on a part of it, an MLP without a gate, and mixers in parallel.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{AttentionMixer, BlockConfig, FusedQkv, ResidualPlan};
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::RopeContext;
use crate::ops::activation::PlainActivation;
use crate::weights::ClassNames;

pub(super) static GPT_NEOX: Architecture = Architecture {
    num_kv_heads: Some(num_kv_heads),
    class_names: &ClassNames::GPT_NEOX,
    module_name,
    rotates_partly: true,
    gguf: GgufFacts {
        plain_activations: &[PlainActivation::Gelu, PlainActivation::GeluTanh],
        heads_fill_hidden: true,
        needs_biases: true,
        reads_o_bias: true,
        reads_mlp_biases: true,
        tied_head: Some(false),
        names_parallel: true,
        rotates_partly: true,
        ..GgufFacts::usual("gptneox")
    },
    ..parts::architecture("gpt_neox", &["gpt_neox"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    parts::refuse_other_heads(keys, sizes)?;
    let bias = keys.bool_or("attention_bias", true)?;
    let plain = parts::attention(keys, sizes)?;
    let attention =
        AttentionMixer { qkv_bias: bias, o_bias: bias, fused: Some(FusedQkv::ByKeyHead), ..plain };
    let mut block = BlockConfig::pre_norm(attention, parts::plain_mlp(keys, "gelu", true)?);
    if keys.bool_or("use_parallel_residual", true)? {
        block.residual = ResidualPlan::ParallelTwoNorms;
    }
    let theta = keys.f64_or("rotary_emb_base", 1e4)?;
    let partial = keys.f64_or("rotary_pct", 0.25)?;
    // transformers reads no others for this class.
    for (other, read, value) in
        [("rope_theta", "rotary_emb_base", theta), ("partial_rotary_factor", "rotary_pct", partial)]
    {
        if let Some(given) = keys.opt_f64(other)?.filter(|given| *given != value) {
            return Err(refused(other, given, &format!("{value}, as {read} says")));
        }
    }
    let rope =
        parts::rope(keys, &RopeContext { theta, partial, ..parts::rope_context(keys, sizes, theta)? })?;
    let composition = parts::llama_like(keys, vec![block; sizes.num_layers], rope)?;
    parts::with_layer_norms(keys, composition, "layer_norm_eps", true)
}

/// Returns a key-value head for each head. transformers does not read `num_key_value_heads` here.
fn num_kv_heads(_: &ConfigReader<'_>, num_heads: usize) -> Result<usize> {
    Ok(num_heads)
}

fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::QkvProj => "attention.query_key_value",
        BlockPart::OProj => "attention.dense",
        BlockPart::UpProj => "mlp.dense_h_to_4h",
        BlockPart::DownProj => "mlp.dense_4h_to_h",
        other => parts::llama_name(other),
    }
}
