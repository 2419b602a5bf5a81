//! The output layer's loss by the kernels of `kernels/cross_entropy.cu`. The f32 logits of a chunk
//! of rows become their own gradient in place. It is bf16 if the weight is bf16 and no product with
//! an f32 operand follows.

use candle_core::{DType, Device, Tensor};

use super::{
    ColumnView, ColumnViewMut, GPU_CHUNK_ROWS, LossAndGrad, LossKind, LossSum, LossTargets, Output,
    OutputGrads, TokenScore, Transpose, columns_product, counted, write_logits,
};
use crate::backends::gpu::{Driver, Gemm, In, InOut, LaunchShape, Out, kernels, number, read, upload};
use crate::error::Result;
use crate::ops::matmul::{Addend, empty};
use crate::runtime::TensorMut;
use crate::runtime::copy::converted;

/// Threads per block; a block processes one row.
const THREADS: u32 = 512;

/// Rows of logits are padded to a multiple of this, so that 16-byte reads are aligned in every row.
const PITCH: usize = 8;

/// Returns true if kernels and products support these dtypes.
pub(super) fn is_supported(x: &Tensor, output: Output<'_>) -> bool {
    matches!((x.dtype(), output.weight.dtype()), (DType::BF16, DType::BF16) | (DType::F32, DType::F32))
}

/// The rows that have a target, in order.
struct Counted {
    /// Their row numbers among all rows.
    places: Vec<usize>,
    /// `[count]`: the row numbers on the device; none if all rows have a target.
    listed: Option<Tensor>,
    /// `[count]`: the targets on the device.
    targets: Tensor,
}

impl Counted {
    fn new(targets: &[u32], device: &Device) -> Result<Self> {
        let places = counted(targets);
        let count = places.len();
        let list = || upload(&places.iter().map(|&n| n as u32).collect::<Vec<_>>(), count, device);
        let listed = (count < targets.len()).then(list).transpose()?;
        let targets = upload(&places.iter().map(|&n| targets[n]).collect::<Vec<_>>(), count, device)?;
        Ok(Counted { places, listed, targets })
    }

    fn count(&self) -> usize {
        self.places.len()
    }

    /// Returns these rows of `x: [n, width]`, packed.
    fn pack(&self, driver: &dyn Driver, x: &Tensor) -> Result<Tensor> {
        self.listed.as_ref().map_or_else(|| Ok(x.clone()), |listed| gather(driver, x, listed))
    }

    /// Returns the rows of `packed: [count, width]` at their row numbers of `[n, width]`, zeros
    /// elsewhere.
    fn unpack(&self, driver: &dyn Driver, packed: TensorMut, n: usize) -> Result<Tensor> {
        if self.count() == n {
            return Ok(packed.into_tensor());
        }
        let mut from = vec![u32::MAX; n];
        (0u32..).zip(&self.places).for_each(|(at, &row)| from[row] = at);
        gather(driver, &packed, &upload(&from, n, packed.device())?)
    }
}

/// Returns `x[rows[i]]` for each i, or zeros if `rows[i]` is `u32::MAX`; `x: [N, width]`, `rows:
/// [count]`.
fn gather(driver: &dyn Driver, x: &Tensor, rows: &Tensor) -> Result<Tensor> {
    let (count, width) = (rows.dim(0)?, x.dim(1)?);
    let y = empty(count, width, x.dtype(), x.device())?;
    let (shape, rows) = (LaunchShape::line(count, 256), In::<u32>::all(rows)?);
    let (columns, pitch, moved) = (number(width)?, width as i64, count * width);
    if x.dtype() == DType::BF16 {
        let (x, y) = (In::all(x)?.touching(moved), Out::all(&y)?);
        kernels::gather_rows_bf16(driver, shape, x, rows, y, columns, pitch, pitch)?;
    } else {
        let (x, y) = (In::all(x)?.touching(moved), Out::all(&y)?);
        kernels::gather_rows_f32(driver, shape, x, rows, y, columns, pitch, pitch)?;
    }
    Ok(y.into_tensor())
}

/// The rows with a target, packed, and their results.
struct Packed {
    rows: Counted,
    /// The hidden states, `[count, D]`.
    x: Tensor,
    /// The adapter's inner activations, `[count, r]`.
    u: Option<Tensor>,
    /// The losses, `[count]` f32.
    losses: TensorMut,
    /// `[count]` u32: 1 where the target has the largest logit.
    hits: TensorMut,
    /// The buffer of a chunk's logits, `[rows, V]` with padding in each row.
    logits: TensorMut,
    vocab: usize,
}

/// A chunk of packed rows, with their logits.
struct PackedChunk {
    start: usize,
    len: usize,
    x: Tensor,
    u: Option<Tensor>,
    targets: Tensor,
    losses: TensorMut,
    hits: TensorMut,
    logits: TensorMut,
    vocab: usize,
}

impl Packed {
    fn new(driver: &dyn Driver, x: &Tensor, output: Output<'_>, targets: &[u32]) -> Result<Self> {
        let (rows, device) = (Counted::new(targets, x.device())?, x.device());
        let (count, vocab) = (rows.count(), output.weight.dim(0)?);
        Ok(Packed {
            x: rows.pack(driver, x)?,
            u: output.delta.map(|delta| rows.pack(driver, delta.u)).transpose()?,
            losses: TensorMut::zeros(count, DType::F32, device)?,
            hits: TensorMut::zeros(count, DType::U32, device)?,
            logits: empty(GPU_CHUNK_ROWS.min(count), vocab.next_multiple_of(PITCH), DType::F32, device)?,
            rows,
            vocab,
        })
    }

    /// Iterates over the chunks; each overwrites the logits of the previous one.
    fn chunks<'a>(&'a self, output: Output<'a>) -> impl Iterator<Item = Result<PackedChunk>> + 'a {
        let (count, step) = (self.rows.count(), self.logits.dims()[0]);
        (0..count).step_by(step).map(move |start| self.chunk(start, step.min(count - start), output))
    }

    /// Computes `logits = x · Wᵀ + scale · u · Bᵀ` of `len` rows from `start`.
    fn chunk(&self, start: usize, len: usize, output: Output<'_>) -> Result<PackedChunk> {
        let part = |whole: &Tensor| whole.narrow(0, start, len);
        let chunk = PackedChunk {
            start,
            len,
            x: part(&self.x)?,
            u: self.u.as_ref().map(part).transpose()?,
            targets: part(&self.rows.targets)?,
            losses: self.losses.narrow(0, start, len)?,
            hits: self.hits.narrow(0, start, len)?,
            logits: self.logits.narrow(0, 0, len)?,
            vocab: self.vocab,
        };
        write_logits(chunk.logits(), &chunk.x, output.with_u(chunk.u.as_ref()))?;
        Ok(chunk)
    }
}

impl PackedChunk {
    fn logits(&self) -> ColumnViewMut<'_> {
        ColumnViewMut { tensor: &self.logits, start: 0, len: self.vocab }
    }

    fn pitch(&self) -> i64 {
        self.logits.dims()[1] as i64
    }

    /// Turns the logits into their gradient, in bf16 or f32, times the row's entry of `scales` or
    /// `kind.scale`.
    fn differentiate(
        &self,
        driver: &dyn Driver,
        kind: LossKind,
        scales: Option<&Tensor>,
        in_bf16: bool,
    ) -> Result<()> {
        let scales = scales.map(|scales| scales.narrow(0, self.start, self.len)).transpose()?;
        let kernel = if in_bf16 { kernels::cross_entropy_bf16 } else { kernels::cross_entropy_f32 };
        let (shape, logits) =
            (LaunchShape::line(self.len, THREADS), InOut::columns(&self.logits().as_view())?);
        let (targets, scales) = (In::all(&self.targets)?, In::optional(scales.as_ref())?);
        let (losses, hits, vocab) = (Out::all(&self.losses)?, Out::all(&self.hits)?, number(self.vocab)?);
        let (scale, cap) = (kind.scale as f32, kind.softcap.unwrap_or(0.0) as f32);
        kernel(driver, shape, logits, targets, scales, losses, hits, vocab, self.pitch(), scale, cap)
    }
}

pub(super) fn linear_cross_entropy(
    driver: &dyn Driver,
    x: &Tensor,
    output: Output<'_>,
    targets: LossTargets<'_>,
    kind: LossKind,
    grads: OutputGrads<'_>,
) -> Result<LossAndGrad> {
    targets.check()?;
    let ((n, width), device, count) = (x.dims2()?, x.device(), counted(targets.ids).len());
    let du_of =
        |n: usize| output.delta.map(|delta| TensorMut::zeros((n, delta.u.dim(1)?), DType::F32, device));
    if count == 0 {
        let du = du_of(n).transpose()?.map(TensorMut::into_tensor);
        return Ok(LossAndGrad {
            loss: LossSum::default(),
            dx: Tensor::zeros((n, width), x.dtype(), device)?,
            du,
        });
    }
    let packed = Packed::new(driver, x, output, targets.ids)?;
    let (dx, du) = (empty(count, width, x.dtype(), device)?, du_of(count).transpose()?);
    let places = &packed.rows.places;
    let scales = |_| -> Result<Tensor> {
        let scales: Vec<f32> = places.iter().map(|&n| targets.scale(n, kind.scale)).collect();
        upload(&scales, count, device)
    };
    let scales = targets.coefficients.map(scales).transpose()?;
    let in_bf16 = x.dtype() == DType::BF16 && output.delta.is_none() && grads.rows.is_none();
    for chunk in packed.chunks(output) {
        let chunk = chunk?;
        chunk.differentiate(driver, kind, scales.as_ref(), in_bf16)?;
        let (d, dx) = (chunk.logits().as_view(), dx.narrow(0, chunk.start, chunk.len)?);
        if in_bf16 {
            backward_in_bf16(driver, d, &chunk.x, output.weight, &dx, grads.weight)?;
        } else {
            let du = du.as_ref().map(|du| du.narrow(0, chunk.start, chunk.len)).transpose()?;
            backward(d, (&chunk.x, &dx), chunk.u.as_ref().zip(du.as_ref()), output, grads)?;
        }
    }
    let loss = LossSum::pending(packed.losses.clone().into_tensor(), targets.coefficients_of(places));
    let du = du.map(|du| packed.rows.unpack(driver, du, n)).transpose()?;
    Ok(LossAndGrad { loss, dx: packed.rows.unpack(driver, dx, n)?, du })
}

/// Computes `dx = d · W` and `dW += dᵀ · x`; d is bf16, in the front halves of the rows of
/// `logits`.
fn backward_in_bf16(
    driver: &dyn Driver,
    logits: ColumnView<'_>,
    x: &Tensor,
    weight: &Tensor,
    dx: &TensorMut,
    dweight: Option<&TensorMut>,
) -> Result<()> {
    driver.gemm(&Gemm::of_front_halves(dx, &logits, weight, Transpose::Nn, Addend::Nothing)?)?;
    let Some(dweight) = dweight else { return Ok(()) };
    driver.gemm(&Gemm::of_front_halves(dweight, &logits, x, Transpose::Tn, Addend::Destination)?)
}

/// Backpropagates `d`, f32, to x, the weight, single rows of it, and the adapter's `u` and B.
fn backward(
    d: ColumnView<'_>,
    (x, dx): (&Tensor, &TensorMut),
    delta: Option<(&Tensor, &TensorMut)>,
    output: Output<'_>,
    grads: OutputGrads<'_>,
) -> Result<()> {
    let (x, weight, dtype) = (ColumnView::all(x), ColumnView::all(output.weight), output.weight.dtype());
    let rounded = (dtype != DType::F32).then(|| converted(&d.narrow()?, dtype)).transpose()?;
    let low = rounded.as_ref().map_or(d, ColumnView::all);
    columns_product(ColumnViewMut::all(dx), low, weight, Transpose::Nn, 1.0, Addend::Nothing)?;
    if let Some(dweight) = grads.weight {
        columns_product(ColumnViewMut::all(dweight), low, x, Transpose::Tn, 1.0, Addend::Destination)?;
    }
    if let Some((ids, drows)) = grads.rows {
        let ids = upload(ids, ids.len(), drows.device())?;
        let picked = d.narrow()?.contiguous()?.index_select(&ids, 1)?;
        let (drows, picked) = (ColumnViewMut::all(drows), ColumnView::all(&picked));
        columns_product(drows, picked, x, Transpose::Tn, 1.0, Addend::Destination)?;
    }
    let Some((delta, (u, du))) = output.delta.zip(delta) else { return Ok(()) };
    let b = ColumnView::all(delta.b);
    columns_product(ColumnViewMut::all(du), d, b, Transpose::Nn, delta.scale, Addend::Nothing)?;
    let Some(db) = grads.b else { return Ok(()) };
    let (db, u) = (ColumnViewMut::all(db), ColumnView::all(u));
    columns_product(db, d, u, Transpose::Tn, delta.scale, Addend::Destination)
}

pub(super) fn score_targets(
    driver: &dyn Driver,
    x: &Tensor,
    output: Output<'_>,
    targets: &[u32],
    softcap: Option<f64>,
) -> Result<Vec<TokenScore>> {
    if counted(targets).is_empty() {
        return Ok(Vec::new());
    }
    let packed = Packed::new(driver, x, output, targets)?;
    for chunk in packed.chunks(output) {
        let chunk = chunk?;
        let (shape, cap) = (LaunchShape::line(chunk.len, THREADS), softcap.unwrap_or(0.0) as f32);
        let (logits, targets) = (In::columns(&chunk.logits().as_view())?, In::all(&chunk.targets)?);
        let (losses, hits, vocab) = (Out::all(&chunk.losses)?, Out::all(&chunk.hits)?, number(chunk.vocab)?);
        kernels::score_rows(driver, shape, logits, targets, losses, hits, vocab, chunk.pitch(), cap)?;
    }
    let scores = read::<f32>(&packed.losses)?.into_iter().zip(read::<u32>(&packed.hits)?);
    Ok(scores.map(|(loss, hit)| TokenScore { loss, correct: hit == 1 }).collect())
}

#[cfg(all(test, feature = "kernel-emu"))]
mod tests;
