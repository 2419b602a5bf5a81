//! Dequantization of a matrix into a panel for one product, by the kernels of
//! `kernels/dequantize.cu`.

use candle_core::{DType, Tensor};
use half::bf16;

use super::Quantized;
use crate::error::{Error, Result};
use crate::ops::gpu::{Driver, In, LaunchShape, Out, constant, is_float, kernels};
use crate::ops::matmul::empty;
use crate::quant::{CodeKind, RunMeaning, dynamic_signed};

/// Returns true if a kernel writes panels of this dtype.
pub(super) fn is_supported(dtype: DType) -> bool {
    is_float(dtype)
}

/// Returns stacked whole matrices of one width, `[Σ out, in]` in `dtype`, bit-identical to the
/// CPU's values, rounded once.
pub(in crate::ops) fn dequantize(
    driver: &dyn Driver,
    weights: &[&Quantized],
    dtype: DType,
) -> Result<Tensor> {
    let Some(first) = weights.first() else { return Err(Error::internal("a panel without matrices")) };
    let rows = weights.iter().map(|weight| weight.shape.0).sum();
    let panel = empty(rows, first.shape.1, dtype, first.run(RunMeaning::Codes)?.device())?;
    let mut start = 0;
    for weight in weights {
        dequantize_from(driver, weight, 0, &*panel.narrow(0, start, weight.shape.0)?)?;
        start += weight.shape.0;
    }
    Ok(panel.into_tensor())
}

/// Fills `panel`, bf16 or f32, with the values of the flattened matrix from `start` on.
fn dequantize_from(driver: &dyn Driver, weight: &Quantized, start: usize, panel: &Tensor) -> Result<()> {
    let codes = weight.run(RunMeaning::Codes)?;
    let (device, format, count, dtype) = (codes.device(), weight.format, panel.elem_count(), panel.dtype());
    let values = constant(format.kind.table(), device)?;
    let (scales, nested, map) = if format.double_quant {
        let nested = weight.run(RunMeaning::ScaleCodes)?;
        (weight.run(RunMeaning::NestedScales)?, Some(nested), Some(constant(dynamic_signed(), device)?))
    } else {
        (weight.run(RunMeaning::Scales)?, None, None)
    };
    let per_block = if dtype == DType::BF16 { 8192 } else { 4096 };
    let shape = LaunchShape::line(count.div_ceil(per_block), 256);
    let size = crate::ops::gpu::number(format.block_size)?;
    let shift = if format.block_size.is_power_of_two() { format.block_size.ilog2() as i32 } else { -1 };
    macro_rules! launch {
        ($kernel:ident, $panel:ty) => {
            kernels::$kernel(
                driver,
                shape,
                In::<u8>::all(codes)?,
                In::<f32>::all(&values)?,
                In::<f32>::all(scales)?,
                In::<u8>::optional(nested)?,
                In::<f32>::optional(map.as_ref())?,
                weight.offset,
                size,
                shift,
                Out::<$panel>::all(panel)?,
                start as i64,
                count as i64,
            )
        };
    }
    match (format.kind, dtype) {
        (CodeKind::Int8Rows, DType::BF16) => launch!(dequantize_int8_rows_bf16, bf16),
        (CodeKind::Int8Rows, _) => launch!(dequantize_int8_rows_f32, f32),
        (kind, DType::BF16) if kind.bits() == 4 => launch!(dequantize_4bit_bf16, bf16),
        (kind, _) if kind.bits() == 4 => launch!(dequantize_4bit_f32, f32),
        (_, DType::BF16) => launch!(dequantize_int8_bf16, bf16),
        _ => launch!(dequantize_int8_f32, f32),
    }
}

#[cfg(all(test, feature = "kernel-emu"))]
mod tests;
