//! OLMoE: Llama with experts instead of MLPs, and norms of q and k over all heads together.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufExperts, GgufFacts};
use super::olmo2;
use super::parts::{self, ExpertKeys};
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::composition::BlockConfig;
use crate::model::config_reader::{ConfigReader, refused};

const EXPERTS: ExpertKeys = ExpertKeys {
    chosen: 8,
    count: 64,
    width: "intermediate_size",
    renormalize: false,
    aux_coefficient: 0.01,
};

pub(super) static OLMOE: Architecture = Architecture {
    gguf: GgufFacts {
        heads_fill_hidden: true,
        tied_head: Some(false),
        experts: Some(GgufExperts { renormalizes: Some(false), has_width: false, ..GgufExperts::USUAL }),
        ..GgufFacts::usual("olmoe")
    },
    ..parts::architecture("olmoe", &["olmoe"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    if let Some(clip) = keys.opt_f64("clip_qkv")? {
        return Err(refused("clip_qkv", clip, "null: the engine does not clip q, k and v"));
    }
    let block = BlockConfig::pre_norm(olmo2::attention(keys, sizes)?, parts::experts(keys, &EXPERTS)?);
    let composition =
        parts::llama_like(keys, vec![block; sizes.num_layers], parts::plain_rope(keys, sizes)?)?;
    parts::with_eps(keys, composition, 1e-5)
}
