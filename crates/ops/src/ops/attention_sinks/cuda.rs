//! Sinks of attention by the kernels of `kernels/attention_sinks.cu`: a warp for each head.

use candle_core::{DType, Tensor};

use crate::backends::gpu::{Driver, In, InOut, LaunchShape, Out, kernels, number};
use crate::error::Result;
use crate::ops::attention::AttentionOutput;
use crate::ops::matmul::empty;
use crate::ops::rms_norm::cuda::add_partials;
use crate::runtime::TensorMut;

/// Threads per block, and heads that they process.
const THREADS: u32 = 256;
const HEADS: usize = 8;
/// Maximum number of blocks that share the rows of a gradient; each writes a row of partial sums.
const PARTS: usize = 64;

/// Returns the numbers of rows and heads, and the width of a head.
fn sizes(out: &Tensor, sinks: &Tensor) -> Result<[usize; 3]> {
    let ((rows, all), heads) = (out.dims2()?, sinks.elem_count());
    Ok([rows, heads, all / heads.max(1)])
}

pub(super) fn forward(driver: &dyn Driver, out: &TensorMut, lse: &TensorMut, sinks: &Tensor) -> Result<()> {
    let [rows, heads, width] = sizes(out, sinks)?;
    let shape = LaunchShape::line((rows * heads).div_ceil(HEADS), THREADS);
    let (rows, heads, width) = (number(rows)?, number(heads)?, number(width)?);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (out, lse, sinks) = (InOut::all(out)?, InOut::all(lse)?, In::all(sinks)?);
            kernels::$kernel(driver, shape, out, lse, sinks, rows, heads, width)
        }};
    }
    match (out.dtype(), sinks.dtype()) {
        (DType::BF16, DType::BF16) => launch!(attention_sinks_bf16),
        (DType::BF16, _) => launch!(attention_sinks_bf16_f32),
        _ => launch!(attention_sinks_f32),
    }
}

pub(super) fn backward(
    driver: &dyn Driver,
    AttentionOutput { out, lse }: &AttentionOutput,
    dout: &Tensor,
    sinks: &Tensor,
    dsinks: &TensorMut,
) -> Result<()> {
    let [rows, heads, width] = sizes(out, sinks)?;
    if rows == 0 {
        return Ok(());
    }
    let parts = rows.min(PARTS);
    let partial = empty(parts, heads, DType::F32, out.device())?;
    let grid = [number(parts)?, number(heads.div_ceil(HEADS))?, 1];
    let shape = LaunchShape { grid, block: [THREADS, 1, 1], shared_bytes: 0 };
    let (rows, heads, width) = (number(rows)?, number(heads)?, number(width)?);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (out, lse, dout) = (In::all(out)?, In::all(lse)?, In::all(dout)?);
            let (sinks, partial) = (In::all(sinks)?, Out::all(&partial)?);
            kernels::$kernel(driver, shape, out, lse, dout, sinks, partial, rows, heads, width)?
        }};
    }
    match (out.dtype(), sinks.dtype()) {
        (DType::BF16, DType::BF16) => launch!(attention_sinks_partial_bf16),
        (DType::BF16, _) => launch!(attention_sinks_partial_bf16_f32),
        _ => launch!(attention_sinks_partial_f32),
    }
    add_partials(driver, &partial, dsinks)
}
