//! Products of bf16 tiles, or of rows in memory and tiles, by `VDPBF16PS`, which multiplies 16
//! pairs and adds both products to 16 sums.
//!
//! Eight rows of 32 sums stay in registers over all steps. The f32 kernels use runs of steps that
//! stay in the L1 cache; here, loading and storing the sums would cost more than reading tiles from
//! the L2 cache: 6 % on Zen 4. Numbers below 2⁻¹²⁶ count as zero, as on the matrix unit.

use std::arch::x86_64::*;

use super::tile::{LANES, PackedFormat, RowsInMemory, SQUARE, STEP, Strip, Tile};

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
    match (left.format, right.format, right.outer > LANES) {
        (Bf16, Bf16, true) => multiply_parts::<1, 1, 2>(left, right, &[(0, 0)], dst, stride, accumulate),
        (Bf16, Bf16, false) => multiply_parts::<1, 1, 1>(left, right, &[(0, 0)], dst, stride, accumulate),
        (Bf16Parts, Bf16, _) => {
            let pairs = &[(2, 0), (1, 0), (0, 0)];
            multiply_parts::<3, 1, 2>(left, right, pairs, dst, stride, accumulate);
        }
        (Bf16Parts, Bf16Parts, _) => {
            let pairs = &[(0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)];
            multiply_parts::<3, 3, 2>(left, right, pairs, dst, stride, accumulate);
        }
        _ => unreachable!("values of one part or three, and no right ones of three beside left ones of one"),
    }
}

/// Multiplies operands of `A` and `B` parts, `V` vectors of columns; `pairs` lists the parts to
/// multiply, in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn multiply_parts<const A: usize, const B: usize, const V: usize>(
    left: &Strip<'_>,
    right: &Strip<'_>,
    pairs: &[(usize, usize)],
    dst: &mut [f32],
    stride: usize,
    accumulate: bool,
) {
    for (first, dst) in (0..left.outer).step_by(ROWS).zip(dst.chunks_mut(ROWS * stride)) {
        let (half, first) = (first / LANES, first % LANES);
        // Returning them from `load` would copy them.
        let mut sums = [[_mm512_setzero_ps(); V]; ROWS];
        if accumulate {
            load::<V>(&mut sums, dst, stride);
        }
        let tiles = left.tiles.chunks_exact(2 * A).zip(right.tiles.chunks_exact(2 * B));
        for ((a_tiles, b_tiles), from) in tiles.zip((0..left.inner).step_by(STEP)) {
            let count = (left.inner - from).div_ceil(2).min(LANES);
            for &(a, b) in pairs {
                let columns = std::array::from_fn(|v| &b_tiles[2 * b + v]);
                add_products::<V>(&mut sums, &a_tiles[2 * a + half], first, columns, count);
            }
        }
        store::<V>(dst, stride, &sums);
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
    if right.outer > LANES {
        rows_by_columns::<2>(left, right, dst, stride, accumulate);
    } else {
        rows_by_columns::<1>(left, right, dst, stride, accumulate);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn rows_by_columns<const V: usize>(
    left: &RowsInMemory<'_>,
    right: &Strip<'_>,
    dst: &mut [f32],
    stride: usize,
    accumulate: bool,
) {
    for (first, dst) in (0..left.outer).step_by(ROWS).zip(dst.chunks_mut(ROWS * stride)) {
        // Rows past the end repeat the last one; their results are ignored.
        let rows: [_; ROWS] = std::array::from_fn(|i| left.row((first + i).min(left.outer - 1)).as_ptr());
        let mut sums = [[_mm512_setzero_ps(); V]; ROWS];
        if accumulate {
            load::<V>(&mut sums, dst, stride);
        }
        for (tiles, from) in right.tiles.chunks_exact(2).zip((0..left.inner).step_by(STEP)) {
            let tiles = std::array::from_fn(|v| &tiles[v]);
            // SAFETY: each row has an even number of elements, at least `2 * count` from `from` on.
            let at = rows.map(|row| unsafe { row.add(from) });
            let count = ((left.inner - from) / 2).min(LANES);
            each_pair(count, |pair| {
                // SAFETY: as above; `pair` is below `count`.
                let both = |row: usize| unsafe { at[row].add(2 * pair).cast::<i32>().read_unaligned() };
                add_pair(&mut sums, both, tiles, pair);
            });
        }
        store::<V>(dst, stride, &sums);
    }
}

/// Adds the products of [`ROWS`] rows of a left tile, from `first` on, and some right tiles, of
/// `count` pairs of inner elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn add_products<const V: usize>(
    sums: &mut [[__m512; V]; ROWS],
    left: &Tile,
    first: usize,
    right: [&Tile; V],
    count: usize,
) {
    each_pair(count.min(LANES), |pair| {
        add_pair(sums, |row| left.line(first + row)[pair].cast_signed(), right, pair);
    });
}

/// Calls `add` with each of the `count` pairs of a step. A whole step is unrolled by four, which
/// makes the speed less sensitive to code alignment.
#[inline(always)]
fn each_pair(count: usize, mut add: impl FnMut(usize)) {
    if count == LANES {
        for pair in (0..LANES).step_by(4) {
            (0..4).for_each(|i| add(pair + i));
        }
    } else {
        (0..count).for_each(add);
    }
}

/// Adds the products of one pair of inner elements, for [`ROWS`] rows and some right tiles; `both`
/// returns a row's pair as one number.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn add_pair<const V: usize>(
    sums: &mut [[__m512; V]; ROWS],
    both: impl Fn(usize) -> i32,
    right: [&Tile; V],
    pair: usize,
) {
    let columns = right.map(|tile| as_bf16(tile.line(pair)));
    for (row, sums) in sums.iter_mut().enumerate() {
        // SAFETY: two vectors of the same bits.
        let both: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi32(both(row))) };
        for (sum, columns) in sums.iter_mut().zip(columns) {
            *sum = _mm512_dpbf16_ps(*sum, both, columns);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn as_bf16(line: &[u32; LANES]) -> __m512bh {
    // SAFETY: a line is 64 bytes; the vector has the same bits.
    unsafe { std::mem::transmute(_mm512_loadu_si512(line.as_ptr().cast())) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load<const V: usize>(sums: &mut [[__m512; V]; ROWS], dst: &[f32], stride: usize) {
    for (sums, row) in sums.iter_mut().zip(dst.chunks(stride)) {
        for (sums, values) in sums.iter_mut().zip(row[..SQUARE].chunks_exact(LANES)) {
            // SAFETY: sixteen values.
            *sums = unsafe { _mm512_loadu_ps(values.as_ptr()) };
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store<const V: usize>(dst: &mut [f32], stride: usize, sums: &[[__m512; V]; ROWS]) {
    for (sums, row) in sums.iter().zip(dst.chunks_mut(stride)) {
        for (sums, values) in sums.iter().zip(row[..SQUARE].chunks_exact_mut(LANES)) {
            // SAFETY: sixteen values.
            unsafe { _mm512_storeu_ps(values.as_mut_ptr(), *sums) };
        }
    }
}
