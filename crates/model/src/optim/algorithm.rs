//! The interface of an optimizer's algorithm: its state, and the update of pieces of memory.

use std::fmt::Debug;

use candle_core::Tensor;

use super::state::{StateTensor, StateValues};
use crate::error::Result;
use crate::ops::stochastic_rounding::StochasticRounding;
use crate::runtime::TensorMut;

/// An algorithm that updates parameters by their gradients. It declares the state of each
/// parameter. Allocation, staging, saving, restoring and planning follow that declaration.
pub trait OptimizerAlgorithm: Debug + Send + Sync {
    /// Returns the state tensors of each parameter.
    fn state(&self) -> &'static [StateTensor];

    /// Returns whether an update also writes [`UpdatePiece::value`]. Otherwise the caller copies it
    /// from the parameters afterwards.
    fn writes_value(&self) -> bool {
        false
    }

    /// Updates the parameters of all pieces and their state in place; all are on one device.
    ///
    /// # Errors
    /// An operation of the device fails.
    fn update(&self, pieces: &[UpdatePiece<'_>]) -> Result<()>;
}

/// A run of parameters to update: all of `[elements]`.
#[derive(Debug, Clone, Copy)]
pub struct UpdatePiece<'a> {
    /// The parameters: f32, or bf16 rounded by `rounding`.
    pub param: &'a TensorMut,
    /// The bf16 values used for compute, if any: the updated `param` is rounded to them. `None` for
    /// an algorithm that does not write them.
    pub value: Option<&'a TensorMut>,
    /// The rounding of a bf16 `param` in this update.
    pub rounding: StochasticRounding,
    /// Their gradients, f32 or bf16.
    pub grad: &'a Tensor,
    /// The state of the parameters: one for each of [`OptimizerAlgorithm::state`].
    pub state: &'a [StateValues],
    /// The settings of this update.
    pub step: UpdateStep,
}

/// The settings of one update of one piece, besides the algorithm's constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UpdateStep {
    /// Learning rate of the piece in this update.
    pub learning_rate: f64,
    /// Weight decay of the piece.
    pub weight_decay: f64,
    /// Number of the update; the first is 1.
    pub update: u64,
    /// Factor of the gradient (clipping).
    pub grad_scale: f64,
}
