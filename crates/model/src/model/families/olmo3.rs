//! OLMo 3: OLMo 2 with sliding windows on three of four layers, which have a rope of their own.

use super::architecture::{Architecture, Composition};
use super::sizes::ModelSizes;
use super::{olmo2, parts};
use crate::error::Result;
use crate::model::composition::AttentionMixer;
use crate::model::config_reader::ConfigReader;

pub(super) static OLMO3: Architecture =
    Architecture { gguf: olmo2::GGUF, ..parts::architecture("olmo3", &["olmo3"], compose) };

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let (attention, mlp) = (olmo2::attention(keys, sizes)?, parts::gated_mlp(keys)?);
    let window = parts::window(keys, Some(4096))?;
    let block = |slides: bool| {
        let window = window.filter(|_| slides);
        olmo2::block(AttentionMixer { window, rope: usize::from(slides), ..attention }, mlp)
    };
    let slides = parts::sliding_layers(keys, sizes, |layer| !(layer + 1).is_multiple_of(4))?;
    let context = parts::rope_context(keys, sizes, 5e5)?;
    let ropes = parts::ropes_by_layer_type(keys, &context, &context)?;
    let blocks = slides.into_iter().map(block).collect();
    let composition = parts::llama_like(keys, blocks, ropes[0].clone())?;
    parts::with_eps(keys, Composition { ropes, ..composition }, 1e-5)
}
