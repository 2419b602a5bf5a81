//! DoRA's norms, magnitudes and their gradients by kernels of `kernels/reduce.cu` and
//! `kernels/elementwise.cu`.

use candle_core::{DType, Tensor};

use super::{ColumnView, ColumnViewMut, Weight};
use crate::error::Result;
use crate::ops::gpu::{Driver, In, InOut, LaunchShape, Out, is_float, kernels, number};
use crate::ops::matmul::{Addend, Transpose, cuda as matmul_cuda, empty, matmul};
use crate::ops::matmul_quantized::cuda::dequantize;
use crate::runtime::TensorMut;

/// Threads per block.
const THREADS: u32 = 256;
/// Values per block of a cast.
const CAST_SHARE: usize = 4096;

/// Returns true if kernels support a weight of this dtype.
pub(super) fn is_supported(weight: Weight<'_>) -> bool {
    match weight {
        Weight::Dense(weight) => is_float(weight.dtype()),
        Weight::Quantized(_) => true,
    }
}

/// Returns the row norms; the whole sum `W + scale · B · A` is in memory, in f32, meanwhile.
pub(super) fn weight_norm(
    driver: &dyn Driver,
    weight: Weight<'_>,
    a: &Tensor,
    b: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    let (out, width) = weight.dims()?;
    let sum = match weight {
        Weight::Quantized(weight) => TensorMut::new(dequantize(driver, &[weight], DType::F32)?),
        Weight::Dense(weight) => widened(driver, weight)?,
    };
    let (b, a) = (ColumnView::all(b), ColumnView::all(a));
    matmul(ColumnViewMut::all(&sum), b, a, Transpose::Nn, scale, Addend::Destination)?;
    let norms = TensorMut::zeros(out, DType::F32, sum.device())?;
    let shape = LaunchShape::line(out, THREADS);
    kernels::row_norms_f32(driver, shape, In::all(&sum)?, Out::all(&norms)?, number(width)?, width as i64)?;
    Ok(norms.into_tensor())
}

/// Returns a copy in f32.
fn widened(driver: &dyn Driver, weight: &Tensor) -> Result<TensorMut> {
    let (out, width) = weight.dims2()?;
    let copy = empty(out, width, DType::F32, weight.device())?;
    if weight.dtype() == DType::F32 {
        copy.slice_set(weight, 0, 0)?;
        return Ok(copy);
    }
    let count = out * width;
    let shape = LaunchShape::line(count.div_ceil(CAST_SHARE), THREADS);
    kernels::cast_bf16_f32(driver, shape, In::all(weight)?, Out::all(&copy)?, count as i64)?;
    Ok(copy)
}

pub(super) fn scale_columns(
    driver: &dyn Driver,
    dst: ColumnViewMut<'_>,
    x: ColumnView<'_>,
    factors: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let ((rows, pitch), (_, x_pitch)) = (dst.tensor.dims2()?, x.tensor.dims2()?);
    let (shape, view) = (LaunchShape::line(rows, THREADS), dst.as_view());
    let (width, pitch, x_pitch) = (number(dst.len)?, pitch as i64, x_pitch as i64);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (dst, x, factors) = (InOut::columns(&view)?, In::columns(&x)?, In::all(factors)?);
            kernels::$kernel(driver, shape, dst, x, factors, width, pitch, x_pitch, u32::from(accumulate))
        }};
    }
    match (dst.tensor.dtype(), x.tensor.dtype()) {
        (DType::BF16, DType::BF16) => launch!(scale_columns_bf16_bf16),
        (DType::BF16, _) => launch!(scale_columns_bf16_f32),
        (_, DType::BF16) => launch!(scale_columns_f32_bf16),
        _ => launch!(scale_columns_f32_f32),
    }
}

pub(super) fn magnitude_backward(
    driver: &dyn Driver,
    grad: &TensorMut,
    dy: ColumnView<'_>,
    x: &Tensor,
    norm: &Tensor,
) -> Result<()> {
    let ((rows, pitch), (_, x_pitch)) = (dy.tensor.dims2()?, x.dims2()?);
    let sums = matmul_cuda::ColumnSums::new(rows, dy.len, grad.device())?;
    let (shape, out) = (sums.shape()?, Out::<f32>::all(&sums.partials)?);
    let (rows, width, pitch, x_pitch) = (number(rows)?, number(dy.len)?, pitch as i64, x_pitch as i64);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (dy, x) = (In::columns(&dy)?, In::all(x)?);
            kernels::$kernel(driver, shape, dy, x, out, rows, width, pitch, x_pitch)?
        }};
    }
    match (dy.tensor.dtype(), x.dtype()) {
        (DType::BF16, DType::BF16) => launch!(column_products_bf16_bf16),
        (DType::BF16, _) => launch!(column_products_bf16_f32),
        (_, DType::BF16) => launch!(column_products_f32_bf16),
        _ => launch!(column_products_f32_f32),
    }
    sums.add_to(driver, grad, Some(norm))
}
