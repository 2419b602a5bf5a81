//! Products of bf16 tiles, or of rows in memory and tiles, by `VDPBF16PS`, which multiplies 16
//! pairs and adds both products to 16 sums.
//!
//! Eight rows of 32 sums stay in registers over all steps. The f32 kernels use runs of steps that
//! stay in the L1 cache; here, loading and storing the sums would cost more than reading tiles from
//! the L2 cache: 6 % on Zen 4. Numbers below 2⁻¹²⁶ count as zero, as on the matrix unit.
//!
//! One function has all loops over the sums, by index. With closures and functions that borrowed
//! the sums, the compiler kept them in memory or not as other code of the crate changed, and
//! products took 2.3 times as long (6 times in the dev profile).

use std::arch::x86_64::*;
use std::mem::transmute;

use super::f32_kernel::avx512;
use super::tile::{LANES, PackedFormat, RowsInMemory, SQUARE, STEP, Strip, TILE_LEN};

/// Number of rows whose sums are in registers.
const ROWS: usize = 8;

/// Implements [`super::micro_kernel::OpenKernel::multiply`], which has checked the arguments.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn multiply(
    left: &Strip<'_>,
    right: &Strip<'_>,
    dst: &mut [f32],
    stride: usize,
    accumulate: bool,
) {
    use PackedFormat::{Bf16, Bf16Parts};
    let parts: &[(usize, usize)] = match (left.format, right.format) {
        (Bf16, Bf16) => &[(0, 0)],
        (Bf16Parts, Bf16) => &[(2, 0), (1, 0), (0, 0)],
        (Bf16Parts, Bf16Parts) => &[(0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)],
        _ => unreachable!("values of one part or three, and no right ones of three beside left ones of one"),
    };
    for (first, dst) in (0..left.outer).step_by(ROWS).zip(dst.chunks_mut(ROWS * stride)) {
        let lines = left.tiles[first / LANES].lines_from(first % LANES).as_ptr().cast::<i32>();
        let rows = LeftRows {
            first: [0, 1, 2, 3, 4, 5, 6, 7].map(|i| lines.wrapping_add(i * LANES)),
            step: left.format.tiles_per_step() * TILE_LEN,
        };
        // SAFETY: a left tile has a line of 16 pairs for each row, and every part two tiles.
        unsafe { add_block(&rows, right, left.inner, parts, dst, stride, accumulate) }
    }
}

/// Multiplies like [`multiply`], with rows in memory.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn multiply_rows(
    left: &RowsInMemory<'_>,
    right: &Strip<'_>,
    dst: &mut [f32],
    stride: usize,
    accumulate: bool,
) {
    for (first, dst) in (0..left.outer).step_by(ROWS).zip(dst.chunks_mut(ROWS * stride)) {
        // Rows past the end repeat the last one; their results are ignored.
        let row = |i: usize| left.row((first + i).min(left.outer - 1)).as_ptr().cast::<i32>();
        let rows = LeftRows { first: [0, 1, 2, 3, 4, 5, 6, 7].map(row), step: LANES };
        // SAFETY: each row has an even number of inner elements.
        unsafe { add_block(&rows, right, left.inner, &[(0, 0)], dst, stride, accumulate) }
    }
}

/// [`ROWS`] rows of a left operand, as pairs of inner elements.
struct LeftRows {
    /// The first pair of each row.
    first: [*const i32; ROWS],
    /// Number of pairs from a step of a row to its next one.
    step: usize,
}

/// Computes the sums of up to [`ROWS`] rows and all columns of `right`, from the beginning of `dst`
/// on. `parts` lists the parts of both operands to multiply in each step, in order.
///
/// # Safety
/// From the pointers of `rows` on, each step has the pairs of its inner elements, and each listed
/// part begins two tiles after the part before it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn add_block(
    rows: &LeftRows,
    right: &Strip<'_>,
    inner: usize,
    parts: &[(usize, usize)],
    dst: &mut [f32],
    stride: usize,
    accumulate: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if right.outer > LANES {
            add_columns::<2>(rows, right, inner, parts, dst, stride, accumulate);
        } else {
            add_columns::<1>(rows, right, inner, parts, dst, stride, accumulate);
        }
    }
}

/// Implements [`add_block`] for `V` vectors of columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[allow(clippy::needless_range_loop, reason = "sums under two counters stay in registers")]
unsafe fn add_columns<const V: usize>(
    rows: &LeftRows,
    right: &Strip<'_>,
    inner: usize,
    parts: &[(usize, usize)],
    dst: &mut [f32],
    stride: usize,
    accumulate: bool,
) {
    let right_step = right.format.tiles_per_step() * TILE_LEN;
    assert!(V * LANES <= SQUARE && dst.len() >= (ROWS - 1) * stride + SQUARE);
    assert!(right.tiles.len() * TILE_LEN >= inner.div_ceil(STEP) * right_step);
    let dst = dst.as_mut_ptr();
    let right = right.tiles.as_ptr().cast::<f32>();
    // SAFETY: the assertions, and the caller's promise for the rows.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); V]; ROWS];
        if accumulate {
            for i in 0..ROWS {
                for v in 0..V {
                    sums[i][v] = avx512::load(dst.wrapping_add(i * stride + v * LANES));
                }
            }
        }
        for step in 0..inner.div_ceil(STEP) {
            let count = (inner - step * STEP).div_ceil(2).min(LANES);
            for &(a, b) in parts {
                let right = right.wrapping_add(step * right_step + 2 * b * TILE_LEN);
                let left = step * rows.step + 2 * a * TILE_LEN;
                for pair in 0..count {
                    let mut columns = [_mm512_setzero_ps(); V];
                    for v in 0..V {
                        columns[v] = avx512::load(right.wrapping_add(v * TILE_LEN + pair * LANES));
                    }
                    for i in 0..ROWS {
                        let both = rows.first[i].wrapping_add(left + pair).read_unaligned();
                        let both = transmute::<__m512i, __m512bh>(_mm512_set1_epi32(both));
                        for v in 0..V {
                            let columns = transmute::<__m512, __m512bh>(columns[v]);
                            sums[i][v] = _mm512_dpbf16_ps(sums[i][v], both, columns);
                        }
                    }
                }
            }
        }
        for i in 0..ROWS {
            for v in 0..V {
                avx512::store(dst.wrapping_add(i * stride + v * LANES), sums[i][v]);
            }
        }
    }
}
