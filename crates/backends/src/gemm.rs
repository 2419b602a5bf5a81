//! Matrix products on CPU slices: `dst = [dst +] alpha · a · b` for any strides, with `f32` sums
//! for all operand dtypes.
//!
//! Large products are packed ([`super::packed_gemm`]); small ones use the `gemm` crate. For the
//! crate, operands that are not `f32` are widened: `a` (activations) whole, `b` (often a weight)
//! panel by panel, so that a half-precision or quantized weight never exists in full as `f32`.

use std::cell::Cell;

use gemm::Parallelism;

use super::mat_view::{GemmMatrix, GemmOperand, as_f32_mut, is_f32, store};
pub use super::mat_view::{LowRankTerm, MatView, MatViewMut, QuantMat, Threads};
use super::packed_gemm::{self, MicroKernel};
use crate::instruction_set::InstructionSet;
use crate::runtime::cpu_tensor::{FloatElement, unwritten};

/// Maximum `f32` values of a widened panel of `b`: 4 MiB, which stays in the L2 and L3 caches until
/// it is multiplied.
const PANEL: usize = 1 << 20;

thread_local! {
    /// The panel of the last product on this thread: fresh memory would cost a page fault every 4
    /// KiB, more than the widening itself.
    static LAST_PANEL: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Computes `dst = [dst +] alpha · a · b`, with `a: [m, k]` and `b: [k, n]` of any types.
pub fn matmul<D: FloatElement, A: FloatElement, B: GemmMatrix>(
    dst: MatViewMut<'_, D>,
    a: MatView<'_, A>,
    b: B,
    alpha: f32,
    threads: Threads,
) {
    matmul_as::<D, _, _, _>(dst, a, b, alpha, threads);
}

/// Computes the same as [`matmul`] for a result of type `R`: if `R` is bf16, operands may be
/// rounded to bf16.
pub fn matmul_as<R: FloatElement, D: FloatElement, A: FloatElement, B: GemmMatrix>(
    dst: MatViewMut<'_, D>,
    a: MatView<'_, A>,
    b: B,
    alpha: f32,
    threads: Threads,
) {
    let (m, n, k) = (a.rows(), b.cols(), a.cols());
    assert_eq!(k, b.rows(), "inner dimensions of a product");
    if m == 0 || n == 0 {
        return;
    }
    let end = (m - 1) * dst.stride + n;
    assert!(dst.stride >= n && end <= dst.data.len(), "product outside its destination");
    if let Some(kernel) = packed_kernel::<R>(&a, &b) {
        return packed_gemm::product(kernel, dst, a, b, None, alpha, threads);
    }
    let mut held = Vec::new();
    let a = match a.dense() {
        Some(dense) => dense,
        None => {
            let strides = a.widen_columns(0, k, &mut held);
            GemmOperand { data: &held, strides }
        }
    };
    let dense = b.dense();
    // A destination that is not f32 needs a panel of its own.
    let deepest = if is_f32::<D>() { k } else { k.max(m) };
    let step = if dense.is_some() && is_f32::<D>() { n } else { panel_columns(n, deepest) };
    let mut widened = if dense.is_some() { Vec::new() } else { LAST_PANEL.take() };
    for start in (0..n).step_by(step.max(1)) {
        let len = step.min(n - start);
        let b = match dense {
            Some(all) => {
                GemmOperand { data: &all.data[(start * all.strides.1).min(all.data.len())..], ..all }
            }
            None => {
                let strides = b.widen_columns(start, len, &mut widened);
                GemmOperand { data: &widened, strides }
            }
        };
        if let Some(out) = as_f32_mut(&mut *dst.data) {
            raw(&mut out[start..], dst.stride, dst.accumulate, (m, len, k), a, b, alpha, threads);
        } else {
            let mut out: Vec<f32> = unwritten(m * len);
            raw(&mut out, len, false, (m, len, k), a, b, alpha, threads);
            for (row, values) in out.chunks_exact(len).enumerate() {
                let at = row * dst.stride + start;
                store(&mut dst.data[at..at + len], values, dst.accumulate);
            }
        }
    }
    if dense.is_none() {
        LAST_PANEL.set(widened);
    }
}

/// Returns the kernel of a packed product, if packing is profitable for this one.
fn packed_kernel<D: FloatElement>(a: &impl GemmMatrix, b: &impl GemmMatrix) -> Option<MicroKernel> {
    let kernel = MicroKernel::of(InstructionSet::in_use(), packed_gemm::has_bf16::<D>(a, b));
    packed_gemm::is_profitable(kernel, a.rows(), b.cols(), a.cols()).then_some(kernel)
}

/// Computes `dst = [dst +] a · b + term`: in one pass over `dst` if the product is packed, else in
/// two.
pub fn matmul_plus<D: FloatElement, A: FloatElement, B: GemmMatrix>(
    dst: MatViewMut<'_, D>,
    a: MatView<'_, A>,
    b: B,
    term: LowRankTerm<'_>,
    threads: Threads,
) {
    let MatViewMut { data, stride, accumulate } = dst;
    let (m, n) = (a.rows(), b.cols());
    assert_eq!(
        (term.u.rows(), term.factor.cols(), term.u.cols()),
        (m, n, term.factor.rows()),
        "shape of a term"
    );
    if m * n * term.r() > 0
        && let Some(kernel) = packed_kernel::<D>(&a, &b)
    {
        assert_eq!(a.cols(), b.rows(), "inner dimensions of a product");
        assert!(stride >= n && (m - 1) * stride + n <= data.len(), "product outside its destination");
        let dst = MatViewMut { data, stride, accumulate };
        return packed_gemm::product(kernel, dst, a, b, Some(term), 1.0, threads);
    }
    matmul(MatViewMut { data: &mut *data, stride, accumulate }, a, b, 1.0, threads);
    matmul(MatViewMut { data, stride, accumulate: true }, term.u, term.factor, 1.0, threads);
}

/// Returns the columns of one panel of `n`, each at most `deepest` elements deep. All panels have
/// the same width, since a narrow last one would be slow.
fn panel_columns(n: usize, deepest: usize) -> usize {
    let most = PANEL / deepest.max(1);
    let panels = n.div_ceil(most.max(64)).max(1);
    n.div_ceil(panels).next_multiple_of(64).min(n.max(16))
}

/// Calls the `gemm` crate; this is the only call.
#[allow(clippy::too_many_arguments)]
fn raw(
    dst: &mut [f32],
    stride: usize,
    accumulate: bool,
    (m, n, k): (usize, usize, usize),
    a: GemmOperand<'_, f32>,
    b: GemmOperand<'_, f32>,
    alpha: f32,
    threads: Threads,
) {
    assert!(k == 0 || (a.holds(m, k) && b.holds(k, n)), "operand too short");
    assert!((m - 1) * stride + n <= dst.len() && stride >= n, "destination too short");
    let parallelism = match threads {
        Threads::One => Parallelism::None,
        Threads::All => Parallelism::Rayon(0),
    };
    // SAFETY: the assertions above keep every access of the strided operands and of the destination
    // inside their slices; `dst` is borrowed mutably, so it overlaps neither operand, and its rows
    // do not overlap each other.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            stride as isize,
            accumulate,
            a.data.as_ptr(),
            a.strides.1 as isize,
            a.strides.0 as isize,
            b.data.as_ptr(),
            b.strides.1 as isize,
            b.strides.0 as isize,
            1.0,
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn naive(a: &[f32], b: &[f32], (m, n, k): (usize, usize, usize)) -> Vec<f32> {
        (0..m * n).map(|i| (0..k).map(|j| a[i / n * k + j] * b[j * n + i % n]).sum()).collect()
    }

    #[test]
    fn strides_transposes_and_widening_agree_with_the_definition() {
        let (m, n, k) = (7, 37, 19);
        let a: Vec<f32> = (0..m * k).map(|i| ((i * 7919) % 13) as f32 - 6.0).collect();
        let b: Vec<f32> = (0..k * n).map(|i| ((i * 104_729) % 11) as f32 - 5.0).collect();
        let want = naive(&a, &b, (m, n, k));
        let bt: Vec<bf16> = (0..n * k).map(|i| bf16::from_f32(b[i % k * n + i / k])).collect();
        let a16: Vec<bf16> = a.iter().map(|&x| bf16::from_f32(x)).collect();
        let mut out = vec![1f32; m * (n + 3)];
        let dst = MatViewMut { data: &mut out, stride: n + 3, accumulate: true };
        matmul(dst, MatView::new(&a16, m, k, k), MatView::new(&bt, n, k, k).t(), 2.0, Threads::All);
        for (i, want) in want.iter().enumerate() {
            assert_eq!(out[i / n * (n + 3) + i % n], 1.0 + 2.0 * want);
        }
        let mut out16 = vec![bf16::ZERO; m * n];
        let dst = MatViewMut { data: &mut out16, stride: n, accumulate: false };
        matmul(dst, MatView::new(&a, m, k, k), MatView::new(&b, k, n, n), 1.0, Threads::One);
        assert!(out16.iter().zip(&want).all(|(x, want)| *x == bf16::from_f32(*want)));
    }
}
