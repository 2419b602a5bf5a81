//! DoRA's norms, magnitudes and their gradients by kernels of `kernels/dora.cu`,
//! `kernels/reduce.cu` and `kernels/elementwise.cu`.

use candle_core::{DType, Tensor};

use super::{ColumnView, ColumnViewMut, Weight};
use crate::backends::gpu::{Driver, In, InOut, LaunchShape, Out, is_float, kernels, number};
use crate::error::Result;
use crate::ops::matmul::{cuda as matmul_cuda, empty};
use crate::ops::matmul_quantized::cuda::dequantize;
use crate::runtime::TensorMut;

/// Threads per block.
const THREADS: u32 = 256;
/// Rows of a block whose products the tensor cores compute.
const ROWS: usize = 16;

/// Returns true if kernels support a weight with factors of this dtype.
pub(super) fn is_supported(weight: Weight<'_>, factors: DType) -> bool {
    match weight {
        Weight::Dense(weight) => is_float(factors) && [DType::BF16, factors].contains(&weight.dtype()),
        Weight::Quantized(_) => is_float(factors),
    }
}

/// Returns the row norms. A quantized weight is dequantized to the dtype of the factors meanwhile.
pub(super) fn weight_norm(
    driver: &dyn Driver,
    weight: Weight<'_>,
    a: &Tensor,
    b: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    let panel;
    let w = match weight {
        Weight::Dense(weight) => weight,
        Weight::Quantized(weight) => {
            panel = dequantize(driver, &[weight], a.dtype())?;
            &panel
        }
    };
    let ((out, width), (rank, _)) = (w.dims2()?, a.dims2()?);
    let norms = empty(1, out, DType::F32, w.device())?;
    let (width, rank, to) = (number(width)?, number(rank)?, Out::all(&norms)?);
    macro_rules! launch {
        ($kernel:ident, $blocks:expr $(, $rows:expr)?) => {{
            let (shape, w, a, b) = (LaunchShape::line($blocks, THREADS), In::all(w)?, In::all(a)?, In::all(b)?);
            kernels::$kernel(driver, shape, w, a, b, to $(, $rows)?, width, rank, scale)?
        }};
    }
    match (w.dtype(), a.dtype()) {
        (DType::BF16, DType::BF16) => launch!(dora_norms_bf16_bf16, out.div_ceil(ROWS), number(out)?),
        (DType::BF16, _) => launch!(dora_norms_bf16_f32, out),
        _ => launch!(dora_norms_f32_f32, out),
    }
    Ok(norms.into_tensor().flatten_all()?)
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
