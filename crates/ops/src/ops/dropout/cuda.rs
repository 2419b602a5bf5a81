//! Dropout by the kernels of `kernels/dropout.cu`: one block per row, with the same masks as the
//! CPU form.

use candle_core::{DType, Tensor};
use half::bf16;

use super::Dropout;
use crate::error::Result;
use crate::ops::gpu::{Driver, In, LaunchShape, Out, is_float, kernels, number};
use crate::ops::matmul::empty;

/// Returns true if kernels support values of this dtype.
pub(super) fn is_supported(x: &Tensor) -> bool {
    is_float(x.dtype())
}

pub(super) fn dropout(driver: &dyn Driver, x: &Tensor, site: Dropout) -> Result<Tensor> {
    let (rows, columns) = x.dims2()?;
    let y = empty(rows, columns, x.dtype(), x.device())?;
    let (shape, width) = (LaunchShape::line(rows, 256), number(columns)?);
    let (stream, first) = (site.stream.state(), site.first_token);
    if x.dtype() == DType::BF16 {
        let (x, y) = (In::<bf16>::all(x)?, Out::<bf16>::all(&y)?);
        kernels::dropout_bf16(driver, shape, x, y, width, stream, first, site.p)?;
    } else {
        let (x, y) = (In::<f32>::all(x)?, Out::<f32>::all(&y)?);
        kernels::dropout_f32(driver, shape, x, y, width, stream, first, site.p)?;
    }
    Ok(y.into_tensor())
}
