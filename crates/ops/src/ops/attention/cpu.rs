//! Flash attention on the CPU: square tiles, online softmax, exact skipping of masked tiles.
//!
//! Queries, keys and values are packed for products once, tile by tile. A forward task is one
//! (span, head, block of query rows), a backward task one (span, head, run of key tiles). If the
//! instruction set multiplies bf16, probabilities and score gradients are rounded to bf16 for the
//! products that follow, as FlashAttention does on GPUs. Results are summed in task order, so a run
//! is bit-identical for any number of threads.

mod backward;
mod seen;

use std::ops::Range;

use rayon::prelude::*;

use super::{AttentionKind, AttentionOutput, Qkv, Span};
use crate::backends::gemm::MatView;
use crate::backends::mat_view::{OperandRole, is_f32};
use crate::backends::packed_gemm::{MicroKernel, SQUARE, STEP, TileOperand};
use crate::backends::simd::{self, LANES};
use crate::error::Result;
use crate::instruction_set::InstructionSet;
use crate::instruction_set::vectorized;
use crate::ops::matmul::ColumnView;
use crate::runtime::cpu_tensor::{FloatElement, PlainElement, dims2, read, tensor, with_elem};
pub(super) use backward::backward;
use seen::TilePair;

/// Rows and columns of a score tile, and query rows of a forward task. Fully masked squares of a
/// tile are not multiplied.
const TILE: usize = 128;

pub(super) fn forward(qkv: Qkv<'_>, spans: &[Span], kind: AttentionKind) -> Result<AttentionOutput> {
    let (rows, _) = dims2(qkv.q.tensor)?;
    let (heads, dim) = (kind.heads.num_heads, kind.heads.head_dim);
    with_elem!(qkv.q.tensor.dtype(), T => {
        let (q, k, v) = (read::<T>(qkv.q.tensor)?, read::<T>(qkv.k.tensor)?, read::<T>(qkv.v.tensor)?);
        let q = HeadRows::new(&q, qkv.q, dim)?;
        let (k, v) = (HeadRows::new(&k, qkv.k, dim)?, HeadRows::new(&v, qkv.v, dim)?);
        let kernel = kernel::<T>();
        let keys = TilesBySpan::of(spans, kind.heads.num_kv_heads, |span| span.k_len, |span, head, tile| {
            let at = span.k_start + tile.start..span.k_start + tile.end;
            KeyTile {
                k: TileOperand::of(kernel, &k.rows(head, at.clone()).t(), OperandRole::Right),
                v: TileOperand::of(kernel, &v.rows(head, at), OperandRole::Right),
            }
        });
        let tasks: Vec<(usize, usize, usize)> = (0..spans.len())
            .flat_map(|s| (0..heads).flat_map(move |h| (0..spans[s].q_len).step_by(TILE).map(move |i| (s, h, i))))
            .collect();
        let done: Vec<(Vec<f32>, Vec<f32>)> = tasks
            .par_iter()
            .map(|&(s, h, from)| {
                let keys = keys.of_head(s, h * kind.heads.num_kv_heads / heads);
                forward_rows(kernel, &q, h, keys, spans[s], from, kind)
            })
            .collect();
        // Zeros for rows outside every span.
        let width = heads * dim;
        let mut out = T::zeros(rows * width);
        out.par_chunks_mut(TILE * width).enumerate().for_each(|(i, out)| {
            let here = i * TILE..(i + 1) * TILE;
            for ((s, h, from), (o, _)) in tasks.iter().zip(&done) {
                for (n, o) in rows_in(&here, o, padded(dim), spans[*s].q_start + from) {
                    narrow(&mut out[(n - here.start) * width + h * dim..][..dim], &o[..dim]);
                }
            }
        });
        let mut lse = vec![0f32; heads * rows];
        for ((s, h, from), (_, l)) in tasks.iter().zip(&done) {
            let at = h * rows + spans[*s].q_start + from;
            lse[at..at + l.len()].copy_from_slice(l);
        }
        Ok(AttentionOutput { out: tensor(out, (rows, width))?, lse: tensor(lse, (heads, rows))? })
    })
}

/// Returns the kernel that multiplies tiles: for bf16 inputs, one that may round operands to bf16.
fn kernel<T: FloatElement>() -> MicroKernel {
    MicroKernel::of(InstructionSet::in_use(), !is_f32::<T>())
}

/// Returns `dim` rounded up to whole squares.
fn padded(dim: usize) -> usize {
    dim.next_multiple_of(SQUARE)
}

/// Column range of a matrix, split into heads.
struct HeadRows<'a, T> {
    data: &'a [T],
    /// Elements from one row to the next.
    width: usize,
    dim: usize,
}

impl<'a, T: FloatElement> HeadRows<'a, T> {
    /// Returns the heads of `columns`; `data` holds the elements of its tensor.
    fn new(data: &'a [T], columns: ColumnView<'_>, dim: usize) -> Result<Self> {
        let (_, width) = dims2(columns.tensor)?;
        Ok(HeadRows { data: data.get(columns.start..).unwrap_or(&[]), width, dim })
    }

    /// Returns some rows of a head, `[rows, D]`.
    fn rows(&self, head: usize, rows: Range<usize>) -> MatView<'a, T> {
        MatView::new(
            &self.data[rows.start * self.width + head * self.dim..],
            rows.len(),
            self.dim,
            self.width,
        )
    }

    fn row(&self, head: usize, row: usize) -> &'a [T] {
        &self.data[row * self.width + head * self.dim..][..self.dim]
    }
}

/// One value per tile of each head of each span.
struct TilesBySpan<X> {
    tiles: Vec<X>,
    /// The first tile of each span, and the tiles per head.
    spans: Vec<(usize, usize)>,
}

impl<X: Send> TilesBySpan<X> {
    /// Calls `make` with a span, a head and a range of rows, for every tile; `len` returns a span's
    /// number of rows.
    fn of(
        spans: &[Span],
        heads: usize,
        len: impl Fn(&Span) -> usize,
        make: impl Fn(&Span, usize, Range<usize>) -> X + Sync,
    ) -> Self {
        let mut all = Vec::new();
        let mut begins = Vec::with_capacity(spans.len());
        for span in spans {
            let len = len(span);
            begins.push((all.len(), len.div_ceil(TILE)));
            for head in 0..heads {
                all.extend((0..len).step_by(TILE).map(|at| (span, head, at..(at + TILE).min(len))));
            }
        }
        let tiles = all.into_par_iter().map(|(span, head, rows)| make(span, head, rows)).collect();
        TilesBySpan { tiles, spans: begins }
    }

    /// Returns the tiles of a head in order.
    fn of_head(&self, span: usize, head: usize) -> &[X] {
        let (begin, count) = self.spans[span];
        &self.tiles[begin + head * count..][..count]
    }
}

/// Keys and values of a tile: right operands of `Q Kᵀ` and `P V`.
struct KeyTile {
    k: TileOperand,
    v: TileOperand,
}

/// Iterates over the rows of `part` that are in `rows`, with their row numbers in the batch. `part`
/// begins at row `first` of the batch and has `width` values per row.
fn rows_in<'a>(
    rows: &Range<usize>,
    part: &'a [f32],
    width: usize,
    first: usize,
) -> impl Iterator<Item = (usize, &'a [f32])> {
    let from = rows.start.max(first);
    let to = rows.end.min(first + part.len() / width).max(from);
    (from..to).zip(part.chunks_exact(width).skip(from - first))
}

vectorized! {
    fn narrow<T: FloatElement>(dst: &mut [T], src: &[f32]) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = T::nearest(*src);
        }
    }
}

/// Computes query rows `from..from + TILE` of one head: output `[rows, padded D]` and log-sum-exp
/// `[rows]`.
fn forward_rows<T: FloatElement>(
    kernel: MicroKernel,
    q: &HeadRows<'_, T>,
    head: usize,
    keys: &[KeyTile],
    span: Span,
    from: usize,
    kind: AttentionKind,
) -> (Vec<f32>, Vec<f32>) {
    let (dim, width) = (kind.heads.head_dim, padded(kind.heads.head_dim));
    let rows = TILE.min(span.q_len - from);
    let mut out = vec![0f32; rows.next_multiple_of(SQUARE) * width];
    let at = span.q_start + from;
    let q = TileOperand::of(kernel, &q.rows(head, at..at + rows), OperandRole::Left);
    let mut p = TileOperand::new(kernel, OperandRole::Left);
    let mut scores = vec![0f32; rows.next_multiple_of(SQUARE) * TILE];
    let mut running = [Running { max: f32::NEG_INFINITY, sum: 0.0 }; TILE];
    let kernel = kernel.open();
    let (k_from, _) = span.visible(from, kind.window);
    let (_, k_to) = span.visible(from + rows - 1, kind.window);
    for key in (k_from / TILE * TILE..k_to).step_by(TILE) {
        let pair = TilePair::new(span, kind, (from, key));
        let (tile, strips) = (&keys[key / TILE], pair.strips());
        kernel.multiply_operands((&q, &tile.k), &mut scores, TILE, false, |i, j| {
            strips.all_or_none(i, j, dim.div_ceil(STEP))
        });
        let score = (kind.scale as f32, kind.softcap);
        online_softmax(&mut scores, &pair.of_rows()[..rows], score, &mut running, &mut out, width);
        p.fill(&MatView::new(&scores, rows, pair.m, TILE));
        kernel.multiply_operands((&p, &tile.v), &mut out, width, true, |i, _| strips.keys(i));
    }
    out.truncate(rows * width);
    divide_by_sums(&mut out, width, &running);
    let lse = running.iter().take(rows).map(|row| row.max + row.sum.ln()).collect();
    (out, lse)
}

/// The largest score of a row so far, and the sum of `exp(score − max)`.
#[derive(Clone, Copy)]
struct Running {
    max: f32,
    sum: f32,
}

vectorized! {
    /// Turns rows of [`TILE`] scores into `exp(score − max)` with the running maximum of each row,
    /// and sets masked entries to zero. Adds to the running sum, and rescales the row of `out`,
    /// `width` values wide, to the new maximum.
    fn online_softmax(
        scores: &mut [f32],
        seen: &[(usize, usize)],
        score: (f32, Option<f64>),
        running: &mut [Running],
        out: &mut [f32],
        width: usize,
    ) {
        let (scale, softcap) = score;
        let rows = scores.chunks_exact_mut(TILE).zip(out.chunks_exact_mut(width));
        for (((row, out), &(from, to)), running) in rows.zip(seen).zip(running) {
            // Whole vectors: masked entries of the first and the last vector count as −∞, whose
            // exponential is zero.
            let (start, end) = (from / LANES * LANES, to.next_multiple_of(LANES));
            row[..start].fill(0.0);
            row[end..].fill(0.0);
            if from == to {
                continue;
            }
            let (row, unseen) = (&mut row[start..end], [0..from - start, to - start..end - start]);
            match softcap {
                None => row.iter_mut().for_each(|s| *s *= scale),
                Some(cap) => {
                    let cap = cap as f32;
                    simd::map_lanes(row, |s| cap * simd::tanh(s * scale / cap));
                }
            }
            unseen.into_iter().for_each(|unseen| row[unseen].fill(f32::NEG_INFINITY));
            // The maximum ignores a NaN here; its exponential is NaN, and so is the sum.
            let new = simd::largest(row).max(running.max);
            simd::map_lanes(row, |s| simd::exp(s - new));
            let shrink = if running.max == f32::NEG_INFINITY { 1.0 } else { simd::exp(running.max - new) };
            *running = Running { max: new, sum: running.sum * shrink + simd::sum_of(row, |s| s) };
            if shrink != 1.0 {
                out.iter_mut().for_each(|o| *o *= shrink);
            }
        }
    }
}

vectorized! {
    /// Divides each row of `out` by its running sum.
    fn divide_by_sums(out: &mut [f32], width: usize, rows: &[Running]) {
        for (out, row) in out.chunks_exact_mut(width).zip(rows) {
            let inverse = 1.0 / row.sum;
            out.iter_mut().for_each(|o| *o *= inverse);
        }
    }
}
