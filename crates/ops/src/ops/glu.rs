//! Gated activations: `h = act(gate) · up`, where gate and up are the left and right half of one
//! tensor. [`Activation::ClampedSilu`] has its own product, of alternating columns.
//!
//! Backward, from the saved halves alone: `dup = dh · act(gate)`, `dgate = dh · up · act'(gate)`.
//! The same pass writes `h` again, for the gradient of the weight that multiplies `h`.

pub(super) mod cases;
mod cuda;

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use crate::backends::gpu::{Route, are_floats};
use crate::backends::simd;
use crate::error::Result;
use crate::instruction_set::vectorized;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, unwritten, update, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// The activation of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// SiLU, also called swish: `x · sigmoid(x)`.
    Silu,
    /// GELU by tanh (`gelu_pytorch_tanh`): `x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    GeluTanh,
    /// The sigmoid alone, of the gates on attention's output (Qwen3.5).
    Sigmoid,
    /// `h = (up + 1) · gate · sigmoid(1.702 · gate)` with gate at most 7 and up from −7 to 7, of
    /// gates in the even and ups in the odd columns (gpt-oss).
    ClampedSilu,
}

/// The largest gate, and the largest magnitude of an up, of [`Activation::ClampedSilu`].
pub const CLAMP: f32 = 7.0;
/// The factor in the sigmoid of [`Activation::ClampedSilu`].
pub const SIGMOID_FACTOR: f32 = 1.702;

const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const GELU_CUBIC: f32 = 0.044_715;

impl Activation {
    /// Returns value and derivative at `x`: `(act(x), act'(x))`.
    #[inline(always)]
    pub(super) fn value_and_slope(self, x: f32) -> (f32, f32) {
        match self {
            Activation::Silu => {
                let s = simd::sigmoid(x);
                (x * s, s * (1.0 + x * (1.0 - s)))
            }
            Activation::GeluTanh => {
                let t = simd::tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x));
                let inner = SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * x * x);
                (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)
            }
            Activation::Sigmoid => {
                let s = simd::sigmoid(x);
                (s, s * (1.0 - s))
            }
            Activation::ClampedSilu => {
                // Comparisons keep a NaN.
                let clamped = if x > CLAMP { CLAMP } else { x };
                let s = simd::sigmoid(SIGMOID_FACTOR * clamped);
                let slope = s * (1.0 + SIGMOID_FACTOR * clamped * (1.0 - s));
                (clamped * s, if x > CLAMP { 0.0 } else { slope })
            }
        }
    }

    /// Returns [`Activation::value_and_slope`] of each element of `x`, f32, in candle's primitives.
    pub(super) fn reference_value_and_slope(self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        match self {
            Activation::Silu => {
                let s = (x.neg()?.exp()? + 1.0)?.recip()?;
                let slope = (((1.0 - &s)? * x)? + 1.0)?;
                Ok(((x * &s)?, (s * slope)?))
            }
            Activation::GeluTanh => {
                let root = f64::from(SQRT_2_OVER_PI);
                let cubic = f64::from(GELU_CUBIC);
                let t = ((x + (x.sqr()?.mul(x)? * cubic)?)? * root)?.tanh()?;
                let left = ((&t + 1.0)? * 0.5)?;
                let inner = ((x.sqr()? * (3.0 * cubic))? + 1.0)?;
                let right = ((x * (1.0 - t.sqr()?)?)? * inner)?;
                Ok(((x * &left)?, (left + (right * (0.5 * root))?)?))
            }
            Activation::Sigmoid => {
                let s = (x.neg()?.exp()? + 1.0)?.recip()?;
                let slope = (&s * (1.0 - &s)?)?;
                Ok((s, slope))
            }
            Activation::ClampedSilu => {
                let (limit, factor) = (f64::from(CLAMP), f64::from(SIGMOID_FACTOR));
                let within = x.le(limit)?.to_dtype(DType::F32)?;
                let x = x.minimum(limit)?;
                let s = ((&x * -factor)?.exp()? + 1.0)?.recip()?;
                let slope = ((((1.0 - &s)? * &x)? * factor)? + 1.0)?;
                Ok(((&x * &s)?, ((s * slope)? * within)?))
            }
        }
    }
}

/// Returns the gated product `act(gate) · up` of `gate_up: [N, 2F]`, whose rows hold F gates, then
/// F ups: `[N, F]` in the same dtype. [`Activation::ClampedSilu`] has another order and product.
///
/// # Errors
/// Fails if `gate_up` is not a contiguous matrix of floating-point values, or an operation of the
/// device fails.
pub fn glu(gate_up: &Tensor, activation: Activation) -> Result<Tensor> {
    let _span = span(|| {
        SpanInfo::op("glu")
            .dims(gate_up.dims())
            .moves(&[gate_up])
            .bytes(gate_up.elem_count() / 2 * gate_up.dtype().size_in_bytes())
    });
    match Route::of(gate_up, are_floats([gate_up.dtype()])) {
        Route::Kernel(driver) => return cuda::forward(driver, gate_up, activation),
        Route::Composed => return reference(gate_up, activation),
        Route::Cpu => {}
    }
    let (rows, width) = dims2(gate_up)?;
    let half = width / 2;
    with_elem!(gate_up.dtype(), T => {
        let gate_up = read::<T>(gate_up)?;
        let mut h = unwritten::<T>(rows * half);
        h.par_chunks_mut(half).zip(gate_up.par_chunks(width)).with_min_len(8).for_each(|(h, row)| {
            let (gate, up) = row.split_at(half);
            match activation {
                Activation::Silu => silu_row(h, gate, up),
                Activation::GeluTanh => gelu_row(h, gate, up),
                Activation::Sigmoid => sigmoid_row(h, gate, up),
                Activation::ClampedSilu => clamped_row(h, row),
            }
        });
        tensor(h, (rows, half))
    })
}

/// Returns the gradient of [`glu`] with respect to `gate_up: [N, 2F]`, from `dh: [N, F]`: `[N,
/// 2F]`, all in the same dtype. Replaces `dh` by the result of [`glu`], to the bit.
///
/// # Errors
/// Fails if a tensor is not contiguous, the dtypes differ, or an operation of the device fails.
pub fn glu_backward(gate_up: &Tensor, dh: &TensorMut, activation: Activation) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("glu_backward").dims(gate_up.dims()).moves(&[gate_up, gate_up, dh, dh]));
    match Route::of(gate_up, are_floats([gate_up.dtype()])) {
        Route::Kernel(driver) => return cuda::backward(driver, gate_up, dh, activation),
        Route::Composed => {
            let d = reference_backward(gate_up, dh, activation)?;
            dh.slice_set(&reference(gate_up, activation)?, 0, 0)?;
            return Ok(d);
        }
        Route::Cpu => {}
    }
    let (rows, width) = dims2(gate_up)?;
    let half = width / 2;
    with_elem!(gate_up.dtype(), T => {
        let gate_up = read::<T>(gate_up)?;
        let mut d = unwritten::<T>(rows * width);
        update(dh, |dh: &mut [T]| {
            let rows_of = d.par_chunks_mut(width).zip(dh.par_chunks_mut(half)).zip(gate_up.par_chunks(width));
            rows_of.with_min_len(8).for_each(|((d, dh), row)| {
                if activation == Activation::ClampedSilu {
                    return clamped_row_backward(d, dh, row);
                }
                let ((dgate, dup), (gate, up)) = (d.split_at_mut(half), row.split_at(half));
                match activation {
                    Activation::Silu => silu_row_backward(dgate, dup, dh, gate, up),
                    Activation::GeluTanh => gelu_row_backward(dgate, dup, dh, gate, up),
                    Activation::Sigmoid | Activation::ClampedSilu => {
                        sigmoid_row_backward(dgate, dup, dh, gate, up);
                    }
                }
            });
        })?;
        tensor(d, (rows, width))
    })
}

/// Defines one loop per activation, to avoid a branch per element.
macro_rules! row_loops {
    ($forward:ident, $backward:ident, $activation:expr) => {
        vectorized! {
            fn $forward<T: FloatElement>(h: &mut [T], gate: &[T], up: &[T]) {
                for ((h, gate), up) in h.iter_mut().zip(gate).zip(up) {
                    *h = T::nearest($activation.value_and_slope(gate.widen()).0 * up.widen());
                }
            }
        }
        vectorized! {
            fn $backward<T: FloatElement>(dgate: &mut [T], dup: &mut [T], dh: &mut [T], gate: &[T], up: &[T]) {
                for ((((dgate, dup), dh), gate), up) in dgate.iter_mut().zip(dup).zip(dh).zip(gate).zip(up) {
                    let (value, slope) = $activation.value_and_slope(gate.widen());
                    *dgate = T::nearest(dh.widen() * up.widen() * slope);
                    *dup = T::nearest(dh.widen() * value);
                    *dh = T::nearest(value * up.widen());
                }
            }
        }
    };
}
row_loops!(silu_row, silu_row_backward, Activation::Silu);
row_loops!(gelu_row, gelu_row_backward, Activation::GeluTanh);
row_loops!(sigmoid_row, sigmoid_row_backward, Activation::Sigmoid);

/// Returns the factor on the activated gate of [`Activation::ClampedSilu`], and its slope.
#[inline(always)]
fn clamped_up(up: f32) -> (f32, f32) {
    let clamped = if up > CLAMP { CLAMP } else { up };
    let clamped = if clamped < -CLAMP { -CLAMP } else { clamped };
    (clamped + 1.0, if up.abs() > CLAMP { 0.0 } else { 1.0 })
}

vectorized! {
    fn clamped_row<T: FloatElement>(h: &mut [T], row: &[T]) {
        for (h, [gate, up]) in h.iter_mut().zip(row.as_chunks::<2>().0) {
            let value = Activation::ClampedSilu.value_and_slope(gate.widen()).0;
            *h = T::nearest(value * clamped_up(up.widen()).0);
        }
    }
}
vectorized! {
    fn clamped_row_backward<T: FloatElement>(d: &mut [T], dh: &mut [T], row: &[T]) {
        let pairs = d.as_chunks_mut::<2>().0.iter_mut().zip(dh).zip(row.as_chunks::<2>().0);
        for (([dgate, dup], dh), [gate, up]) in pairs {
            let (value, slope) = Activation::ClampedSilu.value_and_slope(gate.widen());
            let (up, up_slope) = clamped_up(up.widen());
            *dgate = T::nearest(dh.widen() * up * slope);
            *dup = T::nearest(dh.widen() * value * up_slope);
            *dh = T::nearest(value * up);
        }
    }
}

/// Returns gates and ups of alternating columns, `[N, F]` f32.
fn alternating(gate_up: &Tensor) -> Result<(Tensor, Tensor)> {
    let (rows, width) = dims2(gate_up)?;
    let x = gate_up.to_dtype(DType::F32)?.reshape((rows, width / 2, 2))?;
    let column = |at| -> Result<Tensor> { Ok(x.narrow(2, at, 1)?.squeeze(2)?.contiguous()?) };
    Ok((column(0)?, column(1)?))
}

fn halves(gate_up: &Tensor) -> Result<(Tensor, Tensor)> {
    let (_, width) = dims2(gate_up)?;
    let x = gate_up.to_dtype(DType::F32)?;
    Ok((x.narrow(1, 0, width / 2)?.contiguous()?, x.narrow(1, width / 2, width / 2)?.contiguous()?))
}

/// The definition, in candle's primitives.
pub(crate) fn reference(gate_up: &Tensor, activation: Activation) -> Result<Tensor> {
    if activation == Activation::ClampedSilu {
        let (gate, up) = alternating(gate_up)?;
        let limit = f64::from(CLAMP);
        let up = (up.clamp(-limit, limit)? + 1.0)?;
        return Ok((activation.reference_value_and_slope(&gate)?.0 * up)?.to_dtype(gate_up.dtype())?);
    }
    let (gate, up) = halves(gate_up)?;
    let act = match activation {
        Activation::Silu => gate.silu()?,
        Activation::GeluTanh => gate.gelu()?,
        Activation::Sigmoid | Activation::ClampedSilu => (gate.neg()?.exp()? + 1.0)?.recip()?,
    };
    Ok((act * up)?.to_dtype(gate_up.dtype())?)
}

/// The backward formula in candle's primitives.
pub(crate) fn reference_backward(gate_up: &Tensor, dh: &Tensor, activation: Activation) -> Result<Tensor> {
    let dh = dh.to_dtype(DType::F32)?;
    if activation == Activation::ClampedSilu {
        let (gate, up) = alternating(gate_up)?;
        let limit = f64::from(CLAMP);
        let (value, slope) = activation.reference_value_and_slope(&gate)?;
        let within = up.abs()?.le(limit)?.to_dtype(DType::F32)?;
        let dgate = ((&dh * (up.clamp(-limit, limit)? + 1.0)?)? * slope)?;
        let dup = ((dh * value)? * within)?;
        let d = Tensor::stack(&[dgate, dup], 2)?.reshape(gate_up.shape())?;
        return Ok(d.to_dtype(gate_up.dtype())?);
    }
    let (x, up) = halves(gate_up)?;
    let (value, slope) = activation.reference_value_and_slope(&x)?;
    let dgate = ((&dh * &up)? * slope)?;
    let dup = (dh * value)?;
    Ok(Tensor::cat(&[dgate, dup], 1)?.to_dtype(gate_up.dtype())?)
}
