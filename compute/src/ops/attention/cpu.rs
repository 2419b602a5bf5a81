//! Flash attention on the CPU: square tiles, online softmax, exact skipping of tiles nobody sees.
//!
//! Keys and values are packed once per key/value head into dense f32; a task is one (span, head, block of query
//! rows) forward and one (span, head) backward. Results are written in task order, so a run repeats to the bit for
//! any number of threads.

use std::ops::Range;

use candle_core::Tensor;
use rayon::prelude::*;

use super::{AttentionKind, AttentionOutput, Qkv, Span};
use crate::error::Result;
use crate::ops::gemm::{MatView, MatViewMut, Threads, matmul};
use crate::ops::matmul::ColumnView;
use crate::ops::simd;
use crate::runtime::cpu_tensor::{FloatElement, PlainElement, dims2, read, tensor, unwritten, with_elem};

/// Rows and columns of a score tile.
const TILE: usize = 64;
/// Query rows of a forward task.
const TASK_ROWS: usize = 128;

pub(super) fn forward(qkv: Qkv<'_>, spans: &[Span], kind: AttentionKind) -> Result<AttentionOutput> {
    let (rows, _) = dims2(qkv.q.tensor)?;
    let (heads, dim) = (kind.heads.num_heads, kind.heads.head_dim);
    with_elem!(qkv.q.tensor.dtype(), T => {
        let (k, v) = (packed::<T>(qkv.k, dim, 1.0)?, packed::<T>(qkv.v, dim, 1.0)?);
        let q = packed::<T>(qkv.q, dim, kind.scale as f32)?;
        let tasks: Vec<(Span, usize, usize)> = spans
            .iter()
            .flat_map(|&span| (0..heads).flat_map(move |h| (0..span.q_len).step_by(TASK_ROWS).map(move |i| (span, h, i))))
            .collect();
        let done: Vec<(Vec<f32>, Vec<f32>)> = tasks
            .par_iter()
            .map(|&(span, h, from)| {
                let kv = h * kind.heads.num_kv_heads / heads;
                let q = &q[h][span.q_start * dim..];
                let (k, v) = (&k[kv][span.k_start * dim..], &v[kv][span.k_start * dim..]);
                forward_rows(q, k, v, span, from, kind)
            })
            .collect();
        // Zeros, for rows of no span.
        let width = heads * dim;
        let mut out = T::zeros(rows * width);
        out.par_chunks_mut(TASK_ROWS * width).enumerate().for_each(|(i, out)| {
            let here = i * TASK_ROWS..(i + 1) * TASK_ROWS;
            for ((span, h, from), (o, _)) in tasks.iter().zip(&done) {
                for (n, o) in rows_in(&here, o, dim, span.q_start + from) {
                    narrow(&mut out[(n - here.start) * width + h * dim..][..dim], o);
                }
            }
        });
        let mut lse = vec![0f32; heads * rows];
        for ((span, h, from), (_, l)) in tasks.iter().zip(&done) {
            let at = h * rows + span.q_start + from;
            lse[at..at + l.len()].copy_from_slice(l);
        }
        Ok(AttentionOutput { out: tensor(out, (rows, width))?, lse: tensor(lse, (heads, rows))? })
    })
}

pub(super) fn backward(
    qkv: Qkv<'_>,
    attended: &AttentionOutput,
    dout: &Tensor,
    spans: &[Span],
    kind: AttentionKind,
) -> Result<Tensor> {
    let (rows, _) = dims2(dout)?;
    let (heads, kv_heads, dim) = (kind.heads.num_heads, kind.heads.num_kv_heads, kind.heads.head_dim);
    with_elem!(dout.dtype(), T => {
        let (k, v) = (packed::<T>(qkv.k, dim, 1.0)?, packed::<T>(qkv.v, dim, 1.0)?);
        let q = packed::<T>(qkv.q, dim, kind.scale as f32)?;
        let o = packed::<T>(ColumnView::all(&attended.out), dim, 1.0)?;
        let do_ = packed::<T>(ColumnView::all(dout), dim, 1.0)?;
        let lse = read::<f32>(&attended.lse)?;
        let tasks: Vec<(Span, usize)> =
            spans.iter().flat_map(|&span| (0..heads).map(move |h| (span, h))).collect();
        let done: Vec<CpuGradients> = tasks
            .par_iter()
            .map(|&(span, h)| {
                let kv = h * kv_heads / heads;
                let rows_of = |x: &'_ [Vec<f32>], head: usize| -> Range<usize> {
                    debug_assert!(x[head].len() >= (span.q_start + span.q_len) * dim);
                    span.q_start * dim..(span.q_start + span.q_len) * dim
                };
                let inputs = CpuInputs {
                    q: &q[h][rows_of(&q, h)],
                    k: &k[kv][rows_of(&k, kv)],
                    v: &v[kv][rows_of(&v, kv)],
                    o: &o[h][rows_of(&o, h)],
                    do_: &do_[h][rows_of(&do_, h)],
                    lse: &lse[h * rows + span.q_start..][..span.q_len],
                };
                backward_span(&inputs, span, kind)
            })
            .collect();
        let width = kind.heads.qkv_width();
        let mut out = unwritten::<T>(rows * width);
        out.par_chunks_mut(TASK_ROWS * width).enumerate().for_each(|(i, out)| {
            let here = i * TASK_ROWS..(i + 1) * TASK_ROWS;
            let mut sums = vec![0f32; out.len()];
            for ((span, h), g) in tasks.iter().zip(&done) {
                let kv = h * kv_heads / heads;
                let columns = [(h * dim, &g.dq), ((heads + kv) * dim, &g.dk), ((heads + kv_heads + kv) * dim, &g.dv)];
                for (column, part) in columns {
                    for (n, row) in rows_in(&here, part, dim, span.q_start) {
                        let sums = &mut sums[(n - here.start) * width + column..][..dim];
                        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                    }
                }
            }
            narrow(out, &sums);
        });
        tensor(out, (rows, width))
    })
}

/// Each head of some columns as a dense `[rows, D]` f32 matrix, times `scale`.
fn packed<T: FloatElement>(columns: ColumnView<'_>, dim: usize, scale: f32) -> Result<Vec<Vec<f32>>> {
    let (rows, width) = dims2(columns.tensor)?;
    let data = read::<T>(columns.tensor)?;
    let data: &[T] = &data;
    Ok((0..columns.len / dim)
        .into_par_iter()
        .map(|head| {
            let mut dense: Vec<f32> = unwritten(rows * dim);
            for (n, row) in dense.chunks_exact_mut(dim).enumerate() {
                let at = n * width + columns.start + head * dim;
                for (y, x) in row.iter_mut().zip(&data[at..at + dim]) {
                    *y = x.widen() * scale;
                }
            }
            dense
        })
        .collect())
}

/// The rows of a head's part, the first of which is row `first` of the batch, that are among `rows`, with their numbers.
fn rows_in<'a>(
    rows: &Range<usize>,
    part: &'a [f32],
    dim: usize,
    first: usize,
) -> impl Iterator<Item = (usize, &'a [f32])> {
    let from = rows.start.max(first);
    let to = rows.end.min(first + part.len() / dim).max(from);
    (from..to).zip(part.chunks_exact(dim).skip(from - first))
}

fn narrow<T: FloatElement>(dst: &mut [T], src: &[f32]) {
    for (dst, src) in dst.iter_mut().zip(src) {
        *dst = T::nearest(*src);
    }
}

/// Query rows `from..from + TASK_ROWS` of one head: output `[rows, D]` and log-sum-exp `[rows]`.
fn forward_rows(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    span: Span,
    from: usize,
    kind: AttentionKind,
) -> (Vec<f32>, Vec<f32>) {
    let dim = kind.heads.head_dim;
    let rows = TASK_ROWS.min(span.q_len - from);
    let mut out = vec![0f32; rows * dim];
    let mut lse = vec![0f32; rows];
    let mut scores = vec![0f32; TILE * TILE];
    for first in (0..rows).step_by(TILE) {
        let n = TILE.min(rows - first);
        let o = &mut out[first * dim..(first + n) * dim];
        let mut max = [f32::NEG_INFINITY; TILE];
        let mut sum = [0f32; TILE];
        let q = MatView::new(&q[(from + first) * dim..], n, dim, dim);
        let (k_from, _) = span.visible(from + first, kind.window);
        let (_, k_to) = span.visible(from + first + n - 1, kind.window);
        for key in (k_from / TILE * TILE..k_to).step_by(TILE) {
            let m = TILE.min(k_to - key);
            tile_product(&mut scores, m, q, MatView::new(&k[key * dim..], m, dim, dim).t());
            for i in 0..n {
                let row = &mut scores[i * m..(i + 1) * m];
                let seen = seen_in_tile(span, from + first + i, key, m, kind);
                let shrink = online_softmax(row, seen, kind.softcap, &mut max[i], &mut sum[i]);
                if shrink != 1.0 {
                    o[i * dim..(i + 1) * dim].iter_mut().for_each(|o| *o *= shrink);
                }
            }
            let dst = MatViewMut { data: o, stride: dim, accumulate: true };
            matmul(
                dst,
                MatView::new(&scores, n, m, m),
                MatView::new(&v[key * dim..], m, dim, dim),
                1.0,
                Threads::One,
            );
        }
        for i in 0..n {
            let inverse = 1.0 / sum[i];
            o[i * dim..(i + 1) * dim].iter_mut().for_each(|o| *o *= inverse);
            lse[first + i] = max[i] + sum[i].ln();
        }
    }
    (out, lse)
}

fn tile_product(scores: &mut [f32], stride: usize, a: MatView<'_, f32>, b: MatView<'_, f32>) {
    matmul(MatViewMut { data: scores, stride, accumulate: false }, a, b, 1.0, Threads::One);
}

/// The columns of the tile at `key` (width `m`) that query `i` sees.
fn seen_in_tile(span: Span, i: usize, key: usize, m: usize, kind: AttentionKind) -> (usize, usize) {
    let (from, to) = span.visible(i, kind.window);
    let from = from.clamp(key, key + m) - key;
    (from, (to.clamp(key, key + m) - key).max(from))
}

/// Turns a row of scores into `exp(score − max)` with the running maximum, zeroes what is not seen, adds to the
/// running sum, and returns the factor for what was accumulated before.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2+fma"))]
fn online_softmax(
    row: &mut [f32],
    (from, to): (usize, usize),
    softcap: Option<f64>,
    max: &mut f32,
    sum: &mut f32,
) -> f32 {
    row[..from].fill(0.0);
    row[to..].fill(0.0);
    let seen = &mut row[from..to];
    if seen.is_empty() {
        return 1.0;
    }
    if let Some(cap) = softcap {
        let cap = cap as f32;
        seen.iter_mut().for_each(|s| *s = cap * simd::tanh(*s / cap));
    }
    let new = simd::max(seen);
    let new = if new > *max {
        new
    } else if new <= *max {
        *max
    } else {
        new
    };
    for s in seen.iter_mut() {
        *s = simd::exp(*s - new);
    }
    let shrink = if *max == f32::NEG_INFINITY { 1.0 } else { simd::exp(*max - new) };
    *sum = *sum * shrink + simd::sum_of(seen, |s| s);
    *max = new;
    shrink
}

/// One head of one span, all `[len, D]`; `q` is scaled.
struct CpuInputs<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    o: &'a [f32],
    do_: &'a [f32],
    lse: &'a [f32],
}

struct CpuGradients {
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

fn backward_span(x: &CpuInputs<'_>, span: Span, kind: AttentionKind) -> CpuGradients {
    let (len, dim) = (span.q_len, kind.heads.head_dim);
    let zeros = || vec![0f32; len * dim];
    let mut g = CpuGradients { dq: zeros(), dk: zeros(), dv: zeros() };
    let delta: Vec<f32> =
        x.o.chunks_exact(dim)
            .zip(x.do_.chunks_exact(dim))
            .map(|(o, d)| simd::sum_of2(o, d, |o, d| o * d))
            .collect();
    let (mut p, mut dp) = (vec![0f32; TILE * TILE], vec![0f32; TILE * TILE]);
    for key in (0..len).step_by(TILE) {
        let m = TILE.min(len - key);
        let keys = key * dim..(key + m) * dim;
        let (k, v) =
            (MatView::new(&x.k[keys.clone()], m, dim, dim), MatView::new(&x.v[keys.clone()], m, dim, dim));
        // The last key of the tile is seen by no query past the window.
        let last_query = kind.window.map_or(len, |window| (key + m - 1 + window).min(len));
        for first in (key..last_query).step_by(TILE) {
            let n = TILE.min(last_query - first);
            let queries = first * dim..(first + n) * dim;
            let q = MatView::new(&x.q[queries.clone()], n, dim, dim);
            let do_ = MatView::new(&x.do_[queries.clone()], n, dim, dim);
            tile_product(&mut p, m, q, k.t());
            tile_product(&mut dp, m, do_, v.t());
            for i in 0..n {
                let (p, dp) = (&mut p[i * m..(i + 1) * m], &mut dp[i * m..(i + 1) * m]);
                let seen = seen_in_tile(span, first + i, key, m, kind);
                score_gradient(p, dp, seen, kind.softcap, x.lse[first + i], delta[first + i]);
            }
            let (p, ds) = (MatView::new(&p, n, m, m), MatView::new(&dp, n, m, m));
            accumulate(&mut g.dv[keys.clone()], dim, p.t(), do_, 1.0);
            accumulate(&mut g.dk[keys.clone()], dim, ds.t(), q, 1.0);
            accumulate(&mut g.dq[queries], dim, ds, k, kind.scale as f32);
        }
    }
    g
}

fn accumulate(data: &mut [f32], stride: usize, a: MatView<'_, f32>, b: MatView<'_, f32>, alpha: f32) {
    matmul(MatViewMut { data, stride, accumulate: true }, a, b, alpha, Threads::One);
}

/// Scores in `p` become probabilities, `dp` becomes the gradient of the (scaled, uncapped) scores.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2+fma"))]
fn score_gradient(
    p: &mut [f32],
    dp: &mut [f32],
    (from, to): (usize, usize),
    softcap: Option<f64>,
    lse: f32,
    delta: f32,
) {
    p[..from].fill(0.0);
    p[to..].fill(0.0);
    dp[..from].fill(0.0);
    dp[to..].fill(0.0);
    let (p, dp) = (&mut p[from..to], &mut dp[from..to]);
    match softcap {
        None => {
            for (p, dp) in p.iter_mut().zip(dp) {
                *p = simd::exp(*p - lse);
                *dp = *p * (*dp - delta);
            }
        }
        Some(cap) => {
            let cap = cap as f32;
            for (p, dp) in p.iter_mut().zip(dp) {
                let tanh = simd::tanh(*p / cap);
                *p = simd::exp(cap * tanh - lse);
                *dp = *p * (*dp - delta) * (1.0 - tanh * tanh);
            }
        }
    }
}
