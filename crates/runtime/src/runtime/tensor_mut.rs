//! Tensors whose memory may be written.

use std::ops::Deref;

use candle_core::{DType, Device, Shape, Tensor};

use super::device_memory::requested;
use crate::error::Result;

/// The destination of an operation that overwrites memory or adds into it: a gradient, an output, a parameter under
/// update, a state of the optimizer. Whoever owns the memory makes one of it, so that a tensor which is only to be read
/// cannot be handed in as a destination by accident.
///
/// Clones and views are the same memory, and it is read as any tensor is. An operation must not read memory that it
/// writes: on the CPU it would wait for itself, which debug builds assert.
#[derive(Debug, Clone)]
pub struct TensorMut(Tensor);

impl TensorMut {
    /// Makes `memory`, contiguous and of any dtype, a destination.
    pub fn new(memory: Tensor) -> Self {
        TensorMut(memory)
    }

    /// New memory that holds zeros.
    ///
    /// # Errors
    /// When the device has not enough memory.
    pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        let shape = shape.into();
        let bytes = shape.elem_count() * dtype.size_in_bytes();
        let made = || match (device, bytes) {
            (Device::Cpu, _) | (_, 1..) => Tensor::zeros(shape, dtype, device),
            // The driver of a GPU allocates no 0 bytes: of one element nothing is shown.
            (_, 0) => Tensor::zeros(1, dtype, device)?.narrow(0, 0, 0)?.reshape(shape),
        };
        requested(bytes, made).map(TensorMut)
    }

    /// The part `start..start + len` along dimension `dim`, in the same memory.
    ///
    /// # Errors
    /// When the part does not lie within the tensor.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Self> {
        Ok(TensorMut(self.0.narrow(dim, start, len)?))
    }

    /// The tensor, when it has been written.
    pub fn into_tensor(self) -> Tensor {
        self.0
    }
}

impl Deref for TensorMut {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        &self.0
    }
}
