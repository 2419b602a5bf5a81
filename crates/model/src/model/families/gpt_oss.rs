//! gpt-oss (20B, 120B): a learned logit of each head in attention's softmax, windows on every
//! second layer, and experts with biases whose gates and ups alternate.

use serde_json::json;

use super::architecture::{Architecture, Composition, StackedExperts};
use super::gguf_facts::{GgufExperts, GgufFacts, GgufSliding, GgufWindows};
use super::parts::{self, ExpertKeys};
use super::sizes::{ModelSizes, key_heads_or};
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{AttentionMixer, BlockConfig, Experts};
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::Rope;
use crate::ops::glu::{Activation, CLAMP, SIGMOID_FACTOR};

/// A softmax over the chosen logits alone is one over all, renormalized.
const EXPERTS: ExpertKeys = ExpertKeys {
    chosen: 4,
    count: 128,
    width: "intermediate_size",
    renormalize: true,
    aux_coefficient: 0.001,
};

pub(super) static GPT_OSS: Architecture = Architecture {
    head_dim: Some(64),
    module_name,
    stacked_experts: Some(StackedExperts {
        gate_up: "mlp.experts.gate_up_proj",
        down: "mlp.experts.down_proj",
    }),
    transposes_stacks: true,
    stacks_in_mxfp4: true,
    num_kv_heads: Some(key_heads_or::<8>),
    gguf: GgufFacts {
        activation: Activation::ClampedSilu,
        mlp_norm: "post_attention_norm",
        needs_biases: true,
        reads_o_bias: true,
        tied_head: Some(false),
        rounds_yarn_ramp: true,
        windows: Some(GgufWindows { period: 2, models: GgufSliding::Always }),
        experts: Some(GgufExperts::USUAL),
        ..GgufFacts::usual("gpt-oss")
    },
    ..parts::architecture("gpt_oss", &["gpt_oss"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let computed = [("swiglu_limit", CLAMP, "7"), ("swiglu_alpha", SIGMOID_FACTOR, "1.702")];
    for (key, value, accepted) in computed {
        let given = keys.f64_or(key, value.into())?;
        if given as f32 != value {
            return Err(refused(key, given, accepted));
        }
    }
    let bias = keys.bool_or("attention_bias", true)?;
    let window = parts::window(keys, Some(128))?;
    let attention =
        AttentionMixer { qkv_bias: bias, o_bias: bias, has_sinks: true, ..parts::attention(keys, sizes)? };
    if let Some(name) = keys.opt_str("hidden_act")?.filter(|name| !["silu", "swish"].contains(name)) {
        return Err(refused("hidden_act", format!("\"{name}\""), "silu, which the gate clamps"));
    }
    let experts = Experts {
        activation: Activation::ClampedSilu,
        has_one_gate_up: true,
        layer_biases: true,
        ..parts::experts(keys, &EXPERTS)?
    };
    let sliding = parts::sliding_layers(keys, sizes, |layer| layer % 2 == 0)?;
    let block = |slides: bool| {
        let window = window.filter(|_| slides);
        BlockConfig::pre_norm(AttentionMixer { window, ..attention }, experts)
    };
    // The default of transformers 5.24, `GptOssConfig`.
    let default = json!({
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
        "original_max_position_embeddings": 4096
    });
    let scaling = parts::rope_scaling(keys)?.map_or_else(|| ConfigReader::new(&default), Ok)?;
    let rope = Rope::read(Some(&scaling), &parts::rope_context(keys, sizes, 150_000.0)?)?;
    let blocks = sliding.into_iter().map(block).collect();
    parts::with_eps(keys, parts::llama_like(keys, blocks, rope)?, 1e-5)
}

fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::Router => "mlp.router",
        other => parts::llama_name(other),
    }
}
