//! The token mixers of a block by their kind.

use candle_core::{DType, Device, Tensor};

use super::attention::{AttentionSaved, AttentionWeights, KeyValueCache};
use super::carried::{Carried, CarriedBackward};
use super::gated_delta::{DeltaState, GatedDeltaSaved, GatedDeltaWeights};
use super::latent::{LatentSaved, LatentWeights};
use super::short_conv::{ConvState, ShortConvSaved, ShortConvWeights};
use super::{LayerPass, MixerBackward, MixerGradients};
use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::model::block_part::LinearGroup;
use crate::model::composition::{LatentMixer, TokenMixer};
use crate::model::linear::MergedLinear;

/// The parameters of a token mixer.
#[derive(Debug, Clone)]
pub enum TokenMixerWeights {
    /// Softmax attention with rotary positions.
    Attention(AttentionWeights),
    /// Softmax attention whose queries, keys and values come from narrow latents.
    Latent(Box<LatentWeights>),
    /// A recurrence with a state of fixed size.
    GatedDelta(GatedDeltaWeights),
    /// A convolution over a few tokens between two gates.
    ShortConv(ShortConvWeights),
}

impl TokenMixerWeights {
    /// Returns the linear layers for changes to them.
    pub(super) fn linears(&mut self) -> Vec<&mut MergedLinear> {
        match self {
            TokenMixerWeights::Attention(attention) => attention.linears().into(),
            TokenMixerWeights::Latent(latent) => latent.linears(),
            TokenMixerWeights::GatedDelta(delta) => delta.linears().into(),
            TokenMixerWeights::ShortConv(conv) => conv.linears().into(),
        }
    }

    /// Returns the layers of a group, if the mixer has it.
    pub(super) fn linear(&self, group: LinearGroup) -> Option<&MergedLinear> {
        let (first, last) = match self {
            TokenMixerWeights::Attention(attention) => (&attention.qkv, &attention.o),
            TokenMixerWeights::Latent(latent) => (&latent.attention.qkv, &latent.attention.o),
            TokenMixerWeights::GatedDelta(delta) => (&delta.input, &delta.out),
            TokenMixerWeights::ShortConv(conv) => (&conv.input, &conv.out),
        };
        match (group, self) {
            (LinearGroup::Qkv, _) => Some(first),
            (LinearGroup::O, _) => Some(last),
            (LinearGroup::QUp, TokenMixerWeights::Latent(latent)) => latent.q_up.as_ref().map(|up| &up.up),
            (LinearGroup::KvUp, TokenMixerWeights::Latent(latent)) => Some(&latent.kv_up.up),
            _ => None,
        }
    }

    /// Computes the mixer's output for `x: [N, D]`, normed, plus `residual`: `[N, D]`.
    pub(super) fn forward(
        &self,
        pass: LayerPass<'_>,
        x: &Tensor,
        residual: Option<&Tensor>,
        cache: Option<&mut BlockCache>,
        carried: &mut Carried,
    ) -> Result<(Tensor, TokenMixerSaved)> {
        match (self, cache) {
            (TokenMixerWeights::Attention(attention), None | Some(BlockCache::OfAnother)) => {
                let (out, saved) = attention.forward(pass, x, residual, None, carried)?;
                Ok((out, TokenMixerSaved::Attention(saved)))
            }
            (TokenMixerWeights::Attention(attention), Some(BlockCache::KeysAndValues(cache))) => {
                let (out, saved) = attention.forward(pass, x, residual, Some(cache), carried)?;
                Ok((out, TokenMixerSaved::Attention(saved)))
            }
            (TokenMixerWeights::Latent(latent), None) => {
                let (out, saved) = latent.forward(pass, x, residual, None, carried)?;
                Ok((out, TokenMixerSaved::Latent(saved)))
            }
            (TokenMixerWeights::Latent(latent), Some(BlockCache::KeysAndValues(cache))) => {
                let (out, saved) = latent.forward(pass, x, residual, Some(cache), carried)?;
                Ok((out, TokenMixerSaved::Latent(saved)))
            }
            (TokenMixerWeights::GatedDelta(delta), None) => {
                let (out, saved) = delta.forward(pass, x, residual, None)?;
                Ok((out, TokenMixerSaved::GatedDelta(saved)))
            }
            (TokenMixerWeights::GatedDelta(delta), Some(BlockCache::State(state))) => {
                let (out, saved) = delta.forward(pass, x, residual, Some(state))?;
                Ok((out, TokenMixerSaved::GatedDelta(saved)))
            }
            (TokenMixerWeights::ShortConv(conv), None) => {
                let (out, saved) = conv.forward(pass, x, residual, None)?;
                Ok((out, TokenMixerSaved::ShortConv(saved)))
            }
            (TokenMixerWeights::ShortConv(conv), Some(BlockCache::Convolution(state))) => {
                let (out, saved) = conv.forward(pass, x, residual, Some(state))?;
                Ok((out, TokenMixerSaved::ShortConv(saved)))
            }
            _ => Err(Error::internal("the cache belongs to another kind of token mixer")),
        }
    }

    /// Adds the gradients of the parameters that do not need the input. Returns that of the input,
    /// if something reads it.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &TokenMixerSaved,
        half: MixerBackward,
        state: &mut CarriedBackward<'_>,
    ) -> Result<MixerGradients<'_>> {
        match (self, saved) {
            (TokenMixerWeights::Attention(attention), TokenMixerSaved::Attention(saved)) => {
                attention.backward(pass, saved, half, state)
            }
            (TokenMixerWeights::Latent(latent), TokenMixerSaved::Latent(saved)) => {
                latent.backward(pass, saved, half, state)
            }
            (TokenMixerWeights::GatedDelta(delta), TokenMixerSaved::GatedDelta(saved)) => {
                delta.backward(pass, saved, half)
            }
            (TokenMixerWeights::ShortConv(conv), TokenMixerSaved::ShortConv(saved)) => {
                conv.backward(pass, saved, half)
            }
            _ => Err(Error::internal("the saved tensors belong to another kind of token mixer")),
        }
    }
}

/// The tensors that a token mixer's backward needs.
#[derive(Debug, Clone)]
pub(super) enum TokenMixerSaved {
    Attention(AttentionSaved),
    Latent(LatentSaved),
    GatedDelta(GatedDeltaSaved),
    ShortConv(ShortConvSaved),
}

impl TokenMixerSaved {
    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, by tensor, without adapters.
    pub(super) fn parts(mixer: &TokenMixer, tokens: usize, dtype: DType) -> Vec<(&'static str, usize)> {
        match mixer {
            TokenMixer::Attention(attention) => AttentionSaved::parts(attention, tokens, dtype),
            TokenMixer::Latent(latent) => LatentSaved::parts(latent, tokens, dtype),
            TokenMixer::GatedDelta(delta) => GatedDeltaSaved::parts(delta, tokens, dtype).into(),
            TokenMixer::ShortConv(conv) => ShortConvSaved::parts(conv, tokens, dtype).into(),
        }
    }

    /// Returns whether [`TokenMixerSaved::drop_attended`] drops the tensor of this name.
    pub(super) fn is_attended(name: &str) -> bool {
        AttentionSaved::ATTENDED.contains(&name) || GatedDeltaSaved::ATTENDED.contains(&name)
    }

    /// Drops the results of attention and of the delta rule.
    pub(super) fn drop_attended(&mut self) {
        match self {
            TokenMixerSaved::Attention(attention) => attention.attended = None,
            TokenMixerSaved::Latent(latent) => latent.attended = None,
            TokenMixerSaved::GatedDelta(delta) => delta.delta = None,
            TokenMixerSaved::ShortConv(_) => {}
        }
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        match self {
            TokenMixerSaved::Attention(attention) => attention.tensors(),
            TokenMixerSaved::Latent(latent) => latent.tensors(),
            TokenMixerSaved::GatedDelta(delta) => delta.tensors(),
            TokenMixerSaved::ShortConv(conv) => conv.tensors(),
        }
    }
}

/// The memory of a block of the tokens seen so far, for generation.
#[derive(Debug)]
pub enum BlockCache {
    /// Keys and values of all tokens.
    KeysAndValues(KeyValueCache),
    /// The state of a recurrence.
    State(DeltaState),
    /// The last inputs of a convolution.
    Convolution(ConvState),
    /// Nothing: the block reads the keys and values of another one.
    OfAnother,
}

impl BlockCache {
    /// Creates the empty cache of block `layer` for `capacity` tokens.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn new(
        config: &ModelConfig,
        layer: usize,
        capacity: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        Ok(match &config.blocks[layer].token_mixer {
            TokenMixer::Attention(attention) if attention.reads_from().is_some() => BlockCache::OfAnother,
            TokenMixer::Attention(attention) | TokenMixer::Latent(LatentMixer { attention, .. }) => {
                BlockCache::KeysAndValues(KeyValueCache::new(attention.heads, capacity, dtype, device)?)
            }
            TokenMixer::GatedDelta(mixer) => BlockCache::State(DeltaState::new(mixer, dtype, device)?),
            TokenMixer::ShortConv(mixer) => BlockCache::Convolution(ConvState::new(mixer, dtype, device)?),
        })
    }

    /// Returns the bytes of the cache of block `layer` for `capacity` tokens.
    pub fn bytes(config: &ModelConfig, layer: usize, capacity: usize, dtype: DType) -> u64 {
        match &config.blocks[layer].token_mixer {
            TokenMixer::Attention(attention) if attention.reads_from().is_some() => 0,
            TokenMixer::Attention(attention) | TokenMixer::Latent(LatentMixer { attention, .. }) => {
                let token = 2 * attention.heads.kv_width() * dtype.size_in_bytes();
                (capacity as u64).saturating_mul(token as u64)
            }
            TokenMixer::GatedDelta(mixer) => DeltaState::bytes(mixer, dtype) as u64,
            TokenMixer::ShortConv(mixer) => ConvState::bytes(mixer, dtype) as u64,
        }
    }
}
