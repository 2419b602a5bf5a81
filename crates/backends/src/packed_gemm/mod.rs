//! Large matrix products: operands are packed into tiles, and a kernel for the processor's
//! instructions multiplies them (the scheme of Goto and van de Geijn, "Anatomy of high-performance
//! matrix multiplication", 2008). AVX-512 BF16 requires only pairs of neighbours in a row of the
//! left operand, so it multiplies rows of bf16 in memory without packing.
//!
//! If activations are bf16, kernels that multiply bf16 (AMX, AVX-512 BF16) take all operands as
//! bf16: f32 operands, such as an adapter's matrices and gradients, are rounded, as in PyTorch's
//! autocast (`has_bf16`). Other kernels widen bf16 to f32.
//!
//! On the matrix unit (AMX) products of f32 have the precision of f32. An f32 number is exactly the
//! sum of three bf16 numbers, so `a · b` is nine products of those. The three smallest, together
//! under 2⁻²⁴ of the result, are skipped. The remaining six have an error like that of an f32
//! product's own rounding (the scheme of Henry, Tang and Heinecke, "Leveraging the bfloat16
//! artificial intelligence datatype for higher-precision computations", 2019). Six passes at
//! sixteen times the rate of AVX-512 are faster. A bf16 operand is one part: three passes beside
//! f32. Infinities, and numbers above 3.396e38, become NaN, and parts below 2⁻¹²⁶ become zero.
//!
//! An element's products are added in one order, for any threads and task shapes. The `gemm` crate
//! ([`crate::gemm`]) computes products too small for packing.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "x86_64")]
mod bf16_tiles;
mod destination;
mod f32_kernel;
mod f32_tiles;
mod micro_kernel;
mod packing;
mod peak;
mod register_sums;
mod task;
#[cfg(test)]
mod tests;
mod tile;
mod tile_operand;

use std::cell::Cell;
use std::ops::Range;

use rayon::prelude::*;

use crate::mat_view::{GemmMatrix, LowRankTerm, MatViewMut, OperandRole, Threads, is_f32};
use crate::runtime::cpu_tensor::FloatElement;
use crate::runtime::thread_pool;
use destination::{Accumulator, Destination};
pub use micro_kernel::{MicroKernel, OpenKernel};
pub use peak::peak_flops;
use task::{SharedOperand, Side};
pub use tile::{SQUARE, STEP};
pub use tile_operand::TileOperand;

/// Maximum outer elements of the shared operand packed at a time; few in tests, so that small
/// products have several parts.
const SHARED: usize = if cfg!(test) { 96 } else { 2048 };
/// Bytes of a strip with the maximum number of inner elements per pass.
const DEPTH: usize = 144 << 10;
/// Bytes of sums held while inner elements are summed in several parts, or the sums of one strip
/// per thread if those are more.
const SUMS: usize = if cfg!(test) { 1 << 16 } else { 16 << 20 };
/// Bytes of the strips of a task, which stay in the L2 cache: a task reads each strip of the shared
/// operand from beyond that cache once for all its own strips.
const TASK: usize = 4 * DEPTH;
/// Tasks per thread, if enough strips exist: the last task delays the others by at most an eighth
/// of the time.
const TASKS_PER_THREAD: usize = 8;
/// Minimum number of multiplications for which packing is profitable.
const LEAST: usize = 1 << 22;

thread_local! {
    /// The held sums of the last product on this thread: fresh memory would cost page faults.
    static LAST_SUMS: Cell<Vec<Accumulator>> = const { Cell::new(Vec::new()) };
}

/// Returns true if a product of this shape is faster here than by the `gemm` crate. That includes
/// thin products, an adapter's, for kernels that skip padding, but not for f32 with AVX-512, where
/// the crate takes 6 % less time. The crate selects its instructions itself, so it is used as
/// little as possible with a restricted instruction set (`FINETUNE_CPU`).
pub(super) fn is_profitable(kernel: MicroKernel, m: usize, n: usize, k: usize) -> bool {
    let sizes = [m, n, k];
    let (least, unit) = if kernel.takes_thin() { (SQUARE / 8, SQUARE) } else { (SQUARE, 1) };
    let multiplications: usize = sizes.map(|size| size.next_multiple_of(unit)).iter().product();
    sizes.iter().all(|size| *size >= least) && multiplications >= LEAST
}

/// Returns true if activations or the result are bf16, in which case all operands are taken as
/// bf16. A bf16 weight beside f32 activations does not count: a run in f32 stores frozen weights in
/// their original dtype, and computes in f32. Activations are the left operand, and also the right
/// one in the gradient of a weight, whose left operand is transposed.
pub(super) fn has_bf16<D: FloatElement>(a: &impl GemmMatrix, b: &impl GemmMatrix) -> bool {
    !is_f32::<D>() || a.is_bf16() || (a.is_transposed() && b.is_bf16())
}

/// Computes `dst = [dst +] alpha · (a · b + term)`, with `a: [m, k]` and `b: [k, n]`, none of which
/// is empty.
pub(super) fn product<D: FloatElement>(
    kernel: MicroKernel,
    dst: MatViewMut<'_, D>,
    a: impl GemmMatrix,
    b: impl GemmMatrix,
    term: Option<LowRankTerm<'_>>,
    alpha: f32,
    threads: Threads,
) {
    let (m, n) = (a.rows(), b.cols());
    let dst = Destination::new(dst, (m, n), alpha);
    let left = Side { kernel, role: OperandRole::Left, matrix: a, term: term.map(|term| term.u) };
    let right = Side { kernel, role: OperandRole::Right, matrix: b, term: term.map(|term| term.factor) };
    if m <= n { run(&dst, &left, &right, threads) } else { run(&dst, &right, &left, threads) }
}

/// Packs the shared side once for all tasks, unless its rows are multiplied in memory; each task
/// packs some strips of the other side and multiplies them with the whole shared side. If the inner
/// elements exceed one pass, this repeats for each part of them.
fn run<D: FloatElement, S: GemmMatrix, O: GemmMatrix>(
    dst: &Destination<'_, D>,
    shared: &Side<'_, S>,
    own: &Side<'_, O>,
    threads: Threads,
) {
    let k = own.inner();
    let most = DEPTH / own.step_bytes().max(shared.step_bytes()) * STEP;
    // Parts of equal size.
    let depth = k.div_ceil(k.div_ceil(most)).next_multiple_of(STEP);
    let threads_here = if threads == Threads::All { thread_pool::num_threads() } else { 1 };
    // Number of strips whose sums are held at a time, and of strips per task.
    let strips = own.outer().div_ceil(SQUARE);
    let height = shared.outer().min(SHARED).div_ceil(SQUARE);
    let held = SUMS / (height * size_of::<Accumulator>());
    let group = if depth >= k { strips } else { strips.min(held.max(threads_here)) };
    let of_task =
        (group / (TASKS_PER_THREAD * threads_here)).min(TASK / (depth / STEP * own.step_bytes())).max(1);
    // Blocks of a quantized matrix are two strips wide.
    let is_dense = own.matrix.dense().is_some() || own.matrix.dense_bf16().is_some();
    let task_len = SQUARE * if is_dense { of_task } else { of_task.next_multiple_of(2) };
    for start in (0..shared.outer()).step_by(SHARED) {
        let shared_outer = start..(start + SHARED).min(shared.outer());
        if depth < k {
            let group_len = (group * SQUARE).next_multiple_of(task_len);
            in_parts(dst, shared, own, shared_outer, (depth, group_len, task_len), threads);
            continue;
        }
        let strips = shared_outer.len().div_ceil(SQUARE);
        let packed = SharedOperand::pack(shared, shared_outer, 0..k, threads);
        let tasks = own.outer().div_ceil(task_len);
        // Otherwise idle threads take a part of the shared strips, and pack the same strips of the
        // other side.
        let parts = threads_here.div_ceil(tasks).min(strips);
        each(threads, tasks * parts, |number| {
            let (task, part) = (number / parts, number % parts);
            let outer = task * task_len..((task + 1) * task_len).min(own.outer());
            let strips = part * strips / parts..(part + 1) * strips / parts;
            packed.add_part(dst, own, outer, strips, &mut []);
        });
        packed.keep_memory();
    }
}

/// Multiplies like [`run`] for some outer elements of the shared operand, `depth` inner elements at
/// a time. Sums are held for `group_len` outer elements of the tasks' operand, `task_len` per task.
fn in_parts<D: FloatElement, S: GemmMatrix, O: GemmMatrix>(
    dst: &Destination<'_, D>,
    shared: &Side<'_, S>,
    own: &Side<'_, O>,
    shared_outer: Range<usize>,
    (depth, group_len, task_len): (usize, usize, usize),
    threads: Threads,
) {
    let height = shared_outer.len().div_ceil(SQUARE);
    let mut memory = LAST_SUMS.take();
    for first in (0..own.outer()).step_by(group_len) {
        let end = (first + group_len).min(own.outer());
        let len = height * (end - first).div_ceil(SQUARE);
        if memory.len() < len {
            memory.resize(len, Accumulator::default());
        }
        for from in (0..own.inner()).step_by(depth) {
            let inner = from..(from + depth).min(own.inner());
            let packed = SharedOperand::pack(shared, shared_outer.clone(), inner, threads);
            each_chunk(threads, &mut memory[..len], height * task_len / SQUARE, |number, sums| {
                let begin = first + number * task_len;
                packed.add_part(dst, own, begin..(begin + task_len).min(end), 0..height, sums);
            });
            packed.keep_memory();
        }
    }
    LAST_SUMS.set(memory);
}

/// Calls `work` with each number below `count`.
fn each(threads: Threads, count: usize, work: impl Fn(usize) + Sync) {
    match threads {
        Threads::All => (0..count).into_par_iter().with_max_len(1).for_each(&work),
        Threads::One => (0..count).for_each(work),
    }
}

/// Calls `work` with the number and the contents of each chunk of `data`.
fn each_chunk<T: Send>(
    threads: Threads,
    data: &mut [T],
    chunk: usize,
    work: impl Fn(usize, &mut [T]) + Sync,
) {
    match threads {
        Threads::All => data.par_chunks_mut(chunk).enumerate().for_each(|(i, part)| work(i, part)),
        Threads::One => data.chunks_mut(chunk).enumerate().for_each(|(i, part)| work(i, part)),
    }
}
