//! The convolution in candle's primitives, span by span.

use candle_core::{DType, Tensor};

use super::ConvWeight;
use crate::error::Result;
use crate::ops::attention::Span;
use crate::ops::glu::Activation;
use crate::ops::matmul::{ColumnView, ColumnViewMut};
use crate::runtime::TensorMut;

/// The definition of [`super::causal_conv`].
pub(crate) fn reference(
    x: ColumnView<'_>,
    ConvWeight { weight, has_silu }: ConvWeight<'_>,
    spans: &[Span],
    state: Option<&TensorMut>,
) -> Result<Tensor> {
    let (dtype, device, rows) = (x.tensor.dtype(), x.tensor.device(), x.tensor.dim(0)?);
    let (channels, taps) = weight.dims2()?;
    let by_tap = weight.to_dtype(DType::F32)?.t()?.contiguous()?;
    let mut parts = Vec::new();
    let mut end = 0;
    let gap = |len: usize| Tensor::zeros((len, channels), DType::F32, device);
    for span in spans {
        let before = match state {
            Some(state) => state.to_dtype(DType::F32)?,
            None => gap(taps - 1)?,
        };
        let inputs = Tensor::cat(&[before, rows_of(x, span)?], 0)?;
        if let Some(state) = state {
            let last = inputs.narrow(0, span.q_len, taps - 1)?.to_dtype(dtype)?;
            state.slice_set(&last.contiguous()?, 0, 0)?;
        }
        parts.push(gap(span.q_start - end)?);
        let sums = sums(&inputs, &by_tap)?;
        parts.push(if has_silu { sums.silu()? } else { sums });
        end = span.q_start + span.q_len;
    }
    parts.push(gap(rows - end)?);
    parts.retain(|part| part.elem_count() > 0);
    if parts.is_empty() {
        return Ok(gap(rows)?.to_dtype(dtype)?);
    }
    Ok(Tensor::cat(&parts, 0)?.to_dtype(dtype)?)
}

/// The backward formula in candle's primitives.
pub(crate) fn reference_backward(
    x: ColumnView<'_>,
    ConvWeight { weight, has_silu }: ConvWeight<'_>,
    dy: &Tensor,
    spans: &[Span],
    dweight: Option<&TensorMut>,
    dx: ColumnViewMut<'_>,
) -> Result<()> {
    let (channels, taps) = weight.dims2()?;
    let device = dy.device();
    let by_tap = weight.to_dtype(DType::F32)?.t()?.contiguous()?;
    let all = Tensor::zeros((dy.dim(0)?, channels), DType::F32, device)?;
    let zeros = Tensor::zeros((taps - 1, channels), DType::F32, device)?;
    for span in spans.iter().filter(|span| span.q_len > 0) {
        let inputs = Tensor::cat(&[zeros.clone(), rows_of(x, span)?], 0)?;
        let mut ds = rows_of(ColumnView::all(dy), span)?;
        if has_silu {
            let (_, slope) = Activation::Silu.reference_value_and_slope(&sums(&inputs, &by_tap)?)?;
            ds = (slope * ds)?;
        }
        // The same sum over the rows after a row, in reverse order of the taps.
        let after = Tensor::cat(&[ds.clone(), zeros.clone()], 0)?;
        let reversed: Vec<Tensor> =
            (0..taps).rev().map(|w| by_tap.narrow(0, w, 1)).collect::<candle_core::Result<_>>()?;
        all.slice_set(&sums(&after, &Tensor::cat(&reversed, 0)?)?.contiguous()?, 0, span.q_start)?;
        let Some(dweight) = dweight else { continue };
        let of_tap = |w: usize| -> Result<Tensor> { Ok((inputs.narrow(0, w, span.q_len)? * &ds)?.sum(0)?) };
        let sums = Tensor::stack(&(0..taps).map(of_tap).collect::<Result<Vec<_>>>()?, 1)?;
        let sums = (sums + dweight.to_dtype(DType::F32)?)?.to_dtype(dweight.dtype())?;
        dweight.slice_set(&sums.contiguous()?, 0, 0)?;
    }
    dx.tensor.slice_set(&all.to_dtype(dx.tensor.dtype())?, 1, dx.start)?;
    Ok(())
}

/// Returns the rows of a span in f32.
fn rows_of(x: ColumnView<'_>, span: &Span) -> Result<Tensor> {
    let rows = x.narrow()?.narrow(0, span.q_start, span.q_len)?;
    Ok(rows.contiguous()?.to_dtype(DType::F32)?)
}

/// Returns the sums `[len, C]` of `inputs: [W − 1 + len, C]`.
fn sums(inputs: &Tensor, by_tap: &Tensor) -> Result<Tensor> {
    let taps = by_tap.dim(0)?;
    let len = inputs.dim(0)? + 1 - taps;
    let mut sum = inputs.narrow(0, 0, len)?.broadcast_mul(&by_tap.narrow(0, 0, 1)?)?;
    for w in 1..taps {
        sum = (sum + inputs.narrow(0, w, len)?.broadcast_mul(&by_tap.narrow(0, w, 1)?)?)?;
    }
    Ok(sum)
}
