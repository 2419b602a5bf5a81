//! Products of f32 tiles by fused multiply-adds, for processors that do not multiply bf16: one kernel, with the registers of
//! AVX-512, of AVX2, and with arrays that the compiler vectorizes.
//!
//! Two vectors of columns of some rows stay in registers over a run of steps. Every kernel adds an element's products in
//! the same order.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::micro_kernel::{SQUARE, Strip};
use super::packing::{LANES, PackedFormat, Tile};

/// Tiles of an operand that are multiplied with all rows before the next ones are: they stay in the L1 cache.
const RUN: usize = 16;
/// Tiles of a step.
const STEP_TILES: usize = 4;
/// Elements of a tile.
const TILE_LEN: usize = LANES * LANES;

/// From a row, and from an inner element, to the next in a left tile, as [`PackedFormat`] lays it out.
const fn left_strides(by_rows: bool) -> (usize, usize) {
    if by_rows { (LANES, 1) } else { (1, LANES) }
}

/// The kernel `$name` for `$rows` rows at a time of two vectors of `$lanes` columns.
macro_rules! kernel {
    ($(#[$meta:meta])* $name:ident, $rows:literal, $lanes:literal, $load:path, $splat:path, $madd:path, $store:path) => {
        /// As [`super::micro_kernel::OpenKernel::multiply`], which has checked the arguments.
        $(#[$meta])*
        pub(super) fn $name(
            left: Strip<'_>,
            right: Strip<'_>,
            dst: &mut [f32],
            stride: usize,
            accumulate: bool,
        ) {
            /// Products of a run of steps are added to two vectors of columns of some rows, from `row` and `column` on.
            #[inline]
            $(#[$meta])*
            fn add_run<const BY_ROWS: bool>(
                left: &[Tile],
                right: &[Tile],
                (row, column): (usize, usize),
                dst: &mut [f32],
                stride: usize,
                keep: bool,
            ) {
                let (by_row, by_inner) = const { left_strides(BY_ROWS) };
                // The second vector stands in the same lines as the first, or in the next tiles.
                let at = |column: usize| column / LANES * 2 * TILE_LEN + column % LANES;
                let (first, second) = (at(column), at(column + $lanes));
                assert!(row + $rows <= SQUARE && column + 2 * $lanes <= SQUARE);
                assert!(dst.len() >= (row + $rows - 1) * stride + SQUARE);
                let dst = dst[row * stride + column..].as_mut_ptr();
                // SAFETY: the assertions keep the sums inside `dst`; an index of a step is below its STEP_TILES tiles.
                unsafe {
                    let mut sums = [[$splat(0.0); 2]; $rows];
                    if keep {
                        for (i, sums) in sums.iter_mut().enumerate() {
                            *sums = [$load(dst.add(i * stride)), $load(dst.add(i * stride + $lanes))];
                        }
                    }
                    for (left, right) in left.chunks_exact(STEP_TILES).zip(right.chunks_exact(STEP_TILES)) {
                        // Rows of a block are in one half of the strip.
                        let left = left.as_ptr().cast::<f32>();
                        let left = left.add(row / LANES * 2 * TILE_LEN + row % LANES * by_row);
                        let right = right.as_ptr().cast::<f32>();
                        for tile in [0, TILE_LEN] {
                            for inner in 0..LANES {
                                let right = right.add(tile + inner * LANES);
                                let columns = [$load(right.add(first)), $load(right.add(second))];
                                let left = left.add(tile + inner * by_inner);
                                for (i, sums) in sums.iter_mut().enumerate() {
                                    let x = $splat(*left.add(i * by_row));
                                    sums[0] = $madd(x, columns[0], sums[0]);
                                    sums[1] = $madd(x, columns[1], sums[1]);
                                }
                            }
                        }
                    }
                    for (i, sums) in sums.iter().enumerate() {
                        $store(dst.add(i * stride), sums[0]);
                        $store(dst.add(i * stride + $lanes), sums[1]);
                    }
                }
            }
            let runs = left.tiles.chunks(RUN).zip(right.tiles.chunks(RUN)).enumerate();
            for (run, (left_run, right_run)) in runs {
                let keep = accumulate || run > 0;
                for column in (0..SQUARE).step_by(2 * $lanes) {
                    for row in (0..SQUARE).step_by($rows) {
                        let at = (row, column);
                        match left.format {
                            PackedFormat::F32Rows => add_run::<true>(left_run, right_run, at, dst, stride, keep),
                            _ => add_run::<false>(left_run, right_run, at, dst, stride, keep),
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
mod array {
    type Vector = [f32; 8];

    #[inline(always)]
    pub(super) fn splat(value: f32) -> Vector {
        [value; 8]
    }

    #[inline(always)]
    pub(super) unsafe fn load(from: *const f32) -> Vector {
        // SAFETY: the caller's: eight values are there. An array of f32 has no stricter alignment than one.
        unsafe { from.cast::<Vector>().read() }
    }

    #[inline(always)]
    pub(super) unsafe fn store(to: *mut f32, values: Vector) {
        // SAFETY: as above.
        unsafe { to.cast::<Vector>().write(values) }
    }

    /// Rounded once where the architecture multiplies and adds in one instruction, else twice.
    #[inline(always)]
    pub(super) fn multiply_add(x: Vector, y: Vector, sum: Vector) -> Vector {
        std::array::from_fn(|i| {
            if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                x[i].mul_add(y[i], sum[i])
            } else {
                x[i] * y[i] + sum[i]
            }
        })
    }
}
