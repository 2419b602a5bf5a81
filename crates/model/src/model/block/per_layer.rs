//! Per-layer inputs (Gemma 4 E2B, E4B), forward and backward.
//!
//! ```text
//! inputs = (norm(per_layer_model(x) / √D) + rows) / √2        in the first block, for all blocks
//! z      = y + norm(projection(act(gate(y)) · input))         in each block
//! ```
//!
//! `x` are the embeddings, `rows` those of the per-layer table, `y` the output of a block's mixers.
//! The backward of the first block computes `per_layer_model` again instead of keeping its output.

use candle_core::{DType, Tensor};

use super::carried::CarriedBackward;
use super::{HalfEnds, LayerPass, MixerBackward, MixerGradients, MixerNorms, around_mixer_backward};
use crate::error::{Error, Result};
use crate::model::block_part::LinearGroup;
use crate::model::composition::PerLayerInput;
use crate::model::linear::{self, LoraSaved, MergedLinear};
use crate::model::{Carried, ModelConfig, Param};
use crate::ops::elementwise::{add, scaled};
use crate::ops::glu::{glu, glu_backward};
use crate::ops::rms_norm::{rms_norm, rms_norm_backward};
use crate::runtime::TensorMut;

/// Factor on the sum of both parts of an input.
const HALF_ROOT: f64 = std::f64::consts::FRAC_1_SQRT_2;

/// The parameters of a block's use of its input.
#[derive(Debug, Clone)]
pub struct PerLayerWeights {
    /// The shape of the part.
    pub input: PerLayerInput,
    /// The projection to the gate, `[P, D]`.
    pub gate: MergedLinear,
    /// The projection back, `[D, P]`.
    pub projection: MergedLinear,
    /// The norm of the projected input.
    pub norms: MixerNorms,
    /// The parameters that make the inputs of all blocks, in the first block.
    pub model: Option<PerLayerModelWeights>,
}

/// The parameters that make the inputs of all blocks.
#[derive(Debug, Clone)]
pub struct PerLayerModelWeights {
    /// The projection of embeddings, `[Σ P, D]`.
    pub projection: MergedLinear,
    /// The norm of each block's part, `[P]`.
    pub norm: Param,
}

/// The tensors that backward needs.
#[derive(Debug, Clone)]
pub(super) struct PerLayerSaved {
    /// The output of the mixers, `[N, D]`.
    y: Tensor,
    /// The output of the gate, `[N, P]`.
    gate: Tensor,
    /// The projected input before its norm, `[N, D]`.
    out: Tensor,
    lora_gate: LoraSaved,
    lora_projection: LoraSaved,
}

impl PerLayerSaved {
    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, without adapters.
    pub(super) fn bytes(input: &PerLayerInput, config: &ModelConfig, tokens: usize, dtype: DType) -> usize {
        tokens * (input.width + 2 * config.hidden_size) * dtype.size_in_bytes()
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let PerLayerSaved { y, gate, out, lora_gate, lora_projection } = self;
        [y, gate, out].into_iter().chain(lora_gate.tensors()).chain(lora_projection.tensors()).collect()
    }
}

impl PerLayerWeights {
    /// Returns the linear layers for changes to them.
    pub(super) fn linears(&mut self) -> impl Iterator<Item = &mut MergedLinear> {
        let model = self.model.iter_mut().map(|model| &mut model.projection);
        [&mut self.gate, &mut self.projection].into_iter().chain(model)
    }

    /// Returns the layers of a group, if it is one of these.
    pub(super) fn linear(&self, group: LinearGroup) -> Option<&MergedLinear> {
        match group {
            LinearGroup::PerLayerGate => Some(&self.gate),
            LinearGroup::PerLayerProjection => Some(&self.projection),
            _ => None,
        }
    }

    /// Adds the block's input to the output `y: [N, D]` of its mixers. Also returns the tensors
    /// that backward needs.
    pub(super) fn forward(
        &self,
        pass: LayerPass<'_>,
        y: Tensor,
        carried: &Carried,
    ) -> Result<(Tensor, PerLayerSaved)> {
        let (added, saved) = self.branch(pass, y, carried)?;
        Ok((add(&saved.y, &added)?, saved))
    }

    /// Works like [`PerLayerWeights::forward`] without the sum: returns the addend.
    pub(super) fn branch(
        &self,
        pass: LayerPass<'_>,
        y: Tensor,
        carried: &Carried,
    ) -> Result<(Tensor, PerLayerSaved)> {
        let (gate, lora_gate) = linear::forward(&self.gate, &y, None, pass.branch())?;
        let gated = glu(&self.gate_and_input(pass, &gate, carried)?, self.input.activation)?;
        let (out, lora_projection) = linear::forward(&self.projection, &gated, None, pass.branch())?;
        let added = self.norms.output(pass.config, &out)?;
        Ok((added, PerLayerSaved { y, gate, out, lora_gate, lora_projection }))
    }

    /// Adds the gradients of the parameters, and that of the block's input to `state`. Returns the
    /// gradient of the output of the mixers from that of the sum, `dy: [N, D]`.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &PerLayerSaved,
        dy: &Tensor,
        state: &mut CarriedBackward<'_>,
    ) -> Result<Tensor> {
        self.around_backward(pass, saved, (dy, Some(dy)), state)
    }

    /// Works like [`PerLayerWeights::backward`] for [`PerLayerWeights::branch`].
    pub(super) fn branch_backward(
        &self,
        pass: LayerPass<'_>,
        saved: &PerLayerSaved,
        dadded: &Tensor,
        state: &mut CarriedBackward<'_>,
    ) -> Result<Tensor> {
        self.around_backward(pass, saved, (dadded, None), state)
    }

    fn around_backward(
        &self,
        pass: LayerPass<'_>,
        saved: &PerLayerSaved,
        gradients: (&Tensor, Option<&Tensor>),
        state: &mut CarriedBackward<'_>,
    ) -> Result<Tensor> {
        let ends = HalfEnds { x: &saved.y, out: Some(&saved.out) };
        let mixer = |half: MixerBackward| self.through(pass, saved, &half.dout, state);
        let dy = around_mixer_backward(&self.norms, pass.config, ends, gradients, true, mixer)?;
        dy.ok_or_else(|| Error::internal("a per-layer input without the gradient of its block"))
    }

    /// Works like [`PerLayerWeights::backward`] from the gradient of the projection's output.
    fn through(
        &self,
        pass: LayerPass<'_>,
        saved: &PerLayerSaved,
        dout: &Tensor,
        state: &mut CarriedBackward<'_>,
    ) -> Result<MixerGradients<'_>> {
        let (config, branch, width) = (pass.config, pass.branch(), self.input.width);
        let (dgated, pending) = linear::backward(&self.projection, &saved.lora_projection, dout, branch)?;
        let both = self.gate_and_input(pass, &saved.gate, state.carried)?;
        let dgated = TensorMut::new(dgated);
        let d = glu_backward(&both, &dgated, self.input.activation)?;
        // The gated input takes the place of its gradient.
        pending.add(&dgated)?;
        drop((dgated, both));
        let [dgate, dinput] = [0, width].map(|start| d.narrow(1, start, width)?.contiguous());
        let (start, all) = (config.per_layer_width(pass.layer), config.per_layer_width(config.num_layers()));
        state.gradients.set_input(&dinput?, start, all)?;
        let (dy, pending) = linear::backward(&self.gate, &saved.lora_gate, &dgate?, branch)?;
        Ok(MixerGradients { dinput: Some(dy), pending: pending.into() })
    }

    /// Returns the gate and the block's input side by side, `[N, 2 P]`.
    fn gate_and_input(&self, pass: LayerPass<'_>, gate: &Tensor, carried: &Carried) -> Result<Tensor> {
        let input = carried.input(pass.config.per_layer_width(pass.layer), self.input.width)?;
        Ok(Tensor::cat(&[gate, &input], 1)?)
    }
}

impl PerLayerModelWeights {
    /// Makes the inputs of all blocks, `[N, Σ P]`, of the embeddings `x: [N, D]` and of `rows`.
    pub(super) fn inputs(&self, pass: LayerPass<'_>, x: &Tensor, rows: &Tensor) -> Result<Tensor> {
        let (projected, _) = self.projected(pass, x)?;
        let normed = rms_norm(&projected, &self.norm.value, pass.config.norm)?.reshape(rows.shape())?;
        scaled(&add(&normed, rows)?, HALF_ROOT)
    }

    /// Adds the gradients of the parameters from that of all inputs, and replaces this by that of
    /// the rows. Returns the gradient of `x` if something needs it.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        x: &Tensor,
        state: &mut CarriedBackward<'_>,
        need_dx: bool,
    ) -> Result<Option<Tensor>> {
        let Some(dinputs) = state.gradients.per_layer.take() else { return Ok(None) };
        let drows = scaled(&dinputs.into_tensor(), HALF_ROOT)?;
        let (projected, lora) = self.projected(pass, x)?;
        let dnormed = drows.reshape(projected.shape())?;
        let (weight, grad) = (&self.norm.value, self.norm.grad.as_ref());
        let d = rms_norm_backward(&projected, weight, &dnormed, None, grad, None, pass.config.norm)?;
        drop(projected);
        let d = scaled(&d.reshape(drows.shape())?, root(pass.config))?;
        let (dx, pending) = linear::backward_first(&self.projection, &lora, &d, pass.branch(), need_dx)?;
        pending.add(x)?;
        state.gradients.per_layer = Some(TensorMut::new(drows));
        Ok(dx)
    }

    /// Returns the scaled projection of `x`, a row for each token and block: `[N L, P]`.
    fn projected(&self, pass: LayerPass<'_>, x: &Tensor) -> Result<(Tensor, LoraSaved)> {
        let (raw, lora) = linear::forward(&self.projection, x, None, pass.branch())?;
        let width = self.norm.value.dim(0)?;
        let rows = raw.elem_count() / width;
        Ok((scaled(&raw, root(pass.config))?.reshape((rows, width))?, lora))
    }
}

/// Returns the factor on the projection of embeddings, `1 / √D`.
fn root(config: &ModelConfig) -> f64 {
    1.0 / (config.hidden_size as f64).sqrt()
}
