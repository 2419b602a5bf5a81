//! Large products of matrices: operands are packed into tiles, and a kernel for the processor's instructions multiplies
//! those (the scheme of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008).
//!
//! Where activations are bf16, all is taken as bf16 by kernels that multiply it (AMX, AVX-512 BF16): what is f32 beside
//! it, an adapter's matrices and gradients, is rounded, as PyTorch's autocast does ([`has_bf16`]). Other kernels widen bf16 to f32.
//!
//! On the matrix unit (AMX) products of f32 have the precision of f32. An f32 number is exactly the sum of three bf16 numbers,
//! so `a · b` is nine products of theirs; the three smallest, under 2⁻²⁴ of the result together, are left out, which leaves six and an
//! error like that of an f32 product's own rounding (the scheme of Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial
//! intelligence datatype for higher-precision computations", 2019). Six passes at sixteen times the rate of AVX-512 are faster. What is bf16 already
//! is one number: three passes beside f32. Infinities, and numbers above 3.396e38, come out as NaN, and parts below 2⁻¹²⁶ as zero.
//!
//! An element's products are added in one order, whatever the threads and the shape of their tasks are. Whatever packing
//! does not pay for is the `gemm` crate's ([`super::gemm`]).

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "x86_64")]
mod bf16_tiles;
mod epilogue;
mod f32_kernel;
mod f32_tiles;
mod micro_kernel;
mod packing;
#[cfg(test)]
mod tests;
mod tile_operand;

use std::cell::Cell;
use std::ops::Range;

use half::bf16;
use rayon::prelude::*;

use super::mat_view::{GemmMatrix, LowRankTerm, MatViewMut, OperandRole, Threads, is_f32, store};
use crate::runtime::cpu_tensor::{FloatElement, unwritten};
use crate::runtime::thread_pool;
use epilogue::Accumulator;
pub(crate) use micro_kernel::{MicroKernel, OpenKernel, SQUARE};
use packing::{PackSource, PackedOperand, STEP, Tile};
pub(super) use tile_operand::TileOperand;

/// Bytes of the right operand that are packed at a time, about what the L2 cache holds; more where there are more threads to
/// pack them, and for operands in three parts.
const PACKED: usize = 1 << 19;
/// Most inner elements that are added up before the sums are stored, of operands in three parts; three times as many where
/// both have one.
const INNER: usize = 768;
/// Most rows that are packed at a time, for all columns: 9 MiB of bf16.
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
    static LAST: Cell<[Vec<Tile>; 4]> = const { Cell::new([Vec::new(), Vec::new(), Vec::new(), Vec::new()]) };
    /// The part of an operand that this thread widened last.
    static WIDENED: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}
/// Whether a product of this shape is faster here. With a kernel that takes bf16 thin products are, too: the adapters'.
/// They fill an eighth of a register's rows or more, and elsewhere what is bf16 is widened first.
pub(super) fn is_profitable(kernel: MicroKernel, m: usize, n: usize, k: usize) -> bool {
    let least = if kernel.is_bf16() { SQUARE / 8 } else { SQUARE };
    let padded = [m, n, k].map(|size| size.next_multiple_of(SQUARE));
    m.min(n).min(k) >= least && padded.iter().product::<usize>() >= LEAST
}

/// How a product is made.
#[derive(Clone, Copy)]
struct Settings {
    kernel: MicroKernel,
    alpha: f32,
    threads: Threads,
}

impl Settings {
    /// Inner elements that are added up at a time: parts of one size, as a short last one would cost as much traffic of
    /// sums as the others.
    fn depth(&self, a: &impl GemmMatrix, b: &impl GemmMatrix) -> usize {
        let k = a.cols();
        let formats = [self.kernel.format(a, OperandRole::Left), self.kernel.format(b, OperandRole::Right)];
        let most = if formats == [packing::PackedFormat::Bf16; 2] { 3 * INNER } else { INNER };
        k.div_ceil(k.div_ceil(most)).next_multiple_of(STEP)
    }
}

/// `dst = [dst +] alpha · (a · b + term)`, with `a: [m, k]` and `b: [k, n]`, none of which is empty.
pub(super) fn product<D: FloatElement>(
    kernel: MicroKernel,
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
    let settings = Settings { kernel, alpha, threads };
    if is_f32::<D>() || settings.depth(&a, &b) >= k {
        return sums(settings, MatViewMut { data, stride, accumulate }, a, b, term, 0..n);
    }
    // A narrower type is rounded once, when all is summed up.
    let width = (SUMS / m).max(ROWS).next_multiple_of(SQUARE).min(n);
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
    let Settings { kernel, alpha, threads } = settings;
    let (m, k) = (a.rows(), a.cols());
    let MatViewMut { data, stride, accumulate } = dst;
    let depth = settings.depth(&a, &b);
    // Strips for every thread, or few of them would pack.
    let strips = if threads == Threads::All { STRIPS * thread_pool::num_threads() } else { 1 };
    let element_size = if kernel.takes_f32() { size_of::<f32>() } else { size_of::<bf16>() };
    let width = (PACKED / element_size / depth).max(strips * SQUARE).next_multiple_of(SQUARE);
    let tasks = if threads == Threads::All { 4 * thread_pool::num_threads() } else { 1 };
    let [mut left, mut right, mut u, mut factor] = LAST.with(Cell::take);
    // The part that `right` holds: where there is but one, it serves all rows.
    let mut held = None;
    for (top, data) in (0..m).step_by(ROWS).zip(data.chunks_mut(ROWS * stride)) {
        let rows = top..(top + ROWS).min(m);
        let task_rows = rows.len().div_ceil(tasks).next_multiple_of(SQUARE).min(TASK_ROWS);
        for from in (0..k).step_by(depth) {
            let inner = from..(from + depth).min(k);
            pack(settings, &mut left, &a, rows.clone(), inner.clone(), OperandRole::Left);
            let left = packed(settings, &left, &a, (rows.len(), inner.len()), OperandRole::Left);
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
                let right = packed(settings, &right, &b, (columns.len(), inner.len()), OperandRole::Right);
                let term = term.map(|term| {
                    pack(
                        settings,
                        &mut factor,
                        &term.factor,
                        columns.clone(),
                        0..term.r(),
                        OperandRole::Right,
                    );
                    let u = packed(settings, &u, &term.u, (rows.len(), term.r()), OperandRole::Left);
                    (
                        u,
                        packed(
                            settings,
                            &factor,
                            &term.factor,
                            (columns.len(), term.r()),
                            OperandRole::Right,
                        ),
                    )
                });
                let (accumulate, first) = (accumulate || from > 0, first - all.start);
                let part = BlockProduct { kernel, left, right, term, first, stride, alpha, accumulate };
                each(threads, data, task_rows * stride, |i, data| {
                    part.rows(data, i * task_rows / SQUARE, task_rows / SQUARE);
                });
            }
        }
    }
    LAST.with(|last| last.set([left, right, u, factor]));
}

/// What [`pack`] left in `memory`.
fn packed<'a>(
    settings: Settings,
    memory: &'a [Tile],
    from: &impl GemmMatrix,
    (outer, inner): (usize, usize),
    role: OperandRole,
) -> PackedOperand<'a> {
    PackedOperand::new(memory, settings.kernel.format(from, role), outer, inner)
}

/// Packs a part of an operand into `memory`.
fn pack(
    settings: Settings,
    memory: &mut Vec<Tile>,
    from: &impl GemmMatrix,
    outer: Range<usize>,
    inner: Range<usize>,
    role: OperandRole,
) {
    let Settings { kernel, threads, .. } = settings;
    let format = kernel.format(from, role);
    let strip = format.strip_len(inner.len());
    let len = strip * outer.len().div_ceil(SQUARE);
    if memory.len() < len {
        memory.resize(len, Tile::ZERO);
    }
    let is_dense = from.dense().is_some() || from.dense_bf16().is_some();
    let strips = if is_dense { 1 } else { STRIPS };
    each(threads, &mut memory[..len], strips * strip, |i, tiles| {
        let start = outer.start + i * strips * SQUARE;
        let outer = start..(start + strips * SQUARE).min(outer.end);
        let mut widened = WIDENED.with(Cell::take);
        let source = PackSource::of(from, outer.clone(), inner.clone(), role, &mut widened);
        for (tiles, start) in tiles.chunks_exact_mut(strip).zip((0..outer.len()).step_by(SQUARE)) {
            let here = start..(start + SQUARE).min(outer.len());
            packing::pack(kernel, tiles, format, source, here, inner.len(), role);
        }
        WIDENED.with(|last| last.set(widened));
    });
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
    kernel: MicroKernel,
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
        let kernel = self.kernel.open();
        let mut square = Accumulator::default();
        for (number, right) in self.right.strips() {
            let column = self.first + number * SQUARE;
            let width = self.right.strip_outer(number);
            for (strip, left) in self.left.strips().skip(first).take(count) {
                kernel.multiply(left, right, square.values_mut(), SQUARE, false);
                if let Some((u, factor)) = self.term {
                    let (u, factor) = (u.strip_at(strip), factor.strip_at(number));
                    kernel.multiply(u, factor, square.values_mut(), SQUARE, true);
                }
                let height = self.left.strip_outer(strip);
                let to = &mut dst[(strip - first) * SQUARE * self.stride + column..];
                epilogue::add(
                    self.kernel.set(),
                    to,
                    self.stride,
                    &square,
                    (height, width),
                    self.alpha,
                    self.accumulate,
                );
            }
        }
    }
}
