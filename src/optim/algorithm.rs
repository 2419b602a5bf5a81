//! What an optimizer's algorithm is to the rest: what it keeps, and one update of one piece of memory.

use std::fmt::Debug;

use candle_core::Tensor;

use super::state::{StateTensor, StateValues};
use crate::error::Result;
use crate::runtime::TensorMut;

/// An algorithm that updates parameters by their gradients. It declares what it keeps beside each; allocating that,
/// staging, saving, restoring and planning follow the declaration.
pub trait OptimizerAlgorithm: Debug + Send + Sync {
    /// The tensors that it keeps beside each parameter.
    fn state(&self) -> &'static [StateTensor];

    /// Updates `param` and its `state`, one for each of [`OptimizerAlgorithm::state`], in place; all of `[elements]`,
    /// `param` and `grad` f32.
    ///
    /// # Errors
    /// When an operation of the device fails.
    fn update(
        &self,
        param: &TensorMut,
        grad: &Tensor,
        state: &[StateValues],
        step: &UpdateStep,
    ) -> Result<()>;
}

/// What one update of one piece is besides the algorithm's constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UpdateStep {
    /// Learning rate of the piece in this update.
    pub learning_rate: f64,
    /// Weight decay of the piece.
    pub weight_decay: f64,
    /// 1 for the first update.
    pub update: u64,
    /// Factor on the gradient (clipping).
    pub grad_scale: f64,
}
