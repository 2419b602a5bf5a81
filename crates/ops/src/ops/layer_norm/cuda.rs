//! LayerNorm by the kernels of `kernels/rms_norm.cu`: one block per row.

use candle_core::{DType, Tensor};

use super::LayerNorm;
use crate::backends::gpu::{Driver, In, LaunchShape, Out, kernels, number};
use crate::error::{Error, Result};
use crate::ops::matmul::empty;
use crate::ops::rms_norm;
use crate::ops::rms_norm::cuda::{THREADS, gain_gradient};
use crate::runtime::TensorMut;

/// Returns true if kernels support activations and parameters of these dtypes.
pub(super) fn is_supported(x: &Tensor, norm: LayerNorm<'_>) -> bool {
    let weight = norm.weight;
    rms_norm::cuda::is_supported(x, weight) && norm.bias.is_none_or(|bias| bias.dtype() == weight.dtype())
}

pub(super) fn forward(driver: &dyn Driver, x: &Tensor, norm: LayerNorm<'_>) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let LayerNorm { weight, bias, kind } = norm;
    let y = empty(rows, width, x.dtype(), x.device())?;
    let shape = LaunchShape::line(rows, THREADS);
    let (width, offset, eps) = (number(width)?, kind.offset(), kind.eps as f32);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (x, weight, bias, y) = (In::all(x)?, In::all(weight)?, In::optional(bias)?, Out::all(&y)?);
            kernels::$kernel(driver, shape, x, weight, bias, y, width, offset, eps)?
        }};
    }
    match (x.dtype(), weight.dtype()) {
        (DType::BF16, DType::BF16) => launch!(layer_norm_bf16),
        (DType::BF16, DType::F32) => launch!(layer_norm_bf16_f32),
        (DType::F32, DType::F32) => launch!(layer_norm_f32),
        _ => return Err(refused(x, weight)),
    }
    Ok(y.into_tensor())
}

pub(super) fn backward(
    driver: &dyn Driver,
    [x, dy]: [&Tensor; 2],
    norm: LayerNorm<'_>,
    residual: Option<&Tensor>,
    dweight: Option<&TensorMut>,
    normed: Option<&TensorMut>,
) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let LayerNorm { weight, bias, kind } = norm;
    let dx = empty(rows, width, x.dtype(), x.device())?;
    let of_rows = || dweight.map(|_| empty(1, rows, DType::F32, x.device())).transpose();
    let (means, inverses) = (of_rows()?, of_rows()?);
    let shape = LaunchShape::line(rows, THREADS);
    let (columns, offset, eps) = (number(width)?, kind.offset(), kind.eps as f32);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (x, weight, bias) = (In::all(x)?, In::all(weight)?, In::optional(bias)?);
            let (dy, residual) = (In::all(dy)?, In::optional(residual)?);
            let (dx, normed) = (Out::all(&dx)?, Out::optional(normed.map(|normed| &**normed))?);
            let (means, inverses) = (Out::optional(means.as_deref())?, Out::optional(inverses.as_deref())?);
            kernels::$kernel(
                driver, shape, x, weight, bias, dy, residual, dx, normed, means, inverses, columns, offset,
                eps,
            )?
        }};
    }
    match (x.dtype(), weight.dtype()) {
        (DType::BF16, DType::BF16) => launch!(layer_norm_backward_bf16),
        (DType::BF16, DType::F32) => launch!(layer_norm_backward_bf16_f32),
        (DType::F32, DType::F32) => launch!(layer_norm_backward_f32),
        _ => return Err(refused(x, weight)),
    }
    if let (Some(dweight), Some(inverses), false) = (dweight, inverses, shape.is_empty()) {
        gain_gradient(driver, [x, dy], means.as_deref(), &inverses, dweight)?;
    }
    Ok(dx.into_tensor())
}

fn refused(x: &Tensor, weight: &Tensor) -> Error {
    let found = format!("found {:?} with a weight of {:?}", x.dtype(), weight.dtype());
    Error::internal("no kernel of LayerNorm supports these types").because(found)
}
