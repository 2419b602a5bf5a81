//! What a model is, family differences resolved to numbers. `families` reads it from config.json.

use super::rope::Rope;
use crate::ops::attention::{AttentionKind, Heads};
use crate::ops::glu::Activation;
use crate::ops::rms_norm::NormKind;

/// The `model_type`s of config.json that share the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama 1–3.x and its namesakes (TinyLlama, SmolLM, Yi, …).
    Llama,
    /// Mistral 7B and its descendants.
    Mistral,
    /// Qwen2 and Qwen2.5, dense.
    Qwen2,
    /// Qwen3 without mixture of experts.
    Qwen3,
    /// Gemma 2 of all sizes.
    Gemma2,
    /// Gemma 3, text only.
    Gemma3,
    /// Phi-3, Phi-3.5, Phi-4-mini.
    Phi3,
}

/// What differs between the layers of one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerKind {
    /// A token sees itself and the `window − 1` tokens before it; none: all before it.
    pub window: Option<usize>,
    /// Index into [`ModelConfig::ropes`].
    pub rope: usize,
}

/// A model's shape and arithmetic.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    /// The family of architectures.
    pub family: Family,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the hidden states, D.
    pub hidden_size: usize,
    /// Width inside of the MLP, F.
    pub intermediate_size: usize,
    /// Head counts and width.
    pub heads: Heads,
    /// One entry per block.
    pub layers: Vec<LayerKind>,
    /// The rotary embeddings that layers refer to.
    pub ropes: Vec<Rope>,
    /// Context length the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Every norm of the model.
    pub norm: NormKind,
    /// The gate's activation.
    pub activation: Activation,
    /// q, k and v are one tensor, gate and up another (phi3).
    pub fused: bool,
    /// q, k and v have biases.
    pub qkv_bias: bool,
    /// o has a bias.
    pub o_bias: bool,
    /// gate, up and down have biases.
    pub mlp_bias: bool,
    /// q and k are normed per head.
    pub qk_norm: bool,
    /// The outputs of attention and MLP are normed too (gemma).
    pub post_norms: bool,
    /// Factor on the embeddings.
    pub embedding_factor: f64,
    /// Factor on attention scores.
    pub attention_scale: f64,
    /// Soft-cap on attention scores.
    pub attention_softcap: Option<f64>,
    /// Soft-cap on logits.
    pub logit_softcap: Option<f64>,
    /// Embedding and head are one parameter.
    pub tie_word_embeddings: bool,
    /// The padding token, whose row of the embedding gets no gradient from lookups (torch's `padding_idx`).
    pub pad_token_id: Option<u32>,
    /// Standard deviation of random initial weights.
    pub initializer_range: f64,
    /// The dtype config.json names.
    pub dtype: Option<String>,
    /// The `model_type` of the model for images whose text part it is.
    pub text_of: Option<String>,
}

impl ModelConfig {
    /// Number of blocks.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The attention of one layer.
    pub fn attention(&self, layer: usize) -> AttentionKind {
        AttentionKind {
            heads: self.heads,
            scale: self.attention_scale,
            softcap: self.attention_softcap,
            window: self.layers[layer].window,
        }
    }

    /// The widths that make the shapes of its tensors, by their keys in config.json.
    pub(super) fn dimensions(&self) -> String {
        let Heads { num_heads, num_kv_heads, head_dim } = self.heads;
        format!(
            "hidden_size {}, intermediate_size {}, vocab_size {}, {num_heads} and {num_kv_heads} heads of {head_dim}",
            self.hidden_size, self.intermediate_size, self.vocab_size,
        )
    }
}
