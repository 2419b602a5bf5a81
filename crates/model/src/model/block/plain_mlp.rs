//! An MLP without a gate, forward and backward.
//!
//! ```text
//! y = down_proj(act(up_proj(x)))
//! ```
//!
//! Backward recomputes the activated values, which are elementwise, in the pass that computes their
//! gradient.

use candle_core::{DType, Tensor};

use super::xielu::XieluWeights;
use super::{LayerPass, MixerBackward, MixerGradients};
use crate::error::Result;
use crate::model::ModelConfig;
use crate::model::composition::PlainMlp;
use crate::model::linear::{self, LoraSaved, MergedLinear};
use crate::ops::activation::{PlainActivation, activate, activate_backward};
use crate::runtime::TensorMut;

/// The parameters of an MLP without a gate, for one use.
#[derive(Debug, Clone)]
pub struct PlainMlpWeights {
    /// The shape of the mixer.
    pub mixer: PlainMlp,
    /// The first projection, `up_proj`.
    pub up: MergedLinear,
    /// The second projection, `down_proj`.
    pub down: MergedLinear,
    /// The activation between them.
    pub activation: ActivationWeights,
}

/// An activation and its parameters, for one use.
#[derive(Debug, Clone)]
pub enum ActivationWeights {
    /// One without parameters.
    Fixed(PlainActivation),
    /// xIELU with the numbers of its block.
    Xielu(XieluWeights),
}

impl ActivationWeights {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            ActivationWeights::Fixed(activation) => activate(x, *activation),
            ActivationWeights::Xielu(xielu) => xielu.forward(x),
        }
    }

    /// Returns the gradient of `x` from `dh`, which becomes the activated values, and adds those of
    /// the parameters.
    fn backward(&self, x: &Tensor, dh: &TensorMut) -> Result<Tensor> {
        match self {
            ActivationWeights::Fixed(activation) => activate_backward(x, dh, *activation),
            ActivationWeights::Xielu(xielu) => xielu.backward(x, dh),
        }
    }
}

/// The tensors that backward needs: `up` is `[N, F]`.
#[derive(Debug, Clone)]
pub(super) struct PlainMlpSaved {
    up: Tensor,
    lora_up: LoraSaved,
    lora_down: LoraSaved,
}

impl PlainMlpSaved {
    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, by tensor, without adapters.
    pub(super) fn parts(config: &ModelConfig, tokens: usize, dtype: DType) -> [(&'static str, usize); 1] {
        [("up", tokens * config.intermediate_size * dtype.size_in_bytes())]
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let PlainMlpSaved { up, lora_up, lora_down } = self;
        std::iter::once(up).chain(lora_up.tensors()).chain(lora_down.tensors()).collect()
    }
}

impl PlainMlpWeights {
    /// Computes `x: [N, D]`, normed → `[N, D]` plus `residual`, and the tensors that backward
    /// needs.
    pub(super) fn forward(
        &self,
        pass: LayerPass<'_>,
        x: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, PlainMlpSaved)> {
        let (up, lora_up) = linear::forward(&self.up, x, None, pass.branch())?;
        let activated = self.activation.forward(&up)?;
        let (y, lora_down) = linear::forward(&self.down, &activated, residual, pass.branch())?;
        Ok((y, PlainMlpSaved { up, lora_up, lora_down }))
    }

    /// Works like [`PlainMlpWeights::forward`] without its output, so without the product of
    /// `down_proj`.
    pub(super) fn recompute(&self, pass: LayerPass<'_>, x: &Tensor) -> Result<PlainMlpSaved> {
        let (up, lora_up) = linear::forward(&self.up, x, None, pass.branch())?;
        let activated = || self.activation.forward(&up);
        let lora_down = linear::recompute(&self.down, activated, pass.branch())?;
        Ok(PlainMlpSaved { up, lora_up, lora_down })
    }

    /// Adds the gradients of the parameters that do not need the input. Returns that of the input,
    /// if something reads it.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &PlainMlpSaved,
        MixerBackward { dout, need_dx }: MixerBackward,
    ) -> Result<MixerGradients<'_>> {
        let branch = pass.branch();
        let (dactivated, pending) = linear::backward(&self.down, &saved.lora_down, &dout, branch)?;
        drop(dout);
        // The gradient's memory becomes that of the activated values.
        let activated = TensorMut::new(dactivated);
        let dup = self.activation.backward(&saved.up, &activated)?;
        pending.add(&activated)?;
        drop(activated);
        let (dinput, pending) = linear::backward_first(&self.up, &saved.lora_up, &dup, branch, need_dx)?;
        Ok(MixerGradients { dinput, pending: pending.into() })
    }
}
