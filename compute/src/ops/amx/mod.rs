//! Large `f32` products on the matrix unit of newer Intel processors (AMX), at the precision of `f32`.
//!
//! The unit multiplies bf16 and sums in f32. An f32 number is exactly the sum of three bf16 numbers, so `a · b` is nine
//! products of theirs; the three smallest, under 2⁻²⁴ of the result together, are left out, which leaves six and an
//! error like that of an f32 product's own rounding (the scheme of Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial
//! intelligence datatype for higher-precision computations", 2019). Six passes at sixteen times the rate of AVX-512 are faster. What is bf16 already
//! is one number: three passes beside f32, one beside bf16, with nothing left out. In a run in bf16 f32 operands are rounded,
//! and all is one pass ([`has_bf16`]).
//!
//! An element's products are added in one order, whatever the threads and the shape of their tasks are. Infinities, and
//! numbers above 3.396e38, come out as NaN, and parts below 2⁻¹²⁶ as zero. Whatever the unit does not pay for is the `gemm` crate's ([`super::gemm`]).

mod kernel;
mod pack;
#[cfg(test)]
mod tests;
mod tile;

use std::cell::Cell;
use std::ops::Range;

use rayon::prelude::*;

use super::mat_view::{
    GemmMatrix, GemmOperand, LowRankTerm, MatViewMut, OperandRole, Threads, is_f32, store,
};
use crate::runtime::cpu_tensor::{FloatElement, first, unwritten};
use crate::runtime::thread_pool;
use kernel::{Accumulator, PAIR};
pub(crate) use kernel::{Amx, Unit};
use pack::{AmxTile, PackSource, STEP, Strided};
pub(super) use tile::AmxOperand;

/// Elements of the right operand that are packed at a time, 2 bytes a part, about what the L2 cache holds; more where there
/// are more threads to pack them.
const PACKED: usize = 1 << 18;
/// Most inner elements that are added up in the unit, of operands in three parts; three times as many where both have one.
const INNER: usize = 768;
/// Most rows that are packed at a time, for all columns: 9 MiB.
const ROWS: usize = 2048;
/// Most rows of a task: more of them read the right tiles less often, until their own leave the L2 cache.
const TASK_ROWS: usize = 256;
/// Strips that are widened together: the blocks of a quantized matrix are two strips wide.
const STRIPS: usize = 2;
/// Sums that are held before they are rounded to a narrower type: 16 MiB, and those of [`ROWS`] columns at least, for the
/// left operand is packed for each such group.
const SUMS: usize = 1 << 22;
/// Rows that a task rounds.
const STORED: usize = 16;
/// Fewest multiplications that pay for packing.
const LEAST: usize = 1 << 22;

thread_local! {
    /// The packed operands of the last product on this thread: fresh memory would cost page faults.
    static LAST: Cell<[Vec<AmxTile>; 4]> = const { Cell::new([Vec::new(), Vec::new(), Vec::new(), Vec::new()]) };
    /// The part of an operand that this thread widened last.
    static WIDENED: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Whether a product of this shape is faster here. Where an operand or the result is bf16, thin products are, too: the
/// adapters'. They fill an eighth of a register's rows or more, and elsewhere what is bf16 is widened first.
pub(super) fn is_profitable(m: usize, n: usize, k: usize, has_bf16: bool) -> bool {
    if !has_bf16 {
        return m.min(n).min(k) >= PAIR && m * n * k >= LEAST;
    }
    let padded = [m, n, k].map(|size| size.next_multiple_of(PAIR));
    m.min(n).min(k) >= PAIR / 8 && padded.iter().product::<usize>() >= LEAST
}

/// How a product is made.
#[derive(Clone, Copy)]
struct Settings {
    amx: Amx,
    alpha: f32,
    threads: Threads,
    /// What is wider than bf16 is rounded to it.
    rounded: bool,
}

impl Settings {
    /// The parts of an operand's values.
    fn num_splits(&self, of: &impl GemmMatrix) -> usize {
        if self.rounded || of.is_bf16() { 1 } else { 3 }
    }

    /// Inner elements that are added up in the unit at a time: parts of one size, as a short last one would cost as much
    /// traffic of sums as the others.
    fn depth(&self, a: &impl GemmMatrix, b: &impl GemmMatrix) -> usize {
        let k = a.cols();
        let most = INNER * if self.num_splits(a) + self.num_splits(b) == 2 { 3 } else { 1 };
        k.div_ceil(k.div_ceil(most)).next_multiple_of(STEP)
    }
}

/// `dst = [dst +] alpha · (a · b + term)`, with `a: [m, k]` and `b: [k, n]`, none of which is empty. Where [`has_bf16`] says
/// so the operands are taken as bf16: what is f32 beside it, an adapter's matrices and gradients, is rounded, as PyTorch's
/// autocast does.
pub(super) fn product<D: FloatElement>(
    amx: Amx,
    dst: MatViewMut<'_, D>,
    a: impl GemmMatrix,
    b: impl GemmMatrix,
    term: Option<LowRankTerm<'_>>,
    alpha: f32,
    threads: Threads,
) {
    let (m, n, k) = (a.rows(), b.cols(), a.cols());
    let MatViewMut { data, stride, accumulate } = dst;
    let data = &mut data[..(m - 1) * stride + n];
    let settings = Settings { amx, alpha, threads, rounded: has_bf16::<D>(&a, &b) };
    if is_f32::<D>() || settings.depth(&a, &b) >= k {
        return sums(settings, MatViewMut { data, stride, accumulate }, a, b, term, 0..n);
    }
    // A narrower type is rounded once, when all is summed up.
    let width = (SUMS / m).max(ROWS).next_multiple_of(PAIR).min(n);
    let mut wide: Vec<f32> = unwritten(m * width);
    for first in (0..n).step_by(width) {
        let columns = first..(first + width).min(n);
        let width = columns.len();
        let dst = MatViewMut { data: &mut wide[..m * width], stride: width, accumulate: false };
        sums(settings, dst, a, b, term, columns.clone());
        each(threads, data, STORED * stride, |i, rows| {
            let wide = wide[i * STORED * width..].chunks_exact(width);
            for (row, values) in rows.chunks_mut(stride).zip(wide) {
                store(&mut row[columns.clone()], values, accumulate);
            }
        });
    }
}

/// Whether activations, or the result, are bf16: then all is taken as bf16. A bf16 weight beside f32 activations is no reason:
/// a run in f32 keeps frozen weights as they are stored, and computes in f32. The left operand is activations; in the
/// gradient of a weight, where it lies transposed, the right one is, too.
pub(super) fn has_bf16<D: FloatElement>(a: &impl GemmMatrix, b: &impl GemmMatrix) -> bool {
    !is_f32::<D>() || a.is_bf16() || (a.is_transposed() && b.is_bf16())
}

/// Columns `all` of `dst = [dst +] alpha · (a · b + term)`; `dst` begins with the first of them. A narrower type than f32 is
/// rounded after each [`Settings::depth`] inner elements.
fn sums<D: FloatElement>(
    settings: Settings,
    dst: MatViewMut<'_, D>,
    a: impl GemmMatrix,
    b: impl GemmMatrix,
    term: Option<LowRankTerm<'_>>,
    all: Range<usize>,
) {
    let Settings { amx, alpha, threads, .. } = settings;
    let (m, k) = (a.rows(), a.cols());
    let MatViewMut { data, stride, accumulate } = dst;
    let depth = settings.depth(&a, &b);
    // Strips for every thread, or few of them would pack.
    let strips = if threads == Threads::All { STRIPS * thread_pool::num_threads() } else { 1 };
    let width = (PACKED / depth).max(strips * PAIR).next_multiple_of(PAIR);
    let tasks = if threads == Threads::All { 4 * thread_pool::num_threads() } else { 1 };
    let [mut left, mut right, mut u, mut factor] = LAST.with(Cell::take);
    // The part that `right` holds: where there is but one, it serves all rows.
    let mut held = None;
    for (top, data) in (0..m).step_by(ROWS).zip(data.chunks_mut(ROWS * stride)) {
        let rows = top..(top + ROWS).min(m);
        let task_rows = rows.len().div_ceil(tasks).next_multiple_of(PAIR).min(TASK_ROWS);
        for from in (0..k).step_by(depth) {
            let inner = from..(from + depth).min(k);
            pack(settings, &mut left, &a, rows.clone(), inner.clone(), OperandRole::Left);
            let left = packed(settings, &left, &a, rows.len(), inner.len());
            // It is added with the last inner elements.
            let term = term.filter(|_| inner.end == k);
            if let Some(term) = term {
                pack(settings, &mut u, &term.u, rows.clone(), 0..term.r(), OperandRole::Left);
            }
            for first in all.clone().step_by(width) {
                let columns = first..(first + width).min(all.end);
                if held.replace((from, first)) != Some((from, first)) {
                    pack(settings, &mut right, &b, columns.clone(), inner.clone(), OperandRole::Right);
                }
                let right = packed(settings, &right, &b, columns.len(), inner.len());
                let term = term.map(|term| {
                    pack(
                        settings,
                        &mut factor,
                        &term.factor,
                        columns.clone(),
                        0..term.r(),
                        OperandRole::Right,
                    );
                    let u = packed(settings, &u, &term.u, rows.len(), term.r());
                    (u, packed(settings, &factor, &term.factor, columns.len(), term.r()))
                });
                let (accumulate, first) = (accumulate || from > 0, first - all.start);
                let part = BlockProduct { amx, left, right, term, first, stride, alpha, accumulate };
                each(threads, data, task_rows * stride, |i, data| {
                    part.rows(data, i * task_rows / PAIR, task_rows / PAIR);
                });
            }
        }
    }
    LAST.with(|last| last.set([left, right, u, factor]));
}

/// A packed operand.
#[derive(Clone, Copy)]
struct PackedOperand<'a> {
    tiles: &'a [AmxTile],
    /// Tiles of [`PAIR`] outer elements.
    strip: usize,
    /// Number of outer elements.
    outer: usize,
    num_splits: usize,
}

impl<'a> PackedOperand<'a> {
    fn strip_at(self, number: usize) -> &'a [AmxTile] {
        &self.tiles[number * self.strip..][..self.strip]
    }
}

/// What [`pack`] left in `memory`.
fn packed<'a>(
    settings: Settings,
    memory: &'a [AmxTile],
    from: &impl GemmMatrix,
    outer: usize,
    inner: usize,
) -> PackedOperand<'a> {
    let num_splits = settings.num_splits(from);
    let strip = inner.div_ceil(STEP) * 2 * num_splits;
    PackedOperand { tiles: &memory[..strip * outer.div_ceil(PAIR)], strip, outer, num_splits }
}

/// Packs a part of an operand into `memory`. Outer are the rows of the left operand and the columns of the right one.
fn pack(
    settings: Settings,
    memory: &mut Vec<AmxTile>,
    from: &impl GemmMatrix,
    outer: Range<usize>,
    inner: Range<usize>,
    role: OperandRole,
) {
    let Settings { amx, threads, .. } = settings;
    let strip = inner.len().div_ceil(STEP) * 2 * settings.num_splits(from);
    let len = strip * outer.len().div_ceil(PAIR);
    if memory.len() < len {
        memory.resize(len, AmxTile::ZERO);
    }
    let is_dense = from.dense().is_some() || from.dense_bf16().is_some();
    let strips = if is_dense { 1 } else { STRIPS };
    each(threads, &mut memory[..len], strips * strip, |i, tiles| {
        let start = outer.start + i * strips * PAIR;
        let outer = start..(start + strips * PAIR).min(outer.end);
        let mut widened = WIDENED.with(Cell::take);
        let source = source(settings, from, outer.clone(), inner.clone(), role, &mut widened);
        for (tiles, start) in tiles.chunks_exact_mut(strip).zip((0..outer.len()).step_by(PAIR)) {
            amx.pack(tiles, source, start..(start + PAIR).min(outer.len()), inner.len(), role);
        }
        WIDENED.with(|last| last.set(widened));
    });
}

/// A part of an operand: where it lies, or widened.
fn source<'a>(
    settings: Settings,
    from: &'a impl GemmMatrix,
    outer: Range<usize>,
    inner: Range<usize>,
    role: OperandRole,
    widened: &'a mut Vec<f32>,
) -> PackSource<'a> {
    let of_f32 = |values| match settings.num_splits(from) {
        1 => PackSource::Rounded(values),
        _ => PackSource::F32(values),
    };
    if let Some(dense) = from.dense() {
        return of_f32(dense.part(&outer, &inner, role));
    }
    if let Some(dense) = from.dense_bf16() {
        return PackSource::Bf16(dense.part(&outer, &inner, role));
    }
    // Lines of the memory go along the inner elements of a left matrix, and of a right one that is transposed.
    let along = (role == OperandRole::Left) != from.is_transposed();
    let (lines, elements) = if along { (&outer, &inner) } else { (&inner, &outer) };
    let values = first(widened, lines.len() * elements.len());
    for (line, values) in lines.clone().zip(values.chunks_exact_mut(elements.len())) {
        from.widen(line, elements.start, values);
    }
    let (outer, inner) = if along { (elements.len(), 1) } else { (1, elements.len()) };
    of_f32(Strided { data: &*values, outer, inner })
}

impl<'a, T> GemmOperand<'a, T> {
    /// Some outer and inner elements: rows and columns of a left operand, columns and rows of a right one.
    fn part(self, outer: &Range<usize>, inner: &Range<usize>, role: OperandRole) -> Strided<'a, T> {
        let (rows, columns) = self.strides;
        let (by_outer, by_inner) = if role == OperandRole::Left { (rows, columns) } else { (columns, rows) };
        let data = &self.data[outer.start * by_outer + inner.start * by_inner..];
        Strided { data, outer: by_outer, inner: by_inner }
    }
}

/// Calls `work` on each chunk of `data` with its number.
fn each<T: Send>(threads: Threads, data: &mut [T], chunk: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    match threads {
        Threads::All => data.par_chunks_mut(chunk).enumerate().for_each(|(i, part)| work(i, part)),
        Threads::One => data.chunks_mut(chunk).enumerate().for_each(|(i, part)| work(i, part)),
    }
}

/// A product of packed operands: a part of the inner elements, and some columns.
struct BlockProduct<'a> {
    amx: Amx,
    left: PackedOperand<'a>,
    right: PackedOperand<'a>,
    /// A second product for the same sums.
    term: Option<(PackedOperand<'a>, PackedOperand<'a>)>,
    /// The first column.
    first: usize,
    stride: usize,
    alpha: f32,
    accumulate: bool,
}

impl BlockProduct<'_> {
    /// Rows of `count` strips from `first` on; `dst` begins with them.
    fn rows<D: FloatElement>(&self, dst: &mut [D], first: usize, count: usize) {
        let unit = self.amx.open();
        let mut square = Accumulator::default();
        let (left, right) = (self.left, self.right);
        let num_splits = (left.num_splits, right.num_splits);
        for (column_strip, j) in right.tiles.chunks_exact(right.strip).enumerate() {
            let (column, width) =
                (self.first + column_strip * PAIR, PAIR.min(right.outer - column_strip * PAIR));
            let rows = left.tiles.chunks_exact(left.strip).enumerate().skip(first).take(count);
            for (strip, i) in rows {
                unit.multiply(i, j, num_splits, &mut square);
                if let Some((u, factor)) = self.term {
                    let splits = (u.num_splits, factor.num_splits);
                    unit.multiply_more(u.strip_at(strip), factor.strip_at(column_strip), splits, &mut square);
                }
                let height = PAIR.min(left.outer - strip * PAIR);
                let to = &mut dst[(strip - first) * PAIR * self.stride + column..];
                self.amx.add(to, self.stride, &square, (height, width), self.alpha, self.accumulate);
            }
        }
    }
}
