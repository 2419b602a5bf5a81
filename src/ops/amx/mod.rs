//! Large `f32` products on the matrix unit of newer Intel processors (AMX), at the precision of `f32`.
//!
//! The unit multiplies bf16 and sums in f32. An f32 number is exactly the sum of three bf16 numbers, so `a · b` is nine
//! products of theirs; the three smallest, under 2⁻²⁴ of the result together, are left out, which leaves six and an
//! error like that of an f32 product's own rounding (the scheme of Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial
//! intelligence datatype for higher-precision computations", 2019). Six passes at sixteen times the rate of AVX-512 are faster. What is bf16 already
//! is one number: three passes beside f32, one beside bf16, with nothing left out.
//!
//! An element's products are added in one order, whatever the threads and the shape of their tasks are. Infinities come out as
//! NaN, and parts below 2⁻¹²⁶ as zero. Whatever the unit does not pay for is the `gemm` crate's ([`super::gemm`]).

mod kernel;
mod pack;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::ops::Range;

use rayon::prelude::*;

use super::threads;
pub(crate) use kernel::Amx;
use kernel::{PAIR, Square};
use pack::{Role, STEP, Tile};

/// An operand: element (outer, inner) is `data[outer * stride_outer + inner * stride_inner]`, where one stride is 1.
/// Outer are the rows of the left operand and the columns of the right one.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) data: &'a [f32],
    pub(super) outer: usize,
    pub(super) inner: usize,
    /// Every value is a bf16 number.
    pub(super) is_bf16: bool,
}

/// Elements of the right operand that are packed at a time, 6 bytes each: about what the L2 cache holds.
const PACKED: usize = 1 << 18;
/// Most inner elements that are added up in the unit.
const INNER: usize = 768;
/// Most rows that are packed at a time, for all columns: 9 MiB.
const ROWS: usize = 2048;
/// Most rows of a task: more of them read the right tiles less often, until their own leave the L2 cache.
const TASK_ROWS: usize = 256;
/// Fewest multiplications that pay for packing.
const LEAST: usize = 1 << 22;

thread_local! {
    /// The packed operands of the last product on this thread: fresh memory would cost page faults.
    static LAST: Cell<[Vec<Tile>; 2]> = const { Cell::new([Vec::new(), Vec::new()]) };
}

/// Whether a product of this shape is faster here.
pub(super) fn pays(m: usize, n: usize, k: usize) -> bool {
    m.min(n).min(k) >= PAIR && m * n * k >= LEAST
}

/// `dst = [dst +] alpha · a · b` with `dst: [m, n]` at `dst[i * stride + j]`; on all threads of the pool if `parallel`.
#[allow(clippy::too_many_arguments)]
pub(super) fn product(
    amx: Amx,
    dst: &mut [f32],
    stride: usize,
    accumulate: bool,
    (m, n, k): (usize, usize, usize),
    a: Source<'_>,
    b: Source<'_>,
    alpha: f32,
    parallel: bool,
) {
    let dst = &mut dst[..(m - 1) * stride + n];
    // Parts of one size: a short last one would cost as much traffic of sums as the others.
    let depth = k.div_ceil(k.div_ceil(INNER)).next_multiple_of(STEP);
    let width = (PACKED / depth).next_multiple_of(PAIR).min(n.next_multiple_of(PAIR));
    let [mut left, mut right] = LAST.with(Cell::take);
    for (rows, dst) in
        (0..m).step_by(ROWS).map(|top| top..(top + ROWS).min(m)).zip(dst.chunks_mut(ROWS * stride))
    {
        let tasks = if parallel { 2 * threads::count() } else { 1 };
        let task_rows = rows.len().div_ceil(tasks).next_multiple_of(PAIR).min(TASK_ROWS);
        for from in (0..k).step_by(depth) {
            let inner = from..(from + depth).min(k);
            let left = packed(amx, &mut left, a, rows.clone(), inner.clone(), Role::Left, parallel);
            for first in (0..n).step_by(width) {
                let columns = first..(first + width).min(n);
                let right = packed(amx, &mut right, b, columns.clone(), inner.clone(), Role::Right, parallel);
                let part =
                    Part { amx, left, right, columns, stride, alpha, accumulate: accumulate || from > 0 };
                each(parallel, dst, task_rows * stride, |i, dst| {
                    part.rows(dst, i * task_rows / PAIR, task_rows / PAIR)
                });
            }
        }
    }
    LAST.with(|last| last.set([left, right]));
}

/// A packed operand.
#[derive(Clone, Copy)]
struct Packed<'a> {
    tiles: &'a [Tile],
    /// Tiles of [`PAIR`] outer elements.
    strip: usize,
    /// Outer elements.
    outer: usize,
    planes: usize,
}

/// Packs a part of an operand into `memory`.
fn packed<'a>(
    amx: Amx,
    memory: &'a mut Vec<Tile>,
    from: Source<'_>,
    outer: Range<usize>,
    inner: Range<usize>,
    role: Role,
    parallel: bool,
) -> Packed<'a> {
    let planes = if from.is_bf16 { 1 } else { 3 };
    let strip = inner.len().div_ceil(STEP) * 2 * planes;
    let len = strip * outer.len().div_ceil(PAIR);
    if memory.len() < len {
        memory.resize(len, Tile::ZERO);
    }
    let tiles = &mut memory[..len];
    each(parallel, tiles, strip, |i, tiles| {
        let start = outer.start + i * PAIR;
        amx.pack(tiles, from, start..(start + PAIR).min(outer.end), inner.clone(), role);
    });
    Packed { tiles, strip, outer: outer.len(), planes }
}

/// Calls `work` on each chunk of `data` with its number.
fn each<T: Send>(parallel: bool, data: &mut [T], chunk: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    if parallel {
        data.par_chunks_mut(chunk).enumerate().for_each(|(i, part)| work(i, part));
    } else {
        data.chunks_mut(chunk).enumerate().for_each(|(i, part)| work(i, part));
    }
}

/// A product of packed operands: a part of the inner elements, and some columns.
struct Part<'a> {
    amx: Amx,
    left: Packed<'a>,
    right: Packed<'a>,
    columns: Range<usize>,
    stride: usize,
    alpha: f32,
    accumulate: bool,
}

impl Part<'_> {
    /// Rows of `count` strips from `first` on; `dst` begins with them.
    fn rows(&self, dst: &mut [f32], first: usize, count: usize) {
        let unit = self.amx.open();
        let mut square = Square::default();
        let (left, right) = (self.left, self.right);
        let planes = (left.planes, right.planes);
        for (j, column) in right.tiles.chunks_exact(right.strip).zip(self.columns.clone().step_by(PAIR)) {
            let width = PAIR.min(self.columns.end - column);
            let rows = left.tiles.chunks_exact(left.strip).enumerate().skip(first).take(count);
            for (strip, i) in rows {
                unit.multiply(i, j, planes, &mut square);
                let height = PAIR.min(left.outer - strip * PAIR);
                let to = &mut dst[(strip - first) * PAIR * self.stride + column..];
                self.amx.add(to, self.stride, &square, (height, width), self.alpha, self.accumulate);
            }
        }
    }
}
