//! A learned residual of low rank beside attention (LAuReL, arXiv 2411.07501), forward and
//! backward.
//!
//! ```text
//! y = norm(right(left(x)))
//! ```

use candle_core::Tensor;

use super::{LayerPass, Norm};
use crate::error::Result;
use crate::model::linear::{self, LoraSaved, MergedLinear, PendingGradients};
use crate::model::lora::BranchContext;

/// The parameters of the branch.
#[derive(Debug, Clone)]
pub struct LaurelWeights {
    /// The projection to the rank, `[R, D]`.
    pub left: MergedLinear,
    /// The projection back, `[D, R]`.
    pub right: MergedLinear,
    /// The norm of its output.
    pub norm: Norm,
}

/// The tensors that backward needs.
#[derive(Debug, Clone)]
pub(super) struct LaurelSaved {
    /// The output of the first projection, `[N, R]`.
    inner: Tensor,
    /// The output before the norm, `[N, D]`.
    out: Tensor,
    lora_left: LoraSaved,
    lora_right: LoraSaved,
}

impl LaurelSaved {
    /// Returns all tensors that it holds.
    #[cfg(test)]
    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        let LaurelSaved { inner, out, lora_left, lora_right } = self;
        [inner, out].into_iter().chain(lora_left.tensors()).chain(lora_right.tensors()).collect()
    }
}

impl LaurelWeights {
    /// Returns the linear layers for changes to them.
    pub(super) fn linears(&mut self) -> [&mut MergedLinear; 2] {
        [&mut self.left, &mut self.right]
    }

    /// Computes `x: [N, D]` → `[N, D]`, and the tensors that backward needs.
    pub(super) fn forward(&self, pass: LayerPass<'_>, x: &Tensor) -> Result<(Tensor, LaurelSaved)> {
        let branch = BranchContext { panels: None, ..pass.branch() };
        let (inner, lora_left) = linear::forward(&self.left, x, None, branch)?;
        let (out, lora_right) = linear::forward(&self.right, &inner, None, branch)?;
        let y = self.norm.forward(pass.config, &out)?;
        Ok((y, LaurelSaved { inner, out, lora_left, lora_right }))
    }

    /// Returns the gradient of the input, and those of parameters that need it. Adds the others.
    pub(super) fn backward(
        &self,
        pass: LayerPass<'_>,
        saved: &LaurelSaved,
        dy: &Tensor,
    ) -> Result<(Tensor, PendingGradients<'_>)> {
        let branch = BranchContext { panels: None, ..pass.branch() };
        let dout = self.norm.backward(pass.config, &saved.out, dy, None, None)?;
        let (dinner, pending) = linear::backward(&self.right, &saved.lora_right, &dout, branch)?;
        pending.add(&saved.inner)?;
        linear::backward(&self.left, &saved.lora_left, &dinner, branch)
    }
}
