//! Mistral Small 4: latent attention whose queries grow with their positions, and experts by a
//! softmax.

use serde_json::json;

use super::architecture::{Architecture, Composition, StackedExperts};
use super::deepseek_v3::{self, RouterDefaults};
use super::gguf_facts::GgufFacts;
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::config_reader::ConfigReader;
use crate::model::rope::{Rope, RopeContext};
use crate::ops::experts::RouterScores;

pub(super) static MISTRAL4: Architecture = Architecture {
    has_latents: true,
    module_name: deepseek_v3::module_name,
    stacked_experts: Some(StackedExperts {
        gate_up: "mlp.experts.gate_up_proj",
        down: "mlp.experts.down_proj",
    }),
    rotates_partly: true,
    gguf: GgufFacts { architecture: "mistral4", scales_latents_freely: false, ..deepseek_v3::GGUF },
    ..parts::architecture("mistral4", &["mistral4"], compose)
};

const ROUTER: RouterDefaults =
    RouterDefaults { chosen: 4, scores: RouterScores::Softmax, factor: 1.0, groups: [1, 1], dense_layers: 0 };

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    // The default of transformers 5.24, `Mistral4Config`.
    let default = json!({
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1
    });
    let scaling = parts::rope_scaling(keys)?.map_or_else(|| ConfigReader::new(&default), Ok)?;
    let mixer = deepseek_v3::latent_mixer(keys, sizes, Some(&scaling))?;
    // Here the rope counts its columns as a share of the whole head.
    let head_dim = mixer.plain + mixer.rotated;
    let partial = mixer.rotated as f64 / head_dim as f64;
    let context = RopeContext { head_dim, partial, ..parts::rope_context(keys, sizes, 1e4)? };
    let rope = deepseek_v3::latent_rope(keys, Rope::read(Some(&scaling), &context)?)?;
    let blocks = deepseek_v3::blocks(keys, sizes, mixer.into(), &ROUTER)?;
    parts::llama_like(keys, blocks, rope.with_query_growth(&scaling)?)
}
