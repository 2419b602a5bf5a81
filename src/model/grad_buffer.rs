//! The memory in which the gradient of a parameter is added up.

use std::ops::Deref;

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};

/// Where backward adds the gradient of one parameter, in place: f32, contiguous, in the parameter's shape. Clones are
/// the same memory. It is a type of its own so that no value can be handed in as a destination.
#[derive(Debug, Clone)]
pub struct GradBuffer(Tensor);

impl GradBuffer {
    /// Makes `memory` (f32, any shape) the place where a gradient is added up; what it holds is the sum so far.
    ///
    /// # Errors
    /// `memory` has another dtype or is not contiguous: a fault of the caller.
    pub fn new(memory: Tensor) -> Result<Self> {
        if memory.dtype() != DType::F32 || !memory.is_contiguous() {
            return Err(Error::internal("gradients are added up in contiguous f32 memory").because(format!(
                "found {:?} of layout {:?}",
                memory.dtype(),
                memory.layout()
            )));
        }
        Ok(GradBuffer(memory))
    }
}

impl Deref for GradBuffer {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        &self.0
    }
}
