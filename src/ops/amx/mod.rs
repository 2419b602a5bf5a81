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

impl Source<'_> {
    /// bf16 numbers that a value is the sum of.
    fn planes(&self) -> usize {
        if self.is_bf16 { 1 } else { 3 }
    }
}

/// Elements of the right operand that are packed at a time, 6 bytes each: about what the L2 cache holds.
const PACKED: usize = 1 << 18;
/// Most inner elements that are added up in the unit.
const INNER: usize = 768;
/// Most rows of a task: more of them read the packed operand less often, until their own tiles leave the L2 cache.
const ROWS: usize = 256;
/// Fewest multiplications that pay for packing.
const LEAST: usize = 1 << 22;

thread_local! {
    /// Packed operands of the last product and of the last task on this thread: fresh memory would cost page faults.
    static LAST: [Cell<Vec<Tile>>; 2] = const { [Cell::new(Vec::new()), Cell::new(Vec::new())] };
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
    let rows = if parallel { m.div_ceil(2 * threads::count()) } else { m };
    let rows = rows.next_multiple_of(PAIR).min(ROWS);
    let mut packed = LAST.with(|last| last[0].take());
    for first in (0..n).step_by(width) {
        let columns = width.min(n - first);
        for from in (0..k).step_by(depth) {
            let part = Part { inner: from..(from + depth).min(k), columns: first..first + columns };
            let strip = part.inner.len().div_ceil(STEP) * 2 * b.planes();
            let right = grown(&mut packed, strip * columns.div_ceil(PAIR));
            each(parallel, right, strip, |i, tiles| {
                let outer = first + i * PAIR..(first + (i + 1) * PAIR).min(n);
                amx.pack(tiles, b, outer, part.inner.clone(), Role::Right);
            });
            let task = Task { amx, part, a, right, strip, planes: (a.planes(), b.planes()), alpha, stride };
            each(parallel, dst, rows * stride, |i, dst| {
                task.run(dst, i * rows..((i + 1) * rows).min(m), accumulate || from > 0);
            });
        }
    }
    LAST.with(|last| last[0].set(packed));
}

/// Calls `work` on each chunk of `data` with its number.
fn each<T: Send>(parallel: bool, data: &mut [T], chunk: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    if parallel {
        data.par_chunks_mut(chunk).enumerate().for_each(|(i, part)| work(i, part));
    } else {
        data.chunks_mut(chunk).enumerate().for_each(|(i, part)| work(i, part));
    }
}

/// The first `len` tiles, whatever they hold.
fn grown(tiles: &mut Vec<Tile>, len: usize) -> &mut [Tile] {
    if tiles.len() < len {
        tiles.resize(len, Tile::ZERO);
    }
    &mut tiles[..len]
}

/// The part of the right operand that is packed.
struct Part {
    inner: std::ops::Range<usize>,
    columns: std::ops::Range<usize>,
}

/// What the tasks of a product share.
struct Task<'a> {
    amx: Amx,
    part: Part,
    a: Source<'a>,
    /// Strips of [`PAIR`] columns.
    right: &'a [Tile],
    /// Tiles of a strip.
    strip: usize,
    planes: (usize, usize),
    alpha: f32,
    stride: usize,
}

impl Task<'_> {
    /// Rows `rows` of the product, which `dst` begins with.
    fn run(&self, dst: &mut [f32], rows: std::ops::Range<usize>, accumulate: bool) {
        let mut packed = LAST.with(|last| last[1].take());
        let unit = self.amx.open();
        let mut square = Square::default();
        let pair = self.strip / self.planes.1 * self.planes.0;
        let left = grown(&mut packed, pair * rows.len().div_ceil(PAIR));
        for (tiles, top) in left.chunks_exact_mut(pair).zip(rows.clone().step_by(PAIR)) {
            let outer = top..(top + PAIR).min(rows.end);
            self.amx.pack(tiles, self.a, outer, self.part.inner.clone(), Role::Left);
        }
        let columns = self.part.columns.clone().step_by(PAIR);
        for (right, column) in self.right.chunks_exact(self.strip).zip(columns) {
            let width = PAIR.min(self.part.columns.end - column);
            for (left, row) in left.chunks_exact(pair).zip((0..rows.len()).step_by(PAIR)) {
                unit.multiply(left, right, self.planes, &mut square);
                let height = PAIR.min(rows.len() - row);
                let to = &mut dst[row * self.stride + column..];
                self.amx.add(to, self.stride, &square, (height, width), self.alpha, accumulate);
            }
        }
        drop(unit);
        LAST.with(|last| last[1].set(packed));
    }
}
