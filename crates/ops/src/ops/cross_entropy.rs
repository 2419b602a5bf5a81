//! The fused output layer and loss: `loss = Σ −log softmax(x · Wᵀ)[target]`, without storing all
//! logits at once.
//!
//! With a coefficient per row the loss is `Σ cᵢ · −log softmax(xᵢ · Wᵀ)[targetᵢ]`.
//!
//! Only rows that have a target are multiplied. A GPU processes chunks of `GPU_CHUNK_ROWS` rows,
//! and turns a chunk's logits into their own gradient in place before the next chunk (as in Liger
//! and Cut Cross Entropy, arXiv 2411.09009). The CPU processes the vocabulary in parts: once if the
//! layer is frozen and has no soft-cap (`vocabulary_parts`), else twice for each chunk of rows
//! (`row_chunks`). Logits and sums are f32 for all weight dtypes; the values that two passes
//! store of logits have the dtype of the rows.

pub(super) mod cases;
mod cuda;
mod loss_sum;
mod row_chunks;
mod vocabulary_parts;

use std::cell::Cell;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

pub use self::loss_sum::LossSum;
use super::matmul::{Addend, ColumnView, ColumnViewMut, Transpose, matmul as columns_product};
use crate::backends::gpu::{self, Implementation};
use crate::backends::simd;
use crate::error::{Error, Result};
use crate::runtime::TensorMut;
use crate::runtime::copy::to_device;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read};
use crate::runtime::trace::{SpanInfo, span};

pub use finetune_core::IGNORE;

/// Rows whose logits are alive at once on a GPU; fewer rows would not fill it.
const GPU_CHUNK_ROWS: usize = 1024;

/// Returns the bytes of f32 logits alive at once on a GPU for a micro-batch of `rows` rows.
pub fn logits_bytes(vocab: usize, rows: usize) -> usize {
    size_of::<f32>() * vocab * GPU_CHUNK_ROWS.min(rows)
}

/// Returns the peak bytes of the CPU loss of `rows` rows of `width` values under a frozen output
/// layer without soft-cap.
pub fn frozen_loss_bytes(vocab: usize, width: usize, rows: usize) -> usize {
    vocabulary_parts::held_bytes(vocab, width, rows)
}

/// Returns the same as [`frozen_loss_bytes`] for a layer with a trained parameter or a soft-cap,
/// and rows of type `dtype`.
pub fn chunked_loss_bytes(vocab: usize, width: usize, rows: usize, dtype: DType, has_softcap: bool) -> usize {
    row_chunks::held_bytes(vocab, width, rows, dtype, has_softcap)
}

thread_local! {
    /// The logits of the last loss on this thread, or their gradients in f32. The allocator returns
    /// buffers of this size to the system, and fresh ones cost a page fault every 4 KiB.
    static LAST_LOGITS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// The target and the weight of each row of a loss.
#[derive(Debug, Clone, Copy)]
pub struct LossTargets<'a> {
    /// The target of each row, `[N]`, or [`IGNORE`].
    pub ids: &'a [u32],
    /// The factor on the loss and on the gradient of each row, `[N]`; none means 1.
    pub coefficients: Option<&'a [f32]>,
}

impl<'a> LossTargets<'a> {
    /// Returns targets with weight 1: the id of each row, `[N]`, or [`IGNORE`].
    pub fn unweighted(ids: &'a [u32]) -> Self {
        LossTargets { ids, coefficients: None }
    }

    /// Checks that the coefficients, if any, match the rows in number.
    fn check(self) -> Result<()> {
        match self.coefficients {
            Some(coefficients) if coefficients.len() != self.ids.len() => {
                let counts = format!("{} for {} rows", coefficients.len(), self.ids.len());
                Err(Error::internal("a loss requires a coefficient for each row").because(counts))
            }
            _ => Ok(()),
        }
    }

    /// Returns the gradient's factor of row `n`.
    fn scale(self, n: usize, scale: f64) -> f32 {
        self.coefficients.map_or(scale, |coefficients| f64::from(coefficients[n]) * scale) as f32
    }

    /// Multiplies each row of `d`, the gradient of the logits `[rows, V]`, by its coefficient.
    fn weighted_gradient(self, d: Tensor, rows: &[usize]) -> Result<Tensor> {
        let Some(coefficients) = self.coefficients_of(rows) else { return Ok(d) };
        let coefficients = Tensor::from_vec(coefficients, (rows.len(), 1), &Device::Cpu)?;
        Ok(d.broadcast_mul(&to_device(&coefficients, d.device())?)?)
    }

    /// Returns the coefficients of `rows`; none means 1.
    fn coefficients_of(self, rows: &[usize]) -> Option<Vec<f32>> {
        self.coefficients.map(|coefficients| rows.iter().map(|&n| coefficients[n]).collect())
    }

    /// Returns the loss of row `n` times its coefficient.
    fn weighted(self, n: usize, loss: f32) -> f64 {
        let loss = f64::from(loss);
        self.coefficients.map_or(loss, |coefficients| f64::from(coefficients[n]) * loss)
    }
}

/// The scale of the loss gradients, and the soft-cap of the logits.
#[derive(Debug, Clone, Copy)]
pub struct LossKind {
    /// Gradients are those of `loss_sum · scale` (one over the step's number of targets).
    pub scale: f64,
    /// `cap · tanh(logit / cap)` (gemma2).
    pub softcap: Option<f64>,
}

/// The prediction result of one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenScore {
    /// The loss of the row, −log p(target).
    pub loss: f32,
    /// True if the target has the largest logit (the lowest id wins a tie).
    pub correct: bool,
}

/// The output layer: `logits = x · Wᵀ + scale · u · Bᵀ`.
#[derive(Debug, Clone, Copy)]
pub struct Output<'a> {
    /// The matrix W, `[V, D]`.
    pub weight: &'a Tensor,
    /// The adapter's addition, if any.
    pub delta: Option<Delta<'a>>,
}

impl<'a> Output<'a> {
    /// Returns the layer with the adapter's input `u` of other rows.
    fn with_u(self, u: Option<&'a Tensor>) -> Self {
        Output { delta: self.delta.zip(u).map(|(delta, u)| Delta { u, ..delta }), ..self }
    }
}

/// A low-rank addition to the logits.
#[derive(Debug, Clone, Copy)]
pub struct Delta<'a> {
    /// The adapter's inner activations, `[N, r]` f32.
    pub u: &'a Tensor,
    /// The adapter's B, `[V, r]` f32.
    pub b: &'a Tensor,
    /// Factor on the product.
    pub scale: f64,
}

/// Destinations to which the gradients of the output layer's parameters are added, f32; none for
/// frozen parameters.
#[derive(Debug, Clone, Copy, Default)]
pub struct OutputGrads<'a> {
    /// The gradient of the weight, `[V, D]`.
    pub weight: Option<&'a TensorMut>,
    /// The gradient of single rows of the weight: their ids and `[ids, D]`.
    pub rows: Option<(&'a [u32], &'a TensorMut)>,
    /// The gradient of the adapter's B, `[V, r]`.
    pub b: Option<&'a TensorMut>,
}

impl OutputGrads<'_> {
    /// Returns true if the output layer is frozen.
    fn are_none(&self) -> bool {
        self.weight.is_none() && self.rows.is_none() && self.b.is_none()
    }
}

/// The loss of a micro-batch, and the gradients of its inputs.
#[derive(Debug)]
pub struct LossAndGrad {
    /// The sum of the losses of all rows with a target, each times its coefficient.
    pub loss: LossSum,
    /// The gradient of `x` for `scale` times that sum.
    pub dx: Tensor,
    /// The gradient of the adapter's `u`, f32.
    pub du: Option<Tensor>,
}

/// Returns the loss of `x: [N, D]` under `output`, and the gradient of `x`, `[N, D]` in the dtype
/// of `x`. Adds the gradients of the output layer's parameters, f32, to `grads`.
///
/// # Errors
/// Fails if the number of coefficients differs from that of the rows, or a tensor operation fails.
pub fn linear_cross_entropy(
    x: &Tensor,
    output: Output<'_>,
    targets: LossTargets<'_>,
    kind: LossKind,
    grads: OutputGrads<'_>,
) -> Result<LossAndGrad> {
    let _span = span(|| {
        loss_info("cross_entropy", x, output, targets.ids, if grads.weight.is_some() { 6 } else { 4 })
    });
    match Implementation::of(x, cuda::is_supported(x, output)) {
        Implementation::Kernel(driver) => cuda::linear_cross_entropy(driver, x, output, targets, kind, grads),
        Implementation::Composed => reference(x, output, targets, kind, grads),
        Implementation::Cpu => on_cpu(x, output, targets, kind, grads),
    }
}

/// Returns the trace info: the number of rows with a target, the width and the vocabulary, with
/// `products` floating-point operations per weight and row.
fn loss_info(
    name: &'static str,
    x: &Tensor,
    output: Output<'_>,
    targets: &[u32],
    products: usize,
) -> SpanInfo {
    let rows = targets.iter().filter(|target| **target != IGNORE).count();
    let weights = output.weight.elem_count();
    let vocab = output.weight.dims().first().copied().unwrap_or_default();
    let dims = [rows, weights / vocab.max(1), vocab];
    SpanInfo::op(name).dims(&dims).moves(&[x, x, output.weight]).flops(products * rows * weights)
}

fn on_cpu(
    x: &Tensor,
    output: Output<'_>,
    targets: LossTargets<'_>,
    kind: LossKind,
    grads: OutputGrads<'_>,
) -> Result<LossAndGrad> {
    targets.check()?;
    if grads.are_none() && output.delta.is_none() && kind.softcap.is_none() {
        return vocabulary_parts::loss(x, output.weight, targets, kind.scale);
    }
    row_chunks::loss(x, output, targets, kind, grads)
}

/// Returns the score of each row of `x: [N, D]` that has one of the N `targets`, in order. `x` and
/// the weight are f32 or bf16, the logits f32.
///
/// # Errors
/// Fails if a tensor is not a contiguous matrix of floating-point values, or an operation of the
/// device fails.
pub fn score_targets(
    x: &Tensor,
    output: Output<'_>,
    targets: &[u32],
    softcap: Option<f64>,
) -> Result<Vec<TokenScore>> {
    let _span = span(|| loss_info("score_targets", x, output, targets, 2));
    if let Some(driver) = gpu::driver_of(x)
        && cuda::is_supported(x, output)
    {
        return cuda::score_targets(driver, x, output, targets, softcap);
    }
    if x.device().is_cpu() && output.delta.is_none() {
        return vocabulary_parts::scores(x, output.weight, targets, softcap);
    }
    let rows = counted(targets);
    let mut scores = Vec::with_capacity(rows.len());
    let (vocab, _) = dims2(output.weight)?;
    for chunk in rows.chunks(row_chunks::chunk_rows::<f32>(vocab)) {
        let ids = indices(chunk, x.device())?;
        let u = output.delta.map(|delta| delta.u.index_select(&ids, 0)).transpose()?;
        let (x, output) = (x.index_select(&ids, 0)?, output.with_u(u.as_ref()));
        let logits = logits(&x, output, softcap)?.to_device(&candle_core::Device::Cpu)?;
        let logits = read::<f32>(&logits)?;
        let part: Vec<TokenScore> =
            logits.par_chunks(vocab).zip(chunk).map(|(row, &n)| score(row, targets[n] as usize)).collect();
        scores.extend(part);
    }
    Ok(scores)
}

/// Returns the logits of `x: [N, D]` after the soft-cap: `[N, V]` f32.
///
/// # Errors
/// Fails if a tensor is not a contiguous matrix of floating-point values, or an operation of the
/// device fails.
pub fn logits(x: &Tensor, output: Output<'_>, softcap: Option<f64>) -> Result<Tensor> {
    let ((rows, _), (vocab, _)) = (dims2(x)?, dims2(output.weight)?);
    let out = super::empty(rows, vocab, DType::F32, x.device())?;
    write_logits(ColumnViewMut::all(&out), x, output)?;
    let out = out.into_tensor();
    Ok(match softcap {
        Some(cap) => ((out / cap)?.tanh()? * cap)?,
        None => out,
    })
}

/// Computes the logits of `x`, without a soft-cap, into `to`.
fn write_logits(to: ColumnViewMut<'_>, x: &Tensor, output: Output<'_>) -> Result<()> {
    let (x, weight) = (ColumnView::all(x), ColumnView::all(output.weight));
    columns_product(to, x, weight, Transpose::Nt, 1.0, Addend::Nothing)?;
    let Some(Delta { u, b, scale }) = output.delta else { return Ok(()) };
    let (u, b) = (ColumnView::all(u), ColumnView::all(b));
    columns_product(to, u, b, Transpose::Nt, scale, Addend::Destination)
}

fn indices(rows: &[usize], device: &Device) -> Result<Tensor> {
    let ids: Vec<u32> = rows.iter().map(|&n| n as u32).collect();
    to_device(&Tensor::from_vec(ids, rows.len(), &Device::Cpu)?, device)
}

fn counted(targets: &[u32]) -> Vec<usize> {
    (0..targets.len()).filter(|&n| targets[n] != IGNORE).collect()
}

/// Copies the rows of `from` to the rows of `to` with these numbers.
fn scatter<T: FloatElement>(to: &mut [T], from: &[T], rows: &[usize], width: usize) {
    for (row, &n) in from.chunks_exact(width).zip(rows) {
        to[n * width..(n + 1) * width].copy_from_slice(row);
    }
}

fn gather<T: FloatElement>(x: &[T], rows: &[usize], width: usize) -> Vec<T> {
    rows.iter().flat_map(|&n| x[n * width..(n + 1) * width].iter().copied()).collect()
}

fn score(row: &[f32], target: usize) -> TokenScore {
    let max = simd::max(row);
    let sum: f64 = row.iter().map(|&l| f64::from(simd::exp(l - max))).sum();
    let first_best = row.iter().position(|&l| l == max);
    TokenScore { loss: max + sum.ln() as f32 - row[target], correct: first_best == Some(target) }
}

/// The definition, chunk by chunk, in candle's primitives.
pub(crate) fn reference(
    x: &Tensor,
    output: Output<'_>,
    targets: LossTargets<'_>,
    kind: LossKind,
    grads: OutputGrads<'_>,
) -> Result<LossAndGrad> {
    let ((vocab, _), (n, width)) = (dims2(output.weight)?, dims2(x)?);
    targets.check()?;
    let rows = counted(targets.ids);
    let device = x.device();
    let mut dx = Tensor::zeros((n, width), DType::F32, device)?;
    let mut du = output.delta.map(|delta| delta.u.zeros_like()).transpose()?;
    let mut losses = Vec::new();
    for chunk in rows.chunks(row_chunks::chunk_rows::<f32>(vocab)) {
        let hits: Vec<u32> = chunk.iter().map(|&n| targets.ids[n]).collect();
        let ids = indices(chunk, device)?;
        let hits = to_device(&Tensor::from_vec(hits, (chunk.len(), 1), &Device::Cpu)?, device)?;
        let x = x.index_select(&ids, 0)?;
        let u = output.delta.map(|delta| delta.u.index_select(&ids, 0)).transpose()?;
        let output = output.with_u(u.as_ref());
        let (d, row_loss) = reference_chunk(&x, output, &hits, kind)?;
        let d = targets.weighted_gradient(d, chunk)?;
        losses.push(row_loss);
        let dlow = d.to_dtype(output.weight.dtype())?;
        dx = dx.index_add(&ids, &dlow.matmul(output.weight)?.to_dtype(DType::F32)?, 0)?;
        let add = |to: &TensorMut, d: &Tensor, right: &Tensor, scale: f64| {
            let (to, d, right) = (ColumnViewMut::all(to), ColumnView::all(d), ColumnView::all(right));
            columns_product(to, d, right, Transpose::Tn, scale, Addend::Destination)
        };
        if let Some(dweight) = grads.weight {
            add(dweight, &dlow, &x, 1.0)?;
        }
        if let Some((rows, drows)) = grads.rows {
            let rows = Tensor::from_slice(rows, rows.len(), device)?;
            add(drows, &d.index_select(&rows, 1)?, &x, 1.0)?;
        }
        if let Some(Delta { u, b, scale }) = output.delta {
            du = du.map(|du| du.index_add(&ids, &(d.matmul(b)? * scale)?, 0)).transpose()?;
            if let Some(db) = grads.b {
                add(db, &d, u, scale)?;
            }
        }
    }
    let loss = match losses.len() {
        0 => LossSum::default(),
        _ => LossSum::pending(Tensor::cat(&losses, 0)?.flatten_all()?, targets.coefficients_of(&rows)),
    };
    Ok(LossAndGrad { loss, dx: dx.to_dtype(x.dtype())?, du })
}

/// Returns the gradient of one chunk's logits, and its rows' losses, both f32. candle's own
/// cross-entropy gives only the mean.
fn reference_chunk(
    x: &Tensor,
    output: Output<'_>,
    hits: &Tensor,
    kind: LossKind,
) -> Result<(Tensor, Tensor)> {
    let logits = logits(x, output, kind.softcap)?;
    let log_p = candle_nn::ops::log_softmax(&logits, 1)?;
    let row_loss = log_p.gather(hits, 1)?.neg()?;
    let minus_one = hits.ones_like()?.to_dtype(DType::F32)?.neg()?;
    let mut d = (log_p.exp()?.scatter_add(hits, &minus_one, 1)? * kind.scale)?;
    if let Some(cap) = kind.softcap {
        d = (d * (1.0 - (logits / cap)?.sqr()?)?)?;
    }
    Ok((d, row_loss))
}
