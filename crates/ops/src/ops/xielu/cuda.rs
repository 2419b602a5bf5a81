//! xIELU by the kernels of `kernels/xielu.cu`: a block for each row.

use candle_core::{DType, Tensor};

use crate::backends::gpu::{Driver, In, InOut, LaunchShape, Out, kernels, number};
use crate::error::Result;
use crate::ops::matmul::empty;
use crate::ops::rms_norm::cuda::add_partials;
use crate::runtime::TensorMut;

/// Threads per block.
const THREADS: u32 = 256;

pub(super) fn forward(driver: &dyn Driver, x: &Tensor, curve: &Tensor) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let h = empty(rows, width, x.dtype(), x.device())?;
    let shape = LaunchShape::line(rows, THREADS);
    macro_rules! launch {
        ($kernel:ident) => {
            kernels::$kernel(driver, shape, In::all(x)?, In::all(curve)?, Out::all(&h)?, number(width)?)?
        };
    }
    match x.dtype() {
        DType::BF16 => launch!(xielu_bf16),
        _ => launch!(xielu_f32),
    }
    Ok(h.into_tensor())
}

pub(super) fn backward(
    driver: &dyn Driver,
    x: &Tensor,
    dh: &TensorMut,
    curve: &Tensor,
    dcurve: Option<&TensorMut>,
) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let dx = empty(rows, width, x.dtype(), x.device())?;
    let partial = dcurve.map(|_| empty(rows, 2, DType::F32, x.device())).transpose()?;
    let shape = LaunchShape::line(rows, THREADS);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (x, curve, dh, dx) = (In::all(x)?, In::all(curve)?, InOut::all(dh)?, Out::all(&dx)?);
            let partial = Out::optional(partial.as_deref())?;
            kernels::$kernel(driver, shape, x, curve, dh, dx, partial, number(width)?)?
        }};
    }
    match x.dtype() {
        DType::BF16 => launch!(xielu_backward_bf16),
        _ => launch!(xielu_backward_f32),
    }
    if let (Some(dcurve), Some(partial)) = (dcurve, partial)
        && rows > 0
    {
        add_partials(driver, &partial, dcurve)?;
    }
    Ok(dx.into_tensor())
}
