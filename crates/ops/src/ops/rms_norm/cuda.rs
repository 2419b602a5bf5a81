//! RMSNorm by the kernels of `kernels/rms_norm.cu`: one block per row.

use candle_core::{DType, Tensor};

use super::NormKind;
use crate::backends::gpu::{Driver, In, InOut, LaunchShape, Out, kernels, number};
use crate::error::{Error, Result};
use crate::ops::matmul::empty;
use crate::runtime::TensorMut;

/// Threads per block.
pub(in crate::ops) const THREADS: u32 = 256;

/// Threads of a block that processes rows of a weight gradient.
const GAIN_THREADS: u32 = 128;

/// Maximum number of blocks that share the rows of a weight gradient; each writes a row of partial
/// sums.
const PARTS: usize = 64;

/// Returns true if kernels support activations and weights of these dtypes.
pub(in crate::ops) fn is_supported(x: &Tensor, weight: &Tensor) -> bool {
    matches!((x.dtype(), weight.dtype()), (DType::BF16, DType::BF16 | DType::F32) | (DType::F32, DType::F32))
}

pub(super) fn forward(driver: &dyn Driver, x: &Tensor, weight: &Tensor, kind: NormKind) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let y = empty(rows, width, x.dtype(), x.device())?;
    let shape = LaunchShape::line(rows, THREADS);
    let (width, offset, eps) = (number(width)?, kind.offset(), kind.eps as f32);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (x, w, y) = (In::all(x)?, In::all(weight)?, Out::all(&y)?);
            kernels::$kernel(driver, shape, x, w, y, width, offset, eps)?
        }};
    }
    match (x.dtype(), weight.dtype()) {
        (DType::BF16, DType::BF16) => launch!(rms_norm_bf16),
        (DType::BF16, DType::F32) => launch!(rms_norm_bf16_f32),
        (DType::F32, DType::F32) => launch!(rms_norm_f32),
        _ => return Err(refused(x, weight)),
    }
    Ok(y.into_tensor())
}

pub(super) fn backward(
    driver: &dyn Driver,
    [x, weight, dy]: [&Tensor; 3],
    residual: Option<&Tensor>,
    dweight: Option<&TensorMut>,
    normed: Option<&TensorMut>,
    kind: NormKind,
) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let dx = empty(rows, width, x.dtype(), x.device())?;
    let inverses = dweight.map(|_| empty(1, rows, DType::F32, x.device())).transpose()?;
    let shape = LaunchShape::line(rows, THREADS);
    let (columns, offset, eps) = (number(width)?, kind.offset(), kind.eps as f32);
    macro_rules! launch {
        ($kernel:ident) => {{
            let (x, weight, dy, residual) =
                (In::all(x)?, In::all(weight)?, In::all(dy)?, In::optional(residual)?);
            let (dx, normed) = (Out::all(&dx)?, Out::optional(normed.map(|normed| &**normed))?);
            let inverses = Out::optional(inverses.as_deref())?;
            kernels::$kernel(
                driver, shape, x, weight, dy, residual, dx, normed, inverses, columns, offset, eps,
            )?
        }};
    }
    match (x.dtype(), weight.dtype()) {
        (DType::BF16, DType::BF16) => launch!(rms_norm_backward_bf16),
        (DType::BF16, DType::F32) => launch!(rms_norm_backward_bf16_f32),
        (DType::F32, DType::F32) => launch!(rms_norm_backward_f32),
        _ => return Err(refused(x, weight)),
    }
    if let (Some(dweight), Some(inverses), false) = (dweight, inverses, shape.is_empty()) {
        gain_gradient(driver, [x, dy], None, &inverses, dweight)?;
    }
    Ok(dx.into_tensor())
}

/// Computes `dweight += Σ rows dy · x̂`, in two stages; `x̂ = (x − mean) · inverse` of each row, of
/// RMSNorm without `means`.
pub(in crate::ops) fn gain_gradient(
    driver: &dyn Driver,
    [x, dy]: [&Tensor; 2],
    means: Option<&Tensor>,
    inverses: &Tensor,
    dweight: &TensorMut,
) -> Result<()> {
    let (rows, width) = x.dims2()?;
    let parts = rows.clamp(1, PARTS);
    let partial = empty(parts, width, DType::F32, x.device())?;
    // A thread processes the columns of 16 bytes.
    let columns = number((width * x.dtype().size_in_bytes()).div_ceil(16 * GAIN_THREADS as usize))?;
    let shape =
        LaunchShape { grid: [number(parts)?, columns, 1], block: [GAIN_THREADS, 1, 1], shared_bytes: 0 };
    let (rows, width) = (number(rows)?, number(width)?);
    let (inverses, out) = (In::all(inverses)?, Out::all(&partial)?);
    macro_rules! launch {
        ($kernel:ident $(, $means:expr)?) => {{
            let (x, dy) = (In::all(x)?, In::all(dy)?);
            kernels::$kernel(driver, shape, x, dy $(, $means)?, inverses, out, rows, width)?
        }};
    }
    match (x.dtype(), means) {
        (DType::BF16, None) => launch!(rms_norm_gain_partial_bf16),
        (_, None) => launch!(rms_norm_gain_partial_f32),
        (DType::BF16, Some(means)) => launch!(layer_norm_gain_partial_bf16, In::all(means)?),
        (_, Some(means)) => launch!(layer_norm_gain_partial_f32, In::all(means)?),
    }
    add_partials(driver, &partial, dweight)
}

/// Computes `dst: [width] += Σ partial: [parts, width]` over its rows, in order; all f32.
pub(in crate::ops) fn add_partials(driver: &dyn Driver, partial: &Tensor, dst: &TensorMut) -> Result<()> {
    let (parts, width) = partial.dims2()?;
    let shape = LaunchShape::line(width.div_ceil(THREADS as usize), THREADS);
    kernels::add_partials(driver, shape, In::all(partial)?, InOut::all(dst)?, number(parts)?, number(width)?)
}

fn refused(x: &Tensor, weight: &Tensor) -> Error {
    let found = format!("found {:?} with a weight of {:?}", x.dtype(), weight.dtype());
    Error::internal("no kernel of RMSNorm supports these types").because(found)
}
