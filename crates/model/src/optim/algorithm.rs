//! What an optimizer's algorithm is to the rest: what it keeps, and one update of one piece of memory.

use std::fmt::Debug;

use candle_core::Tensor;

use super::state::{StateTensor, StateValues};
use crate::error::Result;
use crate::ops::stochastic_rounding::StochasticRounding;
use crate::runtime::TensorMut;

/// An algorithm that updates parameters by their gradients. It declares what it keeps beside each; allocating that,
/// staging, saving, restoring and planning follow the declaration.
pub trait OptimizerAlgorithm: Debug + Send + Sync {
    /// The tensors that it keeps beside each parameter.
    fn state(&self) -> &'static [StateTensor];

    /// Whether an update writes [`UpdatePiece::value`] too; else it is made of the parameters afterwards.
    fn writes_value(&self) -> bool {
        false
    }

    /// Updates the parameters of all pieces and their state in place; all are on one device.
    ///
    /// # Errors
    /// When an operation of the device fails.
    fn update(&self, pieces: &[UpdatePiece<'_>]) -> Result<()>;
}

/// A run of parameters to update: all of `[elements]`.
#[derive(Debug, Clone, Copy)]
pub struct UpdatePiece<'a> {
    /// The parameters, f32, or bf16 that an update rounds by `rounding`.
    pub param: &'a TensorMut,
    /// Where they are computed with in bf16: what becomes of `param` is rounded to it. None for an algorithm that does not
    /// write it.
    pub value: Option<&'a TensorMut>,
    /// How a `param` in bf16 is rounded in this update.
    pub rounding: StochasticRounding,
    /// Their gradients, f32 or bf16.
    pub grad: &'a Tensor,
    /// What is kept beside them: one for each of [`OptimizerAlgorithm::state`].
    pub state: &'a [StateValues],
    /// The numbers of this update.
    pub step: UpdateStep,
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
