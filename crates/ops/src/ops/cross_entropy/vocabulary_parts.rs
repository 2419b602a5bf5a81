//! The CPU loss under a frozen output layer without soft-cap, and the evaluation scores without an
//! adapter on that layer. Both process the vocabulary in parts, so that the logits of a part stay
//! in a cache and its weights are read once for both products.
//!
//! ```text
//! for each part:  l = x · W_partᵀ,  m' = max(m, max l),  f = e^(m − m'),
//!                 s = f s + Σ e^(l − m'),  a = f a + e^(l − m') · W_part
//! loss = m + ln s − l_target        dx = scale (a / s − W_target)
//! ```
//!
//! This is the running softmax of attention (Milakov and Gimelshein, arXiv 1805.02867) with the
//! weights of the output layer as values. The gradient of a trained weight requires the softmax
//! itself, and so all logits of a row ([`super::row_chunks`]).

use std::ops::Range;

use candle_core::Tensor;
use rayon::prelude::*;

use super::{LAST_LOGITS, LossAndGrad, LossTargets, TokenScore, counted, gather, scatter};
use crate::backends::gemm::{MatView, MatViewMut, Threads, matmul, matmul_as};
use crate::backends::mat_view::GemmMatrix;
use crate::backends::simd;
use crate::error::Result;
use crate::instruction_set::vectorized;
use crate::runtime::cpu_tensor::{FloatElement, dims2, first, read, tensor, with_elem};

/// Tokens of a part; fewer in tests, so that small vocabularies have several parts.
pub(super) const PART: usize = if cfg!(test) { 256 } else { 2048 };
/// Rows processed together, whose logits of a part are 8 MiB; fewer in tests.
const ROWS: usize = if cfg!(test) { 32 } else { 1024 };
/// Minimum number of rows that a thread processes at a time.
pub(super) const ROWS_OF_TASK: usize = 8;

/// Returns the peak bytes of the loss of `rows` rows of this width: logits of a part, sums, and the
/// packed rows.
pub(super) fn held_bytes(vocab: usize, width: usize, rows: usize) -> usize {
    size_of::<f32>() * rows.min(ROWS) * (vocab.min(PART) + 2 * width)
}

/// The running state of a row after some parts.
#[derive(Clone, Copy)]
pub(super) struct RowState {
    /// The largest logit.
    pub(super) max: f32,
    /// The index of the first largest logit.
    best: usize,
    /// Σ e^(logit − max).
    pub(super) sum: f32,
    /// The target's logit.
    pub(super) at_target: f32,
}

impl RowState {
    const NOTHING: RowState = RowState { max: f32::NEG_INFINITY, best: 0, sum: 0.0, at_target: f32::NAN };

    pub(super) fn loss(&self) -> f32 {
        self.max + self.sum.ln() - self.at_target
    }

    fn score(&self, target: u32) -> TokenScore {
        let loss = self.loss();
        TokenScore { loss, correct: self.best == target as usize && !loss.is_nan() }
    }
}

/// Returns the loss of the rows of `x` that have a target, and the gradient of `x` for `scale`
/// times that loss. A soft-cap is not supported: the target's term would be multiplied by its
/// slope, and the rounding errors of the two terms would no longer cancel.
pub(super) fn loss(x: &Tensor, weight: &Tensor, targets: LossTargets<'_>, scale: f64) -> Result<LossAndGrad> {
    let rows = counted(targets.ids);
    let ((n, width), (vocab, _)) = (dims2(x)?, dims2(weight)?);
    with_elem!(x.dtype(), T => with_elem!(weight.dtype(), W => {
        let (xs, w) = (read::<T>(x)?, read::<W>(weight)?);
        let (mut dx, mut loss) = (vec![T::default(); n * width], 0f64);
        for chunk in rows.chunks(ROWS) {
            let x = gather::<T>(&xs, chunk, width);
            let x = MatView::new(&x, chunk.len(), width, width);
            let mut sums = vec![0f32; chunk.len() * width];
            let states = each_part(x, &w, vocab, |logits, states, part| {
                let len = part.len();
                let work = logits.par_chunks_mut(len).zip(sums.par_chunks_mut(width)).zip(states.par_iter_mut());
                work.zip(chunk).with_min_len(ROWS_OF_TASK).for_each(|(((row, sums), state), &n)| {
                    add_part(row, sums, state, part.start, targets.ids[n] as usize);
                });
                let p = MatView::new(logits, chunk.len(), len, len);
                let values = MatView::new(&w[part.start * width..part.end * width], len, width, width);
                let dst = MatViewMut { data: &mut sums, stride: width, accumulate: true };
                matmul_as::<T, f32, _, _>(dst, p, values, 1.0, Threads::All);
            });
            let mut gradients = vec![T::default(); sums.len()];
            let work = gradients.par_chunks_mut(width).zip(sums.par_chunks(width)).zip(&states).zip(chunk);
            work.with_min_len(ROWS_OF_TASK).for_each(|(((dx, sums), state), &n)| {
                let target = targets.ids[n] as usize;
                let scale = targets.scale(n, scale);
                let values = &w[target * width..(target + 1) * width];
                gradient_of_row(dx, sums, values, (scale / state.sum, scale));
            });
            scatter(&mut dx, &gradients, chunk, width);
            loss += states.iter().zip(chunk).map(|(state, &n)| targets.weighted(n, state.loss())).sum::<f64>();
        }
        Ok(LossAndGrad { loss: loss.into(), dx: tensor(dx, (n, width))?, du: None })
    }))
}

/// Returns loss and hit of the rows of `x` that have a target.
pub(super) fn scores(
    x: &Tensor,
    weight: &Tensor,
    targets: &[u32],
    softcap: Option<f64>,
) -> Result<Vec<TokenScore>> {
    let rows = counted(targets);
    let ((_, width), (vocab, _)) = (dims2(x)?, dims2(weight)?);
    let mut scores = Vec::with_capacity(rows.len());
    with_elem!(x.dtype(), T => with_elem!(weight.dtype(), W => {
        let (xs, w) = (read::<T>(x)?, read::<W>(weight)?);
        for chunk in rows.chunks(ROWS) {
            let x = gather::<T>(&xs, chunk, width);
            let x = MatView::new(&x, chunk.len(), width, width);
            let states = each_part(x, &w, vocab, |logits, states, part| {
                let work = logits.par_chunks_mut(part.len()).zip(states.par_iter_mut()).zip(chunk);
                work.with_min_len(ROWS_OF_TASK).for_each(|((row, state), &n)| {
                    if let Some(cap) = softcap {
                        cap_logits(row, cap as f32);
                    }
                    add_part(row, &mut [], state, part.start, targets[n] as usize);
                });
            });
            let score = |(state, &n): (&RowState, &usize)| {
                state.score(targets[n])
            };
            scores.extend(states.iter().zip(chunk).map(score));
        }
        Ok(scores)
    }))
}

/// Iterates over the parts of the vocabulary.
pub(super) fn parts(vocab: usize) -> impl Iterator<Item = Range<usize>> {
    (0..vocab).step_by(PART).map(move |start| start..(start + PART).min(vocab))
}

/// Calls `work` with the logits of each part of the vocabulary, `[rows, part]`, and the running
/// states of the rows, then returns these states.
pub(super) fn each_part<T: FloatElement, W: FloatElement>(
    x: MatView<'_, T>,
    w: &[W],
    vocab: usize,
    mut work: impl FnMut(&mut [f32], &mut [RowState], Range<usize>),
) -> Vec<RowState> {
    let (rows, width) = (x.rows(), x.cols());
    let mut states = vec![RowState::NOTHING; rows];
    let mut held = LAST_LOGITS.take();
    let logits = first(&mut held, rows * PART.min(vocab));
    for part in parts(vocab) {
        let logits = &mut logits[..rows * part.len()];
        let weights = MatView::new(&w[part.start * width..part.end * width], part.len(), width, width);
        matmul(
            MatViewMut { data: logits, stride: part.len(), accumulate: false },
            x,
            weights.t(),
            1.0,
            Threads::All,
        );
        work(logits, &mut states, part);
    }
    LAST_LOGITS.set(held);
    states
}

vectorized! {
    /// Computes `cap · tanh(logit / cap)`.
    pub(super) fn cap_logits(row: &mut [f32], cap: f32) {
        row.iter_mut().for_each(|l| *l = cap * simd::tanh(*l / cap));
    }
}

vectorized! {
    /// Updates a row's state with its logits from token `start` on, turns them into e^(logit −
    /// max), and returns that maximum. Rescales `sums`, accumulated with earlier factors, to a new
    /// maximum.
    pub(super) fn add_part(
        row: &mut [f32],
        sums: &mut [f32],
        state: &mut RowState,
        start: usize,
        target: usize,
    ) -> f32 {
        if (start..start + row.len()).contains(&target) {
            state.at_target = row[target - start];
        }
        // The maximum ignores a NaN here; its exponential is NaN, and so is the sum.
        let largest = simd::largest(row);
        if largest > state.max {
            let factor = simd::exp(state.max - largest);
            state.sum *= factor;
            sums.iter_mut().for_each(|a| *a *= factor);
            state.max = largest;
            state.best = start + row.iter().position(|l| *l == largest).unwrap_or(0);
        }
        // If all logits so far are −∞, their exponentials are 0.
        let max = state.max.max(f32::MIN);
        row.iter_mut().for_each(|l| *l = simd::exp(*l - max));
        state.sum += simd::sum_of(row, |l| l);
        max
    }
}

vectorized! {
    /// Computes `dx = by_sum · sums − by_target · values`.
    fn gradient_of_row<T: FloatElement, W: FloatElement>(
        dx: &mut [T],
        sums: &[f32],
        values: &[W],
        factors: (f32, f32),
    ) {
        let (by_sum, by_target) = factors;
        for ((dx, sum), value) in dx.iter_mut().zip(sums).zip(values) {
            *dx = T::nearest(by_sum * sum - by_target * value.widen());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row in one part and in several: equal up to rounding; a NaN in any part makes every result
    /// NaN.
    #[test]
    fn parts_are_the_whole() {
        let logits: Vec<f32> = (0..150).map(|i| ((i * 37) % 101) as f32 * 0.11 - 4.0).collect();
        let summed = |parts: &[usize], logits: &[f32]| {
            let (mut state, mut sums, mut start) = (RowState::NOTHING, vec![0f32; 2], 0);
            for &len in parts {
                let mut row = logits[start..start + len].to_vec();
                add_part(&mut row, &mut sums, &mut state, start, 140);
                row.iter().enumerate().for_each(|(i, p)| {
                    sums[0] += p;
                    sums[1] += p * (start + i) as f32;
                });
                start += len;
            }
            (state.loss(), state.best, [sums[0] / state.sum, sums[1] / state.sum])
        };
        let whole = summed(&[150], &logits);
        for parts in [&[64, 64, 22][..], &[1, 149], &[149, 1]] {
            let (loss, best, sums) = summed(parts, &logits);
            assert_eq!(best, whole.1);
            assert!((loss - whole.0).abs() < 1e-5, "{loss} {}", whole.0);
            sums.iter().zip(whole.2).for_each(|(a, b)| assert!((a / b - 1.0).abs() < 1e-5, "{a} {b}"));
        }
        for at in [3, 70, 149] {
            let mut logits = logits.clone();
            logits[at] = f32::NAN;
            let (loss, _, sums) = summed(&[64, 64, 22], &logits);
            assert!(loss.is_nan() && sums.iter().all(|sum| sum.is_nan()), "{at}: {loss} {sums:?}");
        }
    }
}
