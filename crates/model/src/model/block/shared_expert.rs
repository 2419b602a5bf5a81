//! The shared expert of a mixture, forward and backward.
//!
//! ```text
//! y = down_proj(w · act(gate) · up)          gate, up = gate_up_proj(x),  w = σ(factor(x)), or 1
//! ```
//!
//! As with the chosen experts, the factor multiplies the input of `down_proj`.

use candle_core::{DType, Tensor};

use super::{LayerPass, MixerBackward};
use crate::error::Result;
use crate::model::composition::SharedExpert;
use crate::model::linear::{self, LoraSaved, MergedLinear, PendingGradients};
use crate::ops::elementwise::add;
use crate::ops::experts::{ExpertRows, scale_rows, scale_rows_backward};
use crate::ops::glu::{Activation, glu, glu_backward};
use crate::runtime::TensorMut;

/// The parameters of a shared expert, for one use.
#[derive(Debug, Clone)]
pub struct SharedExpertWeights {
    /// The activation of the gate.
    pub activation: Activation,
    /// The projections to gate and up.
    pub gate_up: MergedLinear,
    /// The second projection.
    pub down: MergedLinear,
    /// The projection to the logit of the factor, if the expert has one.
    pub factor: Option<MergedLinear>,
}

/// The tensors that backward needs.
#[derive(Debug, Clone)]
pub(super) struct SharedExpertSaved {
    /// Gates and ups, `[N, 2F]`.
    gate_up: Tensor,
    lora_gate_up: LoraSaved,
    lora_down: LoraSaved,
    factor: Option<FactorSaved>,
}

#[derive(Debug, Clone)]
struct FactorSaved {
    /// w: `[N, 1]` f32.
    weights: Tensor,
    /// A row for each token.
    rows: ExpertRows,
    lora: LoraSaved,
}

/// Gradients that need the mixer's input.
pub(super) struct PendingShared<'w>(Vec<PendingGradients<'w>>);

impl PendingShared<'_> {
    /// Returns whether a gradient needs the input.
    pub(super) fn reads_input(&self) -> bool {
        self.0.iter().any(PendingGradients::reads_input)
    }

    /// Adds the gradients, given the mixer's input, `x: [N, D]`.
    pub(super) fn add(self, x: &Tensor) -> Result<()> {
        self.0.into_iter().try_for_each(|pending| pending.add(x))
    }
}

impl SharedExpertSaved {
    /// Returns the bytes that it holds for `tokens` tokens in `dtype`, without adapters: of gate
    /// and up, and of the factor.
    pub(super) fn bytes(shared: &SharedExpert, tokens: usize, dtype: DType) -> [usize; 2] {
        // Of each token: the factor, and its row in both directions.
        let factor = if shared.has_gate { 3 * tokens * DType::F32.size_in_bytes() } else { 0 };
        [tokens * 2 * shared.width * dtype.size_in_bytes(), factor]
    }

    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let SharedExpertSaved { gate_up, lora_gate_up, lora_down, factor } = self;
        let of_factor = factor.iter().flat_map(|FactorSaved { weights, rows, lora }| {
            lora.tensors().into_iter().chain(rows.tensors()).chain([weights])
        });
        let loras = lora_gate_up.tensors().into_iter().chain(lora_down.tensors());
        std::iter::once(gate_up).chain(loras).chain(of_factor).collect()
    }
}

impl SharedExpertWeights {
    /// Computes `x: [N, D]`, normed → `[N, D]` plus `residual`, and the tensors that backward
    /// needs.
    pub(super) fn forward(
        &self,
        pass: LayerPass<'_>,
        x: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, SharedExpertSaved)> {
        let (mut saved, product) = self.gated(pass, x)?;
        let (y, lora_down) = linear::forward(&self.down, &product, residual, pass.branch())?;
        saved.lora_down = lora_down;
        Ok((y, saved))
    }

    /// Works like [`SharedExpertWeights::forward`] without its output, so without the product of
    /// `down_proj`.
    pub(super) fn recompute(&self, pass: LayerPass<'_>, x: &Tensor) -> Result<SharedExpertSaved> {
        let (mut saved, product) = self.gated(pass, x)?;
        saved.lora_down = linear::recompute(&self.down, || Ok(product), pass.branch())?;
        Ok(saved)
    }

    /// Computes the input of `down_proj`, `[N, F]`. The adapter of `down_proj` is still missing.
    fn gated(&self, pass: LayerPass<'_>, x: &Tensor) -> Result<(SharedExpertSaved, Tensor)> {
        let (gate_up, lora_gate_up) = linear::forward(&self.gate_up, x, None, pass.branch())?;
        let product = glu(&gate_up, self.activation)?;
        let factor = |factor: &MergedLinear| -> Result<FactorSaved> {
            let (logits, lora) = linear::forward(factor, x, None, pass.branch())?;
            // One value a token, so candle computes it.
            let weights = (logits.to_dtype(DType::F32)?.neg()?.exp()? + 1.0)?.recip()?;
            Ok(FactorSaved { weights, rows: ExpertRows::of_tokens(x.dim(0)?, x.device())?, lora })
        };
        let factor = self.factor.as_ref().map(factor).transpose()?;
        let product = match &factor {
            Some(factor) => scale_rows(&product, &factor.weights, &factor.rows)?,
            None => product,
        };
        let lora_down = LoraSaved::default();
        Ok((SharedExpertSaved { gate_up, lora_gate_up, lora_down, factor }, product))
    }

    /// Adds the gradients of the parameters that do not need the input. Returns that of the input,
    /// if something reads it.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &SharedExpertSaved,
        MixerBackward { dout, need_dx }: MixerBackward,
    ) -> Result<(Option<Tensor>, PendingShared<'_>)> {
        let branch = pass.branch();
        let (dproduct, pending) = linear::backward(&self.down, &saved.lora_down, &dout, branch)?;
        drop(dout);
        let dproduct = TensorMut::new(dproduct);
        let product = TensorMut::new(glu(&saved.gate_up, self.activation)?);
        let mut dlogits = None;
        if let Some(FactorSaved { weights, rows, .. }) = &saved.factor {
            let dweights = scale_rows_backward(&product, &dproduct, weights, rows)?;
            let slope = (weights * weights.affine(-1.0, 1.0)?)?;
            dlogits = Some((dweights * slope)?.to_dtype(product.dtype())?);
        }
        pending.add(&product)?;
        drop(product);
        let dgate_up = glu_backward(&saved.gate_up, &dproduct, self.activation)?;
        drop(dproduct);
        let (mut dx, pending) =
            linear::backward_first(&self.gate_up, &saved.lora_gate_up, &dgate_up, branch, need_dx)?;
        let mut all = vec![pending];
        if let (Some(factor), Some(FactorSaved { lora, .. }), Some(dlogits)) =
            (&self.factor, &saved.factor, dlogits)
        {
            let (through, pending) = linear::backward_first(factor, lora, &dlogits, branch, need_dx)?;
            dx = dx.zip(through).map(|(dx, through)| add(&dx, &through)).transpose()?;
            all.push(pending);
        }
        Ok((dx, PendingShared(all)))
    }
}
