//! Gemma 2 of all sizes: soft-caps on attention and logits, a sliding window in every other layer.

use super::architecture::{Architecture, Composition};
use super::gguf_facts::{GgufFacts, GgufSliding, GgufSoftcap, GgufWindows};
use super::sizes::{ModelSizes, key_heads_or};
use super::{gemma, parts};
use crate::error::Result;
use crate::model::composition::AttentionMixer;
use crate::model::config_reader::ConfigReader;
use crate::ops::glu::Activation;

pub(super) static GEMMA2: Architecture = Architecture {
    head_dim: Some(gemma::HEAD_DIM),
    ties_embeddings: true,
    module_name: gemma::module_name,
    num_kv_heads: Some(key_heads_or::<4>),
    gguf: GgufFacts {
        activation: Activation::GeluTanh,
        attention_softcap: GgufSoftcap::Always,
        logit_softcap: GgufSoftcap::Always,
        tied_head: Some(true),
        windows: Some(GgufWindows { period: 2, models: GgufSliding::Always }),
        // The 27B model.
        scales_by_hidden_at: Some(46),
        ..GgufFacts::usual("gemma2")
    },
    ..parts::architecture("gemma2", &["gemma2"], compose)
};

fn compose(keys: &ConfigReader<'_>, sizes: &ModelSizes) -> Result<Composition> {
    let rope = parts::plain_rope(keys, sizes)?;
    let softcap = parts::softcap(keys, "attn_logit_softcapping", Some(50.0))?;
    let attention = AttentionMixer { softcap, ..gemma::attention(keys, sizes)? };
    let mlp = gemma::mlp(keys)?;
    let window = parts::window(keys, Some(4096))?;
    let block =
        |slides: bool| gemma::block(AttentionMixer { window: window.filter(|_| slides), ..attention }, mlp);
    let blocks = parts::sliding_layers(keys, sizes, |layer| layer % 2 == 0)?.into_iter().map(block);
    gemma::compose(keys, sizes, blocks.collect(), vec![rope], Some(30.0))
}
