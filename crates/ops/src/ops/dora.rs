//! DoRA of a linear layer (arXiv 2402.09353): `y = m / ‖W + s·B·A‖ ⊙ (W x + s·B·A x)`, with the
//! norm over each row of the weight. As in PEFT the backward treats the norm as a constant (section
//! 4.3 of the paper).

pub(super) mod cases;
mod cuda;

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::gemm::{MatView, MatViewMut, Threads, matmul};
use super::gpu::{Route, are_floats};
use super::matmul::{ColumnView, ColumnViewMut};
use super::matmul_quantized::Weight;
use crate::error::Result;
use crate::rounding::Rounded;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, update, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// Rows of the weight whose update `s·B·A` is in memory at once, per thread.
const ROWS: usize = 32;

/// Returns `‖W + scale · B · A‖` of each row: `[out]` f32. `a: [r, in]`, `b: [out, r]`, both f32.
///
/// # Errors
/// Fails if `a` is not a contiguous f32 matrix, the weight's dtype is unknown, or an operation of
/// the device fails.
pub fn weight_norm(weight: Weight<'_>, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("dora_weight_norm").dims(a.dims()));
    match Route::of(a, cuda::is_supported(weight)) {
        Route::Kernel(driver) => return cuda::weight_norm(driver, weight, a, b, scale),
        Route::Composed => return weight_norm_reference(weight, a, b, scale),
        Route::Cpu => {}
    }
    let (out, width) = weight.dims()?;
    let (r, _) = dims2(a)?;
    let (a, b) = (read::<f32>(a)?, read::<f32>(b)?);
    let (a, b): (&[f32], &[f32]) = (&a, &b);
    let mut norms = vec![0f32; out];
    let norms_of = |norms: &mut [f32], widen: &(dyn Fn(usize, &mut [f32]) + Sync)| {
        norms.par_chunks_mut(ROWS).enumerate().for_each(|(i, norms)| {
            let (first, rows) = (i * ROWS, norms.len());
            let mut sum = vec![0f32; rows * width];
            for (j, row) in sum.chunks_exact_mut(width).enumerate() {
                widen(first + j, row);
            }
            let b = MatView::new(&b[first * r..(first + rows) * r], rows, r, r);
            let dst = MatViewMut { data: &mut sum, stride: width, accumulate: true };
            matmul(dst, b, MatView::new(a, r, width, width), scale as f32, Threads::One);
            for (norm, row) in norms.iter_mut().zip(sum.chunks_exact(width)) {
                *norm = super::simd::sum_of(row, |x| x * x).sqrt();
            }
        });
    };
    match weight {
        Weight::Quantized(weight) => weight.with_view(|view| {
            norms_of(&mut norms, &|row, values| view.dequantize(row * width, values));
        })?,
        Weight::Dense(weight) => with_elem!(weight.dtype(), T => {
            let values = read::<T>(weight)?;
            let values: &[T] = &values;
            norms_of(&mut norms, &|row, out| {
                for (out, value) in out.iter_mut().zip(&values[row * width..(row + 1) * width]) {
                    *out = value.widen();
                }
            });
            Ok::<(), crate::error::Error>(())
        })?,
    }
    tensor(norms, out)
}

/// The definition of [`weight_norm`], in candle's primitives.
pub(crate) fn weight_norm_reference(
    weight: Weight<'_>,
    a: &Tensor,
    b: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    let dense = match weight {
        Weight::Dense(weight) => weight.to_dtype(DType::F32)?,
        Weight::Quantized(weight) => weight.dequantize_reference()?,
    };
    Ok((dense + (b.matmul(a)? * scale)?)?.sqr()?.sum(1)?.sqrt()?)
}

/// Computes `dst[n, j] = [dst +] factors[j] · x[n, j]`; `x: [N, len]`, `factors: [len]` f32.
///
/// # Errors
/// Fails if a tensor is not a contiguous matrix of floating-point values, or an operation of the
/// device fails.
pub fn scale_columns(
    dst: ColumnViewMut<'_>,
    x: ColumnView<'_>,
    factors: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let _span = span(|| SpanInfo::op("dora_scale_columns"));
    match Route::of(factors, are_floats([dst.tensor.dtype(), x.tensor.dtype()])) {
        Route::Kernel(driver) => return cuda::scale_columns(driver, dst, x, factors, accumulate),
        Route::Composed => return scale_columns_reference(dst, x, factors, accumulate),
        Route::Cpu => {}
    }
    let ((_, width), (_, x_width)) = (dims2(dst.tensor)?, dims2(x.tensor)?);
    let factors = read::<f32>(factors)?;
    let factors: &[f32] = &factors;
    with_elem!(dst.tensor.dtype(), D => with_elem!(x.tensor.dtype(), X => {
        let values = read::<X>(x.tensor)?;
        let values: &[X] = &values;
        update(dst.tensor, |data: &mut [D]| {
            let rows = data.par_chunks_mut(width).zip(values.par_chunks(x_width)).with_min_len(16);
            rows.for_each(|(out, row)| {
                let out = &mut out[dst.start..dst.start + dst.len];
                for ((out, x), factor) in out.iter_mut().zip(&row[x.start..x.start + x.len]).zip(factors) {
                    let scaled = x.widen() * factor;
                    *out = D::nearest(if accumulate { out.widen() + scaled } else { scaled });
                }
            });
        })
    }))
}

/// The definition of [`scale_columns`], in candle's primitives.
pub(crate) fn scale_columns_reference(
    dst: ColumnViewMut<'_>,
    x: ColumnView<'_>,
    factors: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let mut scaled = x.narrow()?.to_dtype(DType::F32)?.broadcast_mul(factors)?;
    if accumulate {
        scaled = (dst.as_view().narrow()?.to_dtype(DType::F32)? + scaled)?;
    }
    dst.tensor.slice_set(&scaled.to_dtype(dst.tensor.dtype())?.contiguous()?, 1, dst.start)?;
    Ok(())
}

/// Computes `grad[j] += Σ rows dy[n, j] · x[n, j] / norm[j]`: the gradient of DoRA's magnitudes.
/// `x: [N, len]` is the tensor that they scale; `grad` and `norm` are `[len]` f32.
///
/// # Errors
/// Fails if a tensor is not contiguous or of another dtype, or an operation of the device fails.
pub fn magnitude_backward(grad: &TensorMut, dy: ColumnView<'_>, x: &Tensor, norm: &Tensor) -> Result<()> {
    let _span = span(|| SpanInfo::op("dora_magnitude_backward").dims(x.dims()).moves(&[x]));
    match Route::of(grad, are_floats([dy.tensor.dtype(), x.dtype()])) {
        Route::Kernel(driver) => return cuda::magnitude_backward(driver, grad, dy, x, norm),
        Route::Composed => return magnitude_backward_reference(grad, dy, x, norm),
        Route::Cpu => {}
    }
    let (_, width) = dims2(dy.tensor)?;
    let norm = read::<f32>(norm)?;
    let norm: &[f32] = &norm;
    with_elem!(dy.tensor.dtype(), T => with_elem!(x.dtype(), X => {
        let (dys, xs) = (read::<T>(dy.tensor)?, read::<X>(x)?);
        let mut sums = vec![0f32; dy.len];
        for (row, x) in dys.chunks_exact(width).zip(xs.chunks_exact(dy.len)) {
            for ((sum, dy), x) in sums.iter_mut().zip(&row[dy.start..dy.start + dy.len]).zip(x) {
                *sum += dy.widen() * x.widen();
            }
        }
        update(grad, |grad: &mut [f32]| {
            for ((grad, sum), norm) in grad.iter_mut().zip(&sums).zip(norm) {
                *grad += sum / norm;
            }
        })
    }))
}

/// The definition of [`magnitude_backward`], in candle's primitives.
pub(crate) fn magnitude_backward_reference(
    grad: &TensorMut,
    dy: ColumnView<'_>,
    x: &Tensor,
    norm: &Tensor,
) -> Result<()> {
    let sums = (dy.narrow()?.to_dtype(DType::F32)? * x.to_dtype(DType::F32)?)?.sum(0)?;
    grad.slice_set(&(&**grad + (sums / norm)?)?, 0, 0)?;
    Ok(())
}
