//! xIELU, an activation with two learned curvatures (arXiv 2411.13010): elementwise in f32, rounded
//! once.
//!
//! ```text
//! h = p · x² + β · x                          x > 0
//! h = n · (exp(min(x, ε)) − 1 − x) + β · x    otherwise
//! ```
//!
//! A curve `[4]` holds p, n, β and ε. Backward, from the saved `x` alone: `dx = dh · h'(x)`, `dp =
//! Σ dh · x²` over the positive values and `dn = Σ dh · (exp(min(x, ε)) − 1 − x)` over the others.
//! The same pass writes `h` again, for the gradient of the weight that multiplies `h`.

pub(super) mod cases;
mod cuda;
mod reference;

use candle_core::Tensor;
use rayon::prelude::*;

use crate::backends::gpu::{Route, are_floats};
use crate::backends::simd;
use crate::error::{Error, Result};
use crate::instruction_set::vectorized;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{
    FloatElement, dims2, read, tensor, unwritten, update, update_in_f32, with_elem,
};
use crate::runtime::trace::{SpanInfo, span};
pub(crate) use reference::{reference, reference_backward};

/// Below this value `exp(x) − 1 − x` is computed as written, above it by its series.
const SERIES_FROM: f32 = -0.5;

/// The numbers of a curve.
#[derive(Clone, Copy)]
struct Curve {
    positive: f32,
    negative: f32,
    beta: f32,
    eps: f32,
}

/// The activation at a value: itself, its derivative, and the factors of the two curvatures.
struct Point {
    value: f32,
    slope: f32,
    positive: f32,
    negative: f32,
}

impl Curve {
    fn read(curve: &Tensor) -> Result<Self> {
        match &*read::<f32>(curve)? {
            &[positive, negative, beta, eps] => Ok(Curve { positive, negative, beta, eps }),
            other => Err(Error::internal(format!("a curve of xIELU has {} numbers, not 4", other.len()))),
        }
    }

    #[inline(always)]
    fn at(self, x: f32) -> Point {
        let clamped = if x < self.eps { x } else { self.eps };
        let curved = curved(clamped);
        let is_positive = x > 0.0;
        let positive = if is_positive { x * x } else { 0.0 };
        let negative = if is_positive { 0.0 } else { curved + (clamped - x) };
        let below = if x < self.eps { curved + x } else { -1.0 };
        let slope = if is_positive { 2.0 * self.positive * x } else { self.negative * below };
        Point {
            value: self.positive * positive + self.negative * negative + self.beta * x,
            slope: slope + self.beta,
            positive,
            negative,
        }
    }
}

/// Returns `exp(x) − 1 − x` for `x` of at most 0.
#[inline(always)]
fn curved(x: f32) -> f32 {
    let mut series = 1.0 / 40320.0;
    for factor in [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        series = series * x + factor;
    }
    if x > SERIES_FROM { series * x * x } else { simd::exp(x) - 1.0 - x }
}

/// Returns xIELU of each element of `x: [N, F]`, in the same dtype, by `curve: [4]` f32.
///
/// # Errors
/// Fails if `x` is not a contiguous matrix of floating-point values, or an operation of the device
/// fails.
pub fn xielu(x: &Tensor, curve: &Tensor) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("xielu").dims(x.dims()).moves(&[x, x]));
    match Route::of(x, are_floats([x.dtype()])) {
        Route::Kernel(driver) => return cuda::forward(driver, x, curve),
        Route::Composed => return reference(x, curve),
        Route::Cpu => {}
    }
    let ((rows, width), curve) = (dims2(x)?, Curve::read(curve)?);
    with_elem!(x.dtype(), T => {
        let x = read::<T>(x)?;
        let mut h = unwritten::<T>(rows * width);
        let of_rows = h.par_chunks_mut(width.max(1)).zip(x.par_chunks(width.max(1)));
        of_rows.with_min_len(8).for_each(|(h, x)| activate_row(h, x, curve));
        tensor(h, (rows, width))
    })
}

/// Returns the gradient of [`xielu`] with respect to `x: [N, F]`, from `dh: [N, F]`: `[N, F]`, all
/// in the same dtype. Replaces `dh` by the result of [`xielu`], to the bit. Adds the gradients of
/// the first two numbers of `curve: [4]` f32 to `dcurve: [2]` f32.
///
/// # Errors
/// Fails if a tensor is not contiguous, the dtypes differ, or an operation of the device fails.
pub fn xielu_backward(
    x: &Tensor,
    dh: &TensorMut,
    curve: &Tensor,
    dcurve: Option<&TensorMut>,
) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("xielu_backward").dims(x.dims()).moves(&[x, x, dh, dh]));
    match Route::of(x, are_floats([x.dtype()])) {
        Route::Kernel(driver) => return cuda::backward(driver, x, dh, curve, dcurve),
        Route::Composed => {
            let dx = reference_backward(x, dh, curve, dcurve)?;
            dh.slice_set(&reference(x, curve)?, 0, 0)?;
            return Ok(dx);
        }
        Route::Cpu => {}
    }
    let ((rows, width), curve) = (dims2(x)?, Curve::read(curve)?);
    let mut sums = vec![[0f32; 2]; if dcurve.is_some() { rows } else { 0 }];
    let dx = with_elem!(x.dtype(), T => {
        let x = read::<T>(x)?;
        let x: &[T] = &x;
        let mut dx = unwritten::<T>(rows * width);
        update(dh, |dh: &mut [T]| {
            let of_sums = sums.par_iter_mut().zip(dh.par_chunks(width.max(1))).zip(x.par_chunks(width.max(1)));
            of_sums.with_min_len(8).for_each(|((sums, dh), x)| *sums = sums_of_row(x, dh, curve));
            let rows = dx.par_chunks_mut(width.max(1)).zip(dh.par_chunks_mut(width.max(1)));
            let of_rows = rows.zip(x.par_chunks(width.max(1)));
            of_rows.with_min_len(8).for_each(|((dx, dh), x)| row_backward(dx, dh, x, curve));
        })?;
        tensor(dx, (rows, width))
    })?;
    if let Some(dcurve) = dcurve {
        let sum = |i: usize| sums.iter().map(|row| f64::from(row[i])).sum::<f64>() as f32;
        update_in_f32(dcurve, |d| d.iter_mut().enumerate().for_each(|(i, d)| *d += sum(i)))?;
    }
    Ok(dx)
}

vectorized! {
    fn activate_row<T: FloatElement>(h: &mut [T], x: &[T], curve: Curve) {
        for (h, x) in h.iter_mut().zip(x) {
            *h = T::nearest(curve.at(x.widen()).value);
        }
    }
}

vectorized! {
    fn row_backward<T: FloatElement>(dx: &mut [T], dh: &mut [T], x: &[T], curve: Curve) {
        for ((dx, dh), x) in dx.iter_mut().zip(dh).zip(x) {
            let Point { value, slope, .. } = curve.at(x.widen());
            *dx = T::nearest(dh.widen() * slope);
            *dh = T::nearest(value);
        }
    }
}

vectorized! {
    fn sums_of_row<T: FloatElement>(x: &[T], dh: &[T], curve: Curve) -> [f32; 2] {
        [
            simd::sum_of2(x, dh, |x, dh| dh.widen() * curve.at(x.widen()).positive),
            simd::sum_of2(x, dh, |x, dh| dh.widen() * curve.at(x.widen()).negative),
        ]
    }
}
