//! Memory of a rank's device for sending and receiving.

use candle_core::{DType, Device, Tensor, WithDType};

use crate::error::Result;
use crate::runtime::buffer::Buffer;
use crate::runtime::cpu_tensor;

/// A vector of numbers and its memory.
pub(crate) struct RankBuffer {
    tensor: Tensor,
    memory: Buffer,
}

impl RankBuffer {
    /// Creates `elements` f32 zeroes on `device`.
    pub(crate) fn zeros(elements: usize, device: &Device) -> Result<Self> {
        Self::of(Tensor::zeros(elements, DType::F32, device)?)
    }

    /// Creates `elements` f32 numbers on `device`, each from its index.
    pub(crate) fn filled(elements: usize, device: &Device, value: impl Fn(usize) -> f32) -> Result<Self> {
        let values: Vec<f32> = (0..elements).map(value).collect();
        Self::of(Tensor::from_vec(values, elements, device)?)
    }

    /// Copies numbers to the host's memory: bytes, or f64 for sums over ranks.
    pub(crate) fn numbers<T: WithDType>(numbers: Vec<T>) -> Result<Self> {
        let len = numbers.len();
        Self::of(Tensor::from_vec(numbers, len, &Device::Cpu)?)
    }

    fn of(tensor: Tensor) -> Result<Self> {
        let memory = cpu_tensor::memory(&tensor)?;
        Ok(RankBuffer { tensor, memory })
    }

    /// Returns the memory for collectives.
    pub(crate) fn memory(&self) -> &Buffer {
        &self.memory
    }

    /// Returns the current contents in the original type.
    pub(crate) fn values<T: WithDType>(&self) -> Result<Vec<T>> {
        Ok(self.tensor.to_vec1()?)
    }
}
