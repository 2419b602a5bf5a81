//! Copies between tensors of any two dtypes, and zeros, in place.

use std::ops::Range;

use candle_core::{DType, Device, Tensor, WithDType};
use rayon::prelude::*;

use super::TensorMut;
use super::cpu_tensor::{FloatElement, dims2, read, tensor, unwritten, update, with_elem};
use super::deferred::issue_deferred;
use super::device_memory::{allocated, allocated_by_candle};
use super::device_queue::{finish_upload, wait_for};
use super::trace::{SpanInfo, SpanKind, span};
use crate::error::{Error, Result};
use crate::rounding::Rounded;

/// Elements per task.
const CHUNK: usize = 1 << 14;

/// Copies `x` to `dst` in place, rounded to dst's dtype.
///
/// # Errors
/// A tensor is not contiguous, or an operation of the device fails.
pub fn copy_into(dst: &TensorMut, x: &Tensor) -> Result<()> {
    issue_deferred()?;
    let _span = span(|| {
        let name = if dst.dtype() == x.dtype() { "copy" } else { "cast" };
        SpanInfo::op(name).dims(x.dims()).moves(&[x, dst])
    });
    if !dst.device().is_cpu() {
        return Ok(dst.slice_set(&converted(x, dst.dtype())?, 0, 0)?);
    }
    with_elem!(dst.dtype(), D => with_elem!(x.dtype(), X => {
        let x = read::<X>(x)?;
        let x: &[X] = &x;
        update(dst, |dst: &mut [D]| {
            dst.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).for_each(|(dst, x)| {
                for (dst, x) in dst.iter_mut().zip(x) {
                    *dst = D::nearest(x.widen());
                }
            });
        })
    }))
}

/// Returns `x` in `dtype` as a contiguous tensor: `x` itself if it is one already.
///
/// # Errors
/// The device has too little memory, or does not convert to the dtype.
pub fn converted(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() != dtype || !x.is_contiguous() {
        issue_deferred()?;
    }
    let bytes = x.elem_count() * dtype.size_in_bytes();
    allocated_by_candle(x.device(), bytes, || x.to_dtype(dtype)?.contiguous())
}

/// Returns the rows of all `parts`, of one dtype and width, as one tensor.
///
/// # Errors
/// The device has too little memory, or the parts do not match.
pub fn stacked(parts: &[&Tensor]) -> Result<Tensor> {
    issue_deferred()?;
    let Some(first) = parts.first() else { return Err(Error::internal("no rows to stack")) };
    let bytes = parts.iter().map(|part| part.elem_count() * part.dtype().size_in_bytes()).sum();
    allocated_by_candle(first.device(), bytes, || Tensor::cat(parts, 0))
}

/// Returns the column ranges `columns` of `x: [N, W]`, side by side in this order: `[N, Σ len]` in
/// the same dtype.
///
/// # Errors
/// The device has too little memory, or `x` is not a contiguous matrix.
///
/// # Panics
/// A range exceeds the columns of `x`.
pub fn columns_of(x: &Tensor, columns: &[Range<usize>]) -> Result<Tensor> {
    issue_deferred()?;
    let (rows, width) = dims2(x)?;
    let out: usize = columns.iter().map(Range::len).sum();
    let bytes = rows * out * x.dtype().size_in_bytes();
    let _span = span(|| SpanInfo::op("columns").dims(&[rows, out]).bytes(2 * bytes));
    if !x.device().is_cpu() {
        let numbers: Vec<u32> = columns.iter().cloned().flatten().map(|column| column as u32).collect();
        let numbers = to_device(&Tensor::from_vec(numbers, out, &Device::Cpu)?, x.device())?;
        return allocated_by_candle(x.device(), bytes, || x.index_select(&numbers, 1));
    }
    with_elem!(x.dtype(), T => {
        let x = read::<T>(x)?;
        let mut y = unwritten::<T>(rows * out);
        y.par_chunks_mut(out.max(1)).zip(x.par_chunks(width.max(1))).with_min_len(8).for_each(|(y, x)| {
            let mut y = y;
            for range in columns {
                let (part, rest) = y.split_at_mut(range.len());
                part.copy_from_slice(&x[range.clone()]);
                y = rest;
            }
        });
        tensor(y, (rows, out))
    })
}

/// Copies `x` to `device`, or returns it if it is there already. Of a view it copies only the
/// visible elements, whereas candle's `to_device` copies the whole storage. Large tensors use
/// page-locked memory.
///
/// # Errors
/// The device has too little memory, or a copy fails.
pub fn to_device(x: &Tensor, device: &Device) -> Result<Tensor> {
    issue_deferred()?;
    if x.device().same_device(device) {
        return Ok(x.clone());
    }
    let bytes = x.elem_count() * x.dtype().size_in_bytes();
    let _span = span(|| {
        let name = if device.is_cpu() { "copy to the host" } else { "copy to the device" };
        SpanInfo::new(SpanKind::Copy, name).dims(x.dims()).bytes(bytes)
    });
    let gpu = if device.is_cpu() { x.device() } else { device };
    allocated(gpu, bytes, || -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(copied) = super::pinned::to_device(x, device)? {
            return Ok(copied);
        }
        let x = x.force_contiguous()?;
        // Before a copy to the host, because the driver would wait inside it; behind it, because
        // a copy of pageable memory may end after the call.
        wait_for(x.device())?;
        let copied = x.to_device(device)?;
        wait_for(x.device())?;
        finish_upload(device)?;
        Ok(copied)
    })
}

/// Elements of a tensor of any shape and device, in row-major order. Of a view it copies only the
/// visible elements, whereas candle's `to_vec1` copies the whole storage.
///
/// # Errors
/// The tensor has another dtype, or a copy fails.
pub fn to_host_vec<T: WithDType>(x: &Tensor) -> Result<Vec<T>> {
    Ok(to_device(x, &Device::Cpu)?.flatten_all()?.to_vec1()?)
}

/// Sets every element of `x` to zero, in place.
///
/// # Errors
/// `x` is not contiguous, or an operation of the device fails.
pub fn zero(x: &TensorMut) -> Result<()> {
    issue_deferred()?;
    let _span = span(|| SpanInfo::op("zero").dims(x.dims()).moves(&[x]));
    if !x.device().is_cpu() {
        return Ok(x.zero_set()?);
    }
    with_elem!(x.dtype(), T => update(x, |values: &mut [T]| {
        values.par_chunks_mut(CHUNK).for_each(|chunk| chunk.fill(T::default()));
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::planned_failure::PlannedFailure;

    #[test]
    fn columns_come_in_the_given_order() -> Result<()> {
        let x = Tensor::new(&[[1f32, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], &Device::Cpu)?;
        for dtype in [DType::F32, DType::BF16] {
            let columns = columns_of(&x.to_dtype(dtype)?, &[3..4, 0..2, 0..1])?.to_dtype(DType::F32)?;
            assert_eq!(columns.to_vec2::<f32>()?, [[4.0, 1.0, 2.0, 1.0], [8.0, 5.0, 6.0, 5.0]]);
        }
        Ok(())
    }

    /// The first request of candle's fails; its repetition gives the tensor.
    #[test]
    fn a_conversion_without_memory_is_repeated() -> Result<()> {
        let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
        PlannedFailure::CandleRequest.plan();
        let first = converted(&x.t()?, DType::BF16)?;
        assert!(!PlannedFailure::CandleRequest.strikes(), "a conversion asks for the plan");
        assert!(first.is_contiguous() && first.dtype() == DType::BF16);
        PlannedFailure::CandleRequest.plan();
        let both = stacked(&[&first, &first])?;
        assert!(!PlannedFailure::CandleRequest.strikes(), "a stack asks for the plan");
        let rows = [[1.0, 3.0], [2.0, 4.0], [1.0, 3.0], [2.0, 4.0]];
        assert_eq!(converted(&both, DType::F32)?.to_vec2::<f32>()?, rows);
        assert!(stacked(&[]).is_err());
        Ok(())
    }
}
