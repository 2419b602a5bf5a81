//! Products of f32 tiles by fused multiply-adds, for processors that do not multiply bf16: one
//! kernel, with the registers of AVX-512, of AVX2, and with arrays that the compiler vectorizes.
//!
//! The sums of a block of rows and vectors of columns stay in registers over a run of steps. Every
//! kernel adds an element's products in the same order.
//!
//! Vectors are read and written as arrays: with debug assertions, the intrinsics for loads and
//! stores check for overlap and go through the stack.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::tile::{LANES, PackedFormat, SQUARE, STEP, Strip, TILE_LEN, Tile};

/// Tiles of an operand multiplied with all rows before the next tiles: they stay in the L1 cache.
const RUN: usize = 16;
/// Inner elements of these tiles.
const RUN_INNER: usize = RUN / STEP_TILES * STEP;
/// Number of tiles of a step.
const STEP_TILES: usize = 4;

/// Returns the distances from a row, and from an inner element, to the next in a left tile of
/// [`PackedFormat`].
const fn left_strides(by_rows: bool) -> (usize, usize) {
    if by_rows { (LANES, 1) } else { (1, LANES) }
}

/// Returns the distance from the first of a block's vectors of columns to vector `number`.
const fn vector_at(number: usize, lanes: usize) -> usize {
    number * lanes / LANES * 2 * TILE_LEN + number * lanes % LANES
}

/// Defines the kernel `$name` for vectors of `$lanes` columns. A block has the first number of
/// `$vectors` that the remaining columns fill, and `$rows` rows; `$tail` is the number of rows of
/// the last block of 32. Each number of vectors divides the 32 columns, or comes first in them.
macro_rules! kernel {
    (
        $(#[$meta:meta])* $name:ident, $lanes:literal, [$($vectors:literal x ($rows:literal, $tail:literal)),+],
        $load:path, $splat:path, $madd:path, $store:path
    ) => {
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
            /// Adds products of `inner` inner elements to `V` vectors of columns of `R` rows, from
            /// `row` and `column` on.
            #[inline]
            $(#[$meta])*
            #[allow(clippy::needless_range_loop, reason = "sums under two counters stay in registers")]
            fn add_run<const BY_ROWS: bool, const R: usize, const V: usize>(
                (left, right): (&[Tile], &[Tile]),
                inner: usize,
                (row, column): (usize, usize),
                dst: &mut [f32],
                stride: usize,
                keep: bool,
            ) {
                let (by_row, by_inner) = const { left_strides(BY_ROWS) };
                assert!(row + R <= SQUARE && column + V * $lanes <= SQUARE);
                assert!(dst.len() >= (row + R - 1) * stride + SQUARE);
                assert!(left.len() == right.len() && inner <= left.len() / STEP_TILES * STEP);
                let dst = dst[row * stride + column..].as_mut_ptr();
                let mut lefts = [left.as_ptr().cast::<f32>(); R];
                for (i, left) in lefts.iter_mut().enumerate() {
                    // The distances are constants if all rows of any block are in one half.
                    let first = if LANES.is_multiple_of(R) { row } else { row + i };
                    let at = first / LANES * 2 * TILE_LEN + (first % LANES + row + i - first) * by_row;
                    *left = left.wrapping_add(at);
                }
                let within = if V * $lanes < LANES { column % LANES } else { 0 };
                let right = right.as_ptr().cast::<f32>().wrapping_add(column / LANES * 2 * TILE_LEN + within);
                // SAFETY: the assertions keep the sums inside `dst`, and the inner elements inside
                // the tiles of `left` and `right`.
                unsafe {
                    let mut sums = [[$splat(0.0); V]; R];
                    if keep {
                        for i in 0..R {
                            for v in 0..V {
                                sums[i][v] = $load(dst.wrapping_add(i * stride + v * $lanes));
                            }
                        }
                    }
                    for first in (0..inner).step_by(LANES) {
                        let tile = (first / STEP * STEP_TILES + first / LANES % 2) * TILE_LEN;
                        let (mut at_left, mut at_right) = (tile, tile);
                        for _ in 0..(inner - first).min(LANES) {
                            let right = right.wrapping_add(at_right);
                            // The shorter side stays in registers, beside one vector of the other.
                            if R < V {
                                let mut rows = [$splat(0.0); R];
                                for i in 0..R {
                                    rows[i] = $splat(*lefts[i].wrapping_add(at_left));
                                }
                                for v in 0..V {
                                    let column = $load(right.wrapping_add(vector_at(v, $lanes)));
                                    for i in 0..R {
                                        sums[i][v] = $madd(rows[i], column, sums[i][v]);
                                    }
                                }
                            } else {
                                let mut columns = [$splat(0.0); V];
                                for v in 0..V {
                                    columns[v] = $load(right.wrapping_add(vector_at(v, $lanes)));
                                }
                                for i in 0..R {
                                    let row = $splat(*lefts[i].wrapping_add(at_left));
                                    for v in 0..V {
                                        sums[i][v] = $madd(row, columns[v], sums[i][v]);
                                    }
                                }
                            }
                            at_left = at_left.wrapping_add(by_inner);
                            at_right = at_right.wrapping_add(LANES);
                        }
                    }
                    for i in 0..R {
                        for v in 0..V {
                            $store(dst.wrapping_add(i * stride + v * $lanes), sums[i][v]);
                        }
                    }
                }
            }
            let runs = left.tiles.chunks(RUN).zip(right.tiles.chunks(RUN)).zip((0..left.inner).step_by(RUN_INNER));
            let (by_rows, vectors) = (left.format == PackedFormat::F32Rows, right.outer.div_ceil($lanes));
            for (tiles, first) in runs {
                let (keep, inner) = (accumulate || first > 0, (left.inner - first).min(RUN_INNER));
                let mut column = 0;
                while column < vectors {
                    $(if vectors - column >= $vectors {
                        for row in (0..left.outer).step_by($rows) {
                            let at = (row, column * $lanes);
                            match (by_rows, row + $rows <= SQUARE) {
                                (true, true) => add_run::<true, $rows, $vectors>(tiles, inner, at, dst, stride, keep),
                                (true, false) => add_run::<true, $tail, $vectors>(tiles, inner, at, dst, stride, keep),
                                (false, true) => add_run::<false, $rows, $vectors>(tiles, inner, at, dst, stride, keep),
                                (false, false) => add_run::<false, $tail, $vectors>(tiles, inner, at, dst, stride, keep),
                            }
                        }
                        column += $vectors;
                        continue;
                    })+
                    unreachable!("the last number of vectors is 1");
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
kernel!(
    #[target_feature(enable = "avx512f")]
    multiply_avx512,
    16,
    [2 x (8, 8), 1 x (8, 8)],
    avx512::load,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    avx512::store
);
#[cfg(target_arch = "x86_64")]
kernel!(
    #[target_feature(enable = "avx2,fma")]
    multiply_avx2,
    8,
    [4 x (3, 2), 3 x (3, 2), 2 x (4, 4), 1 x (8, 8)],
    avx2::load,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    avx2::store
);
// SSE2 has 16 registers of four lanes.
#[cfg(target_arch = "x86_64")]
kernel!(
    multiply_baseline,
    8,
    [2 x (2, 2), 1 x (4, 4)],
    array::load,
    array::splat,
    array::multiply_add,
    array::store
);
#[cfg(not(target_arch = "x86_64"))]
kernel!(
    multiply_baseline,
    8,
    [2 x (4, 4), 1 x (4, 4)],
    array::load,
    array::splat,
    array::multiply_add,
    array::store
);

/// Defines the module `$name`: loads and stores of vectors, without the checks of the intrinsics.
#[cfg(target_arch = "x86_64")]
macro_rules! loads {
    ($name:ident, $vector:ty, $lanes:literal) => {
        pub(super) mod $name {
            use std::arch::x86_64::*;

            #[inline(always)]
            pub(in crate::packed_gemm) unsafe fn load(from: *const f32) -> $vector {
                // SAFETY: the caller guarantees as many values as the vector has.
                unsafe { std::mem::transmute::<[f32; $lanes], $vector>(*from.cast()) }
            }

            #[inline(always)]
            pub(in crate::packed_gemm) unsafe fn store(to: *mut f32, values: $vector) {
                // SAFETY: as above.
                unsafe { *to.cast() = std::mem::transmute::<$vector, [f32; $lanes]>(values) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
loads!(avx512, __m512, 16);
#[cfg(target_arch = "x86_64")]
loads!(avx2, __m256, 8);

/// Vectors of eight numbers as arrays.
pub(super) mod array {
    type Vector = [f32; 8];

    /// True if the architecture multiplies and adds in one instruction.
    pub(in crate::packed_gemm) const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

    #[inline(always)]
    pub(in crate::packed_gemm) fn splat(value: f32) -> Vector {
        [value; 8]
    }

    #[inline(always)]
    pub(super) unsafe fn load(from: *const f32) -> Vector {
        // SAFETY: the caller guarantees eight values. An array of f32 has no stricter alignment
        // than one.
        unsafe { *from.cast::<Vector>() }
    }

    #[inline(always)]
    pub(in crate::packed_gemm) unsafe fn store(to: *mut f32, values: Vector) {
        // SAFETY: as above.
        unsafe { *to.cast::<Vector>() = values }
    }

    /// Computes `x · y + sum`, rounded once if [`FUSED`], else twice.
    #[inline(always)]
    pub(super) fn multiply_add(x: Vector, y: Vector, sum: Vector) -> Vector {
        let mut sums = sum;
        // The dev profile calls the closure of `from_fn` for each number.
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = if FUSED { x[i].mul_add(y[i], *sum) } else { x[i] * y[i] + *sum };
        }
        sums
    }
}
