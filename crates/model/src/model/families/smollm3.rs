//! SmolLM3: Llama with layers without positions, every fourth by default.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufFacts, GgufNoPositions};
use super::parts;
use super::sizes::{ModelSizes, key_heads_or};
use crate::error::{Error, Result};
use crate::model::composition::{AttentionMixer, BlockConfig, GatedMlp};
use crate::model::config_reader::ConfigReader;
use crate::model::rope::Rope;

pub(super) static SMOLLM3: Architecture = Architecture {
    ties_embeddings: true,
    num_kv_heads: Some(key_heads_or::<4>),
    gguf: GgufFacts {
        interleaves_heads: true,
        no_positions: GgufNoPositions::LastOf(4),
        ..GgufFacts::usual("smollm3")
    },
    ..parts::architecture("smollm3", &["smollm3"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let mlp = GatedMlp { bias: keys.bool_or("mlp_bias", false)?, ..parts::gated_mlp(keys)? };
    let attention = parts::attention(keys, sizes)?;
    let positions = layers_with_positions(keys, sizes.num_layers)?;
    let window = if keys.bool_or("use_sliding_window", false)? { parts::window(keys, None)? } else { None };
    let slides = parts::sliding_layers(keys, sizes, |layer| window.is_some() && !positions[layer])?;
    let block = |(has_positions, slides): (&bool, bool)| {
        let rope = usize::from(!has_positions);
        BlockConfig::pre_norm(AttentionMixer { rope, window: window.filter(|_| slides), ..attention }, mlp)
    };
    let blocks = positions.iter().zip(slides).map(block).collect();
    let rope = parts::rope(keys, &parts::rope_context(keys, sizes, 2e6)?)?;
    let composition = parts::llama_like(keys, blocks, rope)?;
    Ok(Composition { ropes: [composition.ropes, vec![Rope::without_positions()]].concat(), ..composition })
}

/// Returns for each layer whether it has positions: all but each `no_rope_layer_interval`-th.
pub(super) fn layers_by_interval(keys: &ConfigReader<'_>, count: usize) -> Result<Vec<bool>> {
    match keys.opt_usize("no_rope_layer_interval")?.unwrap_or(4) {
        0 => Err(Error::user("`no_rope_layer_interval` is 0").because("accepted: above 0")),
        interval => Ok((1..=count).map(|layer| !layer.is_multiple_of(interval)).collect()),
    }
}

/// Returns for each layer whether it has positions: `no_rope_layers` has 1 for those that do.
pub(super) fn layers_with_positions(keys: &ConfigReader<'_>, count: usize) -> Result<Vec<bool>> {
    let Some(listed) = keys.f64_list("no_rope_layers")? else { return layers_by_interval(keys, count) };
    if listed.len() < count || listed.iter().any(|has| *has != 0.0 && *has != 1.0) {
        return Err(Error::user(format!("`no_rope_layers` is {listed:?}"))
            .because(format!("accepted: 0 or 1 for each of the {count} layers")));
    }
    Ok(listed.iter().take(count).map(|has| *has == 1.0).collect())
}
