//! A norm of hidden states in use, of the kind that its model has.

use candle_core::Tensor;

use super::composition::HiddenNorm;
use super::{ModelConfig, Param};
use crate::error::Result;
use crate::ops::layer_norm::{LayerNorm, LayerNormGradients, layer_norm, layer_norm_backward};
use crate::ops::rms_norm::{rms_norm, rms_norm_backward};
use crate::runtime::TensorMut;

/// The parameters of a norm of hidden states, for one use.
#[derive(Debug, Clone)]
pub struct Norm {
    /// The gain, `[D]`.
    pub weight: Param,
    /// The bias, `[D]`, of a LayerNorm that has one.
    pub bias: Option<Param>,
}

impl Norm {
    /// Returns true if a parameter trains.
    pub(super) fn trains(&self) -> bool {
        self.weight.grad.is_some() || self.bias.as_ref().is_some_and(|bias| bias.grad.is_some())
    }

    fn layer_norm(&self, config: &ModelConfig) -> LayerNorm<'_> {
        let bias = self.bias.as_ref().map(|bias| &bias.value);
        LayerNorm { weight: &self.weight.value, bias, kind: config.norm }
    }

    /// Returns the norm of `x: [N, D]`.
    pub(super) fn forward(&self, config: &ModelConfig, x: &Tensor) -> Result<Tensor> {
        match config.hidden_norm {
            HiddenNorm::Rms => rms_norm(x, &self.weight.value, config.norm),
            HiddenNorm::Layer { .. } => layer_norm(x, self.layer_norm(config)),
        }
    }

    /// Returns the gradient of `x: [N, D]` from `dy`, plus `residual` if given, and adds those of
    /// the parameters. Writes the norm of `x` to `normed` if given.
    pub(super) fn backward(
        &self,
        config: &ModelConfig,
        x: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
        normed: Option<&TensorMut>,
    ) -> Result<Tensor> {
        let weight = self.weight.grad.as_ref();
        match config.hidden_norm {
            HiddenNorm::Rms => {
                rms_norm_backward(x, &self.weight.value, dy, residual, weight, normed, config.norm)
            }
            HiddenNorm::Layer { .. } => {
                let bias = self.bias.as_ref().and_then(|bias| bias.grad.as_ref());
                let grads = LayerNormGradients { weight, bias };
                layer_norm_backward(x, self.layer_norm(config), dy, residual, grads, normed)
            }
        }
    }
}
