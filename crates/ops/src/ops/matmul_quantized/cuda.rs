//! Dequantization of a matrix into a panel for one product, by the kernels of
//! `kernels/dequantize.cu` and, for formats of other tools, of the two files beside it.

mod repacked;

use candle_core::{DType, Device, Tensor};

use super::Quantized;
use crate::backends::gpu::{Driver, In, LaunchShape, Out, constant, is_float, kernels, number};
use crate::error::{Error, Result};
use crate::ops::matmul::{empty, empty_if_free};
use crate::quant::{PanelKernel, QuantFormat, RunMeaning, dynamic_signed};
use crate::runtime::TensorMut;

/// Returns true if kernels write panels of all `weights` in this dtype.
pub(super) fn is_supported(weights: &[&Quantized], dtype: DType) -> bool {
    is_float(dtype) && weights.iter().all(|weight| weight.format.scheme().hint().kernel.is_some())
}

/// Returns stacked whole matrices of one width, `[Σ out, in]` in `dtype`, bit-identical to the
/// CPU's values, rounded once.
pub(in crate::ops) fn dequantize(
    driver: &dyn Driver,
    weights: &[&Quantized],
    dtype: DType,
) -> Result<Tensor> {
    let (rows, cols) = panel_shape(weights)?;
    let panel = empty(rows, cols, dtype, device_of(weights)?)?;
    fill(driver, &sources(weights)?, &panel)?;
    Ok(panel.into_tensor())
}

/// Allocates the panel of stacked matrices of one width, `[Σ out, in]` in `dtype`. Returns none if
/// the device has not enough memory at once.
pub(super) fn unwritten_if_free(weights: &[&Quantized], dtype: DType) -> Result<Option<TensorMut>> {
    let (rows, cols) = panel_shape(weights)?;
    empty_if_free(rows, cols, dtype, device_of(weights)?)
}

fn panel_shape(weights: &[&Quantized]) -> Result<(usize, usize)> {
    let rows = weights.iter().map(|weight| weight.shape.0).sum();
    Ok((rows, first_of(weights)?.shape.1))
}

fn device_of<'a>(weights: &[&'a Quantized]) -> Result<&'a Device> {
    Ok(first_of(weights)?.run(RunMeaning::Codes)?.device())
}

fn first_of<'a>(weights: &[&'a Quantized]) -> Result<&'a Quantized> {
    weights.first().copied().ok_or_else(|| Error::internal("a panel without matrices"))
}

/// A matrix and the tables of its kernel on the device.
pub(super) struct Source<'a> {
    weight: &'a Quantized,
    /// The values of the codes, unless the kernel computes them.
    values: Option<Tensor>,
    /// The values of the codes of nested scales.
    map: Option<Tensor>,
}

/// Returns matrices with their tables, which the first use uploads on the first queue: before a
/// second queue follows it.
pub(super) fn sources<'a>(weights: &[&'a Quantized]) -> Result<Vec<Source<'a>>> {
    weights.iter().map(|weight| Source::new(weight)).collect()
}

impl<'a> Source<'a> {
    fn new(weight: &'a Quantized) -> Result<Self> {
        let device = weight.run(RunMeaning::Codes)?.device();
        let table = match weight.format {
            QuantFormat::Grid(_) => &[],
            format => format.scheme().hint().table,
        };
        let values = (!table.is_empty()).then(|| constant(table, device)).transpose()?;
        let nested = weight.optional_run(RunMeaning::ScaleCodes);
        let map = nested.map(|_| constant(dynamic_signed(), device)).transpose()?;
        Ok(Source { weight, values, map })
    }
}

/// Writes the values of stacked matrices to their panel.
pub(super) fn fill(driver: &dyn Driver, sources: &[Source<'_>], panel: &TensorMut) -> Result<()> {
    let mut start = 0;
    for source in sources {
        let rows = source.weight.shape.0;
        dequantize_whole(driver, source, &*panel.narrow(0, start, rows)?)?;
        start += rows;
    }
    Ok(())
}

/// Fills `panel`, `[out, in]` in bf16 or f32, with the values of a matrix.
fn dequantize_whole(driver: &dyn Driver, source: &Source<'_>, panel: &Tensor) -> Result<()> {
    match &source.weight.format {
        QuantFormat::Grid(format) => repacked::grid(driver, source.weight, format, panel),
        QuantFormat::Ggml(format) => repacked::blocks(driver, source, format.kind, panel),
        _ => dequantize_from(driver, source, 0, panel),
    }
}

/// Returns the values that a block of threads of the kernels with codes writes.
fn values_per_block(dtype: DType) -> usize {
    if dtype == DType::BF16 { 8192 } else { 4096 }
}

/// Returns the logarithm of a number for a kernel's division, or -1 if it is no power of two.
fn shift(size: usize) -> i32 {
    if size.is_power_of_two() { size.ilog2() as i32 } else { -1 }
}

/// Fills `panel`, bf16 or f32, with the values of the flattened matrix from `start` on.
fn dequantize_from(driver: &dyn Driver, source: &Source<'_>, start: usize, panel: &Tensor) -> Result<()> {
    let Source { weight, values, map } = source;
    let codes = weight.run(RunMeaning::Codes)?;
    let hint = weight.format.scheme().hint();
    let (count, dtype) = (panel.elem_count(), panel.dtype());
    let nested = weight.optional_run(RunMeaning::ScaleCodes);
    let scales = nested.map_or(RunMeaning::Scales, |_| RunMeaning::NestedScales);
    let scales = weight.run(scales)?;
    let shape = LaunchShape::line(count.div_ceil(values_per_block(dtype)), 256);
    let (size, shift) = (number(hint.block_size)?, shift(hint.block_size));
    let (codes, values, scales) = (In::all(codes)?, In::optional(values.as_ref())?, In::all(scales)?);
    let (nested, map, offset) = (In::optional(nested)?, In::optional(map.as_ref())?, weight.offset);
    let (start, count) = (start as i64, count as i64);
    macro_rules! launch {
        ($kernel:ident) => {{
            let panel = Out::all(panel)?;
            kernels::$kernel(
                driver, shape, codes, values, scales, nested, map, offset, size, shift, panel, start, count,
            )
        }};
    }
    match (hint.kernel, dtype) {
        (Some(PanelKernel::FourBits), DType::BF16) => launch!(dequantize_4bit_bf16),
        (Some(PanelKernel::FourBits), _) => launch!(dequantize_4bit_f32),
        (Some(PanelKernel::Int8), DType::BF16) => launch!(dequantize_int8_bf16),
        (Some(PanelKernel::Int8), _) => launch!(dequantize_int8_f32),
        (Some(PanelKernel::Int8Rows), DType::BF16) => launch!(dequantize_int8_rows_bf16),
        (Some(PanelKernel::Int8Rows), _) => launch!(dequantize_int8_rows_f32),
        _ => Err(Error::internal(format!("no kernel dequantizes {}", weight.format.scheme().name()))),
    }
}

#[cfg(all(test, feature = "kernel-emu"))]
mod tests;
