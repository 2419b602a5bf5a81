//! Ministral 3 and Mistral Medium 3.5: Llama whose queries grow with their positions beyond the
//! original context.

use serde_json::json;

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufFacts, GgufSeventyB};
use super::sizes::{ModelSizes, key_heads_or};
use super::{llama, parts};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, BlockConfig};
use crate::model::config_reader::ConfigReader;
use crate::model::rope::Rope;

pub(super) static MINISTRAL3: Architecture = Architecture {
    head_dim: Some(128),
    num_kv_heads: Some(key_heads_or::<8>),
    gguf: GgufFacts {
        reads_yarn_ramp: true,
        seventy_b: GgufSeventyB::Never,
        architecture: "mistral3",
        ..llama::GGUF
    },
    ..parts::architecture("ministral3", &["ministral3"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    // The default of transformers 5.24, `Ministral3Config`.
    let default = json!({
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1
    });
    let scaling = parts::rope_scaling(keys)?.map_or_else(|| ConfigReader::new(&default), Ok)?;
    let rope = Rope::read(Some(&scaling), &parts::rope_context(keys, sizes, 1e6)?)?;
    let attention = AttentionMixer { window: parts::window(keys, None)?, ..parts::attention(keys, sizes)? };
    let block = BlockConfig::pre_norm(attention, parts::gated_mlp(keys)?);
    let blocks = vec![block; sizes.num_layers];
    let composition = parts::llama_like(keys, blocks, rope.with_query_growth(&scaling)?)?;
    parts::with_eps(keys, composition, 1e-5)
}
