//! EXAONE 4: norms on the outputs of its mixers, norms of each head of q and k, and, if it has
//! sliding windows, no positions on the layers without one.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufFacts, GgufNoPositions, GgufSliding, GgufWindows};
use super::sizes::{ModelSizes, key_heads_or};
use super::{olmo2, parts};
use crate::error::{Error, Result};
use crate::model::composition::{AttentionMixer, QkNormWidth};
use crate::model::config_reader::ConfigReader;
use crate::model::rope::Rope;

pub(super) static EXAONE4: Architecture = Architecture {
    num_kv_heads: Some(key_heads_or::<32>),
    gguf: GgufFacts {
        heads_fill_hidden: true,
        // The 32B model.
        windows: Some(GgufWindows { period: 4, models: GgufSliding::OfLayers(64) }),
        no_positions: GgufNoPositions::BesideWindows,
        rope_types: &["yarn", "llama3"],
        ..GgufFacts::usual("exaone4")
    },
    ..parts::architecture("exaone4", &["exaone4"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let plain = parts::attention(keys, sizes)?;
    let attention =
        AttentionMixer { qk_norm: Some(QkNormWidth::Head), qkv_bias: false, o_bias: false, ..plain };
    let mlp = parts::gated_mlp(keys)?;
    let window = parts::window(keys, Some(4096))?;
    // Without a window the pattern may be 0.
    let pattern = if window.is_some() { pattern(keys)? } else { vec![false] };
    let slides = |layer: usize| pattern[layer % pattern.len()];
    let block = |slides: bool| {
        let rope = usize::from(window.is_some() && !slides);
        olmo2::block(AttentionMixer { window: window.filter(|_| slides), rope, ..attention }, mlp)
    };
    let blocks = parts::sliding_layers(keys, sizes, slides)?.into_iter().map(block).collect();
    let composition = parts::llama_like(keys, blocks, parts::plain_rope(keys, sizes)?)?;
    let ropes = [composition.ropes, vec![Rope::without_positions()]].concat();
    parts::with_eps(keys, Composition { ropes, ..composition }, 1e-5)
}

/// Reads which layers of a period slide: `sliding_window_pattern` is a number of layers, of which
/// the last does not, or a word such as "LLLG".
fn pattern(keys: &ConfigReader<'_>) -> Result<Vec<bool>> {
    let key = "sliding_window_pattern";
    let slides: Vec<bool> = match keys.get(key) {
        Some(value) if value.is_string() => {
            keys.opt_str(key)?.unwrap_or_default().chars().map(|letter| letter == 'L').collect()
        }
        _ => {
            let period = keys.opt_usize(key)?.unwrap_or(4);
            (1..=period).map(|layer| layer < period).collect()
        }
    };
    if slides.is_empty() {
        return Err(Error::user(format!("`{key}` is empty or 0"))
            .because("accepted: a number above 0, or a word of the letters L and G"));
    }
    Ok(slides)
}
