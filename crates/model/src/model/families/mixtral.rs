//! Mixtral: Mistral with experts instead of MLPs.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufExperts, GgufFacts};
use super::llama;
use super::parts::{self, ExpertKeys};
use super::sizes::{ModelSizes, key_heads_or};
use crate::error::Result;
use crate::model::block_part::BlockPart;
use crate::model::composition::{AttentionMixer, BlockConfig};
use crate::model::config_reader::{ConfigReader, refused};

const EXPERTS: ExpertKeys =
    ExpertKeys { chosen: 2, count: 8, width: "intermediate_size", renormalize: true, aux_coefficient: 0.001 };

pub(super) static MIXTRAL: Architecture = Architecture {
    module_name,
    num_kv_heads: Some(key_heads_or::<8>),
    gguf: GgufFacts { experts: Some(GgufExperts { has_width: false, ..GgufExperts::USUAL }), ..llama::GGUF },
    ..parts::architecture("mixtral", &["mixtral"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    if let Some(noise) = keys.opt_f64("router_jitter_noise")?.filter(|noise| *noise != 0.0) {
        return Err(refused("router_jitter_noise", noise, "0 or null: the engine adds no noise"));
    }
    let window = parts::window(keys, None)?;
    let attention = AttentionMixer { window, ..parts::attention(keys, sizes)? };
    let block = BlockConfig::pre_norm(attention, parts::experts(keys, &EXPERTS)?);
    let rope = parts::rope(keys, &parts::rope_context(keys, sizes, 1e6)?)?;
    let composition = parts::llama_like(keys, vec![block; sizes.num_layers], rope)?;
    parts::with_eps(keys, composition, 1e-5)
}

pub(super) fn module_name(part: BlockPart) -> &'static str {
    match part {
        BlockPart::Router => "block_sparse_moe.gate",
        BlockPart::ExpertGate(_) => "block_sparse_moe.experts.{}.w1",
        BlockPart::ExpertUp(_) => "block_sparse_moe.experts.{}.w3",
        BlockPart::ExpertDown(_) => "block_sparse_moe.experts.{}.w2",
        other => parts::llama_name(other),
    }
}
