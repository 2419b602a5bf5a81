//! The CPU loss if a parameter of the output layer trains or the logits have a soft-cap. The
//! gradient of a row's logits requires the sum over all of them, so each chunk of rows processes
//! the vocabulary twice, in parts:
//!
//! ```text
//! for each part:  l = cap(x · W_partᵀ + u · B_partᵀ),  m' = max(m, max l),
//!                 s = e^(m − m') s + Σ e^(l − m'),  scores = e^(l − m')
//! for each part:  d = scale (scores · e^(m' − m) / s − onehot),
//!                 dx += d · W_part,  dW_part += dᵀ · x
//! ```
//!
//! Between the passes, `scores` is stored in the dtype of `x`. `d` overwrites it, rounded once, as
//! autograd passes the gradient of logits to a layer of that dtype. The target's element is
//! computed from its logit, since two numbers cancel there. A soft-cap's slope requires the logits
//! themselves, which are stored in f32. So the logits of a part stay in a cache, the weights are
//! read twice per chunk, and their gradient passes through memory once.

use std::cell::Cell;
use std::ops::Range;
use std::thread::LocalKey;

use candle_core::{DType, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::vocabulary_parts::{PART, ROWS_OF_TASK, RowState, add_part, cap_logits, each_part, parts};
use super::{
    Delta, LAST_LOGITS, LossAndGrad, LossKind, LossTargets, Output, OutputGrads, counted, gather, scatter,
};
use crate::backends::gemm::{MatView, MatViewMut, Threads, matmul, matmul_as};
use crate::backends::mat_view::GemmMatrix;
use crate::backends::simd;
use crate::error::Result;
use crate::instruction_set::vectorized;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{FloatElement, dims2, first, read, tensor, update, with_elem};

/// Bytes stored of a chunk's logits, within the limits on its rows.
const KEPT_BYTES: usize = 48 << 20;
/// Minimum rows of a chunk stored in f32; bf16 doubles it. Each chunk packs the weight anew, and
/// passes its gradient through memory.
const LEAST_CHUNK_ROWS: usize = 256;
/// Maximum rows of a chunk, by the same rule.
const MOST_CHUNK_ROWS: usize = 2048;

/// Returns the rows of a chunk whose logits are stored as type `K`.
pub(super) fn chunk_rows<K: FloatElement>(vocab: usize) -> usize {
    let in_f32 = size_of::<f32>() / size_of::<K>();
    (KEPT_BYTES / (size_of::<f32>() * vocab.max(1))).clamp(LEAST_CHUNK_ROWS, MOST_CHUNK_ROWS) * in_f32
}

/// Returns the peak bytes of the loss of `rows` rows of `width` values of this dtype: stored
/// values, a part's logits, and the rows' gradient.
pub(super) fn held_bytes(vocab: usize, width: usize, rows: usize, dtype: DType, has_softcap: bool) -> usize {
    let (chunk, logit_bytes) = if dtype == DType::BF16 && !has_softcap {
        (chunk_rows::<bf16>(vocab), size_of::<bf16>())
    } else {
        (chunk_rows::<f32>(vocab), size_of::<f32>())
    };
    rows.min(chunk) * (logit_bytes * vocab + size_of::<f32>() * (vocab.min(PART) + 2 * width))
}

/// A storage type for the values of a chunk's logits.
trait Kept: FloatElement {
    /// The buffer of the last loss on this thread: fresh memory would cost a page fault every 4
    /// KiB.
    fn last() -> &'static LocalKey<Cell<Vec<Self>>>;
}

thread_local! {
    static LAST_KEPT_F32: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static LAST_KEPT_BF16: Cell<Vec<bf16>> = const { Cell::new(Vec::new()) };
}

impl Kept for f32 {
    fn last() -> &'static LocalKey<Cell<Vec<f32>>> {
        &LAST_KEPT_F32
    }
}

impl Kept for bf16 {
    fn last() -> &'static LocalKey<Cell<Vec<bf16>>> {
        &LAST_KEPT_BF16
    }
}

/// Returns the loss and its gradients, as specified by [`super::linear_cross_entropy`].
pub(super) fn loss(
    x: &Tensor,
    output: Output<'_>,
    targets: LossTargets<'_>,
    kind: LossKind,
    grads: OutputGrads<'_>,
) -> Result<LossAndGrad> {
    let adapter = output.delta.map(DeltaOnCpu::new).transpose()?;
    let chunked = ChunkedLoss { output, adapter: adapter.as_ref(), targets, kind, grads };
    with_elem!(x.dtype(), T => {
        if kind.softcap.is_some() { chunked.loss::<T, f32>(x) } else { chunked.loss::<T, T>(x) }
    })
}

/// The output layer and all inputs of a loss except the rows.
struct ChunkedLoss<'a> {
    output: Output<'a>,
    adapter: Option<&'a DeltaOnCpu>,
    targets: LossTargets<'a>,
    kind: LossKind,
    grads: OutputGrads<'a>,
}

/// The result of the first pass over the vocabulary for a chunk of rows, part by part: `scores` as
/// `[rows, part]`, and the `[rows]` maxima of its exponentials.
struct FirstPass<'a, K> {
    scores: &'a mut [K],
    maxima: Vec<f32>,
    states: Vec<RowState>,
}

impl ChunkedLoss<'_> {
    fn loss<T: FloatElement, K: Kept>(&self, x: &Tensor) -> Result<LossAndGrad> {
        let rows = counted(self.targets.ids);
        let ((n, width), (vocab, _)) = (dims2(x)?, dims2(self.output.weight)?);
        let r = self.adapter.map_or(0, |adapter| adapter.r);
        let (mut dx, mut du, mut loss) = (vec![T::default(); n * width], vec![0f32; n * r], 0f64);
        let mut held = K::last().take();
        with_elem!(self.output.weight.dtype(), W => {
            let (xs, w) = (read::<T>(x)?, read::<W>(self.output.weight)?);
            for chunk in rows.chunks(chunk_rows::<K>(vocab)) {
                let x = gather::<T>(&xs, chunk, width);
                let x = MatView::new(&x, chunk.len(), width, width);
                let mut sums = self.first_pass::<_, K, _>(x, &w, chunk, first(&mut held, chunk.len() * vocab));
                let of_row = |(state, &n): (&RowState, &usize)| self.targets.weighted(n, state.loss());
                loss += sums.states.iter().zip(chunk).map(of_row).sum::<f64>();
                let (dx_chunk, du_chunk) = self.second_pass(x, &w, chunk, &mut sums)?;
                scatter(&mut dx, &dx_chunk, chunk, width);
                if r > 0 {
                    scatter(&mut du, &du_chunk, chunk, r);
                }
            }
            Ok(())
        })?;
        K::last().set(held);
        let du = self.adapter.map(|adapter| tensor(du, (n, adapter.r))).transpose()?;
        Ok(LossAndGrad { loss: loss.into(), dx: tensor(dx, (n, width))?, du })
    }

    /// Computes the sums of the rows with the numbers `chunk`.
    fn first_pass<'k, T: FloatElement, K: Kept, W: FloatElement>(
        &self,
        x: MatView<'_, T>,
        w: &[W],
        chunk: &[usize],
        scores: &'k mut [K],
    ) -> FirstPass<'k, K> {
        let (rows, vocab) = (chunk.len(), w.len() / x.cols());
        let mut maxima = vec![0f32; parts(vocab).count() * rows];
        let cap = self.kind.softcap.map(|cap| cap as f32);
        let states = each_part(x, w, vocab, |logits, states, part| {
            if let Some(adapter) = self.adapter {
                adapter.add_logits(logits, chunk, &part);
            }
            let len = part.len();
            let part_logits = &mut scores[rows * part.start..rows * part.end];
            let maxima = &mut maxima[part.start / PART * rows..][..rows];
            let work =
                logits.par_chunks_mut(len).zip(part_logits.par_chunks_mut(len)).zip(maxima).zip(states);
            work.zip(chunk).with_min_len(ROWS_OF_TASK).for_each(
                |((((row, part_logits), max), state), &n)| {
                    if let Some(cap) = cap {
                        cap_logits(row, cap);
                        keep(part_logits, row);
                    }
                    *max = add_part(row, &mut [], state, part.start, self.targets.ids[n] as usize);
                    if cap.is_none() {
                        keep(part_logits, row);
                    }
                },
            );
        });
        FirstPass { scores, maxima, states }
    }

    /// Returns the gradients of a chunk's rows and of the adapter's inner activations; adds the
    /// gradients of the layer's parameters.
    fn second_pass<T: FloatElement, K: Kept, W: FloatElement>(
        &self,
        x: MatView<'_, T>,
        w: &[W],
        chunk: &[usize],
        first_pass: &mut FirstPass<'_, K>,
    ) -> Result<(Vec<T>, Vec<f32>)> {
        let (rows, width) = (chunk.len(), x.cols());
        let vocab = w.len() / width;
        let mut dx = vec![0f32; rows * width];
        let mut du = vec![0f32; self.adapter.map_or(0, |adapter| rows * adapter.r)];
        let ids = self.grads.rows.map_or(&[][..], |(ids, _)| ids);
        let mut picked = vec![0f32; rows * ids.len()];
        for part in parts(vocab) {
            let len = part.len();
            let d = self.gradient_of_part(chunk, &part, first_pass);
            for (picked, row) in picked.chunks_exact_mut(ids.len().max(1)).zip(d.chunks_exact(len)) {
                let here = picked.iter_mut().zip(ids).filter(|(_, id)| part.contains(&(**id as usize)));
                here.for_each(|(picked, &id)| *picked = row[id as usize - part.start].widen());
            }
            let d = MatView::new(d, rows, len, len);
            let values = MatView::new(&w[part.start * width..part.end * width], len, width, width);
            let dst = MatViewMut { data: &mut dx, stride: width, accumulate: true };
            matmul_as::<T, f32, _, _>(dst, d, values, 1.0, Threads::All);
            if let Some(dweight) = self.grads.weight {
                add_gradient(dweight, part.clone(), d, x)?;
            }
            if let Some(adapter) = self.adapter {
                adapter.backward(d, chunk, &part, &mut du, self.grads.b)?;
            }
        }
        if let Some((ids, drows)) = self.grads.rows {
            add_gradient(drows, 0..ids.len(), MatView::new(&picked, rows, ids.len(), ids.len()), x)?;
        }
        let mut rounded = vec![T::default(); dx.len()];
        rounded.par_chunks_mut(width).zip(dx.par_chunks(width)).for_each(|(to, row)| keep(to, row));
        Ok((rounded, du))
    }

    /// Overwrites the stored values of a part of the vocabulary with the gradient of its logits,
    /// `[rows, part]`.
    fn gradient_of_part<'k, K: Kept>(
        &self,
        chunk: &[usize],
        part: &Range<usize>,
        first_pass: &'k mut FirstPass<'_, K>,
    ) -> &'k [K] {
        let (rows, len) = (chunk.len(), part.len());
        let part_logits = &mut first_pass.scores[rows * part.start..rows * part.end];
        let maxima = &first_pass.maxima[part.start / PART * rows..][..rows];
        let cap = self.kind.softcap.map(|cap| cap as f32);
        let work = part_logits.par_chunks_mut(len).zip(maxima).zip(&first_pass.states);
        work.zip(chunk).with_min_len(ROWS_OF_TASK).for_each(|(((d, &max), state), &n)| {
            let scale = self.targets.scale(n, self.kind.scale);
            match cap {
                None => multiply(d, simd::exp(max - state.max) * scale / state.sum),
                Some(cap) => capped_gradient(d, state, cap, scale),
            }
            let target = self.targets.ids[n] as usize;
            if part.contains(&target) {
                let slope = cap.map_or(1.0, |cap| slope(state.at_target, cap));
                let p = simd::exp(state.at_target - state.max) / state.sum;
                d[target - part.start] = K::nearest(scale * (p - 1.0) * slope);
            }
        });
        part_logits
    }
}

vectorized! {
    fn keep<K: FloatElement>(scores: &mut [K], row: &[f32]) {
        scores.iter_mut().zip(row).for_each(|(scores, value)| *scores = K::nearest(*value));
    }
}

vectorized! {
    fn multiply<K: FloatElement>(values: &mut [K], factor: f32) {
        values.iter_mut().for_each(|value| *value = K::nearest(value.widen() * factor));
    }
}

vectorized! {
    /// Turns capped logits into `scale · softmax · slope`.
    fn capped_gradient<K: FloatElement>(logits: &mut [K], state: &RowState, cap: f32, scale: f32) {
        let (max, factor) = (state.max, scale / state.sum);
        for logit in logits {
            let l = logit.widen();
            *logit = K::nearest(simd::exp(l - max) * factor * slope(l, cap));
        }
    }
}

/// Returns the slope of `cap · tanh(l / cap)` from its value `logit`.
#[inline(always)]
fn slope(logit: f32, cap: f32) -> f32 {
    let tanh = logit / cap;
    1.0 - tanh * tanh
}

/// Computes `grad += dᵀ · x` for some rows of `grad`, f32.
fn add_gradient<D: FloatElement, T: FloatElement>(
    grad: &TensorMut,
    rows: Range<usize>,
    d: MatView<'_, D>,
    x: MatView<'_, T>,
) -> Result<()> {
    let (_, stride) = dims2(grad)?;
    update(grad, |data: &mut [f32]| {
        let data = &mut data[rows.start * stride..rows.end * stride];
        matmul(MatViewMut { data, stride, accumulate: true }, d.t(), x, 1.0, Threads::All);
    })
}

/// A [`Delta`] as slices.
struct DeltaOnCpu {
    u: Vec<f32>,
    b: Vec<f32>,
    r: usize,
    scale: f32,
}

impl DeltaOnCpu {
    fn new(delta: Delta<'_>) -> Result<Self> {
        let (_, r) = dims2(delta.b)?;
        let (u, b) = (read::<f32>(delta.u)?.to_vec(), read::<f32>(delta.b)?.to_vec());
        Ok(DeltaOnCpu { u, b, r, scale: delta.scale as f32 })
    }

    /// Returns the rows of B of a part of the vocabulary.
    fn b(&self, part: &Range<usize>) -> MatView<'_, f32> {
        MatView::new(&self.b[part.start * self.r..part.end * self.r], part.len(), self.r, self.r)
    }

    fn add_logits(&self, logits: &mut [f32], chunk: &[usize], part: &Range<usize>) {
        let u = gather::<f32>(&self.u, chunk, self.r);
        let u = MatView::new(&u, chunk.len(), self.r, self.r);
        let dst = MatViewMut { data: logits, stride: part.len(), accumulate: true };
        matmul(dst, u, self.b(part).t(), self.scale, Threads::All);
    }

    /// Adds a part's contribution to the chunk's rows of `du` and to the gradient of B, by products
    /// in f32.
    fn backward<D: FloatElement>(
        &self,
        d: MatView<'_, D>,
        chunk: &[usize],
        part: &Range<usize>,
        du: &mut [f32],
        db: Option<&TensorMut>,
    ) -> Result<()> {
        let mut held = LAST_LOGITS.take();
        let (rows, len) = (d.rows(), d.cols());
        let d = match d.dense() {
            Some(f32_already) => MatView::new(f32_already.data, rows, len, len),
            None => {
                let wide = first(&mut held, rows * len);
                wide.par_chunks_mut(len).enumerate().for_each(|(row, wide)| d.copy_line(row, 0, wide));
                MatView::new(wide, rows, len, len)
            }
        };
        let dst = MatViewMut { data: du, stride: self.r, accumulate: true };
        matmul(dst, d, self.b(part), self.scale, Threads::All);
        if let Some(db) = db {
            let u = gather::<f32>(&self.u, chunk, self.r);
            let u = MatView::new(&u, chunk.len(), self.r, self.r);
            update(db, |g: &mut [f32]| {
                let data = &mut g[part.start * self.r..part.end * self.r];
                let dst = MatViewMut { data, stride: self.r, accumulate: true };
                matmul(dst, d.t(), u, self.scale, Threads::All);
            })?;
        }
        LAST_LOGITS.set(held);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_worth_packing_for() {
        let rows = [300, 16_384, 49_152, 128_256];
        assert_eq!(rows.map(chunk_rows::<f32>), [2048, 768, 256, 256]);
        assert_eq!(rows.map(chunk_rows::<bf16>), [4096, 1536, 512, 512]);
        let beside = 4 * (PART + 2 * 64);
        let held = |rows, dtype, has_softcap| held_bytes(128_256, 64, rows, dtype, has_softcap);
        assert_eq!(held(1000, DType::F32, false), 256 * (4 * 128_256 + beside));
        assert_eq!(held(1000, DType::BF16, false), 512 * (2 * 128_256 + beside));
        assert_eq!(held(1000, DType::BF16, true), 256 * (4 * 128_256 + beside));
        assert_eq!(held(100, DType::F32, true), 100 * (4 * 128_256 + beside));
    }

    /// One NaN logit makes every result of its row NaN, at any position.
    #[test]
    fn a_nan_is_not_passed_over() -> Result<()> {
        let (vocab, width) = (2 * PART + 41, 8);
        let weight = tensor(vec![0.25f32; vocab * width], (vocab, width))?;
        for softcap in [None, Some(30.0)] {
            for at in [0, 17, PART + 3, vocab - 1] {
                let mut weight = read::<f32>(&weight)?.to_vec();
                weight[at * width] = f32::NAN;
                let weight = tensor(weight, (vocab, width))?;
                let x = tensor(vec![1f32; width], (1, width))?;
                let grad = TensorMut::new(tensor(vec![0f32; vocab * width], (vocab, width))?);
                let grads = OutputGrads { weight: Some(&grad), ..OutputGrads::default() };
                let output = Output { weight: &weight, delta: None };
                let kind = LossKind { scale: 1.0, softcap };
                let result = loss(&x, output, LossTargets::unweighted(&[3]), kind, grads)?;
                assert!(result.loss.read()?.is_nan(), "{softcap:?}, {at}");
                assert!(read::<f32>(&result.dx)?.iter().all(|d| d.is_nan()), "{softcap:?}, {at}");
                assert!(read::<f32>(&grad)?.iter().all(|d| d.is_nan()), "{softcap:?}, {at}");
            }
        }
        Ok(())
    }
}
