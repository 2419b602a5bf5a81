//! Reductions and elementwise operations over whole tensors: norms, addition, casts in place.

pub(super) mod cases;
mod cuda;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use crate::backends::gpu::{self, Route, are_floats};
use crate::backends::simd;
use crate::error::{Error, Result};
use crate::instruction_set::vectorized;
use crate::rounding::Rounded;
use crate::runtime::TensorMut;
use crate::runtime::copy::{stacked, to_device};
use crate::runtime::cpu_tensor::{FloatElement, read, tensor, unwritten, update, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// Elements per partial sum; partials are added in order, so the result does not depend on the
/// number of threads.
const CHUNK: usize = 1 << 14;

/// Sums that a GPU may not have computed yet.
#[derive(Debug)]
pub struct SquareSums(PendingSums);

#[derive(Debug)]
enum PendingSums {
    Known(Vec<f64>),
    /// The sums, `[tensors]` f64.
    OnDevice(Tensor),
}

impl SquareSums {
    /// Returns the sums, in the order of the tensors; waits for the device.
    ///
    /// # Errors
    /// Fails if an operation of the device failed.
    pub fn read(self) -> Result<Vec<f64>> {
        match self.0 {
            PendingSums::Known(sums) => Ok(sums),
            PendingSums::OnDevice(sums) => gpu::read(&sums),
        }
    }
}

/// Returns Σ x² in f64, `[tensors]`, of contiguous f32 or bf16 tensors of any shapes. Computes on
/// `device`; a tensor on another device is copied, one at a time. Values that are equal in both
/// dtypes give the same bits.
///
/// # Errors
/// Fails if a tensor is not contiguous or of another type, or an operation of the device fails.
pub fn sums_of_squares(tensors: &[&Tensor], device: &Device) -> Result<SquareSums> {
    let _span = span(|| SpanInfo::op("sums_of_squares").moves(tensors));
    if let Some(driver) = gpu::driver_on(device)
        && tensors.iter().all(|x| gpu::is_float(x.dtype()))
    {
        return Ok(SquareSums(PendingSums::OnDevice(cuda::sums_of_squares(driver, tensors, device)?)));
    }
    let sum = |x: &&Tensor| match device {
        Device::Cpu => squares_on_cpu(&to_device(x, device)?),
        _ => squares_by_rows(&to_device(x, device)?.to_dtype(DType::F32)?),
    };
    Ok(SquareSums(PendingSums::Known(tensors.iter().map(sum).collect::<Result<_>>()?)))
}

/// Sums rows in f32, then the partial sums in f64 on the host.
fn squares_by_rows(x: &Tensor) -> Result<f64> {
    let flat = x.flatten_all()?;
    let (len, whole) = (flat.elem_count(), flat.elem_count() / CHUNK * CHUNK);
    let mut sum = 0f64;
    if whole > 0 {
        let parts = flat.narrow(0, 0, whole)?.reshape((whole / CHUNK, CHUNK))?.sqr()?.sum(1)?;
        sum += parts.to_vec1::<f32>()?.iter().map(|&p| f64::from(p)).sum::<f64>();
    }
    if len > whole {
        sum += f64::from(flat.narrow(0, whole, len - whole)?.sqr()?.sum_all()?.to_scalar::<f32>()?);
    }
    Ok(sum)
}

fn squares_on_cpu(x: &Tensor) -> Result<f64> {
    let parts: Vec<f64> = with_elem!(x.dtype(), T => {
        let x = read::<T>(x)?;
        Ok(x.par_chunks(CHUNK).map(squares).collect())
    })?;
    Ok(parts.iter().sum())
}

vectorized! {
    /// Returns Σ x² of a chunk, in sixteen interleaved sums: a single one would wait for each
    /// addition.
    fn squares<T: FloatElement>(x: &[T]) -> f64 {
        let mut sums = [0f64; simd::LANES];
        let (parts, rest) = x.as_chunks::<{ simd::LANES }>();
        let square = |x: &T| f64::from(x.widen()) * f64::from(x.widen());
        for part in parts {
            for i in 0..simd::LANES {
                sums[i] += square(&part[i]);
            }
        }
        sums.iter_mut().zip(rest).for_each(|(sum, x)| *sum += square(x));
        sums.iter().sum()
    }
}

/// Returns `a + b`, same shape and dtype; f32 inside, rounded once.
///
/// # Errors
/// Fails if a tensor is not contiguous, the dtypes differ, or an operation of the device fails.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("add").dims(a.dims()).moves(&[a, b, a]));
    match Route::of(a, a.dtype() == b.dtype() && are_floats([a.dtype()])) {
        Route::Kernel(driver) => return cuda::add(driver, a, b),
        Route::Composed => return Ok((a + b)?),
        Route::Cpu => {}
    }
    with_elem!(a.dtype(), T => {
        let (x, y) = (read::<T>(a)?, read::<T>(b)?);
        let mut out = unwritten::<T>(x.len());
        out.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).zip(y.par_chunks(CHUNK)).for_each(|((out, x), y)| {
            for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
                *out = T::nearest(x.widen() + y.widen());
            }
        });
        tensor(out, a.shape())
    })
}

/// Returns the rows of all `parts: [rows, width]`, one part under the other, `[Σ rows, width]` in
/// their dtype.
///
/// # Errors
/// Fails if there is no part, a part is not contiguous, their widths or dtypes differ, or the
/// device has not enough memory.
pub fn stack_rows(parts: &[&Tensor]) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("stack_rows").moves(&[parts, parts].concat()));
    let Some(first) = parts.first() else { return Err(Error::internal("no rows to stack")) };
    let alike = parts.iter().all(|part| part.dtype() == first.dtype()) && are_floats([first.dtype()]);
    match Route::of(first, alike) {
        Route::Kernel(driver) => cuda::stack_rows(driver, parts),
        Route::Composed | Route::Cpu => stacked(parts),
    }
}

/// Returns `factor · x`, of the same shape and dtype; f32 inside, rounded once. A factor of 1
/// copies nothing.
///
/// # Errors
/// Fails if the tensor is not contiguous, or an operation of the device fails.
pub fn scaled(x: &Tensor, factor: f64) -> Result<Tensor> {
    if factor == 1.0 {
        return Ok(x.clone());
    }
    let _span = span(|| SpanInfo::op("scaled").dims(x.dims()).moves(&[x, x]));
    match Route::of(x, are_floats([x.dtype()])) {
        Route::Kernel(driver) => return cuda::scaled(driver, x, factor as f32),
        Route::Composed => return Ok(x.affine(factor, 0.0)?),
        Route::Cpu => {}
    }
    let factor = factor as f32;
    with_elem!(x.dtype(), T => {
        let values = read::<T>(x)?;
        let mut out = unwritten::<T>(values.len());
        out.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK)).for_each(|(out, x)| {
            for (out, x) in out.iter_mut().zip(x) {
                *out = T::nearest(x.widen() * factor);
            }
        });
        tensor(out, x.shape())
    })
}

/// Computes `dst += x` in place, both of the same shape; the dtypes may differ.
///
/// # Errors
/// Fails if a tensor is not contiguous, or an operation of the device fails.
pub fn add_into(dst: &TensorMut, x: &Tensor) -> Result<()> {
    let _span = span(|| SpanInfo::op("add_into").dims(dst.dims()).moves(&[dst, x, dst]));
    match Route::of(dst, are_floats([dst.dtype(), x.dtype()])) {
        Route::Kernel(driver) => return cuda::add_into(driver, dst, x),
        Route::Composed => {
            let sum = (dst.to_dtype(DType::F32)? + x.to_dtype(DType::F32)?)?;
            return Ok(dst.slice_set(&sum.to_dtype(dst.dtype())?, 0, 0)?);
        }
        Route::Cpu => {}
    }
    with_elem!(dst.dtype(), D => with_elem!(x.dtype(), X => {
        let x = read::<X>(x)?;
        let x: &[X] = &x;
        update(dst, |dst: &mut [D]| {
            dst.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).for_each(|(dst, x)| {
                for (dst, x) in dst.iter_mut().zip(x) {
                    *dst = D::nearest(dst.widen() + x.widen());
                }
            });
        })
    }))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::runtime::copy::copy_into;

    /// In the body of `with_elem!`, `T::round` could resolve to `f32::round`.
    #[test]
    fn fractions_survive_in_f32() -> Result<()> {
        let a = TensorMut::new(Tensor::new(&[0.25f32, -1.5, 3.125], &Device::Cpu)?);
        let b = Tensor::new(&[0.5f32, 0.25, 0.0], &Device::Cpu)?;
        assert_eq!(add(&a, &b)?.to_vec1::<f32>()?, [0.75, -1.25, 3.125]);
        add_into(&a, &b)?;
        assert_eq!(a.to_vec1::<f32>()?, [0.75, -1.25, 3.125]);
        copy_into(&a, &b)?;
        assert_eq!(a.to_vec1::<f32>()?, [0.5, 0.25, 0.0]);
        Ok(())
    }
}
