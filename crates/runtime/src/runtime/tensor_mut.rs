//! Tensors with writable memory.

use std::ops::Deref;

use candle_core::{DType, Device, Shape, Tensor};

use super::device_memory::allocated;
use crate::error::Result;

/// Destination of an operation that overwrites or accumulates: a gradient, an output, a parameter,
/// an optimizer state. The owner of the memory creates it, so that a read-only tensor cannot become
/// a destination by accident.
///
/// Clones and views share the memory, and it can be read like any tensor. An operation must not
/// read the memory that it writes: on the CPU it would deadlock, which debug builds assert.
#[derive(Debug, Clone)]
pub struct TensorMut(Tensor);

impl TensorMut {
    /// Makes `memory`, contiguous and of any dtype, a destination.
    pub fn new(memory: Tensor) -> Self {
        TensorMut(memory)
    }

    /// Allocates memory of zeros.
    ///
    /// # Errors
    /// The device has too little memory.
    pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Self> {
        let shape = shape.into();
        let bytes = shape.elem_count() * dtype.size_in_bytes();
        let made = || match (device, bytes) {
            (Device::Cpu, _) | (_, 1..) => Tensor::zeros(&shape, dtype, device),
            // A GPU's driver allocates no 0 bytes: one element is allocated and hidden.
            (_, 0) => Tensor::zeros(1, dtype, device)?.narrow(0, 0, 0)?.reshape(&shape),
        };
        allocated(device, bytes, made).map(TensorMut)
    }

    /// The part `start..start + len` along dimension `dim`, in the same memory.
    ///
    /// # Errors
    /// The part exceeds the tensor.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Self> {
        Ok(TensorMut(self.0.narrow(dim, start, len)?))
    }

    /// The tensor, after writing.
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
