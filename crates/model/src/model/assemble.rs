//! From named parameters to the structs that a segment takes: the one place that knows both.

use candle_core::DType;

use super::block::{
    AttentionWeights, BlockWeights, ChannelMixerWeights, GatedMlpWeights, MixerNorms, TokenMixerWeights,
};
use super::block_part::{BlockPart, LinearGroup};
use super::composition::{ChannelMixer, TokenMixer};
use super::embedding::{EmbedGradients, EmbedWeights, TokenRows};
use super::layout::{BlockLayout, BlockModule, FINAL_NORM_MODULE};
use super::linear::{Linear, MergedLinear};
use super::lm_head::HeadWeights;
use super::{Lora, ModelConfig, Param, WeightMatrix};
use crate::error::{Error, Result};
use crate::runtime::TensorMut;
use crate::weights::{EMBED_TOKENS_MODULE as EMBED, LM_HEAD_MODULE as HEAD};

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
    /// The matrices of these names as one, one under the other, where they are dense and lie so; none where they do not.
    ///
    /// # Errors
    /// There is no such parameter: a fault of the caller.
    fn merged(&self, names: &[String]) -> Result<Option<Param>>;
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
        norm: from.param(&format!("{FINAL_NORM_MODULE}.weight"))?,
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
    let (block, layout) = (&config.blocks[layer], BlockLayout::new(config, layer));
    let missing = |part: BlockPart| Error::internal(format!("a block has no {part:?}"));
    let linears = |group: LinearGroup| -> Result<MergedLinear> {
        // Dropout numbers the linear layers of a block from 1 on.
        let numbered = layout.linears().zip(1..).filter(|(module, _)| module.part.group() == Some(group));
        let linear = |(module, module_index): (&BlockModule, u64)| -> Result<Linear> {
            let name = module.name_in(layer);
            let bias = module.bias.then(|| from.param(&format!("{name}.bias"))).transpose()?;
            let weight = from.matrix(&format!("{name}.weight"))?;
            Ok(Linear { weight, bias, lora: from.lora(&name, module_index)? })
        };
        let layers = numbered.map(linear).collect::<Result<Vec<_>>>()?;
        let members = layout.linears().filter(|module| module.part.group() == Some(group));
        let names: Vec<_> = members.map(|module| format!("{}.weight", module.name_in(layer))).collect();
        let merged = if names.len() > 1 { from.merged(&names)? } else { None };
        Ok(MergedLinear { layers, merged })
    };
    let optional_norm = |part| -> Result<Option<Param>> {
        let name = layout.module(part).map(|module| format!("{}.weight", module.name_in(layer)));
        name.map(|name| from.param(&name)).transpose()
    };
    let norm = |part| optional_norm(part)?.ok_or_else(|| missing(part));
    let token_mixer = match block.token_mixer {
        TokenMixer::Attention(mixer) => TokenMixerWeights::Attention(AttentionWeights {
            mixer,
            qkv: linears(LinearGroup::Qkv)?,
            qk_norm: optional_norm(BlockPart::QNorm)?.zip(optional_norm(BlockPart::KNorm)?),
            o: linears(LinearGroup::O)?,
        }),
    };
    let channel_mixer = match block.channel_mixer {
        ChannelMixer::GatedMlp(mixer) => ChannelMixerWeights::GatedMlp(GatedMlpWeights {
            mixer,
            gate_up: linears(LinearGroup::GateUp)?,
            down: linears(LinearGroup::Down)?,
        }),
    };
    let norms = |before, after| -> Result<MixerNorms> {
        Ok(MixerNorms { before: norm(before)?, after: optional_norm(after)? })
    };
    Ok(BlockWeights {
        token_norms: norms(BlockPart::AttnNorm, BlockPart::AttnPostNorm)?,
        token_mixer,
        channel_norms: norms(BlockPart::MlpNorm, BlockPart::MlpPostNorm)?,
        channel_mixer,
    })
}
