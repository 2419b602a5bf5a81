//! GLM-4.7-Flash: the latent attention and the experts of DeepSeek-V3.

use super::architecture::{Architecture, Composition};
use super::deepseek_v3::{self, RouterDefaults};
use super::parts;
use super::sizes::ModelSizes;
use crate::error::Result;
use crate::model::config_reader::ConfigReader;
use crate::ops::experts::RouterScores;

pub(super) static GLM4_MOE_LITE: Architecture = Architecture {
    has_latents: true,
    module_name: deepseek_v3::module_name,
    rotates_partly: true,
    gguf: deepseek_v3::GGUF,
    ..parts::architecture("glm4_moe_lite", &["glm4_moe_lite"], compose)
};

const ROUTER: RouterDefaults =
    RouterDefaults { chosen: 4, scores: RouterScores::Sigmoid, factor: 1.8, groups: [1, 1], dense_layers: 1 };

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    deepseek_v3::compose_of(keys, sizes, &ROUTER, 1e-5)
}
