//! DoRA of a linear layer (arXiv 2402.09353): `y = m / ‖W + s·B·A‖ ⊙ (W x + s·B·A x)`, with the
//! norm over each row of the weight. As in PEFT the backward treats the norm as a constant (section
//! 4.3 of the paper).
//!
//! The sum `W + s·B·A` never exists as a whole: it is summed in tiles, in the cache of a CPU and in
//! the registers of a GPU. A pass over W of `[out, in]` with rank r reads W once (2 bytes a value
//! in bf16, 0.5 in NF4) and takes `2·r·out·in` FLOPs for B·A and `6·out·in` for the sum and the two
//! squares. The expansion `‖W‖² + 2s·⟨B, W·Aᵀ⟩ + s²·⟨B·A·Aᵀ, B⟩`, with ‖W‖² kept, reads the same
//! bytes and takes as many FLOPs for `W·Aᵀ`. It saves nothing, and it loses more digits: where W
//! and the update cancel, its error grows with `(‖W‖ / norm)²`, that of the sum with `‖W‖ / norm`.
//!
//! On the CPU and by the kernel, a norm is within 1e-6 of its value in f64, relative, unless the
//! terms of B·A cancel each other where W is small. A row shorter than half of W's row has lost
//! digits, so it is summed again with every value in f64. Kernels that compute in f32 sum every row
//! so. Merging an adapter (`adapter::merge`) adds the squares of the f32 values of `W + s·B·A` in
//! f64.

pub(super) mod cases;
mod cuda;
#[cfg(test)]
mod tests;

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::matmul::{ColumnView, ColumnViewMut};
use super::matmul_quantized::Weight;
use crate::backends::gemm::{MatView, MatViewMut, Threads, matmul};
use crate::backends::gpu::{Route, are_floats};
use crate::error::Result;
use crate::rounding::Rounded;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, update, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// Rows of the weight whose update `s·B·A` is in memory at once, per thread.
const ROWS: usize = 32;

/// Squares that are added in f32; longer sums are in f64.
const SQUARES: usize = 512;

/// A row is summed in f64 if its square is less than this share of that of the weight's row.
const LEAST_SHARE: f64 = 0.25;

/// Returns `‖W + scale · B · A‖` of each row: `[out]` f32. `a: [r, in]` and `b: [out, r]` are f32,
/// with kernels also bf16. A quantized W has the values that a product in the dtype of `a` reads.
///
/// # Errors
/// Fails if `a` or `b` is not a contiguous matrix of such a dtype, the weight's dtype is unknown,
/// or an operation of the device fails.
pub fn weight_norm(weight: Weight<'_>, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("dora_weight_norm").dims(a.dims()));
    match Route::of(a, cuda::is_supported(weight, a.dtype())) {
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
            let frozen: Vec<f64> = sum.chunks_exact(width).map(square).collect();
            let b = &b[first * r..(first + rows) * r];
            let dst = MatViewMut { data: &mut sum, stride: width, accumulate: true };
            let update = MatView::new(b, rows, r, r);
            matmul(dst, update, MatView::new(a, r, width, width), scale as f32, Threads::One);
            for (j, (norm, row)) in norms.iter_mut().zip(sum.chunks_exact_mut(width)).enumerate() {
                let mut of_row = square(row);
                if of_row < LEAST_SHARE * frozen[j] {
                    widen(first + j, row);
                    of_row = exact_square(row, a, &b[j * r..(j + 1) * r], scale);
                }
                *norm = of_row.sqrt() as f32;
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

/// Returns the sum of squares.
fn square(values: &[f32]) -> f64 {
    values.chunks(SQUARES).map(|part| f64::from(crate::backends::simd::sum_of(part, |x| x * x))).sum()
}

/// Returns the sum of squares of `w + scale · b · A` for one row `w`, with every value in f64.
fn exact_square(w: &[f32], a: &[f32], b: &[f32], scale: f64) -> f64 {
    let width = w.len();
    let squares = w.iter().enumerate().map(|(column, w)| {
        let of_column = a.iter().skip(column).step_by(width);
        let update: f64 = b.iter().zip(of_column).map(|(b, a)| f64::from(*b) * f64::from(*a)).sum();
        (f64::from(*w) + scale * update).powi(2)
    });
    squares.sum()
}

/// The definition of [`weight_norm`], in candle's primitives.
pub(crate) fn weight_norm_reference(
    weight: Weight<'_>,
    a: &Tensor,
    b: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    let dense = match weight {
        Weight::Dense(weight) => weight.clone(),
        // In the dtype of the factors, as a product dequantizes it.
        Weight::Quantized(weight) => weight.dequantize_reference()?.to_dtype(a.dtype())?,
    };
    let [dense, a, b] = [&dense, a, b].map(|tensor| tensor.to_dtype(DType::F32));
    let update = (b?.matmul(&a?)? * scale)?;
    Ok((dense? + update)?.sqr()?.sum(1)?.sqrt()?)
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
