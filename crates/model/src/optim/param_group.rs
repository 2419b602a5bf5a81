//! The pieces of parameter memory that an optimizer updates.

use candle_core::Tensor;

use crate::ops::stochastic_rounding::StochasticRounding;
use crate::runtime::TensorMut;
use crate::runtime::param_storage::ParamStorage;

/// A run of parameter memory with one update rule: values and gradients in f32 or bf16,
/// one-dimensional.
#[derive(Debug, Clone)]
pub struct ParamGroup {
    /// The memory that is updated in place.
    pub param: ParamStorage,
    /// The bf16 values used for compute, if the update also writes them.
    pub value: Option<TensorMut>,
    /// The rounding of a bf16 `param`: the stream of the run's seed and the bucket, and the
    /// position of the first value there.
    pub rounding: StochasticRounding,
    /// Its gradient, on the device, or on the host if state is offloaded.
    pub grad: Tensor,
    /// True if weight decay applies.
    pub decay: bool,
    /// Factor of the learning rate (LoRA+ for B).
    pub rate: f64,
    /// True if its state may be kept in 8 bits: it is one tensor, or a shard of one, of
    /// `INT8_MIN_ELEMENTS` or more.
    pub large: bool,
}

impl ParamGroup {
    /// Returns the rounding of the values in update `update`.
    pub(super) fn rounding_of(&self, update: u64) -> StochasticRounding {
        StochasticRounding { stream: self.rounding.stream.part(update), ..self.rounding }
    }
}
