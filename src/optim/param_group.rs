//! The pieces of parameter memory that an optimizer updates.

use candle_core::Tensor;

use crate::runtime::TensorMut;
use crate::runtime::param_storage::ParamStorage;

/// A run of parameter memory that is updated alike: f32 values and gradients, one-dimensional.
#[derive(Debug, Clone)]
pub struct ParamGroup {
    /// What is updated in place.
    pub param: ParamStorage,
    /// The bf16 values that are computed with, where the update writes them too.
    pub value: Option<TensorMut>,
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
