//! The output layer and its loss in one: `loss = Σ −log softmax(x · Wᵀ)[target]`, without ever holding all logits.
//!
//! Only rows that have a target are multiplied; they are taken in chunks whose f32 logits fit [`LOGITS_BYTES`], and a
//! chunk's logits turn into their own gradient in place before the next chunk is made (as in Liger and Cut Cross
//! Entropy, arXiv 2411.09009). Logits, softmax and sums are f32 whatever the weights are.

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::access::{Elem, dims2, read, tensor, unwritten, update, with_elem};
use super::gemm::{Dst, Mat, Threads, product};
use super::product::{Columns, Form, product as columns_product};
use super::simd;
use crate::error::Result;

/// A target that does not count.
pub const IGNORE: u32 = u32::MAX;

/// Bytes of f32 logits alive at once.
const LOGITS_BYTES: usize = 48 << 20;

/// What the loss of a micro-batch is divided by, and what happens to logits.
#[derive(Debug, Clone, Copy)]
pub struct LossKind {
    /// Gradients are those of `loss_sum · scale` (one over the step's number of targets).
    pub scale: f64,
    /// `cap · tanh(logit / cap)` (gemma2).
    pub softcap: Option<f64>,
}

/// How well one row was predicted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenScore {
    /// −log p(target).
    pub loss: f32,
    /// The target has the largest logit (the lowest id wins a tie).
    pub correct: bool,
}

/// The sum of the losses of all rows with a target, and the gradient of `x` for `scale` times that sum.
/// `x: [N, D]`, `weight: [V, D]`; the weight's gradient is added to `dweight: [V, D]` f32 when given.
pub fn linear_cross_entropy(
    x: &Tensor,
    weight: &Tensor,
    targets: &[u32],
    kind: LossKind,
    dweight: Option<&Tensor>,
) -> Result<(f64, Tensor)> {
    let rows = counted(targets);
    let (n, width) = dims2(x)?;
    if !x.device().is_cpu() {
        return reference(x, weight, targets, kind, dweight);
    }
    let (vocab, _) = dims2(weight)?;
    with_elem!(x.dtype(), T => with_elem!(weight.dtype(), W => {
        let (xs, w) = (read::<T>(x)?, read::<W>(weight)?);
        let w = Mat::new(&w, vocab, width, width);
        let mut dx = vec![T::default(); n * width];
        let mut loss = 0f64;
        let mut logits: Vec<f32> = unwritten(chunk_rows(vocab).min(rows.len()) * vocab);
        for chunk in rows.chunks(chunk_rows(vocab)) {
            let x = gather::<T>(&xs, chunk, width);
            let x = Mat::new(&x, chunk.len(), width, width);
            let logits = &mut logits[..chunk.len() * vocab];
            product(Dst { data: logits, stride: vocab, accumulate: false }, x, w.t(), 1.0, Threads::All);
            let losses: Vec<f32> = logits
                .par_chunks_mut(vocab)
                .zip(chunk)
                .map(|(row, &n)| loss_and_gradient(row, targets[n], kind.softcap, kind.scale as f32))
                .collect();
            loss += losses.iter().map(|&l| f64::from(l)).sum::<f64>();
            let d = Mat::new(logits, chunk.len(), vocab, vocab);
            let mut out = vec![T::default(); chunk.len() * width];
            product(Dst { data: &mut out, stride: width, accumulate: false }, d, w, 1.0, Threads::All);
            for (row, &n) in out.chunks_exact(width).zip(chunk) {
                dx[n * width..(n + 1) * width].copy_from_slice(row);
            }
            if let Some(dweight) = dweight {
                update(dweight, |g: &mut [f32]| {
                    product(Dst { data: g, stride: width, accumulate: true }, d.t(), x, 1.0, Threads::All);
                })?;
            }
        }
        Ok((loss, tensor(dx, (n, width))?))
    }))
}

/// Scores of the rows that have a target, in order.
pub fn score_targets(
    x: &Tensor,
    weight: &Tensor,
    targets: &[u32],
    softcap: Option<f64>,
) -> Result<Vec<TokenScore>> {
    let rows = counted(targets);
    let mut scores = Vec::with_capacity(rows.len());
    let (vocab, _) = dims2(weight)?;
    for chunk in rows.chunks(chunk_rows(vocab)) {
        let ids: Vec<u32> = chunk.iter().map(|&n| n as u32).collect();
        let x = x.index_select(&Tensor::from_vec(ids, chunk.len(), x.device())?, 0)?;
        let logits = logits(&x, weight, softcap)?.to_device(&candle_core::Device::Cpu)?;
        let logits = read::<f32>(&logits)?;
        let part: Vec<TokenScore> =
            logits.par_chunks(vocab).zip(chunk).map(|(row, &n)| score(row, targets[n] as usize)).collect();
        scores.extend(part);
    }
    Ok(scores)
}

/// `x · Wᵀ` with the soft-cap, in f32: `[N, V]`.
pub fn logits(x: &Tensor, weight: &Tensor, softcap: Option<f64>) -> Result<Tensor> {
    let ((rows, _), (vocab, _)) = (dims2(x)?, dims2(weight)?);
    let out = super::empty(rows, vocab, DType::F32, x.device())?;
    columns_product(Columns::all(&out), Columns::all(x), Columns::all(weight), Form::Nt, 1.0, false)?;
    Ok(match softcap {
        Some(cap) => ((out / cap)?.tanh()? * cap)?,
        None => out,
    })
}

fn counted(targets: &[u32]) -> Vec<usize> {
    (0..targets.len()).filter(|&n| targets[n] != IGNORE).collect()
}

fn chunk_rows(vocab: usize) -> usize {
    (LOGITS_BYTES / (4 * vocab.max(1))).clamp(16, 2048)
}

fn gather<T: Elem>(x: &[T], rows: &[usize], width: usize) -> Vec<T> {
    rows.iter().flat_map(|&n| x[n * width..(n + 1) * width].iter().copied()).collect()
}

/// Turns a row of logits into `scale · (softmax − onehot)` and returns its loss.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2+fma"))]
fn loss_and_gradient(row: &mut [f32], target: u32, softcap: Option<f64>, scale: f32) -> f32 {
    if let Some(cap) = softcap {
        let cap = cap as f32;
        row.iter_mut().for_each(|l| *l = cap * simd::tanh(*l / cap));
    }
    let max = simd::max(row);
    let at_target = row[target as usize];
    // The capped logits are needed for the cap's slope, so only without a cap are they overwritten at once.
    let Some(cap) = softcap else {
        for l in row.iter_mut() {
            *l = simd::exp(*l - max);
        }
        let sum = simd::sum_of(row, |l| l);
        let factor = scale / sum;
        row.iter_mut().for_each(|l| *l *= factor);
        row[target as usize] -= scale;
        return max + sum.ln() - at_target;
    };
    let cap = cap as f32;
    let sum = simd::sum_of(row, |l| simd::exp(l - max));
    for (i, l) in row.iter_mut().enumerate() {
        let slope = 1.0 - (*l / cap) * (*l / cap);
        let hit = if i == target as usize { 1.0 } else { 0.0 };
        *l = scale * (simd::exp(*l - max) / sum - hit) * slope;
    }
    max + sum.ln() - at_target
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
    weight: &Tensor,
    targets: &[u32],
    kind: LossKind,
    dweight: Option<&Tensor>,
) -> Result<(f64, Tensor)> {
    let ((vocab, _), (n, width)) = (dims2(weight)?, dims2(x)?);
    let rows = counted(targets);
    let device = x.device();
    let mut dx = Tensor::zeros((n, width), DType::F32, device)?;
    // Read once at the end: each read would wait for the device.
    let mut losses = Vec::new();
    for chunk in rows.chunks(chunk_rows(vocab)) {
        let ids: Vec<u32> = chunk.iter().map(|&n| n as u32).collect();
        let hits: Vec<u32> = chunk.iter().map(|&n| targets[n]).collect();
        let ids = Tensor::from_vec(ids, chunk.len(), device)?;
        let hits = Tensor::from_vec(hits, (chunk.len(), 1), device)?;
        let x = x.index_select(&ids, 0)?;
        let logits = logits(&x, weight, kind.softcap)?;
        let max = logits.max_keepdim(1)?;
        let exp = logits.broadcast_sub(&max)?.exp()?;
        let sum = exp.sum_keepdim(1)?;
        let row_loss = ((max + sum.log()?)? - logits.gather(&hits, 1)?)?;
        losses.push(row_loss);
        let minus_one = hits.ones_like()?.to_dtype(DType::F32)?.neg()?;
        let mut d = (exp.broadcast_div(&sum)?.scatter_add(&hits, &minus_one, 1)? * kind.scale)?;
        if let Some(cap) = kind.softcap {
            d = (d * (1.0 - (logits / cap)?.sqr()?)?)?;
        }
        let d = d.to_dtype(weight.dtype())?;
        dx = dx.index_add(&ids, &d.matmul(weight)?.to_dtype(DType::F32)?, 0)?;
        if let Some(dweight) = dweight {
            columns_product(Columns::all(dweight), Columns::all(&d), Columns::all(&x), Form::Tn, 1.0, true)?;
        }
    }
    let losses = match losses.is_empty() {
        true => Vec::new(),
        false => Tensor::cat(&losses, 0)?.flatten_all()?.to_vec1::<f32>()?,
    };
    Ok((losses.iter().map(|&loss| f64::from(loss)).sum(), dx.to_dtype(x.dtype())?))
}
