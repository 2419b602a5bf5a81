//! Dropout by the kernels of `kernels/dropout.cu`: one block per row, with the same masks as the
//! CPU form.

use candle_core::{DType, Tensor};

use super::Dropout;
use crate::backends::gpu::{Driver, In, LaunchShape, Out, kernels, number};
use crate::error::Result;
use crate::ops::matmul::empty;

pub(super) fn dropout(driver: &dyn Driver, x: &Tensor, site: Dropout) -> Result<Tensor> {
    let (rows, columns) = x.dims2()?;
    let y = empty(rows, columns, x.dtype(), x.device())?;
    let (shape, width) = (LaunchShape::line(rows, 256), number(columns)?);
    let (stream, first) = (site.stream.state(), site.first_token);
    if x.dtype() == DType::BF16 {
        kernels::dropout_bf16(driver, shape, In::all(x)?, Out::all(&y)?, width, stream, first, site.p)?;
    } else {
        kernels::dropout_f32(driver, shape, In::all(x)?, Out::all(&y)?, width, stream, first, site.p)?;
    }
    Ok(y.into_tensor())
}
