//! Activations of MLPs without a gate: `h = act(x)`, elementwise in f32, rounded once.
//!
//! Backward, from the saved `x` alone: `dx = dh · act'(x)`. The same pass writes `h` again, for the
//! gradient of the weight that multiplies `h`.

pub(super) mod cases;
mod cuda;

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::glu::Activation;
use crate::backends::gpu::{Route, are_floats};
use crate::backends::simd;
use crate::error::Result;
use crate::instruction_set::vectorized;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, unwritten, update, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// The activation of an MLP without a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlainActivation {
    /// The square of ReLU: `max(x, 0)²` (arXiv 2109.08668).
    Relu2,
    /// GELU by the error function: `x · Φ(x)`, `Φ(x) = erfc(−x / √2) / 2` (arXiv 1606.08415).
    Gelu,
    /// GELU by tanh, as in [`Activation::GeluTanh`].
    GeluTanh,
}

const INVERSE_SQRT_2PI: f32 = 0.398_942_3;

impl PlainActivation {
    /// Returns value and derivative at `x`: `(act(x), act'(x))`.
    #[inline(always)]
    fn value_and_slope(self, x: f32) -> (f32, f32) {
        match self {
            PlainActivation::Relu2 => {
                // Keeps NaN.
                let positive = if x < 0.0 { 0.0 } else { x };
                (positive * positive, 2.0 * positive)
            }
            PlainActivation::Gelu => {
                let below = 0.5 * simd::erfc(-x * std::f32::consts::FRAC_1_SQRT_2);
                (x * below, below + x * INVERSE_SQRT_2PI * simd::exp(-0.5 * x * x))
            }
            PlainActivation::GeluTanh => Activation::GeluTanh.value_and_slope(x),
        }
    }
}

/// Returns `act(x)` of each element of `x: [N, F]`, in the same dtype.
///
/// # Errors
/// Fails if `x` is not a contiguous matrix of floating-point values, or an operation of the device
/// fails.
pub fn activate(x: &Tensor, activation: PlainActivation) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("activate").dims(x.dims()).moves(&[x, x]));
    match Route::of(x, are_floats([x.dtype()])) {
        Route::Kernel(driver) => return cuda::forward(driver, x, activation),
        Route::Composed => return reference(x, activation),
        Route::Cpu => {}
    }
    let (rows, width) = dims2(x)?;
    with_elem!(x.dtype(), T => {
        let x = read::<T>(x)?;
        let mut h = unwritten::<T>(rows * width);
        h.par_chunks_mut(width).zip(x.par_chunks(width)).with_min_len(8).for_each(|(h, x)| {
            match activation {
                PlainActivation::Relu2 => relu2_row(h, x),
                PlainActivation::Gelu => gelu_row(h, x),
                PlainActivation::GeluTanh => gelu_tanh_row(h, x),
            }
        });
        tensor(h, (rows, width))
    })
}

/// Returns the gradient of [`activate`] with respect to `x: [N, F]`, from `dh: [N, F]`: `[N, F]`,
/// all in the same dtype. Replaces `dh` by the result of [`activate`], to the bit.
///
/// # Errors
/// Fails if a tensor is not contiguous, the dtypes differ, or an operation of the device fails.
pub fn activate_backward(x: &Tensor, dh: &TensorMut, activation: PlainActivation) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("activate_backward").dims(x.dims()).moves(&[x, x, dh, dh]));
    match Route::of(x, are_floats([x.dtype()])) {
        Route::Kernel(driver) => return cuda::backward(driver, x, dh, activation),
        Route::Composed => {
            let dx = reference_backward(x, dh, activation)?;
            dh.slice_set(&reference(x, activation)?, 0, 0)?;
            return Ok(dx);
        }
        Route::Cpu => {}
    }
    let (rows, width) = dims2(x)?;
    with_elem!(x.dtype(), T => {
        let x = read::<T>(x)?;
        let mut dx = unwritten::<T>(rows * width);
        update(dh, |dh: &mut [T]| {
            let rows_of = dx.par_chunks_mut(width).zip(dh.par_chunks_mut(width)).zip(x.par_chunks(width));
            rows_of.with_min_len(8).for_each(|((dx, dh), x)| match activation {
                PlainActivation::Relu2 => relu2_row_backward(dx, dh, x),
                PlainActivation::Gelu => gelu_row_backward(dx, dh, x),
                PlainActivation::GeluTanh => gelu_tanh_row_backward(dx, dh, x),
            });
        })?;
        tensor(dx, (rows, width))
    })
}

/// Defines one loop per activation, to avoid a branch per element.
macro_rules! row_loops {
    ($forward:ident, $backward:ident, $activation:expr) => {
        vectorized! {
            fn $forward<T: FloatElement>(h: &mut [T], x: &[T]) {
                for (h, x) in h.iter_mut().zip(x) {
                    *h = T::nearest($activation.value_and_slope(x.widen()).0);
                }
            }
        }
        vectorized! {
            fn $backward<T: FloatElement>(dx: &mut [T], dh: &mut [T], x: &[T]) {
                for ((dx, dh), x) in dx.iter_mut().zip(dh).zip(x) {
                    let (value, slope) = $activation.value_and_slope(x.widen());
                    *dx = T::nearest(dh.widen() * slope);
                    *dh = T::nearest(value);
                }
            }
        }
    };
}
row_loops!(relu2_row, relu2_row_backward, PlainActivation::Relu2);
row_loops!(gelu_row, gelu_row_backward, PlainActivation::Gelu);
row_loops!(gelu_tanh_row, gelu_tanh_row_backward, PlainActivation::GeluTanh);

/// The definition, in candle's primitives.
pub(crate) fn reference(x: &Tensor, activation: PlainActivation) -> Result<Tensor> {
    let wide = x.to_dtype(DType::F32)?;
    let h = match activation {
        PlainActivation::Relu2 => wide.relu()?.sqr()?,
        PlainActivation::Gelu => wide.gelu_erf()?,
        PlainActivation::GeluTanh => wide.gelu()?,
    };
    Ok(h.to_dtype(x.dtype())?)
}

/// The backward formula in candle's primitives.
pub(crate) fn reference_backward(x: &Tensor, dh: &Tensor, activation: PlainActivation) -> Result<Tensor> {
    let wide = x.to_dtype(DType::F32)?;
    let slope = match activation {
        PlainActivation::Relu2 => (wide.relu()? * 2.0)?,
        PlainActivation::Gelu => {
            let below = (((&wide / std::f64::consts::SQRT_2)?.erf()? + 1.0)? * 0.5)?;
            let density = ((wide.sqr()? * -0.5)?.exp()? * f64::from(INVERSE_SQRT_2PI))?;
            (below + (&wide * density)?)?
        }
        PlainActivation::GeluTanh => Activation::GeluTanh.reference_value_and_slope(&wide)?.1,
    };
    Ok((dh.to_dtype(DType::F32)? * slope)?.to_dtype(x.dtype())?)
}
