//! Flash attention on the CPU: square tiles, online softmax, exact skipping of tiles nobody sees.
//!
//! Queries, keys and values are laid out for products once, tile by tile. A task is one (span, head, block of query rows)
//! forward and one (span, head, run of key tiles) backward. In bf16, where instructions multiply it, the probabilities and the gradients of
//! the scores are rounded to bf16 for the products that follow, as FlashAttention does on GPUs. Results are summed in task order, so a
//! run repeats to the bit for any number of threads.

mod backward;

use std::ops::Range;

use rayon::prelude::*;

use super::{AttentionKind, AttentionOutput, Qkv, Span};
use crate::error::Result;
use crate::instruction_set::InstructionSet;
use crate::instruction_set::vectorized;
use crate::ops::gemm::MatView;
use crate::ops::mat_view::{OperandRole, is_f32};
use crate::ops::matmul::ColumnView;
use crate::ops::packed_gemm::{MicroKernel, OpenKernel, SQUARE, TileOperand};
use crate::ops::simd;
use crate::runtime::cpu_tensor::{FloatElement, PlainElement, dims2, read, tensor, with_elem};
pub(super) use backward::backward;

/// Rows and columns of a score tile.
const TILE: usize = 64;
/// Query rows of a forward task.
const TASK_ROWS: usize = 128;

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
            .flat_map(|s| (0..heads).flat_map(move |h| (0..spans[s].q_len).step_by(TASK_ROWS).map(move |i| (s, h, i))))
            .collect();
        let done: Vec<(Vec<f32>, Vec<f32>)> = tasks
            .par_iter()
            .map(|&(s, h, from)| {
                let keys = keys.of_head(s, h * kind.heads.num_kv_heads / heads);
                forward_rows(kernel, &q, h, keys, spans[s], from, kind)
            })
            .collect();
        // Zeros, for rows of no span.
        let width = heads * dim;
        let mut out = T::zeros(rows * width);
        out.par_chunks_mut(TASK_ROWS * width).enumerate().for_each(|(i, out)| {
            let here = i * TASK_ROWS..(i + 1) * TASK_ROWS;
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

/// What multiplies tiles: in bf16 operands are rounded to it where the kernel takes bf16.
fn kernel<T: FloatElement>() -> MicroKernel {
    MicroKernel::of(InstructionSet::in_use(), !is_f32::<T>())
}

/// `dim` with room for whole squares.
fn padded(dim: usize) -> usize {
    dim.next_multiple_of(SQUARE)
}

/// The heads of some columns of a matrix.
struct HeadRows<'a, T> {
    data: &'a [T],
    /// Elements from a row to the next.
    width: usize,
    dim: usize,
}

impl<'a, T: FloatElement> HeadRows<'a, T> {
    /// `data` are the elements of the tensor of `columns`.
    fn new(data: &'a [T], columns: ColumnView<'_>, dim: usize) -> Result<Self> {
        let (_, width) = dims2(columns.tensor)?;
        Ok(HeadRows { data: data.get(columns.start..).unwrap_or(&[]), width, dim })
    }

    /// Some rows of a head, `[rows, D]`.
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

/// What is made of each tile of each head of each span.
struct TilesBySpan<X> {
    tiles: Vec<X>,
    /// Where those of a span begin, and how many a head of it has.
    spans: Vec<(usize, usize)>,
}

impl<X: Send> TilesBySpan<X> {
    /// `len` says how many rows a span has; `make` is called with a span, a head and some of the rows.
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

    /// The tiles of a head in order.
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

/// The rows of a head's part, the first of which is row `first` of the batch, that are among `rows`, with their numbers.
/// A row of the part has `width` values.
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

fn narrow<T: FloatElement>(dst: &mut [T], src: &[f32]) {
    for (dst, src) in dst.iter_mut().zip(src) {
        *dst = T::nearest(*src);
    }
}

/// Query rows `from..from + TASK_ROWS` of one head: output `[rows, padded D]` and log-sum-exp `[rows]`.
fn forward_rows<T: FloatElement>(
    kernel: MicroKernel,
    q: &HeadRows<'_, T>,
    head: usize,
    keys: &[KeyTile],
    span: Span,
    from: usize,
    kind: AttentionKind,
) -> (Vec<f32>, Vec<f32>) {
    let width = padded(kind.heads.head_dim);
    let rows = TASK_ROWS.min(span.q_len - from);
    let mut out = vec![0f32; rows.next_multiple_of(SQUARE) * width];
    let mut lse = vec![0f32; rows];
    let mut tiles = ForwardTiles::new(kernel);
    for first in (0..rows).step_by(TILE) {
        let n = TILE.min(rows - first);
        let at = span.q_start + from + first;
        tiles.q.fill(&q.rows(head, at..at + n));
        let o = &mut out[first * width..];
        tiles.attend(o, &mut lse[first..first + n], keys, span, from + first, kind);
    }
    out.truncate(rows * width);
    (out, lse)
}

/// The memory of a forward task.
struct ForwardTiles {
    kernel: OpenKernel,
    q: TileOperand,
    p: TileOperand,
    scores: Vec<f32>,
}

impl ForwardTiles {
    fn new(kernel: MicroKernel) -> Self {
        ForwardTiles {
            kernel: kernel.open(),
            q: TileOperand::new(kernel, OperandRole::Left),
            p: TileOperand::new(kernel, OperandRole::Left),
            scores: vec![0f32; TILE * TILE],
        }
    }

    /// The output of the queries in `q`, the first of which is query `first` of the span; as many as `lse` is long.
    #[allow(clippy::too_many_arguments)]
    fn attend(
        &mut self,
        o: &mut [f32],
        lse: &mut [f32],
        keys: &[KeyTile],
        span: Span,
        first: usize,
        kind: AttentionKind,
    ) {
        let (n, dim) = (lse.len(), kind.heads.head_dim);
        let width = padded(dim);
        let mut max = [f32::NEG_INFINITY; TILE];
        let mut sum = [0f32; TILE];
        let (k_from, _) = span.visible(first, kind.window);
        let (_, k_to) = span.visible(first + n - 1, kind.window);
        for key in (k_from / TILE * TILE..k_to).step_by(TILE) {
            let m = TILE.min(k_to - key);
            let tile = &keys[key / TILE];
            self.kernel.multiply_operands(&self.q, &tile.k, &mut self.scores, TILE, false);
            // Keys of the tile past `m` are seen by no query: their columns become zero.
            let len = TILE.min(span.k_len - key);
            for i in 0..n {
                let row = &mut self.scores[i * TILE..][..len];
                let seen = seen_in_tile(span, first + i, key, m, kind);
                let score = (kind.scale as f32, kind.softcap);
                let shrink = online_softmax(row, seen, score, &mut max[i], &mut sum[i]);
                if shrink != 1.0 {
                    o[i * width..][..dim].iter_mut().for_each(|o| *o *= shrink);
                }
            }
            self.p.fill(&MatView::new(&self.scores, n, len, TILE));
            self.kernel.multiply_operands(&self.p, &tile.v, o, width, true);
        }
        for i in 0..n {
            let inverse = 1.0 / sum[i];
            o[i * width..][..dim].iter_mut().for_each(|o| *o *= inverse);
            lse[i] = max[i] + sum[i].ln();
        }
    }
}

/// The columns of the tile at `key` (width `m`) that query `i` sees.
fn seen_in_tile(span: Span, i: usize, key: usize, m: usize, kind: AttentionKind) -> (usize, usize) {
    let (from, to) = span.visible(i, kind.window);
    let from = from.clamp(key, key + m) - key;
    (from, (to.clamp(key, key + m) - key).max(from))
}

vectorized! {
    /// Turns a row of products of queries and keys into `exp(score − max)` with the running maximum, zeroes what is not seen,
    /// adds to the running sum, and returns the factor for what was accumulated before.
    fn online_softmax(
        row: &mut [f32],
        seen: (usize, usize),
        score: (f32, Option<f64>),
        max: &mut f32,
        sum: &mut f32,
    ) -> f32 {
        let ((from, to), (scale, softcap)) = (seen, score);
        row[..from].fill(0.0);
        row[to..].fill(0.0);
        let seen = &mut row[from..to];
        if seen.is_empty() {
            return 1.0;
        }
        match softcap {
            None => seen.iter_mut().for_each(|s| *s *= scale),
            Some(cap) => {
                let cap = cap as f32;
                seen.iter_mut().for_each(|s| *s = cap * simd::tanh(*s * scale / cap));
            }
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
}
