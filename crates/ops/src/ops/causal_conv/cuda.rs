//! The convolution by the kernels of `kernels/causal_conv.cu`: a thread for each column.

use candle_core::{DType, Tensor};

use super::{ConvWeight, KERNEL_TAPS};
use crate::backends::gpu::{Driver, In, InOut, LaunchShape, Out, kernels, number};
use crate::error::{Error, Result};
use crate::ops::attention::Span;
use crate::ops::matmul::{ColumnView, ColumnViewMut, empty};
use crate::ops::rms_norm::cuda::{add_partials, is_supported as are_supported};
use crate::ops::span_tables::SpanTables;
use crate::runtime::TensorMut;

/// Threads per block.
const THREADS: usize = 256;
/// Rows of a block of the forward, and of the backward.
const FORWARD_ROWS: usize = 16;
const ROWS: usize = 64;

/// Returns true if kernels support these inputs.
pub(super) fn is_supported(x: ColumnView<'_>, weight: &Tensor) -> bool {
    are_supported(x.tensor, weight) && weight.dims().last().is_some_and(|taps| KERNEL_TAPS.contains(taps))
}

fn blocks(channels: usize, parts: usize) -> Result<LaunchShape> {
    let grid = [number(channels.div_ceil(THREADS))?, number(parts)?, 1];
    Ok(LaunchShape { grid, block: [THREADS as u32, 1, 1], shared_bytes: 0 })
}

pub(super) fn forward(
    driver: &dyn Driver,
    x: ColumnView<'_>,
    ConvWeight { weight, has_silu }: ConvWeight<'_>,
    spans: &[Span],
    state: Option<&TensorMut>,
) -> Result<Tensor> {
    let ((rows, width), device) = (x.tensor.dims2()?, x.tensor.device());
    let tables = SpanTables::of(spans, rows, device)?;
    let y = empty(rows, x.len, x.tensor.dtype(), device)?;
    // A state passes through all rows of its columns.
    let of_block = if state.is_some() { rows } else { FORWARD_ROWS };
    let shape = blocks(x.len, rows.div_ceil(of_block.max(1)))?;
    let (count, channels) = (number(rows)?, number(x.len)?);
    let (stride, of_block) = (number(width)?, number(of_block)?);
    let (taps, silu) = (number(weight.dim(1)?)?, u32::from(has_silu));
    macro_rules! launch {
        ($kernel:ident) => {{
            let (x, weight, places) = (In::columns(&x)?, In::all(weight)?, In::all(&tables.places)?);
            let (state, y) = (InOut::optional(state.map(|state| &**state))?, Out::all(&y)?);
            kernels::$kernel(
                driver, shape, x, weight, places, state, y, count, channels, stride, of_block, taps, silu,
            )?
        }};
    }
    match (x.tensor.dtype(), weight.dtype()) {
        (DType::BF16, DType::BF16) => launch!(causal_conv_bf16),
        (DType::BF16, DType::F32) => launch!(causal_conv_bf16_f32),
        (DType::F32, DType::F32) => launch!(causal_conv_f32),
        _ => return Err(refused(x.tensor, weight)),
    }
    Ok(y.into_tensor())
}

pub(super) fn backward(
    driver: &dyn Driver,
    [x, dy]: [ColumnView<'_>; 2],
    ConvWeight { weight, has_silu }: ConvWeight<'_>,
    spans: &[Span],
    dweight: Option<&TensorMut>,
    dx: ColumnViewMut<'_>,
) -> Result<()> {
    let ((rows, width), device) = (x.tensor.dims2()?, x.tensor.device());
    let tables = SpanTables::of(spans, rows, device)?;
    let (parts, taps) = (rows.div_ceil(ROWS), weight.dim(1)?);
    let partial = dweight.map(|_| empty(parts, x.len * taps, DType::F32, device)).transpose()?;
    let shape = blocks(x.len, parts)?;
    let (count, channels) = (number(rows)?, number(x.len)?);
    let (stride, dx_stride) = (number(width)?, number(dx.tensor.dim(1)?)?);
    let (taps, silu) = (number(taps)?, u32::from(has_silu));
    macro_rules! launch {
        ($kernel:ident) => {{
            let (x, weight, dy) = (In::columns(&x)?, In::all(weight)?, In::columns(&dy)?);
            let (places, dx) = (In::all(&tables.places)?, Out::columns(&dx.as_view())?);
            let partial = Out::optional(partial.as_deref())?;
            kernels::$kernel(
                driver, shape, x, weight, dy, places, dx, partial, count, channels, stride, dx_stride, taps,
                silu,
            )?
        }};
    }
    match (x.tensor.dtype(), weight.dtype()) {
        (DType::BF16, DType::BF16) => launch!(causal_conv_backward_bf16),
        (DType::BF16, DType::F32) => launch!(causal_conv_backward_bf16_f32),
        (DType::F32, DType::F32) => launch!(causal_conv_backward_f32),
        _ => return Err(refused(x.tensor, weight)),
    }
    match (dweight, partial) {
        (Some(dweight), Some(partial)) if !shape.is_empty() => add_partials(driver, &partial, dweight),
        _ => Ok(()),
    }
}

fn refused(x: &Tensor, weight: &Tensor) -> Error {
    let found = format!("found {:?} with a weight of {:?}", x.dtype(), weight.dtype());
    Error::internal("no kernel of the causal convolution supports these types").because(found)
}
