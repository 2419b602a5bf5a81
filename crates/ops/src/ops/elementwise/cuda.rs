//! Elementwise sums and products, and copies of rows, by the kernels of `kernels/elementwise.cu`.

use candle_core::{DType, Device, Tensor};

use crate::backends::gpu::{Driver, In, InOut, LaunchShape, Out, kernels, number};
use crate::error::{Error, Result};
use crate::ops::matmul::empty;
use crate::runtime::TensorMut;
use crate::runtime::copy::to_device;

/// Returns the launch shape: a block processes 8192 values if all are bf16, else 4096.
fn shape(count: usize, all_bf16: bool) -> LaunchShape {
    LaunchShape::line(count.div_ceil(if all_bf16 { 8192 } else { 4096 }), 256)
}

/// Returns Σ x² of each tensor, `[tensors]` f64, in two stages whose partition does not depend on
/// the device.
pub(super) fn sums_of_squares(driver: &dyn Driver, tensors: &[&Tensor], device: &Device) -> Result<Tensor> {
    /// Values per block of the first stage.
    const SHARE: usize = 16_384;
    let sums = Tensor::zeros(tensors.len(), DType::F64, device)?;
    for (at, x) in tensors.iter().enumerate().filter(|(_, x)| x.elem_count() > 0) {
        let (x, blocks) = (to_device(x, device)?, x.elem_count().div_ceil(SHARE));
        let partials = Tensor::zeros(blocks, DType::F64, device)?;
        let (shape, count, out) =
            (LaunchShape::line(blocks, 256), x.elem_count() as i64, Out::all(&partials)?);
        if x.dtype() == DType::BF16 {
            kernels::sum_of_squares_bf16(driver, shape, In::all(&x)?, count, out)?;
        } else {
            kernels::sum_of_squares_f32(driver, shape, In::all(&x)?, count, out)?;
        }
        let sum = sums.narrow(0, at, 1)?;
        let (shape, partials) = (LaunchShape::line(1, 256), In::all(&partials)?);
        kernels::sum_partials(driver, shape, partials, number(blocks)?, Out::all(&sum)?)?;
    }
    Ok(sums)
}

pub(super) fn add(driver: &dyn Driver, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let count = a.elem_count();
    let y = empty(1, count, a.dtype(), a.device())?;
    let bf16s = a.dtype() == DType::BF16;
    let shape = shape(count, bf16s);
    if bf16s {
        kernels::add_bf16(driver, shape, In::all(a)?, In::all(b)?, Out::all(&y)?, count as i64)?;
    } else {
        kernels::add_f32(driver, shape, In::all(a)?, In::all(b)?, Out::all(&y)?, count as i64)?;
    }
    Ok(y.reshape(a.shape())?)
}

pub(super) fn scaled(driver: &dyn Driver, x: &Tensor, factor: f32) -> Result<Tensor> {
    let count = x.elem_count();
    let y = empty(1, count, x.dtype(), x.device())?;
    let bf16s = x.dtype() == DType::BF16;
    let shape = shape(count, bf16s);
    if bf16s {
        kernels::scaled_bf16(driver, shape, In::all(x)?, Out::all(&y)?, factor, count as i64)?;
    } else {
        kernels::scaled_f32(driver, shape, In::all(x)?, Out::all(&y)?, factor, count as i64)?;
    }
    Ok(y.reshape(x.shape())?)
}

/// Copies the rows of each part by a launch of its own.
pub(super) fn stack_rows(driver: &dyn Driver, parts: &[&Tensor]) -> Result<Tensor> {
    let sizes = parts.iter().map(|part| part.dims2()).collect::<candle_core::Result<Vec<_>>>()?;
    let width = sizes.first().map_or(0, |(_, width)| *width);
    if sizes.iter().any(|(_, other)| *other != width) {
        return Err(Error::internal("rows to stack have several widths").because(format!("{sizes:?}")));
    }
    let dtype = parts[0].dtype();
    let y = empty(sizes.iter().map(|(rows, _)| rows).sum(), width, dtype, parts[0].device())?;
    let (columns, pitch, mut start) = (number(width)?, width as i64, 0);
    for (part, (rows, _)) in parts.iter().zip(sizes) {
        let (to, shape, all) = (y.narrow(0, start, rows)?, LaunchShape::line(rows, 256), In::optional(None)?);
        if dtype == DType::BF16 {
            let (x, y) = (In::all(part)?, Out::all(&to)?);
            kernels::gather_rows_bf16(driver, shape, x, all, y, columns, pitch, pitch)?;
        } else {
            let (x, y) = (In::all(part)?, Out::all(&to)?);
            kernels::gather_rows_f32(driver, shape, x, all, y, columns, pitch, pitch)?;
        }
        start += rows;
    }
    Ok(y.into_tensor())
}

pub(super) fn add_into(driver: &dyn Driver, dst: &TensorMut, x: &Tensor) -> Result<()> {
    let count = dst.elem_count();
    macro_rules! launch {
        ($kernel:ident, $all_bf16:literal) => {
            kernels::$kernel(driver, shape(count, $all_bf16), InOut::all(dst)?, In::all(x)?, count as i64)
        };
    }
    match (dst.dtype(), x.dtype()) {
        (DType::BF16, DType::BF16) => launch!(add_into_bf16_bf16, true),
        (DType::BF16, _) => launch!(add_into_bf16_f32, false),
        (_, DType::BF16) => launch!(add_into_f32_bf16, false),
        _ => launch!(add_into_f32_f32, false),
    }
}
