//! RMSNorm (arXiv 1910.07467): `y = x / rms(x) · g`, `rms(x) = sqrt(mean(x²) + eps)`; `g` is the
//! weight, or `1 + weight` in the Gemma families. All in f32, rounded once.
//!
//! Backward, with `x̂ = x / rms` and `q = dy · g`: `dx = (q − x̂ · mean(q · x̂)) / rms`, `dg = Σ
//! rows dy · x̂`. Only `x` is saved: recomputing 1/rms is one pass over data that the backward
//! reads anyway. That pass can write `y` again, for the gradients of weights that multiply `y`.

pub(super) mod cases;
pub(super) mod cuda;

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use crate::backends::gpu::Route;
use crate::backends::simd;
use crate::error::Result;
use crate::instruction_set::vectorized;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{
    FloatElement, dims2, read, tensor, unwritten, update, update_in_f32, with_elem,
};
use crate::runtime::trace::{SpanInfo, span};

/// The settings of a norm besides its weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormKind {
    /// Added to the mean square.
    pub eps: f64,
    /// True if the weight is stored minus one (Gemma).
    pub unit_offset: bool,
}

impl NormKind {
    pub(super) fn offset(self) -> f32 {
        if self.unit_offset { 1.0 } else { 0.0 }
    }
}

/// The numbers that norm a row: `x̂ = (x − mean) · inverse`; of RMSNorm the mean is 0.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RowMoments {
    pub(super) mean: f32,
    pub(super) inverse: f32,
}

/// Returns the RMSNorm of `x: [N, D]` by `weight: [D]`: `[N, D]` in the dtype of `x`.
///
/// # Errors
/// Fails if a tensor is not contiguous or of floating-point values, or an operation of the device
/// fails.
pub fn rms_norm(x: &Tensor, weight: &Tensor, kind: NormKind) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("rms_norm").dims(x.dims()).moves(&[x, x]));
    match Route::of(x, cuda::is_supported(x, weight)) {
        Route::Kernel(driver) => return cuda::forward(driver, x, weight, kind),
        Route::Composed => return reference(x, weight, kind),
        Route::Cpu => {}
    }
    let (rows, width) = dims2(x)?;
    with_elem!(x.dtype(), T => {
        let gain = gain(weight, kind)?;
        let x = read::<T>(x)?;
        let mut y = unwritten::<T>(rows * width);
        y.par_chunks_mut(width).zip(x.par_chunks(width)).with_min_len(16).for_each(|(y, x)| {
            forward_row(y, x, &gain, kind.eps as f32);
        });
        tensor(y, (rows, width))
    })
}

/// Returns the gradient of `x: [N, D]` in its dtype, plus `residual: [N, D]` if given (the gradient
/// that bypasses the norm). Adds the weight's gradient to `dweight: [D]` f32, on the CPU also bf16.
/// Writes the result of [`rms_norm`], to the bit, to `normed: [N, D]` if given.
///
/// # Errors
/// Fails if a tensor is not contiguous, the dtypes differ, or an operation of the device fails.
pub fn rms_norm_backward(
    x: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    residual: Option<&Tensor>,
    dweight: Option<&TensorMut>,
    normed: Option<&TensorMut>,
    kind: NormKind,
) -> Result<Tensor> {
    let _span = span(|| {
        let info = SpanInfo::op("rms_norm_backward").dims(x.dims()).moves(&[x, dy, x]);
        residual.into_iter().chain(normed.map(|normed| &**normed)).fold(info, |info, t| info.moves(&[t]))
    });
    match Route::of(x, cuda::is_supported(x, weight)) {
        Route::Kernel(driver) => {
            return cuda::backward(driver, [x, weight, dy], residual, dweight, normed, kind);
        }
        Route::Composed => {
            if let Some(normed) = normed {
                normed.slice_set(&reference(x, weight, kind)?, 0, 0)?;
            }
            return reference_backward(x, weight, dy, residual, dweight, kind);
        }
        Route::Cpu => {}
    }
    let (rows, width) = dims2(x)?;
    with_elem!(x.dtype(), T => {
        let gain = gain(weight, kind)?;
        let (x, dy) = (read::<T>(x)?, read::<T>(dy)?);
        let residual = residual.map(read::<T>).transpose()?;
        let mut dx = unwritten::<T>(rows * width);
        let mut compute = |normed: Vec<Option<&mut [T]>>| {
            dx.par_chunks_mut(width).zip(normed).enumerate().with_min_len(16).for_each_init(
                || vec![0f32; width],
                |q, (i, (dx, normed))| {
                    let row = i * width..(i + 1) * width;
                    let (x, around) = (&x[row.clone()], residual.as_ref().map(|r| &r[row.clone()]));
                    let inverse = backward_row(dx, x, &dy[row], &gain, around, q, kind.eps as f32);
                    if let Some(normed) = normed {
                        normed_row(normed, x, &gain, inverse);
                    }
                },
            );
        };
        match normed {
            None => compute((0..rows).map(|_| None).collect()),
            Some(normed) => {
                update(normed, |normed: &mut [T]| compute(normed.chunks_mut(width).map(Some).collect()))?;
            }
        }
        if let Some(dweight) = dweight {
            add_gain_gradient::<T>(dweight, &x, &dy, width, kind.eps as f32)?;
        }
        tensor(dx, (rows, width))
    })
}

pub(super) fn gain(weight: &Tensor, kind: NormKind) -> Result<Vec<f32>> {
    with_elem!(weight.dtype(), W => Ok(read::<W>(weight)?.iter().map(|w| w.widen() + kind.offset()).collect()))
}

#[inline(always)]
fn inverse_rms<T: FloatElement>(x: &[T], eps: f32) -> f32 {
    let mean = simd::sum_of(x, |x| x.widen() * x.widen()) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// Writes the norm of a row, given its 1/rms.
#[inline(always)]
fn write_normed<T: FloatElement>(y: &mut [T], x: &[T], gain: &[f32], inverse: f32) {
    for ((y, x), g) in y.iter_mut().zip(x).zip(gain) {
        *y = T::nearest(x.widen() * inverse * g);
    }
}

vectorized! {
    pub(super) fn forward_row<T: FloatElement>(y: &mut [T], x: &[T], gain: &[f32], eps: f32) {
        write_normed(y, x, gain, inverse_rms(x, eps));
    }
}

vectorized! {
    fn normed_row<T: FloatElement>(y: &mut [T], x: &[T], gain: &[f32], inverse: f32) {
        write_normed(y, x, gain, inverse);
    }
}

vectorized! {
    /// Writes the gradient of a row, and returns its 1/rms.
    pub(super) fn backward_row<T: FloatElement>(
        dx: &mut [T],
        x: &[T],
        dy: &[T],
        gain: &[f32],
        residual: Option<&[T]>,
        q: &mut [f32],
        eps: f32,
    ) -> f32 {
        let inverse = inverse_rms(x, eps);
        for ((q, dy), g) in q.iter_mut().zip(dy).zip(gain) {
            *q = dy.widen() * g;
        }
        let mean = simd::sum_of2(x, q, |x, q| x.widen() * q) * inverse / x.len() as f32;
        for (q, x) in q.iter_mut().zip(x) {
            *q = inverse * (*q - x.widen() * inverse * mean);
        }
        if let Some(residual) = residual {
            for (q, r) in q.iter_mut().zip(residual) {
                *q += r.widen();
            }
        }
        for (dx, q) in dx.iter_mut().zip(q.iter()) {
            *dx = T::nearest(*q);
        }
        inverse
    }
}

/// Columns of a weight gradient that a task sums.
const COLUMNS: usize = 64;

/// Computes `dweight += Σ rows dy · x̂`, rows in order; f32, or bf16 that is rounded once.
pub(super) fn add_gain_gradient<T: FloatElement>(
    dweight: &TensorMut,
    x: &[T],
    dy: &[T],
    width: usize,
    eps: f32,
) -> Result<()> {
    let mut moments = vec![RowMoments::default(); x.len() / width.max(1)];
    moments.par_iter_mut().zip(x.par_chunks_exact(width)).with_min_len(16).for_each(|(moments, x)| {
        moments.inverse = inverse_of_row(x, eps);
    });
    add_columns_of_gain(dweight, x, dy, width, &moments)
}

/// Works like [`add_gain_gradient`], given the moments of the rows.
pub(super) fn add_columns_of_gain<T: FloatElement>(
    dweight: &TensorMut,
    x: &[T],
    dy: &[T],
    width: usize,
    moments: &[RowMoments],
) -> Result<()> {
    update_in_f32(dweight, |sums| {
        sums.par_chunks_mut(COLUMNS).enumerate().for_each(|(i, sums)| {
            add_columns(sums, x, dy, i * COLUMNS, width, moments);
        });
    })
}

vectorized! {
    fn inverse_of_row<T: FloatElement>(x: &[T], eps: f32) -> f32 {
        inverse_rms(x, eps)
    }
}

vectorized! {
    /// Adds the columns from `start` on, rows in order.
    fn add_columns<T: FloatElement>(
        sums: &mut [f32],
        x: &[T],
        dy: &[T],
        start: usize,
        width: usize,
        moments: &[RowMoments],
    ) {
        for ((x, dy), row) in x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(moments) {
            for ((sum, x), dy) in sums.iter_mut().zip(&x[start..]).zip(&dy[start..]) {
                *sum += dy.widen() * (x.widen() - row.mean) * row.inverse;
            }
        }
    }
}

/// The definition, in candle's differentiable form: `[N, D]` in x's dtype. The gain `1 + weight` is
/// computed first.
pub(crate) fn reference(x: &Tensor, weight: &Tensor, kind: NormKind) -> Result<Tensor> {
    let gain = (weight.to_dtype(DType::F32)? + f64::from(kind.offset()))?;
    let y = candle_nn::ops::rms_norm_slow(&x.to_dtype(DType::F32)?, &gain, kind.eps as f32)?;
    Ok(y.to_dtype(x.dtype())?)
}

/// The backward formula in candle's primitives.
pub(crate) fn reference_backward(
    x: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    residual: Option<&Tensor>,
    dweight: Option<&TensorMut>,
    kind: NormKind,
) -> Result<Tensor> {
    let (normed, inverse) = normalized(x, kind)?;
    let dy = dy.to_dtype(DType::F32)?;
    let gain = (weight.to_dtype(DType::F32)? + f64::from(kind.offset()))?;
    let q = dy.broadcast_mul(&gain)?;
    let mean = (&q * &normed)?.mean_keepdim(1)?;
    let dx = (q - normed.broadcast_mul(&mean)?)?.broadcast_mul(&inverse)?;
    add_gain_reference(dweight, &dy, &normed)?;
    with_residual(dx, residual, x.dtype())
}

/// Adds the gradient of a norm's gain, Σ dy · normed over the rows of both.
pub(super) fn add_gain_reference(dweight: Option<&TensorMut>, dy: &Tensor, normed: &Tensor) -> Result<()> {
    let Some(dweight) = dweight else { return Ok(()) };
    let sum = ((dy * normed)?.sum(0)? + &**dweight)?;
    Ok(dweight.slice_set(&sum.contiguous()?, 0, 0)?)
}

/// Returns `dx` plus the gradient that bypasses the norm, in `dtype`.
pub(super) fn with_residual(dx: Tensor, residual: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
    let dx = match residual {
        Some(residual) => (dx + residual.to_dtype(DType::F32)?)?,
        None => dx,
    };
    Ok(dx.to_dtype(dtype)?)
}

/// Returns `(x / rms, 1 / rms)` in f32.
fn normalized(x: &Tensor, kind: NormKind) -> Result<(Tensor, Tensor)> {
    let x = x.to_dtype(DType::F32)?;
    let inverse = (x.sqr()?.mean_keepdim(1)? + kind.eps)?.sqrt()?.recip()?;
    Ok((x.broadcast_mul(&inverse)?, inverse))
}
