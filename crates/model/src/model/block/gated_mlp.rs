//! An MLP with an activated gate, forward and backward.
//!
//! ```text
//! y = down_proj(act(gate) · up)          gate, up = gate_up_proj(x)
//! ```
//!
//! Backward recomputes the gated product, which is elementwise, in the pass that computes its
//! gradient. In Gemma 3n gates are cut off before their activation, which it recomputes too.

use std::borrow::Cow;

use candle_core::{DType, Tensor};

use super::gate_cutoff::{cut_off, cut_off_backward};
use super::{LayerPass, MixerBackward, MixerGradients};
use crate::error::Result;
use crate::model::ModelConfig;
use crate::model::composition::GatedMlp;
use crate::model::linear::{self, LoraSaved, MergedLinear};
use crate::ops::glu::{glu, glu_backward};
use crate::runtime::TensorMut;

/// The parameters of a gated MLP, for one use.
#[derive(Debug, Clone)]
pub struct GatedMlpWeights {
    /// The shape of the mixer.
    pub mixer: GatedMlp,
    /// gate and up apart, or the one fused `gate_up_proj`.
    pub gate_up: MergedLinear,
    /// The second projection, `down_proj`.
    pub down: MergedLinear,
}

/// The tensors that backward needs: `gate_up` is `[N, 2F]`.
#[derive(Debug, Clone)]
pub(super) struct GatedMlpSaved {
    gate_up: Tensor,
    lora_gate_up: LoraSaved,
    lora_down: LoraSaved,
}

impl GatedMlpSaved {
    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, by tensor, without adapters.
    pub(super) fn parts(
        mlp: &GatedMlp,
        config: &ModelConfig,
        tokens: usize,
        dtype: DType,
    ) -> [(&'static str, usize); 1] {
        let width = mlp.width(config.intermediate_size);
        [("gate and up", tokens * 2 * width * dtype.size_in_bytes())]
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let GatedMlpSaved { gate_up, lora_gate_up, lora_down } = self;
        std::iter::once(gate_up).chain(lora_gate_up.tensors()).chain(lora_down.tensors()).collect()
    }
}

impl GatedMlpWeights {
    /// Computes `x: [N, D]`, normed → `[N, D]` plus `residual`, and the tensors that backward
    /// needs.
    pub(super) fn forward(
        &self,
        pass: LayerPass<'_>,
        x: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, GatedMlpSaved)> {
        let (gate_up, lora_gate_up) = linear::forward(&self.gate_up, x, None, pass.branch())?;
        let product = glu(&*self.cut_off(&gate_up)?, self.mixer.activation)?;
        let (y, lora_down) = linear::forward(&self.down, &product, residual, pass.branch())?;
        Ok((y, GatedMlpSaved { gate_up, lora_gate_up, lora_down }))
    }

    /// Works like [`GatedMlpWeights::forward`] without its output, so without the product of
    /// `down_proj`.
    pub(super) fn recompute(&self, pass: LayerPass<'_>, x: &Tensor) -> Result<GatedMlpSaved> {
        let (gate_up, lora_gate_up) = linear::forward(&self.gate_up, x, None, pass.branch())?;
        let product = || glu(&*self.cut_off(&gate_up)?, self.mixer.activation);
        let lora_down = linear::recompute(&self.down, product, pass.branch())?;
        Ok(GatedMlpSaved { gate_up, lora_gate_up, lora_down })
    }

    /// Returns the input of the gated product: gates, cut off if the mixer says so, and ups.
    fn cut_off<'t>(&self, gate_up: &'t Tensor) -> Result<Cow<'t, Tensor>> {
        match self.mixer.gate_deviations {
            Some(deviations) => cut_off(gate_up, deviations).map(Cow::Owned),
            None => Ok(Cow::Borrowed(gate_up)),
        }
    }

    /// Adds the gradients of the parameters that do not need the input. Returns that of the input,
    /// if something reads it.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &GatedMlpSaved,
        MixerBackward { dout, need_dx }: MixerBackward,
    ) -> Result<MixerGradients<'_>> {
        let branch = pass.branch();
        let (dproduct, pending) = linear::backward(&self.down, &saved.lora_down, &dout, branch)?;
        drop(dout);
        // The gradient's memory becomes that of the product.
        let product = TensorMut::new(dproduct);
        let dgate_up = glu_backward(&*self.cut_off(&saved.gate_up)?, &product, self.mixer.activation)?;
        let dgate_up = match self.mixer.gate_deviations {
            Some(deviations) => cut_off_backward(&saved.gate_up, &dgate_up, deviations)?,
            None => dgate_up,
        };
        pending.add(&product)?;
        drop(product);
        let (dinput, pending) =
            linear::backward_first(&self.gate_up, &saved.lora_gate_up, &dgate_up, branch, need_dx)?;
        Ok(MixerGradients { dinput, pending: pending.into() })
    }
}
