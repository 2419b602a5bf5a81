//! Gated activations by the kernels of `kernels/glu.cu`.

use candle_core::{DType, Tensor};
use half::bf16;

use super::Activation;
use crate::error::Result;
use crate::ops::gpu::{Driver, In, LaunchShape, Out, is_float, kernels, number};
use crate::ops::matmul::empty;

/// Threads per block.
const THREADS: usize = 256;

/// Returns true if kernels support values of this dtype.
pub(super) fn is_supported(gate_up: &Tensor) -> bool {
    is_float(gate_up.dtype())
}

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
    if gate_up.dtype() == DType::BF16 {
        let kernel = match activation {
            Activation::Silu => kernels::glu_silu_bf16,
            Activation::GeluTanh => kernels::glu_gelu_bf16,
        };
        kernel(driver, shape, In::<bf16>::all(gate_up)?, Out::<bf16>::all(&h)?, rows, half)?;
    } else {
        let kernel = match activation {
            Activation::Silu => kernels::glu_silu_f32,
            Activation::GeluTanh => kernels::glu_gelu_f32,
        };
        kernel(driver, shape, In::<f32>::all(gate_up)?, Out::<f32>::all(&h)?, rows, half)?;
    }
    Ok(h.into_tensor())
}

pub(super) fn backward(
    driver: &dyn Driver,
    gate_up: &Tensor,
    dh: &Tensor,
    activation: Activation,
) -> Result<Tensor> {
    let (rows, width) = gate_up.dims2()?;
    let d = empty(rows, width, gate_up.dtype(), gate_up.device())?;
    let (shape, rows, half) = (shape(gate_up, rows, width / 2), number(rows)?, number(width / 2)?);
    if gate_up.dtype() == DType::BF16 {
        let kernel = match activation {
            Activation::Silu => kernels::glu_silu_backward_bf16,
            Activation::GeluTanh => kernels::glu_gelu_backward_bf16,
        };
        let (gate_up, dh) = (In::<bf16>::all(gate_up)?, In::<bf16>::all(dh)?);
        kernel(driver, shape, gate_up, dh, Out::<bf16>::all(&d)?, rows, half)?;
    } else {
        let kernel = match activation {
            Activation::Silu => kernels::glu_silu_backward_f32,
            Activation::GeluTanh => kernels::glu_gelu_backward_f32,
        };
        let (gate_up, dh) = (In::<f32>::all(gate_up)?, In::<f32>::all(dh)?);
        kernel(driver, shape, gate_up, dh, Out::<f32>::all(&d)?, rows, half)?;
    }
    Ok(d.into_tensor())
}
