//! Gated activations by the kernels of `kernels/glu.cu`.

use candle_core::{DType, Tensor};

use super::Activation;
use crate::backends::gpu::{Driver, In, InOut, LaunchShape, Out, kernels, number};
use crate::error::Result;
use crate::ops::matmul::empty;
use crate::runtime::TensorMut;

/// Threads per block.
const THREADS: usize = 256;

/// Returns the launch shape: a thread processes the values of 16 bytes, or one value if rows are
/// not a multiple of that.
fn shape(gate_up: &Tensor, rows: usize, half: usize) -> LaunchShape {
    let many = 16 / gate_up.dtype().size_in_bytes();
    let step = if half.is_multiple_of(many) { many } else { 1 };
    LaunchShape::line((rows * half / step).div_ceil(THREADS), THREADS as u32)
}

pub(super) fn forward(driver: &dyn Driver, gate_up: &Tensor, activation: Activation) -> Result<Tensor> {
    let (rows, width) = gate_up.dims2()?;
    let half = width / 2;
    let h = empty(rows, half, gate_up.dtype(), gate_up.device())?;
    let (shape, rows, half) = (shape(gate_up, rows, half), number(rows)?, number(half)?);
    macro_rules! launch {
        ($kernel:ident) => {
            kernels::$kernel(driver, shape, In::all(gate_up)?, Out::all(&h)?, rows, half)?
        };
    }
    match (activation, gate_up.dtype()) {
        (Activation::Silu, DType::BF16) => launch!(glu_silu_bf16),
        (Activation::Silu, _) => launch!(glu_silu_f32),
        (Activation::GeluTanh, DType::BF16) => launch!(glu_gelu_bf16),
        (Activation::GeluTanh, _) => launch!(glu_gelu_f32),
        (Activation::Sigmoid, DType::BF16) => launch!(glu_sigmoid_bf16),
        (Activation::Sigmoid, _) => launch!(glu_sigmoid_f32),
        (Activation::ClampedSilu, DType::BF16) => launch!(glu_clamped_bf16),
        (Activation::ClampedSilu, _) => launch!(glu_clamped_f32),
    }
    Ok(h.into_tensor())
}

pub(super) fn backward(
    driver: &dyn Driver,
    gate_up: &Tensor,
    dh: &TensorMut,
    activation: Activation,
) -> Result<Tensor> {
    let (rows, width) = gate_up.dims2()?;
    let d = empty(rows, width, gate_up.dtype(), gate_up.device())?;
    let (shape, rows, half) = (shape(gate_up, rows, width / 2), number(rows)?, number(width / 2)?);
    macro_rules! launch {
        ($kernel:ident) => {
            kernels::$kernel(driver, shape, In::all(gate_up)?, InOut::all(dh)?, Out::all(&d)?, rows, half)?
        };
    }
    match (activation, gate_up.dtype()) {
        (Activation::Silu, DType::BF16) => launch!(glu_silu_backward_bf16),
        (Activation::Silu, _) => launch!(glu_silu_backward_f32),
        (Activation::GeluTanh, DType::BF16) => launch!(glu_gelu_backward_bf16),
        (Activation::GeluTanh, _) => launch!(glu_gelu_backward_f32),
        (Activation::Sigmoid, DType::BF16) => launch!(glu_sigmoid_backward_bf16),
        (Activation::Sigmoid, _) => launch!(glu_sigmoid_backward_f32),
        (Activation::ClampedSilu, DType::BF16) => launch!(glu_clamped_backward_bf16),
        (Activation::ClampedSilu, _) => launch!(glu_clamped_backward_f32),
    }
    Ok(d.into_tensor())
}
