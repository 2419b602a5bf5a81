//! The pieces of parameter memory that an optimizer updates.

use candle_core::Tensor;

use crate::ops::stochastic_rounding::StochasticRounding;
use crate::runtime::TensorMut;
use crate::runtime::param_storage::ParamStorage;

/// A run of parameter memory that is updated alike: values and gradients in f32 or bf16, one-dimensional.
#[derive(Debug, Clone)]
pub struct ParamGroup {
    /// What is updated in place.
    pub param: ParamStorage,
    /// The bf16 values that are computed with, where the update writes them too.
    pub value: Option<TensorMut>,
    /// How a `param` in bf16 is rounded: the stream of the run's seed and the bucket, and its first value's place there.
    pub rounding: StochasticRounding,
    /// Its gradient, on the device or, where state is offloaded, on the host.
    pub grad: Tensor,
    /// Weight decay applies.
    pub decay: bool,
    /// Factor on the learning rate (LoRA+ for B).
    pub rate: f64,
    /// Its state may be kept in 8 bits: it is one tensor, or a shard of one, of
    /// [`INT8_MIN_ELEMENTS`](super::INT8_MIN_ELEMENTS) or more.
    pub large: bool,
}

impl ParamGroup {
    /// How the values are rounded in update `update`.
    pub(super) fn rounding_of(&self, update: u64) -> StochasticRounding {
        StochasticRounding { stream: self.rounding.stream.part(update), ..self.rounding }
    }
}
