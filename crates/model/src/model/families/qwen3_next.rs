//! Qwen3-Next: Qwen3.5's token mixers, with the projections of Gated DeltaNet by key head, and
//! experts beside a shared one.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufDelta, GgufExperts, GgufFacts};
use super::parts::{self, ExpertKeys};
use super::sizes::{ModelSizes, key_heads_or};
use super::{qwen3_5, qwen3_5_moe};
use crate::error::Result;
use crate::model::composition::BlockConfig;
use crate::model::config_reader::ConfigReader;

const EXPERTS: ExpertKeys = ExpertKeys {
    chosen: 10,
    count: 512,
    width: "moe_intermediate_size",
    renormalize: true,
    aux_coefficient: 0.001,
};

pub(super) static QWEN3_NEXT: Architecture = Architecture {
    may_be_dense: true,
    head_dim: Some(256),
    num_kv_heads: Some(key_heads_or::<2>),
    rotates_partly: true,
    gguf: GgufFacts {
        architecture: "qwen3next",
        experts: Some(GgufExperts::USUAL),
        delta: Some(GgufDelta { tiles_value_heads: false, has_sections: false }),
        ..qwen3_5::GGUF
    },
    ..parts::architecture("qwen3_next", &["qwen3_next"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let renormalize = keys.bool_or("norm_topk_prob", EXPERTS.renormalize)?;
    let experts = qwen3_5_moe::experts(keys, &ExpertKeys { renormalize, ..EXPERTS })?;
    let mlp = parts::gated_mlp(keys)?;
    let mixers = qwen3_5::token_mixers(keys, sizes, true)?;
    let block = |(mixer, sparse)| {
        if sparse { BlockConfig::pre_norm(mixer, experts) } else { BlockConfig::pre_norm(mixer, mlp) }
    };
    let sparse = parts::sparse_layers(keys, sizes)?;
    qwen3_5::compose_of(keys, sizes, mixers.into_iter().zip(sparse).map(block).collect())
}
