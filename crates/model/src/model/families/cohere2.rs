//! Command R7B and Command A: as Command R, with a sliding window on three of four layers, and no
//! positions on the others.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufFacts, GgufNoPositions, GgufSliding, GgufWindows};
use super::sizes::ModelSizes;
use super::{cohere, parts};
use crate::error::{Error, Result};
use crate::model::composition::AttentionMixer;
use crate::model::config_reader::ConfigReader;
use crate::model::rope::Rope;

pub(super) static COHERE2: Architecture = Architecture {
    ties_embeddings: true,
    gguf: GgufFacts {
        windows: Some(GgufWindows { period: 4, models: GgufSliding::Always }),
        no_positions: GgufNoPositions::BesideWindows,
        heads_fill_hidden: true,
        tied_head: Some(true),
        reads_logit_factor: true,
        ..GgufFacts::usual("cohere2")
    },
    ..parts::architecture("cohere2", &["cohere2"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let (window, plain) = (parts::window(keys, Some(4096))?, parts::attention(keys, sizes)?);
    let period = keys.opt_usize("sliding_window_pattern")?.unwrap_or(4);
    if period == 0 {
        return Err(Error::user("`sliding_window_pattern` is 0").because("accepted: above 0"));
    }
    let slides = parts::sliding_layers(keys, sizes, |layer| !(layer + 1).is_multiple_of(period))?;
    // Only layers with a window have positions.
    let attention = |slides: bool| {
        let window = window.filter(|_| slides);
        AttentionMixer { window, rope: usize::from(window.is_none()), ..plain }
    };
    let attentions = slides.into_iter().map(attention).collect();
    let composition = cohere::compose_of(keys, attentions, parts::plain_rope(keys, sizes)?)?;
    Ok(Composition { ropes: [composition.ropes, vec![Rope::without_positions()]].concat(), ..composition })
}
