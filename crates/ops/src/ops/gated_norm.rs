//! RMSNorm of each head, times the SiLU of a gate: `y = x / rms(x) · w · silu(z)` with `rms(x) =
//! sqrt(mean(x²) + eps)` over the D values of a head. All in f32, rounded once.
//!
//! Backward, with `x̂ = x / rms` and `q = dy · w · silu(z)`: `dx = (q − x̂ · mean(q · x̂)) / rms`,
//! `dz = dy · w · x̂ · silu'(z)`, `dw = Σ dy · silu(z) · x̂` over rows and heads.

pub(super) mod cases;
mod cuda;

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::glu::Activation;
use super::matmul::{ColumnView, ColumnViewMut};
use super::rms_norm::add_gain_reference;
use super::rms_norm::cuda::is_supported;
use crate::backends::gpu::Route;
use crate::backends::simd;
use crate::error::Result;
use crate::instruction_set::vectorized;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{
    FloatElement, dims2, read, tensor, unwritten, update, update_in_f32, with_elem,
};
use crate::runtime::trace::{SpanInfo, span};

/// Rows of a task of the backward, whose part of the weight's gradient is one sum.
const ROWS: usize = 64;

/// Returns `[N, H · D]` in the dtype of `x: [N, H · D]`: the RMSNorm of each head by `weight: [D]`,
/// times the SiLU of `z: [N, H · D]`.
///
/// # Errors
/// Fails if a tensor is not contiguous or of floating-point values, or an operation of the device
/// fails.
pub fn gated_rms_norm(x: &Tensor, z: ColumnView<'_>, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("gated_rms_norm").dims(x.dims()).moves(&[x, x, x]));
    match Route::of(x, is_supported(x, weight)) {
        Route::Kernel(driver) => return cuda::forward(driver, x, z, weight, eps),
        Route::Composed => return reference(x, z, weight, eps),
        Route::Cpu => {}
    }
    let ((rows, width), (_, z_width)) = (dims2(x)?, dims2(z.tensor)?);
    let weight = in_f32(weight)?;
    with_elem!(x.dtype(), T => {
        let (x, gates) = (read::<T>(x)?, read::<T>(z.tensor)?);
        let mut y = unwritten::<T>(rows * width);
        let of_rows = y.par_chunks_mut(width).zip(x.par_chunks(width)).zip(gates.par_chunks(z_width));
        of_rows.with_min_len(8).for_each(|((y, x), gates)| {
            forward_row(y, x, &gates[z.start..][..width], &weight, eps as f32);
        });
        tensor(y, (rows, width))
    })
}

/// Returns the gradient of `x: [N, H · D]` and writes that of `z` to `dz: [N, H · D]`, given `dy:
/// [N, H · D]`, all in the same dtype. Adds the weight's gradient to `dweight: [D]` f32, on the CPU
/// also bf16.
///
/// # Errors
/// Fails if a tensor is not contiguous, the dtypes differ, or an operation of the device fails.
pub fn gated_rms_norm_backward(
    x: &Tensor,
    z: ColumnView<'_>,
    weight: &Tensor,
    dy: &Tensor,
    dweight: Option<&TensorMut>,
    eps: f64,
    dz: ColumnViewMut<'_>,
) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("gated_rms_norm_backward").dims(x.dims()).moves(&[x, x, x, x, dy]));
    match Route::of(x, is_supported(x, weight)) {
        Route::Kernel(driver) => return cuda::backward(driver, [x, weight, dy], z, dweight, eps, dz),
        Route::Composed => {
            return reference_backward(x, z, weight, dy, dweight, eps, dz);
        }
        Route::Cpu => {}
    }
    let ((rows, width), (_, z_width), (_, dz_width)) = (dims2(x)?, dims2(z.tensor)?, dims2(dz.tensor)?);
    let weight = in_f32(weight)?;
    with_elem!(x.dtype(), T => {
        let (x, gates, dy) = (read::<T>(x)?, read::<T>(z.tensor)?, read::<T>(dy)?);
        let (x, gates, dy): (&[T], &[T], &[T]) = (&x, &gates, &dy);
        let mut dx = unwritten::<T>(rows * width);
        let parts: Vec<Vec<f32>> = update(dz.tensor, |dz_data: &mut [T]| {
            let blocks = dx.par_chunks_mut(ROWS * width).zip(dz_data.par_chunks_mut(ROWS * dz_width));
            let of_block = |(block, (dx, dz_rows)): (usize, (&mut [T], &mut [T]))| {
                let mut part = vec![0f32; weight.len()];
                let written = dx.chunks_exact_mut(width).zip(dz_rows.chunks_exact_mut(dz_width));
                for (i, (dx, dz_row)) in written.enumerate() {
                    let row = block * ROWS + i;
                    let inputs = NormInputs {
                        x: &x[row * width..][..width],
                        z: &gates[row * z_width + z.start..][..width],
                        dy: &dy[row * width..][..width],
                    };
                    backward_row(dx, &mut dz_row[dz.start..][..width], inputs, &weight, &mut part, eps as f32);
                }
                part
            };
            blocks.enumerate().map(of_block).collect()
        })?;
        if let Some(dweight) = dweight {
            update_in_f32(dweight, |sums| {
                for part in &parts {
                    sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
                }
            })?;
        }
        tensor(dx, (rows, width))
    })
}

fn in_f32(weight: &Tensor) -> Result<Vec<f32>> {
    with_elem!(weight.dtype(), W => Ok(read::<W>(weight)?.iter().map(|w| w.widen()).collect()))
}

/// One row of the inputs of a backward.
struct NormInputs<'a, T> {
    x: &'a [T],
    z: &'a [T],
    dy: &'a [T],
}

#[inline(always)]
fn inverse_rms<T: FloatElement>(x: &[T], eps: f32) -> f32 {
    let mean = simd::sum_of(x, |x| x.widen() * x.widen()) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

vectorized! {
    fn forward_row<T: FloatElement>(y: &mut [T], x: &[T], z: &[T], weight: &[f32], eps: f32) {
        let width = weight.len();
        let heads = y.chunks_exact_mut(width).zip(x.chunks_exact(width)).zip(z.chunks_exact(width));
        for ((y, x), z) in heads {
            let inverse = inverse_rms(x, eps);
            for (((y, x), z), w) in y.iter_mut().zip(x).zip(z).zip(weight) {
                *y = T::nearest(x.widen() * inverse * w * Activation::Silu.value_and_slope(z.widen()).0);
            }
        }
    }
}

vectorized! {
    /// Writes the gradients of a row, and adds its part of the weight's gradient to `part`.
    fn backward_row<T: FloatElement>(
        dx: &mut [T],
        dz: &mut [T],
        row: NormInputs<'_, T>,
        weight: &[f32],
        part: &mut [f32],
        eps: f32,
    ) {
        let width = weight.len();
        let written = dx.chunks_exact_mut(width).zip(dz.chunks_exact_mut(width));
        let given = row.x.chunks_exact(width).zip(row.z.chunks_exact(width)).zip(row.dy.chunks_exact(width));
        let mut q = vec![0f32; width];
        for ((dx, dz), ((x, z), dy)) in written.zip(given) {
            let inverse = inverse_rms(x, eps);
            let values = x.iter().zip(z).zip(dy).zip(weight);
            for ((((x, z), dy), w), ((q, dz), part)) in values.zip(q.iter_mut().zip(dz).zip(&mut *part)) {
                let (gate, slope) = Activation::Silu.value_and_slope(z.widen());
                let (normed, dy) = (x.widen() * inverse, dy.widen());
                *q = dy * w * gate;
                *dz = T::nearest(dy * w * normed * slope);
                *part += dy * gate * normed;
            }
            let mean = simd::sum_of2(x, &q, |x, q| x.widen() * q) * inverse / width as f32;
            for ((dx, x), q) in dx.iter_mut().zip(x).zip(&q) {
                *dx = T::nearest(inverse * (q - x.widen() * inverse * mean));
            }
        }
    }
}

/// The tensors of a norm by heads, `[N · H, D]` f32.
struct ByHead {
    normed: Tensor,
    inverse: Tensor,
    gates: Tensor,
    weight: Tensor,
}

impl ByHead {
    fn of(x: &Tensor, z: ColumnView<'_>, weight: &Tensor, eps: f64) -> Result<Self> {
        let weight = weight.to_dtype(DType::F32)?;
        let width = weight.elem_count();
        let x = x.to_dtype(DType::F32)?.reshape(((), width))?;
        let inverse = (x.sqr()?.mean_keepdim(1)? + eps)?.sqrt()?.recip()?;
        let gates = z.narrow()?.contiguous()?.to_dtype(DType::F32)?.reshape(((), width))?;
        Ok(ByHead { normed: x.broadcast_mul(&inverse)?, inverse, gates, weight })
    }
}

/// The definition, in candle's primitives.
pub(crate) fn reference(x: &Tensor, z: ColumnView<'_>, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let ByHead { normed, gates, weight, .. } = ByHead::of(x, z, weight, eps)?;
    let y = (normed.broadcast_mul(&weight)? * gates.silu()?)?;
    Ok(y.reshape(x.shape())?.to_dtype(x.dtype())?)
}

/// The backward formula in candle's primitives.
pub(crate) fn reference_backward(
    x: &Tensor,
    z: ColumnView<'_>,
    weight: &Tensor,
    dy: &Tensor,
    dweight: Option<&TensorMut>,
    eps: f64,
    dz: ColumnViewMut<'_>,
) -> Result<Tensor> {
    let ByHead { normed, inverse, gates, weight } = ByHead::of(x, z, weight, eps)?;
    let dy = dy.to_dtype(DType::F32)?.reshape(normed.shape())?;
    let (gate, slope) = Activation::Silu.reference_value_and_slope(&gates)?;
    let gated = (&dy * gate)?;
    let q = gated.broadcast_mul(&weight)?;
    let mean = (&q * &normed)?.mean_keepdim(1)?;
    let dx = (q - normed.broadcast_mul(&mean)?)?.broadcast_mul(&inverse)?;
    add_gain_reference(dweight, &gated, &normed)?;
    let d = (dy.broadcast_mul(&weight)? * (normed * slope)?)?;
    dz.tensor.slice_set(&d.reshape(x.shape())?.to_dtype(dz.tensor.dtype())?, 1, dz.start)?;
    Ok(dx.reshape(x.shape())?.to_dtype(x.dtype())?)
}
