//! Storage of flat runs of values: in a tensor on the device or the host, or in a mapped file.
//!
//! Values outside of the device are copied there before use and copied back after a change. Copies
//! between devices use runs of at most [`STAGING_ELEMENTS`] values, to bound the values in transit,
//! or the two page-locked buffers of a GPU.

use candle_core::{DType, Device, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::TensorMut;
use super::cpu_tensor;
use super::cpu_tensor::{PlainElement, memory, update};
use super::mmap::MappedSlice;
use crate::error::{Error, Result};
use crate::runtime::buffer::Buffer;
use crate::runtime::copy::{converted, copy_into, to_device};
use crate::runtime::device_queue::{QueueMark, finish_upload};

/// Maximum number of values in transit between host and device.
pub const STAGING_ELEMENTS: usize = 1 << 20;

/// Values per task of a copy.
const CHUNK: usize = 1 << 18;

/// A flat run of f32, bf16 or u8 values. A clone shares the memory.
#[derive(Debug, Clone)]
pub enum ParamStorage {
    /// One-dimensional contiguous tensor, on the device or the host.
    Memory(TensorMut),
    /// Values in a mapped file.
    File(MappedSlice),
}

impl From<Tensor> for ParamStorage {
    fn from(tensor: Tensor) -> Self {
        TensorMut::new(tensor).into()
    }
}

impl From<TensorMut> for ParamStorage {
    fn from(tensor: TensorMut) -> Self {
        ParamStorage::Memory(tensor)
    }
}

impl ParamStorage {
    /// Number of values.
    pub fn elements(&self) -> usize {
        match self {
            ParamStorage::Memory(tensor) => tensor.elem_count(),
            ParamStorage::File(run) => run.len(),
        }
    }

    /// Dtype of the values.
    pub fn dtype(&self) -> DType {
        match self {
            ParamStorage::Memory(tensor) => tensor.dtype(),
            ParamStorage::File(run) => run.dtype(),
        }
    }

    /// The `len` values from `start`, in the same memory.
    ///
    /// # Errors
    /// The range exceeds the values.
    pub fn narrow(&self, start: usize, len: usize) -> Result<ParamStorage> {
        Ok(match self {
            ParamStorage::Memory(tensor) => ParamStorage::Memory(tensor.narrow(0, start, len)?),
            ParamStorage::File(run) => ParamStorage::File(run.narrow(start, len)?),
        })
    }

    /// Tensor of these values, for reading and writing in place.
    ///
    /// # Errors
    /// The values are in a file.
    pub fn tensor(&self) -> Result<&TensorMut> {
        match self {
            ParamStorage::Memory(tensor) => Ok(tensor),
            ParamStorage::File(_) => Err(Error::internal("values in a file were used without a copy")),
        }
    }

    /// Values as a tensor for reading: the tensor itself, or a copy on the host if they are in a
    /// file.
    ///
    /// # Errors
    /// The host has too little memory for a copy.
    pub fn to_read(&self) -> Result<Tensor> {
        match self {
            ParamStorage::Memory(tensor) => Ok(tensor.clone().into_tensor()),
            ParamStorage::File(run) => {
                let copy = TensorMut::zeros(run.len(), run.dtype(), &Device::Cpu)?;
                self.load_to(&copy)?;
                Ok(copy.into_tensor())
            }
        }
    }

    /// Copies the values to `to`, on any device, of the same length and dtype.
    ///
    /// # Errors
    /// The lengths or dtypes differ, or a copy between devices fails.
    pub fn load_to(&self, to: &TensorMut) -> Result<()> {
        self.load_after(to, None)
    }

    /// Copies the values to `to` like [`ParamStorage::load_to`], on a GPU beside computation that
    /// follows `free`, after which no earlier work uses `to`.
    ///
    /// # Errors
    /// Same as [`ParamStorage::load_to`].
    pub fn load_after(&self, to: &TensorMut, free: Option<&QueueMark>) -> Result<()> {
        match self {
            ParamStorage::Memory(from) => copy_after(from, to, free),
            ParamStorage::File(run) => in_runs(run.len(), staged(to, to), |start, len| {
                let (run, to) = (run.narrow(start, len)?, to.narrow(0, start, len)?);
                match run.dtype() {
                    DType::F32 => from_file::<f32>(&run, &to, free),
                    DType::BF16 => from_file::<bf16>(&run, &to, free),
                    _ => from_file::<u8>(&run, &to, free),
                }
            }),
        }
    }

    /// Copies the values of `from`, on any device, of the same length and dtype, into this run.
    ///
    /// # Errors
    /// The lengths or dtypes differ, or a copy between devices fails.
    pub fn store_from(&self, from: &Tensor) -> Result<()> {
        match self {
            ParamStorage::Memory(to) => copy_across(from, to),
            ParamStorage::File(run) => in_runs(run.len(), staged(from, from), |start, len| {
                let from = to_device(&from.narrow(0, start, len)?, &Device::Cpu)?;
                let run = run.narrow(start, len)?;
                match run.dtype() {
                    DType::F32 => to_file::<f32>(&from, &run),
                    DType::BF16 => to_file::<bf16>(&from, &run),
                    _ => to_file::<u8>(&from, &run),
                }
            }),
        }
    }

    /// Copies the values of `from` into this run, rounded to its dtype.
    ///
    /// # Errors
    /// The lengths differ, or a copy between devices fails.
    pub fn store_cast(&self, from: &Tensor) -> Result<()> {
        match self {
            ParamStorage::Memory(to) if to.device().same_device(from.device()) => copy_into(to, from),
            _ => in_runs(self.elements(), STAGING_ELEMENTS, |start, len| {
                let device = match self {
                    ParamStorage::Memory(to) => to.device(),
                    ParamStorage::File(_) => &Device::Cpu,
                };
                // Cast on the device of use, as without a copy.
                let from = converted(&to_device(&from.narrow(0, start, len)?, device)?, self.dtype())?;
                self.narrow(start, len)?.store_from(&from)
            }),
        }
    }

    /// Memory of the values, for collectives on the host.
    ///
    /// # Errors
    /// The values' dtype cannot be sent.
    pub fn memory(&self) -> Result<Buffer> {
        match self {
            ParamStorage::Memory(tensor) => memory(tensor),
            ParamStorage::File(run) => run.memory(),
        }
    }

    /// Prefetches values that will be used soon.
    pub fn prefetch(&self) {
        if let ParamStorage::File(run) = self {
            run.prefetch();
        }
    }

    /// Releases the pages of values that will not be used for a while.
    pub fn evict(&self) {
        if let ParamStorage::File(run) = self {
            run.evict();
        }
    }
}

/// Copies one-dimensional `from` to `to`, of the same dtype, between any two devices.
///
/// # Errors
/// The lengths or dtypes differ, or a copy between the devices fails.
pub fn copy_across(from: &Tensor, to: &TensorMut) -> Result<()> {
    copy_after(from, to, None)
}

/// Copies like [`copy_across`]; `free` as in [`ParamStorage::load_after`].
fn copy_after(from: &Tensor, to: &TensorMut, free: Option<&QueueMark>) -> Result<()> {
    if from.device().is_cpu() && to.device().is_cpu() {
        return match to.dtype() {
            DType::F32 => copy::<f32>(from, to),
            DType::BF16 => copy::<bf16>(from, to),
            _ => copy::<u8>(from, to),
        };
    }
    #[cfg(feature = "cuda")]
    if super::pinned::copy(from, to, free)? {
        return Ok(());
    }
    #[cfg(not(feature = "cuda"))]
    let _ = free;
    in_runs(from.elem_count(), staged(from, to), |start, len| {
        let from = to_device(&from.narrow(0, start, len)?, to.device())?;
        Ok(to.slice_set(&from.contiguous()?, 0, start)?)
    })
}

/// Calls `each` with the start and the values of successive runs of flat `from`, on the host, in
/// order. A GPU copies f32 values of the next runs meanwhile.
///
/// # Errors
/// A copy fails, or the first error of `each`.
pub fn for_each_run(from: &Tensor, mut each: impl FnMut(usize, &Tensor) -> Result<()>) -> Result<()> {
    #[cfg(feature = "cuda")]
    if super::pinned::fetch_runs(from, STAGING_ELEMENTS, &mut each)? {
        return Ok(());
    }
    in_runs(from.elem_count(), STAGING_ELEMENTS, |start, len| {
        each(start, &to_device(&from.narrow(0, start, len)?, &Device::Cpu)?)
    })
}

fn copy<T: PlainElement>(from: &Tensor, to: &TensorMut) -> Result<()> {
    let from = cpu_tensor::read::<T>(from)?;
    let from: &[T] = &from;
    write(to, from)
}

fn from_file<T: PlainElement>(run: &MappedSlice, to: &TensorMut, free: Option<&QueueMark>) -> Result<()> {
    run.read(|from: &[T]| {
        if to.device().is_cpu() {
            return write(to, from);
        }
        #[cfg(feature = "cuda")]
        if super::pinned::copy_slice(from, to, free)? {
            return Ok(());
        }
        #[cfg(not(feature = "cuda"))]
        let _ = free;
        to.slice_set(&Tensor::from_slice(from, from.len(), to.device())?, 0, 0)?;
        finish_upload(to.device())
    })?
}

fn to_file<T: PlainElement>(from: &Tensor, run: &MappedSlice) -> Result<()> {
    let from = cpu_tensor::read::<T>(from)?;
    let from: &[T] = &from;
    run.write(|to: &mut [T]| side_by_side(to, from))?
}

fn write<T: PlainElement>(to: &TensorMut, from: &[T]) -> Result<()> {
    update(to, |to: &mut [T]| side_by_side(to, from))?
}

fn side_by_side<T: PlainElement>(to: &mut [T], from: &[T]) -> Result<()> {
    if to.len() != from.len() {
        return Err(Error::internal(format!("{} values for a destination of {}", from.len(), to.len())));
    }
    to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
    Ok(())
}

/// Maximum values per copy: all of them if both sides are on the host.
fn staged(from: &Tensor, to: &Tensor) -> usize {
    if from.device().is_cpu() && to.device().is_cpu() { usize::MAX } else { STAGING_ELEMENTS }
}

/// Calls `each` with starts and lengths, each at most `most`, that cover `len` values.
fn in_runs(len: usize, most: usize, mut each: impl FnMut(usize, usize) -> Result<()>) -> Result<()> {
    (0..len).step_by(most).try_for_each(|start| each(start, most.min(len - start)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::mmap::MappedFile;

    #[test]
    fn runs_are_in_order_and_cover_the_values() -> Result<()> {
        let values: Vec<f32> = (0..STAGING_ELEMENTS + 3).map(|i| i as f32).collect();
        let mut seen = Vec::new();
        for_each_run(&Tensor::new(&values[..], &Device::Cpu)?, |start, run| {
            assert_eq!(start, seen.len());
            seen.extend(run.to_vec1::<f32>()?);
            Ok(())
        })?;
        assert!(seen == values);
        Ok(())
    }

    #[test]
    fn values_come_and_go() -> Result<()> {
        let folder = tempfile::tempdir().unwrap();
        let file = MappedFile::create(folder.path(), MappedFile::file_bytes(5, DType::F32) * 3)?;
        let places = [
            ParamStorage::File(file.run(5, DType::F32)?),
            ParamStorage::Memory(TensorMut::zeros(5, DType::F32, &Device::Cpu)?),
        ];
        for home in places {
            home.store_from(&Tensor::new(&[1f32, 2.0, 3.0, 4.0, 5.0], &Device::Cpu)?)?;
            home.narrow(1, 2)?.store_from(&Tensor::new(&[-1f32, -2.0], &Device::Cpu)?)?;
            let target = TensorMut::zeros(5, DType::F32, &Device::Cpu)?;
            home.load_to(&target)?;
            assert_eq!(target.to_vec1::<f32>()?, [1.0, -1.0, -2.0, 4.0, 5.0]);
            assert_eq!(home.to_read()?.to_vec1::<f32>()?, target.to_vec1::<f32>()?);
            assert!(home.store_from(&Tensor::zeros(4, DType::F32, &Device::Cpu)?).is_err());
        }
        let rounded = ParamStorage::File(file.run(2, DType::BF16)?);
        rounded.store_cast(&Tensor::new(&[1.001f32, 3.0], &Device::Cpu)?)?;
        assert_eq!(rounded.to_read()?.to_dtype(DType::F32)?.to_vec1::<f32>()?, [1.0, 3.0]);
        Ok(())
    }
}
