//! Apertus (8B, 70B): norms of queries and keys, and MLPs without a gate whose activation, xIELU,
//! has learned curvatures.

use serde_json::json;

use super::architecture::{Architecture, Composition};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{AttentionMixer, BlockConfig, MlpActivation, PlainMlp, QkNormWidth};
use crate::model::config_reader::{ConfigReader, refused};
use crate::model::rope::Rope;

pub(super) static APERTUS: Architecture = Architecture {
    module_name,
    gguf: GgufFacts {
        has_xielu: true,
        reads_o_bias: true,
        tied_head: Some(false),
        scales_by_default: true,
        rope_types: &["llama3", "longrope", "yarn"],
        ..GgufFacts::usual("apertus")
    },
    ..parts::architecture("apertus", &["apertus"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    if let Some(name) = keys.opt_str("hidden_act")?.filter(|name| *name != "xielu") {
        return Err(refused("hidden_act", format!("\"{name}\""), "xielu"));
    }
    for key in ["mlp_bias", "post_norm"] {
        if keys.bool_or(key, false)? {
            return Err(refused(key, true, "false, null, no such key"));
        }
    }
    let attention = AttentionMixer { qk_norm: Some(QkNormWidth::Head), ..parts::attention(keys, sizes)? };
    let mlp = PlainMlp { activation: MlpActivation::Xielu, bias: false };
    let blocks = vec![BlockConfig::pre_norm(attention, mlp); sizes.num_layers];
    // The default of transformers 5.24, `ApertusConfig`: a `rope_theta` beside it has no effect.
    let default = json!({
        "rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0
    });
    let scaling = parts::rope_scaling(keys)?.map_or_else(|| ConfigReader::new(&default), Ok)?;
    let rope = Rope::read(Some(&scaling), &parts::rope_context(keys, sizes, 1.2e7)?)?;
    parts::with_eps(keys, parts::llama_like(keys, blocks, rope)?, 1e-5)
}

fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::AttnNorm => "attention_layernorm",
        BlockPart::MlpNorm => "feedforward_layernorm",
        other => parts::llama_name(other),
    }
}
