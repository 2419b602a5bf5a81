//! Memory that a rank sends from and receives in, on the device that it is on.

use candle_core::{DType, Device, Tensor};

use crate::error::Result;
use crate::runtime::buffer::Buffer;
use crate::runtime::cpu_tensor;

/// A run of numbers with the memory behind it.
pub(crate) struct RankBuffer {
    tensor: Tensor,
    memory: Buffer,
}

impl RankBuffer {
    /// `elements` zeroes in f32 on `device`.
    pub(crate) fn zeros(elements: usize, device: &Device) -> Result<Self> {
        Self::of(Tensor::zeros(elements, DType::F32, device)?)
    }

    /// `elements` numbers in f32 on `device`, each by its place.
    pub(crate) fn filled(elements: usize, device: &Device, value: impl Fn(usize) -> f32) -> Result<Self> {
        let values: Vec<f32> = (0..elements).map(value).collect();
        Self::of(Tensor::from_vec(values, elements, device)?)
    }

    /// These bytes in the host's memory.
    pub(crate) fn bytes(bytes: Vec<u8>) -> Result<Self> {
        let len = bytes.len();
        Self::of(Tensor::from_vec(bytes, len, &Device::Cpu)?)
    }

    /// These numbers in the host's memory, for sums over ranks.
    pub(crate) fn numbers(numbers: Vec<f64>) -> Result<Self> {
        let len = numbers.len();
        Self::of(Tensor::from_vec(numbers, len, &Device::Cpu)?)
    }

    fn of(tensor: Tensor) -> Result<Self> {
        let memory = cpu_tensor::memory(&tensor)?;
        Ok(RankBuffer { tensor, memory })
    }

    /// What collectives take.
    pub(crate) fn memory(&self) -> &Buffer {
        &self.memory
    }

    /// What it holds now, as the type that it was made of.
    pub(crate) fn values<T: candle_core::WithDType>(&self) -> Result<Vec<T>> {
        Ok(self.tensor.to_vec1()?)
    }
}
