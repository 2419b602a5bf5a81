//! What a model is, family differences resolved to numbers: read from a Hugging Face config.json of either
//! transformers generation (`torch_dtype`/`dtype`, `rope_theta` + `rope_scaling`/`rope_parameters`).
//!
//! A feature that the engine does not compute is refused here, by name, before any weight is read.

use serde_json::Value;

use super::families;
use super::rope::Rope;
use crate::error::{Error, ErrorContext as _, Result};
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
}

impl ModelConfig {
    /// Reads the text of a config.json; `file` names it in errors.
    ///
    /// # Errors
    /// Not JSON, a missing or mistyped key, an unknown `model_type`, an unsupported feature.
    pub fn from_json(text: &str, file: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text).map_err(|e| {
            Error::user(format!("cannot read {file}"))
                .because(format!("it is not JSON: {e}"))
                .hint("download or save the model again")
        })?;
        let config = families::read(&ConfigReader::new(&value)?)
            .during(|| format!("cannot use the model of {file}"))?;
        config.check().during(|| format!("cannot use the model of {file}"))?;
        Ok(config)
    }

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

    fn check(&self) -> Result<()> {
        let Heads { num_heads, num_kv_heads, head_dim } = self.heads;
        if num_kv_heads == 0 || num_heads == 0 || num_heads % num_kv_heads != 0 {
            return Err(Error::user("the head counts do not fit each other").because(format!(
                "num_attention_heads is {num_heads}, num_key_value_heads {num_kv_heads}; the first must be a multiple of the second"
            )));
        }
        let positive = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("head_dim", head_dim),
            ("num_hidden_layers", self.layers.len()),
        ];
        for (key, value) in positive {
            // 2^31 elements a side is far beyond any model, and keeps shape products inside 64 bits.
            if value == 0 || value >= 1 << 31 {
                return Err(Error::user(format!("`{key}` is {value}")).because("accepted: 1 to 2^31 − 1"));
            }
        }
        if head_dim % 2 != 0 {
            return Err(Error::user(format!("`head_dim` is {head_dim}"))
                .because("rotary positions need an even width"));
        }
        Ok(())
    }
}

/// Typed access to the keys of a JSON object, with errors that name key, value found and type accepted.
pub(super) struct ConfigReader<'a> {
    object: &'a serde_json::Map<String, Value>,
}

impl<'a> ConfigReader<'a> {
    pub(super) fn new(value: &'a Value) -> Result<Self> {
        match value {
            Value::Object(object) => Ok(ConfigReader { object }),
            other => {
                Err(Error::user("config.json does not hold an object").because(format!("found {other}")))
            }
        }
    }

    /// The value of `key`; a null counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// True when the key is there, be it null.
    pub(super) fn mentions(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    fn typed<T>(&self, key: &str, wanted: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let found = || Error::user(format!("`{key}` is {value}")).because(format!("accepted: {wanted}"));
        read(value).map(Some).ok_or_else(found)
    }

    pub(super) fn opt_usize(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    pub(super) fn usize(&self, key: &str) -> Result<usize> {
        self.opt_usize(key)?.ok_or_else(|| {
            Error::user(format!("`{key}` is missing")).because("every model of this family has it")
        })
    }

    pub(super) fn opt_f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(super) fn f64_or(&self, key: &str, default: f64) -> Result<f64> {
        Ok(self.opt_f64(key)?.unwrap_or(default))
    }

    pub(super) fn bool_or(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub(super) fn opt_str(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a text", Value::as_str)
    }

    pub(super) fn opt_keys(&self, key: &str) -> Result<Option<ConfigReader<'a>>> {
        Ok(self.typed(key, "an object", Value::as_object)?.map(|object| ConfigReader { object }))
    }

    pub(super) fn opt_list(&self, key: &str) -> Result<Option<&'a Vec<Value>>> {
        self.typed(key, "a list", Value::as_array)
    }

    pub(super) fn f64_list(&self, key: &str) -> Result<Option<Vec<f64>>> {
        self.typed(key, "a list of numbers", |v| v.as_array()?.iter().map(Value::as_f64).collect())
    }
}
