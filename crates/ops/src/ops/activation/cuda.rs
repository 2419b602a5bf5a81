//! Activations without a gate by the kernels of `kernels/glu.cu`.

use candle_core::{DType, Tensor};

use super::PlainActivation;
use crate::backends::gpu::{Driver, In, InOut, LaunchShape, Out, kernels, number};
use crate::error::Result;
use crate::ops::matmul::empty;
use crate::runtime::TensorMut;

/// Threads per block.
const THREADS: usize = 256;

/// Returns the launch shape: a thread processes the values of 16 bytes, or one value if rows are
/// not a multiple of that.
fn shape(x: &Tensor, rows: usize, width: usize) -> LaunchShape {
    let many = 16 / x.dtype().size_in_bytes();
    let step = if width.is_multiple_of(many) { many } else { 1 };
    LaunchShape::line((rows * width / step).div_ceil(THREADS), THREADS as u32)
}

/// Returns the number of an activation in the kernels.
fn code(activation: PlainActivation) -> u32 {
    match activation {
        PlainActivation::Relu2 => 0,
        PlainActivation::Gelu => 1,
        PlainActivation::GeluTanh => 2,
    }
}

pub(super) fn forward(driver: &dyn Driver, x: &Tensor, activation: PlainActivation) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let h = empty(rows, width, x.dtype(), x.device())?;
    let (shape, rows, width) = (shape(x, rows, width), number(rows)?, number(width)?);
    macro_rules! launch {
        ($kernel:ident) => {
            kernels::$kernel(driver, shape, In::all(x)?, Out::all(&h)?, rows, width, code(activation))?
        };
    }
    match x.dtype() {
        DType::BF16 => launch!(activate_bf16),
        _ => launch!(activate_f32),
    }
    Ok(h.into_tensor())
}

pub(super) fn backward(
    driver: &dyn Driver,
    x: &Tensor,
    dh: &TensorMut,
    activation: PlainActivation,
) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let dx = empty(rows, width, x.dtype(), x.device())?;
    let (shape, rows, width) = (shape(x, rows, width), number(rows)?, number(width)?);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (x, dh, dx) = (In::all(x)?, InOut::all(dh)?, Out::all(&dx)?);
            kernels::$kernel(driver, shape, x, dh, dx, rows, width, code(activation))?
        }};
    }
    match x.dtype() {
        DType::BF16 => launch!(activate_backward_bf16),
        _ => launch!(activate_backward_f32),
    }
    Ok(dx.into_tensor())
}
