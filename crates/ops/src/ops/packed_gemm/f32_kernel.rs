//! Products of f32 tiles by fused multiply-adds, for processors that do not multiply bf16: one
//! kernel, with the registers of AVX-512, of AVX2, and with arrays that the compiler vectorizes.
//!
//! Two vectors of columns of some rows stay in registers over a run of steps. Every kernel adds an
//! element's products in the same order.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::tile::{LANES, PackedFormat, SQUARE, STEP, Strip, Tile};

/// Tiles of an operand multiplied with all rows before the next tiles: they stay in the L1 cache.
const RUN: usize = 16;
/// Inner elements of these tiles.
const RUN_INNER: usize = RUN / STEP_TILES * STEP;
/// Number of tiles of a step.
const STEP_TILES: usize = 4;
/// Number of elements of a tile.
const TILE_LEN: usize = LANES * LANES;

/// Returns the distances from a row, and from an inner element, to the next in a left tile of
/// [`PackedFormat`].
const fn left_strides(by_rows: bool) -> (usize, usize) {
    if by_rows { (LANES, 1) } else { (1, LANES) }
}

/// Defines the kernel `$name` for `$rows` rows at a time and two vectors of `$lanes` columns, or
/// one if no more columns remain.
macro_rules! kernel {
    ($(#[$meta:meta])* $name:ident, $rows:literal, $lanes:literal, $load:path, $splat:path, $madd:path, $store:path) => {
        /// Implements [`super::micro_kernel::OpenKernel::multiply`], which has checked the
        /// arguments.
        $(#[$meta])*
        #[allow(clippy::too_many_lines, reason = "the inner function belongs to the kernel")]
        pub(super) fn $name(
            left: &Strip<'_>,
            right: &Strip<'_>,
            dst: &mut [f32],
            stride: usize,
            accumulate: bool,
        ) {
            /// Adds products of `inner` inner elements to `V` vectors of columns of some rows, from
            /// `row` and `column` on.
            #[inline]
            $(#[$meta])*
            fn add_run<const BY_ROWS: bool, const V: usize>(
                (left, right): (&[Tile], &[Tile]),
                inner: usize,
                (row, column): (usize, usize),
                dst: &mut [f32],
                stride: usize,
                keep: bool,
            ) {
                let (by_row, by_inner) = const { left_strides(BY_ROWS) };
                // The second vector is in the same lines as the first, or in the next tiles.
                let at = |column: usize| column / LANES * 2 * TILE_LEN + column % LANES;
                let columns_at: [usize; V] = std::array::from_fn(|v| at(column + v * $lanes));
                assert!(row + $rows <= SQUARE && column + V * $lanes <= SQUARE);
                assert!(dst.len() >= (row + $rows - 1) * stride + SQUARE);
                let dst = dst[row * stride + column..].as_mut_ptr();
                // SAFETY: the assertions keep the sums inside `dst`; an index of a step is below
                // its STEP_TILES tiles.
                unsafe {
                    let mut sums = [[$splat(0.0); V]; $rows];
                    if keep {
                        for (i, sums) in sums.iter_mut().enumerate() {
                            for (v, sum) in sums.iter_mut().enumerate() {
                                *sum = $load(dst.add(i * stride + v * $lanes));
                            }
                        }
                    }
                    let steps = left.chunks_exact(STEP_TILES).zip(right.chunks_exact(STEP_TILES));
                    for ((left, right), first) in steps.zip((0..inner).step_by(STEP)) {
                        // All rows of a block are in one half of the strip.
                        let left = left.as_ptr().cast::<f32>();
                        let left = left.add(row / LANES * 2 * TILE_LEN + row % LANES * by_row);
                        let right = right.as_ptr().cast::<f32>();
                        for tile in 0..2 {
                            let count = (inner - first).saturating_sub(tile * LANES).min(LANES);
                            let (left, right) = (left.add(tile * TILE_LEN), right.add(tile * TILE_LEN));
                            for inner in 0..count {
                                let mut columns = [$splat(0.0); V];
                                for (column, at) in columns.iter_mut().zip(columns_at) {
                                    *column = $load(right.add(inner * LANES + at));
                                }
                                let left = left.add(inner * by_inner);
                                for (i, sums) in sums.iter_mut().enumerate() {
                                    let x = $splat(*left.add(i * by_row));
                                    for (sum, column) in sums.iter_mut().zip(columns) {
                                        *sum = $madd(x, column, *sum);
                                    }
                                }
                            }
                        }
                    }
                    for (i, sums) in sums.iter().enumerate() {
                        for (v, sum) in sums.iter().enumerate() {
                            $store(dst.add(i * stride + v * $lanes), *sum);
                        }
                    }
                }
            }
            let runs = left.tiles.chunks(RUN).zip(right.tiles.chunks(RUN)).zip((0..left.inner).step_by(RUN_INNER));
            for (tiles, first) in runs {
                let (keep, inner) = (accumulate || first > 0, (left.inner - first).min(RUN_INNER));
                for column in (0..right.outer).step_by(2 * $lanes) {
                    for row in (0..left.outer).step_by($rows) {
                        let at = (row, column);
                        match (left.format, right.outer - column > $lanes) {
                            (PackedFormat::F32Rows, true) => add_run::<true, 2>(tiles, inner, at, dst, stride, keep),
                            (PackedFormat::F32Rows, false) => add_run::<true, 1>(tiles, inner, at, dst, stride, keep),
                            (_, true) => add_run::<false, 2>(tiles, inner, at, dst, stride, keep),
                            (_, false) => add_run::<false, 1>(tiles, inner, at, dst, stride, keep),
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
kernel!(
    #[target_feature(enable = "avx512f")]
    multiply_avx512,
    8,
    16,
    _mm512_loadu_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    _mm512_storeu_ps
);
#[cfg(target_arch = "x86_64")]
kernel!(
    #[target_feature(enable = "avx2,fma")]
    multiply_avx2,
    4,
    8,
    _mm256_loadu_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    _mm256_storeu_ps
);
kernel!(multiply_baseline, 4, 8, array::load, array::splat, array::multiply_add, array::store);

/// Vectors of eight numbers as arrays.
pub(super) mod array {
    type Vector = [f32; 8];

    /// True if the architecture multiplies and adds in one instruction.
    pub(in super::super) const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

    #[inline(always)]
    pub(in super::super) fn splat(value: f32) -> Vector {
        [value; 8]
    }

    #[inline(always)]
    pub(super) unsafe fn load(from: *const f32) -> Vector {
        // SAFETY: the caller guarantees eight values. An array of f32 has no stricter alignment
        // than one.
        unsafe { from.cast::<Vector>().read() }
    }

    #[inline(always)]
    pub(in super::super) unsafe fn store(to: *mut f32, values: Vector) {
        // SAFETY: as above.
        unsafe { to.cast::<Vector>().write(values) }
    }

    /// Computes `x · y + sum`, rounded once if [`FUSED`], else twice.
    #[inline(always)]
    pub(super) fn multiply_add(x: Vector, y: Vector, sum: Vector) -> Vector {
        std::array::from_fn(|i| if FUSED { x[i].mul_add(y[i], sum[i]) } else { x[i] * y[i] + sum[i] })
    }
}
