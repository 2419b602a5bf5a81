//! Copies between tensors of any two dtypes, and zeros, in place.

use candle_core::{Device, Tensor, WithDType};
use rayon::prelude::*;

use super::TensorMut;
use super::cpu_tensor::{FloatElement, read, update, with_elem};
use super::device_memory::allocated;
use super::device_queue::{finish_upload, wait_for};
use super::trace::{SpanInfo, SpanKind, span};
use crate::error::Result;
use crate::rounding::Rounded;

/// Elements per task.
const CHUNK: usize = 1 << 14;

/// Copies `x` to `dst` in place, rounded to dst's dtype.
///
/// # Errors
/// A tensor is not contiguous, or an operation of the device fails.
pub fn copy_into(dst: &TensorMut, x: &Tensor) -> Result<()> {
    let _span = span(|| {
        let name = if dst.dtype() == x.dtype() { "copy" } else { "cast" };
        SpanInfo::op(name).dims(x.dims()).moves(&[x, dst])
    });
    if !dst.device().is_cpu() {
        return Ok(dst.slice_set(&x.to_dtype(dst.dtype())?.contiguous()?, 0, 0)?);
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

/// Copies `x` to `device`, or returns it if it is there already. Of a view it copies only the
/// visible elements, whereas candle's `to_device` copies the whole storage. Large tensors use
/// page-locked memory.
///
/// # Errors
/// The device has too little memory, or a copy fails.
pub fn to_device(x: &Tensor, device: &Device) -> Result<Tensor> {
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
        if let Some(there) = super::pinned::to_device(x, device)? {
            return Ok(there);
        }
        let x = x.force_contiguous()?;
        // Before a copy to the host, because the driver would wait inside it; behind it, because
        // a copy of pageable memory may end after the call.
        wait_for(x.device())?;
        let there = x.to_device(device)?;
        wait_for(x.device())?;
        finish_upload(device)?;
        Ok(there)
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
    let _span = span(|| SpanInfo::op("zero").dims(x.dims()).moves(&[x]));
    if !x.device().is_cpu() {
        return Ok(x.zero_set()?);
    }
    with_elem!(x.dtype(), T => update(x, |values: &mut [T]| {
        values.par_chunks_mut(CHUNK).for_each(|chunk| chunk.fill(T::default()));
    }))
}
