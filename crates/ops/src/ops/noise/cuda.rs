//! Noise by the kernels of `kernels/noise.cu`: one block per row, with the same numbers as the CPU
//! form.

use candle_core::{DType, Tensor};

use super::Noise;
use crate::backends::gpu::{Driver, In, LaunchShape, Out, kernels, number, upload};
use crate::error::Result;
use crate::ops::matmul::empty;

pub(super) fn add_noise(driver: &dyn Driver, x: &Tensor, noise: Noise<'_>) -> Result<Tensor> {
    let (rows, columns) = x.dims2()?;
    let y = empty(rows, columns, x.dtype(), x.device())?;
    let bounds = upload(noise.bounds, rows, x.device())?;
    let (shape, width) = (LaunchShape::line(rows, 256), number(columns)?);
    let (bounds, stream, first) = (In::all(&bounds)?, noise.stream.state(), noise.first_token);
    if x.dtype() == DType::BF16 {
        kernels::add_noise_bf16(driver, shape, In::all(x)?, bounds, Out::all(&y)?, width, stream, first)?;
    } else {
        kernels::add_noise_f32(driver, shape, In::all(x)?, bounds, Out::all(&y)?, width, stream, first)?;
    }
    Ok(y.into_tensor())
}
