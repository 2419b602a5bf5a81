//! Gemma 3, text only: norms on q and k. Per layer of full attention it has five with a sliding
//! window and a rope of their own.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufFacts, GgufLocalRope, GgufSliding, GgufSoftcap, GgufWindows};
use super::sizes::{ModelSizes, key_heads_or};
use super::{gemma, parts};
use crate::error::Result;
use crate::model::composition::{AttentionMixer, QkNormWidth};
use crate::model::config_reader::ConfigReader;
use crate::model::rope::RopeContext;
use crate::ops::glu::Activation;

pub(super) static GEMMA3: Architecture = Architecture {
    head_dim: Some(gemma::HEAD_DIM),
    ties_embeddings: true,
    module_name: gemma::module_name,
    num_kv_heads: Some(key_heads_or::<4>),
    gguf: GgufFacts {
        activation: Activation::GeluTanh,
        logit_softcap: GgufSoftcap::Optional,
        windows: Some(GgufWindows { period: 6, models: GgufSliding::WithKey }),
        local_rope: Some(GgufLocalRope::OwnBase),
        rope_types: &[],
        // The 27B model.
        scales_by_hidden_at: Some(62),
        ..GgufFacts::usual("gemma3")
    },
    ..parts::architecture("gemma3", &["gemma3_text"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let context = parts::rope_context(keys, sizes, 1e6)?;
    let local = RopeContext { theta: keys.f64_or("rope_local_base_freq", 1e4)?, ..context };
    let ropes = parts::ropes_by_layer_type(keys, &context, &local)?;
    let attention = AttentionMixer { qk_norm: Some(QkNormWidth::Head), ..gemma::attention(keys, sizes)? };
    let mlp = gemma::mlp(keys)?;
    let window = parts::window(keys, Some(4096))?;
    let pattern = match keys.opt_usize("sliding_window_pattern")? {
        Some(pattern) => pattern,
        None => keys.opt_usize("_sliding_window_pattern")?.unwrap_or(6),
    };
    let block = |slides: bool| {
        let window = window.filter(|_| slides);
        gemma::block(AttentionMixer { window, rope: usize::from(slides), ..attention }, mlp)
    };
    // With a pattern of 0 every layer has the window.
    let slides = |layer: usize| !(layer + 1).is_multiple_of(pattern);
    let blocks = parts::sliding_layers(keys, sizes, slides)?.into_iter().map(block).collect();
    gemma::compose(keys, sizes, blocks, ropes, None)
}
