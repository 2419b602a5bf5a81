//! From named parameters to the structs that a segment takes: the one place that knows both.

use candle_core::DType;

use super::block::BlockWeights;
use super::embedding::{EmbedGradients, EmbedWeights, TokenRows};
use super::linear::Linear;
use super::lm_head::HeadWeights;
use super::{Lora, ModelConfig, Param, WeightMatrix};
use crate::error::Result;
use crate::runtime::TensorMut;

const EMBED: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";

/// Wherever parameters live.
pub trait ParamLookup {
    /// The parameter of this name.
    ///
    /// # Errors
    /// There is none, or its value is not at hand whole: a fault of the caller.
    fn param(&self, name: &str) -> Result<Param>;
    /// Where the gradient of the parameter of this name is added up, if it trains; its value need not be at hand.
    ///
    /// # Errors
    /// There is no such parameter: a fault of the caller.
    fn grad(&self, name: &str) -> Result<Option<TensorMut>>;
    /// The weight of a linear layer of a block, which may be quantized.
    ///
    /// # Errors
    /// There is none: a fault of the caller.
    fn matrix(&self, name: &str) -> Result<WeightMatrix>;
    /// The adapter on a module, if it is a target.
    ///
    /// # Errors
    /// When the adapter's parameters cannot be had.
    fn lora(&self, module: &str, module_index: u64) -> Result<Option<Lora>>;
    /// The rows of a token table that train, if the module has such.
    ///
    /// # Errors
    /// When the parameters of the rows cannot be had.
    fn rows(&self, module: &str) -> Result<Option<TokenRows>>;
    /// The dtype of activations.
    fn dtype(&self) -> DType;
    /// True when the output layer has a parameter of its own, although the model ties it to the embedding.
    fn has_own_head(&self) -> bool;
}

/// The embedding's weights.
///
/// # Errors
/// When a parameter cannot be had.
pub fn embed(from: &dyn ParamLookup) -> Result<EmbedWeights> {
    let table = from.param(&format!("{EMBED}.weight"))?.value;
    Ok(EmbedWeights { table, lora: from.lora(EMBED, 0)?, dtype: from.dtype() })
}

/// What the embedding's backward needs, which is not the table.
///
/// # Errors
/// There is no embedding: a fault of the caller.
pub fn embed_gradients(from: &dyn ParamLookup) -> Result<EmbedGradients> {
    let table = from.grad(&format!("{EMBED}.weight"))?;
    Ok(EmbedGradients { table, rows: from.rows(EMBED)?, lora: from.lora(EMBED, 0)? })
}

/// The head's weights; a tied one is the embedding's own parameter.
///
/// # Errors
/// When a parameter cannot be had.
pub fn head(config: &ModelConfig, from: &dyn ParamLookup) -> Result<HeadWeights> {
    let tied = config.tie_word_embeddings && !from.has_own_head();
    let table = if tied { EMBED } else { HEAD };
    Ok(HeadWeights {
        norm: from.param("model.norm.weight")?,
        lm_head: from.param(&format!("{table}.weight"))?,
        rows: from.rows(table)?,
        lora: from.lora(HEAD, 0)?,
    })
}

/// The weights of block `layer`.
///
/// # Errors
/// When a parameter of the block cannot be had.
pub fn block(config: &ModelConfig, layer: usize, from: &dyn ParamLookup) -> Result<BlockWeights> {
    let prefix = format!("model.layers.{layer}");
    let mut module_index = 0;
    let mut linear = |name: &str, bias: bool| -> Result<Linear> {
        let module = format!("{prefix}.{name}");
        module_index += 1;
        Ok(Linear {
            weight: from.matrix(&format!("{module}.weight"))?,
            bias: bias.then(|| from.param(&format!("{module}.bias"))).transpose()?,
            lora: from.lora(&module, module_index)?,
        })
    };
    let qkv = if config.fused {
        vec![linear("self_attn.qkv_proj", config.qkv_bias)?]
    } else {
        ["q_proj", "k_proj", "v_proj"]
            .iter()
            .map(|name| linear(&format!("self_attn.{name}"), config.qkv_bias))
            .collect::<Result<_>>()?
    };
    let o = linear("self_attn.o_proj", config.o_bias)?;
    let gate_up = if config.fused {
        vec![linear("mlp.gate_up_proj", config.mlp_bias)?]
    } else {
        vec![linear("mlp.gate_proj", config.mlp_bias)?, linear("mlp.up_proj", config.mlp_bias)?]
    };
    let down = linear("mlp.down_proj", config.mlp_bias)?;
    let norm = |name: &str| from.param(&format!("{prefix}.{name}.weight"));
    let (attn_post_norm, mlp_norm, mlp_post_norm) = if config.post_norms {
        (
            Some(norm("post_attention_layernorm")?),
            norm("pre_feedforward_layernorm")?,
            Some(norm("post_feedforward_layernorm")?),
        )
    } else {
        (None, norm("post_attention_layernorm")?, None)
    };
    let qk_norm =
        if config.qk_norm { Some((norm("self_attn.q_norm")?, norm("self_attn.k_norm")?)) } else { None };
    let attn_norm = norm("input_layernorm")?;
    Ok(BlockWeights { attn_norm, qkv, qk_norm, o, attn_post_norm, mlp_norm, gate_up, down, mlp_post_norm })
}
