//! LayerNorm (arXiv 1607.06450): `y = (x − mean(x)) / σ(x) · g + b`, `σ(x) = sqrt(mean((x −
//! mean(x))²) + eps)`; `g` is the weight, or `1 + weight` (Nemotron). All in f32, rounded once.
//!
//! Backward, with `x̂ = (x − mean) / σ` and `q = dy · g`: `dx = (q − mean(q) − x̂ · mean(q · x̂)) /
//! σ`, `dg = Σ rows dy · x̂`, `db = Σ rows dy`. Like the backward of RMSNorm it needs only `x`, and
//! can write `y` again.

pub(super) mod cases;
mod cuda;

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::matmul::{ColumnView, sum_rows};
use super::rms_norm::{self, NormKind, RowMoments, add_gain_reference, with_residual};
use crate::backends::gpu::Route;
use crate::backends::simd;
use crate::error::Result;
use crate::instruction_set::vectorized;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, unwritten, update, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// The parameters of a LayerNorm.
#[derive(Debug, Clone, Copy)]
pub struct LayerNorm<'a> {
    /// The gain, `[D]`.
    pub weight: &'a Tensor,
    /// The bias, `[D]` in the dtype of the gain.
    pub bias: Option<&'a Tensor>,
    /// The settings; `eps` is added to the variance.
    pub kind: NormKind,
}

/// The sums of gradients of a LayerNorm's parameters, `[D]` f32, on the CPU also bf16.
#[derive(Debug, Clone, Copy, Default)]
pub struct LayerNormGradients<'a> {
    /// That of the gain, if it trains.
    pub weight: Option<&'a TensorMut>,
    /// That of the bias, if it trains.
    pub bias: Option<&'a TensorMut>,
}

/// Returns the LayerNorm of `x: [N, D]`: `[N, D]` in the dtype of `x`.
///
/// # Errors
/// Fails if a tensor is not contiguous or of floating-point values, or an operation of the device
/// fails.
pub fn layer_norm(x: &Tensor, norm: LayerNorm<'_>) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("layer_norm").dims(x.dims()).moves(&[x, x]));
    match Route::of(x, cuda::is_supported(x, norm)) {
        Route::Kernel(driver) => return cuda::forward(driver, x, norm),
        Route::Composed => return reference(x, norm),
        Route::Cpu => {}
    }
    let (rows, width) = dims2(x)?;
    with_elem!(x.dtype(), T => {
        let affine = Affine::read(norm)?;
        let x = read::<T>(x)?;
        let mut y = unwritten::<T>(rows * width);
        y.par_chunks_mut(width).zip(x.par_chunks(width)).with_min_len(16).for_each(|(y, x)| {
            forward_row(y, x, &affine);
        });
        tensor(y, (rows, width))
    })
}

/// Returns the gradient of `x: [N, D]` in its dtype, plus `residual: [N, D]` if given (the gradient
/// that bypasses the norm). Adds the gradients of the parameters to `grads`. Writes the result of
/// [`layer_norm`], to the bit, to `normed: [N, D]` if given.
///
/// # Errors
/// Fails if a tensor is not contiguous, the dtypes differ, or an operation of the device fails.
pub fn layer_norm_backward(
    x: &Tensor,
    norm: LayerNorm<'_>,
    dy: &Tensor,
    residual: Option<&Tensor>,
    grads: LayerNormGradients<'_>,
    normed: Option<&TensorMut>,
) -> Result<Tensor> {
    let _span = span(|| {
        let info = SpanInfo::op("layer_norm_backward").dims(x.dims()).moves(&[x, dy, x]);
        residual.into_iter().chain(normed.map(|normed| &**normed)).fold(info, |info, t| info.moves(&[t]))
    });
    if let Some(dbias) = grads.bias {
        sum_rows(dbias, ColumnView::all(dy))?;
    }
    match Route::of(x, cuda::is_supported(x, norm)) {
        Route::Kernel(driver) => {
            return cuda::backward(driver, [x, dy], norm, residual, grads.weight, normed);
        }
        Route::Composed => {
            if let Some(normed) = normed {
                normed.slice_set(&reference(x, norm)?, 0, 0)?;
            }
            return reference_backward(x, norm, dy, residual, grads.weight);
        }
        Route::Cpu => {}
    }
    let (rows, width) = dims2(x)?;
    with_elem!(x.dtype(), T => {
        let affine = Affine::read(norm)?;
        let (x, dy) = (read::<T>(x)?, read::<T>(dy)?);
        let residual = residual.map(read::<T>).transpose()?;
        let mut dx = unwritten::<T>(rows * width);
        let mut moments = vec![RowMoments::default(); rows];
        let mut compute = |normed: Vec<Option<&mut [T]>>| {
            let rows_of = dx.par_chunks_mut(width).zip(&mut moments).zip(normed).enumerate();
            rows_of.with_min_len(16).for_each_init(
                || vec![0f32; width],
                |q, (i, ((dx, moments), normed))| {
                    let row = i * width..(i + 1) * width;
                    let (x, around) = (&x[row.clone()], residual.as_ref().map(|r| &r[row.clone()]));
                    *moments = backward_row(dx, x, &dy[row], &affine, around, q);
                    if let Some(normed) = normed {
                        normed_row(normed, x, &affine, *moments);
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
        if let Some(dweight) = grads.weight {
            rms_norm::add_columns_of_gain::<T>(dweight, &x, &dy, width, &moments)?;
        }
        tensor(dx, (rows, width))
    })
}

/// Gain and bias in f32.
struct Affine {
    gain: Vec<f32>,
    bias: Option<Vec<f32>>,
    eps: f32,
}

impl Affine {
    fn read(LayerNorm { weight, bias, kind }: LayerNorm<'_>) -> Result<Self> {
        let plain = NormKind { unit_offset: false, ..kind };
        let bias = bias.map(|bias| rms_norm::gain(bias, plain)).transpose()?;
        Ok(Affine { gain: rms_norm::gain(weight, kind)?, bias, eps: kind.eps as f32 })
    }
}

#[inline(always)]
fn moments<T: FloatElement>(x: &[T], eps: f32) -> RowMoments {
    let mean = simd::sum_of(x, |x| x.widen()) / x.len() as f32;
    let square = |x: T| (x.widen() - mean) * (x.widen() - mean);
    let variance = simd::sum_of(x, square) / x.len() as f32;
    RowMoments { mean, inverse: 1.0 / (variance + eps).sqrt() }
}

/// Writes the norm of a row, given its moments.
#[inline(always)]
fn write_normed<T: FloatElement>(y: &mut [T], x: &[T], affine: &Affine, moments: RowMoments) {
    let RowMoments { mean, inverse } = moments;
    let scaled = |x: &T, g: &f32| (x.widen() - mean) * inverse * g;
    match &affine.bias {
        None => {
            for ((y, x), g) in y.iter_mut().zip(x).zip(&affine.gain) {
                *y = T::nearest(scaled(x, g));
            }
        }
        Some(bias) => {
            for (((y, x), g), b) in y.iter_mut().zip(x).zip(&affine.gain).zip(bias) {
                *y = T::nearest(scaled(x, g) + b);
            }
        }
    }
}

vectorized! {
    fn forward_row<T: FloatElement>(y: &mut [T], x: &[T], affine: &Affine) {
        write_normed(y, x, affine, moments(x, affine.eps));
    }
}

vectorized! {
    fn normed_row<T: FloatElement>(y: &mut [T], x: &[T], affine: &Affine, moments: RowMoments) {
        write_normed(y, x, affine, moments);
    }
}

vectorized! {
    /// Writes the gradient of a row, and returns its moments.
    fn backward_row<T: FloatElement>(
        dx: &mut [T],
        x: &[T],
        dy: &[T],
        affine: &Affine,
        residual: Option<&[T]>,
        q: &mut [f32],
    ) -> RowMoments {
        let of_row = moments(x, affine.eps);
        let RowMoments { mean, inverse } = of_row;
        for ((q, dy), g) in q.iter_mut().zip(dy).zip(&affine.gain) {
            *q = dy.widen() * g;
        }
        let count = x.len() as f32;
        let mean_q = simd::sum_of(q, |q| q) / count;
        let slope = simd::sum_of2(x, q, |x, q| (x.widen() - mean) * q) * inverse / count;
        for (q, x) in q.iter_mut().zip(x) {
            *q = inverse * (*q - mean_q - (x.widen() - mean) * inverse * slope);
        }
        if let Some(residual) = residual {
            for (q, r) in q.iter_mut().zip(residual) {
                *q += r.widen();
            }
        }
        for (dx, q) in dx.iter_mut().zip(q.iter()) {
            *dx = T::nearest(*q);
        }
        of_row
    }
}

/// The definition, in candle's differentiable form: `[N, D]` in x's dtype.
pub(crate) fn reference(x: &Tensor, LayerNorm { weight, bias, kind }: LayerNorm<'_>) -> Result<Tensor> {
    let (normed, _) = normalized(x, kind)?;
    let y = normed.broadcast_mul(&(weight.to_dtype(DType::F32)? + f64::from(kind.offset()))?)?;
    let y = match bias {
        Some(bias) => y.broadcast_add(&bias.to_dtype(DType::F32)?)?,
        None => y,
    };
    Ok(y.to_dtype(x.dtype())?)
}

/// The backward formula in candle's primitives, without the gradient of the bias.
pub(crate) fn reference_backward(
    x: &Tensor,
    norm: LayerNorm<'_>,
    dy: &Tensor,
    residual: Option<&Tensor>,
    dweight: Option<&TensorMut>,
) -> Result<Tensor> {
    let (normed, inverse) = normalized(x, norm.kind)?;
    let dy = dy.to_dtype(DType::F32)?;
    let gain = (norm.weight.to_dtype(DType::F32)? + f64::from(norm.kind.offset()))?;
    let q = dy.broadcast_mul(&gain)?;
    let slope = (&q * &normed)?.mean_keepdim(1)?;
    let centered = q.broadcast_sub(&q.mean_keepdim(1)?)?;
    let dx = (centered - normed.broadcast_mul(&slope)?)?.broadcast_mul(&inverse)?;
    add_gain_reference(dweight, &dy, &normed)?;
    with_residual(dx, residual, x.dtype())
}

/// Returns `((x − mean) / σ, 1 / σ)` in f32.
fn normalized(x: &Tensor, kind: NormKind) -> Result<(Tensor, Tensor)> {
    let x = x.to_dtype(DType::F32)?;
    let x = x.broadcast_sub(&x.mean_keepdim(1)?)?;
    let inverse = (x.sqr()?.mean_keepdim(1)? + kind.eps)?.sqrt()?.recip()?;
    Ok((x.broadcast_mul(&inverse)?, inverse))
}
