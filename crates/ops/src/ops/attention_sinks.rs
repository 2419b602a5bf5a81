//! A learned logit for each query head, its sink, in the denominator of attention's softmax
//! (gpt-oss). It follows [`attention`](super::attention::attention), which computes without it:
//! `lse' = ln(e^lse + e^sink)` and `out' = out · e^(lse − lse')`.
//!
//! The backward of attention is unchanged if it gets `out'` and `lse'`. The gradient of the sink of
//! a head is `−Σ e^(sink − lse') · (dout · out')` over its rows.

pub(super) mod cases;
mod cuda;

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::attention::AttentionOutput;
use super::rms_norm::cuda::is_supported;
use crate::backends::gpu::Route;
use crate::backends::simd;
use crate::error::Result;
use crate::rounding::Rounded;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, update, update_in_f32, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// Returns the output of attention with `sinks: [H]` in any dtype of floats, given that without
/// them; in place.
///
/// # Errors
/// Fails if a tensor is not contiguous or of floating-point values, or an operation of the device
/// fails.
pub fn attention_sinks(attended: AttentionOutput, sinks: &Tensor) -> Result<AttentionOutput> {
    let AttentionOutput { out, lse } = attended;
    let _span = span(|| SpanInfo::op("attention_sinks").dims(out.dims()).moves(&[&out, &out]));
    let route = Route::of(&out, is_supported(&out, sinks));
    if let Route::Composed = route {
        return reference(&AttentionOutput { out, lse }, sinks);
    }
    let (out, lse) = (TensorMut::new(out), TensorMut::new(lse));
    match route {
        Route::Kernel(driver) => cuda::forward(driver, &out, &lse, sinks)?,
        _ => on_cpu(&out, &lse, &in_f32(sinks)?)?,
    }
    Ok(AttentionOutput { out: out.into_tensor(), lse: lse.into_tensor() })
}

fn on_cpu(out: &TensorMut, lse: &TensorMut, sinks: &[f32]) -> Result<()> {
    let (rows, all) = dims2(out)?;
    let width = all / sinks.len().max(1);
    update(lse, |lse: &mut [f32]| {
        with_elem!(out.dtype(), T => update(out, |out: &mut [T]| {
            let before: &[f32] = lse;
            out.par_chunks_mut(all.max(1)).enumerate().with_min_len(8).for_each(|(row, out)| {
                for (head, (out, sink)) in out.chunks_exact_mut(width.max(1)).zip(sinks).enumerate() {
                    let factor = simd::sigmoid(before[head * rows + row] - sink);
                    out.iter_mut().for_each(|x| *x = T::nearest(x.widen() * factor));
                }
            });
        }))?;
        for (lse, sink) in lse.chunks_exact_mut(rows.max(1)).zip(sinks) {
            lse.iter_mut().for_each(|lse| *lse = lse.max(*sink) + (-(*lse - sink).abs()).exp().ln_1p());
        }
        Ok(())
    })?
}

/// Adds the gradient of `sinks: [H]` to `dsinks: [H]` f32, on the CPU also bf16, given the results
/// of [`attention_sinks`] and `dout: [N, H · D]` in the dtype of the output.
///
/// # Errors
/// Fails if a tensor is not contiguous, the dtypes differ, or an operation of the device fails.
pub fn attention_sinks_backward(
    attended: &AttentionOutput,
    dout: &Tensor,
    sinks: &Tensor,
    dsinks: &TensorMut,
) -> Result<()> {
    let AttentionOutput { out, lse } = attended;
    let _span = span(|| SpanInfo::op("attention_sinks_backward").dims(out.dims()).moves(&[out, dout]));
    match Route::of(out, is_supported(out, sinks)) {
        Route::Kernel(driver) => return cuda::backward(driver, attended, dout, sinks, dsinks),
        Route::Composed => return reference_backward(attended, dout, sinks, dsinks),
        Route::Cpu => {}
    }
    let (rows, all) = dims2(out)?;
    let sinks = in_f32(sinks)?;
    let width = all / sinks.len().max(1);
    let lse = read::<f32>(lse)?;
    let lse: &[f32] = &lse;
    let sums: Vec<f32> = with_elem!(out.dtype(), T => {
        let (out, dout) = (read::<T>(out)?, read::<T>(dout)?);
        let (out, dout): (&[T], &[T]) = (&out, &dout);
        let of_head = |(head, sink): (usize, &f32)| {
            let of_row = |row: usize| {
                let at = row * all + head * width;
                let dot = simd::sum_of2(&out[at..][..width], &dout[at..][..width], |x, d| x.widen() * d.widen());
                (sink - lse[head * rows + row]).exp() * dot
            };
            (0..rows).map(of_row).sum::<f32>()
        };
        Ok(sinks.par_iter().enumerate().map(of_head).collect())
    })?;
    update_in_f32(dsinks, |d| d.iter_mut().zip(&sums).for_each(|(d, sum)| *d -= sum))
}

fn in_f32(sinks: &Tensor) -> Result<Vec<f32>> {
    with_elem!(sinks.dtype(), S => Ok(read::<S>(sinks)?.iter().map(|sink| sink.widen()).collect()))
}

/// Returns values by head, `[N, H, D]` f32.
fn by_head(x: &Tensor, sinks: &Tensor) -> Result<Tensor> {
    Ok(x.to_dtype(DType::F32)?.reshape((x.dim(0)?, sinks.elem_count(), ()))?)
}

/// The definition, in candle's primitives.
pub(crate) fn reference(attended: &AttentionOutput, sinks: &Tensor) -> Result<AttentionOutput> {
    let AttentionOutput { out, lse } = attended;
    let column = sinks.to_dtype(DType::F32)?.unsqueeze(1)?.broadcast_as(lse.shape())?.contiguous()?;
    let largest = lse.maximum(&column)?;
    let sum = ((lse - &largest)?.exp()? + (column - &largest)?.exp()?)?;
    let after = (largest + sum.log()?)?;
    let factor = (lse - &after)?.exp()?.t()?.unsqueeze(2)?;
    let scaled = by_head(out, sinks)?.broadcast_mul(&factor)?.reshape(out.shape())?;
    Ok(AttentionOutput { out: scaled.to_dtype(out.dtype())?, lse: after })
}

/// The backward formula in candle's primitives.
pub(crate) fn reference_backward(
    attended: &AttentionOutput,
    dout: &Tensor,
    sinks: &Tensor,
    dsinks: &TensorMut,
) -> Result<()> {
    let dots = (by_head(&attended.out, sinks)? * by_head(dout, sinks)?)?.sum(2)?.t()?;
    let share = sinks.to_dtype(DType::F32)?.unsqueeze(1)?.broadcast_sub(&attended.lse)?.exp()?;
    let sums = (share * dots)?.sum(1)?;
    let sum = (dsinks.to_dtype(DType::F32)? - sums)?.to_dtype(dsinks.dtype())?;
    Ok(dsinks.slice_set(&sum, 0, 0)?)
}
