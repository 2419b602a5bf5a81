//! The backward: recomputes probabilities from the rows' log-sum-exp, with five products per pair
//! of tiles.

use std::ops::Range;

use candle_core::Tensor;
use rayon::prelude::*;

use super::super::{AttentionKind, AttentionOutput, Qkv, Span};
use super::{HeadRows, TILE, TilePair, TilesBySpan, kernel, narrow, padded, rows_in};
use crate::backends::gemm::MatView;
use crate::backends::mat_view::OperandRole;
use crate::backends::packed_gemm::{MicroKernel, OpenKernel, SQUARE, STEP, TileOperand};
use crate::backends::simd::{self, LANES};
use crate::error::Result;
use crate::instruction_set::vectorized;
use crate::ops::matmul::ColumnView;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, unwritten, with_elem};

/// Maximum number of tasks per head: each holds query gradients until all are summed.
const TASKS: usize = 4;
/// Rows whose gradients are summed together, sized for a cache.
const SUMMED_ROWS: usize = 32;

/// Returns the runs of keys of each task of a row of `len` tokens. A task takes one run from the
/// front and an equal one from the back, since most queries see the first keys and few the last.
/// The second run is empty if no tiles remain.
fn task_runs(len: usize) -> impl Iterator<Item = [Range<usize>; 2]> {
    let tiles = len.div_ceil(TILE);
    let tasks = tiles.div_ceil(2).min(TASKS);
    let run = move |i: usize| {
        (i * tiles / (2 * tasks) * TILE).min(len)..((i + 1) * tiles / (2 * tasks) * TILE).min(len)
    };
    (0..tasks).map(move |i| [run(i), run(2 * tasks - 1 - i)])
}

pub(in super::super) fn backward(
    qkv: Qkv<'_>,
    attended: &AttentionOutput,
    dout: &Tensor,
    spans: &[Span],
    kind: AttentionKind,
) -> Result<Tensor> {
    let (rows, _) = dims2(dout)?;
    let (heads, kv_heads, dim) = (kind.heads.num_heads, kind.heads.num_kv_heads, kind.heads.head_dim);
    with_elem!(dout.dtype(), T => {
        let (q, k, v) = (read::<T>(qkv.q.tensor)?, read::<T>(qkv.k.tensor)?, read::<T>(qkv.v.tensor)?);
        let (o, do_) = (read::<T>(&attended.out)?, read::<T>(dout)?);
        let q = HeadRows::new(&q, qkv.q, dim)?;
        let (k, v) = (HeadRows::new(&k, qkv.k, dim)?, HeadRows::new(&v, qkv.v, dim)?);
        let o = HeadRows::new(&o, ColumnView::all(&attended.out), dim)?;
        let do_ = HeadRows::new(&do_, ColumnView::all(dout), dim)?;
        let kernel = kernel::<T>();
        let keys = TilesBySpan::of(spans, kv_heads, |span| span.q_len, |span, head, tile| {
            TransposedKeyTile::new(kernel, &k.rows(head, within(span, &tile)), &v.rows(head, within(span, &tile)))
        });
        let queries = TilesBySpan::of(spans, heads, |span| span.q_len, |span, head, tile| {
            QueryTile::new(kernel, &q, &o, &do_, head, within(span, &tile))
        });
        let lse = read::<f32>(&attended.lse)?;
        let lse: &[f32] = &lse;
        let tasks = tasks(spans, heads);
        let done: Vec<HeadGradients> = tasks
            .par_iter()
            .map(|(s, h, runs)| {
                let span = spans[*s];
                let head = HeadTiles {
                    keys: keys.of_head(*s, h * kv_heads / heads),
                    queries: queries.of_head(*s, *h),
                    lse: &lse[h * rows + span.q_start..][..span.q_len],
                };
                head.gradients(kernel, span, runs, kind)
            })
            .collect();
        let width = kind.heads.qkv_width();
        let mut out = unwritten::<T>(rows * width);
        out.par_chunks_mut(SUMMED_ROWS * width).enumerate().for_each(|(i, out)| {
            let here = i * SUMMED_ROWS..(i + 1) * SUMMED_ROWS;
            let mut sums = vec![0f32; out.len()];
            for ((s, h, runs), g) in tasks.iter().zip(&done) {
                let kv = h * kv_heads / heads;
                let (k, v) = ((heads + kv) * dim, (heads + kv_heads + kv) * dim);
                let of_keys = g.dk.iter().zip(&g.dv).zip(runs);
                let of_keys = of_keys.flat_map(|((dk, dv), run)| [(k, dk, run.start), (v, dv, run.start)]);
                for (column, part, from) in of_keys.chain([(h * dim, &g.dq, runs[0].start)]) {
                    for (n, row) in rows_in(&here, part, padded(dim), spans[*s].q_start + from) {
                        add(&mut sums[(n - here.start) * width + column..][..dim], row);
                    }
                }
            }
            narrow(out, &sums);
        });
        tensor(out, (rows, width))
    })
}

/// Returns span, head and runs of keys of each task.
fn tasks(spans: &[Span], heads: usize) -> Vec<(usize, usize, [Range<usize>; 2])> {
    let of_head = |s: usize, h: usize| task_runs(spans[s].q_len).map(move |runs| (s, h, runs));
    (0..spans.len()).flat_map(|s| (0..heads).flat_map(move |h| of_head(s, h))).collect()
}

/// Converts rows of a span to rows of the batch.
fn within(span: &Span, rows: &Range<usize>) -> Range<usize> {
    span.q_start + rows.start..span.q_start + rows.end
}

/// Keys and values of a tile: right operands of `Q Kᵀ`, `dO Vᵀ` and `dS K`.
struct TransposedKeyTile {
    k_transposed: TileOperand,
    v_transposed: TileOperand,
    k: TileOperand,
}

impl TransposedKeyTile {
    fn new<T: FloatElement>(kernel: MicroKernel, k: &MatView<'_, T>, v: &MatView<'_, T>) -> Self {
        TransposedKeyTile {
            k_transposed: TileOperand::of(kernel, &k.t(), OperandRole::Right),
            v_transposed: TileOperand::of(kernel, &v.t(), OperandRole::Right),
            k: TileOperand::of(kernel, k, OperandRole::Right),
        }
    }
}

/// Queries of a tile and the gradients of their outputs: left operands of `Q Kᵀ`, `dO Vᵀ`, `Qᵀ dS`
/// and `dOᵀ P`.
struct QueryTile {
    q: TileOperand,
    q_transposed: TileOperand,
    dout: TileOperand,
    dout_transposed: TileOperand,
    /// `Σ o · do` of each query.
    delta: Vec<f32>,
}

impl QueryTile {
    fn new<T: FloatElement>(
        kernel: MicroKernel,
        q: &HeadRows<'_, T>,
        o: &HeadRows<'_, T>,
        dout: &HeadRows<'_, T>,
        head: usize,
        rows: Range<usize>,
    ) -> Self {
        let delta = |row: usize| delta(o.row(head, row), dout.row(head, row));
        let (q, dout) = (q.rows(head, rows.clone()), dout.rows(head, rows.clone()));
        QueryTile {
            q: TileOperand::of(kernel, &q, OperandRole::Left),
            q_transposed: TileOperand::of(kernel, &q.t(), OperandRole::Left),
            dout: TileOperand::of(kernel, &dout, OperandRole::Left),
            dout_transposed: TileOperand::of(kernel, &dout.t(), OperandRole::Left),
            delta: rows.map(delta).collect(),
        }
    }
}

vectorized! {
    fn delta<T: FloatElement>(o: &[T], dout: &[T]) -> f32 {
        simd::sum_of2(o, dout, |o, d| o.widen() * d.widen())
    }
}

vectorized! {
    fn add(sums: &mut [f32], row: &[f32]) {
        for (sum, x) in sums.iter_mut().zip(row) {
            *sum += x;
        }
    }
}

/// Gradients that a task adds for one head, `[rows, padded D]` each. `dq` covers the queries from
/// the first key of the task's runs to the last query that sees one of them; `dk` and `dv` cover
/// the keys of each run.
struct HeadGradients {
    dq: Vec<f32>,
    dk: [Vec<f32>; 2],
    dv: [Vec<f32>; 2],
}

/// One head of one span.
struct HeadTiles<'a> {
    keys: &'a [TransposedKeyTile],
    queries: &'a [QueryTile],
    lse: &'a [f32],
}

/// The scratch memory of a task.
struct BackwardTiles {
    kernel: OpenKernel,
    /// Probabilities and score gradients of a pair of tiles.
    p: Vec<f32>,
    ds: Vec<f32>,
    /// `p` and `ds` packed as right operands of `dOᵀ P` and `Qᵀ dS`, and `ds` as left operand of
    /// `dS K`.
    p_right: TileOperand,
    ds_right: TileOperand,
    ds_left: TileOperand,
    /// `dKᵀ` and `dVᵀ` of a tile: `[padded D, TILE]`.
    dk: Vec<f32>,
    dv: Vec<f32>,
}

impl BackwardTiles {
    /// Allocates for heads of `width` values and tiles of at most `rows` queries.
    fn new(kernel: MicroKernel, width: usize, rows: usize) -> Self {
        // Products write the visible entries, and the score gradient writes the masked ones.
        let scores = || unwritten::<f32>(rows.min(TILE).next_multiple_of(SQUARE) * TILE);
        BackwardTiles {
            kernel: kernel.open(),
            p: scores(),
            ds: scores(),
            p_right: TileOperand::new(kernel, OperandRole::Right),
            ds_right: TileOperand::new(kernel, OperandRole::Right),
            ds_left: TileOperand::new(kernel, OperandRole::Left),
            // Zeroed for each tile of keys.
            dk: unwritten(width * TILE),
            dv: unwritten(width * TILE),
        }
    }
}

impl HeadTiles<'_> {
    /// Returns the gradients contributed by the keys of a task.
    fn gradients(
        &self,
        kernel: MicroKernel,
        span: Span,
        runs: &[Range<usize>; 2],
        kind: AttentionKind,
    ) -> HeadGradients {
        let (len, width) = (span.q_len, padded(kind.heads.head_dim));
        let from = runs[0].start;
        // No query past the window sees a key.
        let last_query = |keys_to: usize| kind.window.map_or(len, |window| (keys_to - 1 + window).min(len));
        let num_queries = last_query(runs[0].end.max(runs[1].end)) - from;
        let mut dq = vec![0f32; num_queries.next_multiple_of(TILE) * width];
        let of_keys = |run: &Range<usize>| unwritten::<f32>(run.len() * width);
        let (mut dk, mut dv) = (runs.each_ref().map(of_keys), runs.each_ref().map(of_keys));
        let mut tiles = BackwardTiles::new(kernel, width, len);
        for (run, (dk, dv)) in runs.iter().zip(dk.iter_mut().zip(&mut dv)) {
            for key in run.clone().step_by(TILE) {
                let m = TILE.min(len - key);
                tiles.dk.fill(0.0);
                tiles.dv.fill(0.0);
                for first in (key..last_query(key + m)).step_by(TILE) {
                    let dq = &mut dq[(first - from) * width..];
                    self.add_pair(&mut tiles, span, (first, key), kind, dq);
                }
                let here = (key - run.start) * width..(key - run.start + m) * width;
                transpose(&mut dk[here.clone()], width, &tiles.dk, kind.scale as f32);
                transpose(&mut dv[here], width, &tiles.dv, 1.0);
            }
        }
        dq.truncate(num_queries * width);
        let scale = kind.scale as f32;
        dq.iter_mut().for_each(|x| *x *= scale);
        HeadGradients { dq, dk, dv }
    }

    /// Adds the gradients of the query tile at `first` and the key tile at `key`; `dq` begins with
    /// those queries.
    fn add_pair(
        &self,
        tiles: &mut BackwardTiles,
        span: Span,
        (first, key): (usize, usize),
        kind: AttentionKind,
        dq: &mut [f32],
    ) {
        let (queries, keys) = (&self.queries[first / TILE], &self.keys[key / TILE]);
        let pair = TilePair::new(span, kind, (first, key));
        let (n, m, strips) = (pair.n, pair.m, pair.strips());
        let BackwardTiles { kernel, p, ds, p_right, ds_right, ds_left, dk, dv } = tiles;
        let seen = |i: usize, j: usize| strips.all_or_none(i, j, kind.heads.head_dim.div_ceil(STEP));
        kernel.multiply_operands((&queries.q, &keys.k_transposed), p, TILE, false, seen);
        kernel.multiply_operands((&queries.dout, &keys.v_transposed), ds, TILE, false, seen);
        let rows = QueryScalars { lse: &self.lse[first..first + n], delta: &queries.delta };
        score_gradient(p, ds, &pair.of_rows()[..n], (kind.scale as f32, kind.softcap), rows);
        let (p, ds) = (MatView::new(p, n, m, TILE), MatView::new(ds, n, m, TILE));
        p_right.fill(&p);
        ds_right.fill(&ds);
        ds_left.fill(&ds);
        let who_see = |_: usize, j: usize| strips.queries(j);
        kernel.multiply_operands((&queries.dout_transposed, p_right), dv, TILE, true, who_see);
        kernel.multiply_operands((&queries.q_transposed, ds_right), dk, TILE, true, who_see);
        let width = padded(kind.heads.head_dim);
        kernel.multiply_operands((ds_left, &keys.k), dq, width, true, |i, _| strips.keys(i));
    }
}

/// Per query of a tile: the log-sum-exp of its scores, and `Σ o · do`.
#[derive(Clone, Copy)]
struct QueryScalars<'a> {
    lse: &'a [f32],
    delta: &'a [f32],
}

/// Writes column j of `src: [.., TILE]`, times `scale`, to row j of `dst`.
fn transpose(dst: &mut [f32], width: usize, src: &[f32], scale: f32) {
    for (j, row) in dst.chunks_exact_mut(width).enumerate() {
        for (x, from) in row.iter_mut().zip(src.chunks_exact(TILE)) {
            *x = scale * from[j];
        }
    }
}

vectorized! {
    /// Turns rows of [`TILE`] scores in `p` into probabilities, and `dp` into the gradient of the
    /// (scaled, uncapped) scores. Masked entries become zero in both.
    fn score_gradient(
        p: &mut [f32],
        dp: &mut [f32],
        seen: &[(usize, usize)],
        score: (f32, Option<f64>),
        queries: QueryScalars<'_>,
    ) {
        let (scale, softcap) = score;
        let rows = p.chunks_exact_mut(TILE).zip(dp.chunks_exact_mut(TILE));
        let scalars = queries.lse.iter().zip(queries.delta);
        for (((p, dp), &(from, to)), (&lse, &delta)) in rows.zip(seen).zip(scalars) {
            // Compute whole vectors, then zero the masked entries of the first and the last one.
            let (start, end) = (from / LANES * LANES, to.next_multiple_of(LANES));
            let (p_seen, dp_seen) = (&mut p[start..end], &mut dp[start..end]);
            match softcap {
                None => {
                    simd::map_lanes2(p_seen, dp_seen, |score, dp| {
                        let p = simd::exp(score * scale - lse);
                        (p, p * (dp - delta))
                    });
                }
                Some(cap) => {
                    let cap = cap as f32;
                    simd::map_lanes2(p_seen, dp_seen, |score, dp| {
                        let tanh = simd::tanh(score * scale / cap);
                        let p = simd::exp(cap * tanh - lse);
                        (p, p * (dp - delta) * (1.0 - tanh * tanh))
                    });
                }
            }
            for row in [p, dp] {
                row[..from].fill(0.0);
                row[to..].fill(0.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every key is in one run of one task, tasks begin at their first run, and causal tasks have
    /// the same number of tile pairs.
    #[test]
    fn tasks_are_alike() {
        for len in [1, 127, 128, 129, 300, 512, 1024, 2000, 8192] {
            let mut keys = vec![0; len];
            let mut pairs = Vec::new();
            for runs in task_runs(len) {
                assert!(runs[1].is_empty() || runs[0].end <= runs[1].start, "{runs:?}");
                let seen_by = |key: usize| (len - key).div_ceil(TILE);
                pairs.push(runs.iter().flat_map(|run| run.clone().step_by(TILE)).map(seen_by).sum::<usize>());
                runs.into_iter().flatten().for_each(|key| keys[key] += 1);
            }
            assert!(keys.iter().all(|times| *times == 1), "{len}: {keys:?}");
            let (least, most) = (pairs.iter().min().unwrap(), pairs.iter().max().unwrap());
            assert!(len.div_ceil(TILE) % 2 == 1 || least == most, "{len}: {pairs:?}");
        }
    }
}
