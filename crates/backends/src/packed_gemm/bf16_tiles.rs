//! Packing of operands as bf16, for the kernels that multiply it; all of them require AVX-512.

use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;

use super::tile::{LANES, PackSource, PackedFormat, STEP, Strided, Tile};
use crate::mat_view::OperandRole;
use crate::rounding;
use crate::simd::prefetch;

/// Fills `tiles` with up to 32 outer elements, step by step; a step has two tiles per part. f32
/// values are split into three parts for [`PackedFormat::Bf16Parts`], else rounded.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn pack(
    tiles: &mut [Tile],
    format: PackedFormat,
    from: PackSource<'_>,
    outer: Range<usize>,
    inner: usize,
    role: OperandRole,
) {
    match from {
        PackSource::F32(from) if format == PackedFormat::Bf16Parts => {
            pack_f32::<3>(tiles, from, outer, inner, role);
        }
        PackSource::F32(from) => pack_f32::<1>(tiles, from, outer, inner, role),
        PackSource::Bf16(from) if from.outer == 1 => {
            each_step(tiles, 1, outer.len(), inner, is_turned(true, role), |tiles, first| {
                pairs_bf16(tiles, from, outer.clone(), first..inner);
            });
        }
        PackSource::Bf16(from) => rows_bf16(tiles, from, outer, inner, is_turned(false, role)),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pack_f32<const PARTS: usize>(
    tiles: &mut [Tile],
    from: Strided<'_, f32>,
    outer: Range<usize>,
    inner: usize,
    role: OperandRole,
) {
    let by_inner = from.outer == 1;
    each_step(tiles, PARTS, outer.len(), inner, is_turned(by_inner, role), |tiles, first| {
        if by_inner {
            pairs::<PARTS>(tiles, from, outer.clone(), first..inner);
        } else {
            rows::<PARTS>(tiles, from, outer.clone(), first..inner);
        }
    });
}

/// Returns true if filled tiles must be transposed. Filling line by line gives one line per outer
/// element, filling by inner element one line per pair of inner elements.
fn is_turned(by_inner: bool, role: OperandRole) -> bool {
    by_inner == (role == OperandRole::Left)
}

/// Calls `fill` with the tiles of each step and its first inner element.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn each_step(
    tiles: &mut [Tile],
    parts: usize,
    outer: usize,
    inner: usize,
    is_turned: bool,
    fill: impl Fn(&mut [Tile], usize),
) {
    for (tiles, first) in tiles.chunks_exact_mut(2 * parts).zip((0..inner).step_by(STEP)) {
        if outer < 2 * LANES || inner - first < STEP {
            tiles.fill(Tile::ZERO);
        }
        fill(tiles, first);
        if is_turned {
            tiles.iter_mut().for_each(|tile| transpose(tile));
        }
    }
}

/// Fills tiles like [`rows`] from bf16 numbers, 32 per line, for all steps. Memory is read row by
/// row, not one line of each row at a time: this suits the hardware prefetcher, so data from beyond
/// the caches arrives in time.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn rows_bf16(
    tiles: &mut [Tile],
    from: Strided<'_, bf16>,
    outer: Range<usize>,
    inner: usize,
    is_turned: bool,
) {
    /// Maximum number of steps filled at a time: their tiles stay in the L1 cache until they are
    /// transposed.
    const STEPS: usize = 18;
    /// Prefetch distance in rows, which need not be adjacent in memory.
    const AHEAD: usize = 4;
    let steps = tiles.len() / 2;
    let at_a_time = steps.div_ceil(steps.div_ceil(STEPS).max(1)).max(1);
    for (tiles, first) in tiles.chunks_mut(2 * at_a_time).zip((0..inner).step_by(at_a_time * STEP)) {
        let here = first..inner.min(first + tiles.len() / 2 * STEP);
        if outer.len() < 2 * LANES || here.len() < tiles.len() / 2 * STEP {
            tiles.fill(Tile::ZERO);
        }
        for (i, o) in outer.clone().enumerate() {
            let row = &from.data[o * from.outer..][here.clone()];
            let (lines, rest) = row.as_chunks::<STEP>();
            let mut steps = tiles.as_chunks_mut::<2>().0.iter_mut();
            for (line, step) in lines.iter().zip(&mut steps) {
                prefetch(line.as_ptr().wrapping_add(AHEAD * from.outer));
                // SAFETY: 32 numbers are 64 bytes.
                put(&mut step[i / LANES], i % LANES, unsafe { _mm512_loadu_si512(line.as_ptr().cast()) });
            }
            if let Some(step) = steps.next() {
                put(&mut step[i / LANES], i % LANES, load_bf16(rest));
            }
        }
        if is_turned {
            tiles.iter_mut().for_each(|tile| transpose(tile));
        }
    }
}

/// Fills tiles like [`pairs`], from bf16 numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pairs_bf16<'a>(tiles: &mut [Tile], from: Strided<'a, bf16>, outer: Range<usize>, inner: Range<usize>) {
    /// Prefetch distance in rows.
    const AHEAD: usize = 64;
    // Interleaves lanes 0 to 15 of two rows; then lanes 16 to 31.
    let low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34,
        2, 33, 1, 32, 0,
    );
    let high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    let at = |k: usize| {
        if k < inner.end { &from.data[k * from.inner + outer.start..][..outer.len()] } else { &[] }
    };
    for (i, k) in inner.clone().take(STEP).step_by(2).enumerate() {
        for next in [at(k + AHEAD), at(k + AHEAD + 1)] {
            prefetch(next.as_ptr());
            // Prefetch for the next strip, which reads the same pages next.
            prefetch(next.as_ptr().wrapping_add(2 * LANES));
        }
        let (even, odd) = (load_bf16(at(k)), load_bf16(at(k + 1)));
        put(&mut tiles[0], i, _mm512_permutex2var_epi16(even, low, odd));
        put(&mut tiles[1], i, _mm512_permutex2var_epi16(even, high, odd));
    }
}

/// Fills line i of a tile with the first inner elements of an outer element.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn rows<const PARTS: usize>(
    tiles: &mut [Tile],
    from: Strided<'_, f32>,
    outer: Range<usize>,
    inner: Range<usize>,
) {
    /// Prefetch distance in elements: each row of memory is another page.
    const AHEAD: usize = 2 * STEP;
    // Selects the upper half of each of 32 lanes.
    let upper = _mm512_set_epi16(
        63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19, 17, 15,
        13, 11, 9, 7, 5, 3, 1,
    );
    for (i, o) in outer.enumerate() {
        let row = &from.data[o * from.outer..][inner.clone()];
        for line in row.get(AHEAD..).unwrap_or(&[]).chunks(LANES).take(STEP / LANES) {
            prefetch(line.as_ptr());
        }
        let row = &row[..row.len().min(STEP)];
        let (first, second) = row.split_at(row.len().min(LANES));
        let (mut x, mut y) = (load(first), load(second));
        for part in 0..PARTS {
            let (x0, y0) = (next_part::<PARTS>(x, part), next_part::<PARTS>(y, part));
            let both = _mm512_permutex2var_epi16(_mm512_castps_si512(x0), upper, _mm512_castps_si512(y0));
            put(&mut tiles[2 * part + i / LANES], i % LANES, both);
            (x, y) = (_mm512_sub_ps(x, x0), _mm512_sub_ps(y, y0));
        }
    }
}

/// Fills line i of a tile with inner elements 2i and 2i + 1 of each outer element.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pairs<'a, const PARTS: usize>(
    tiles: &mut [Tile],
    from: Strided<'a, f32>,
    outer: Range<usize>,
    inner: Range<usize>,
) {
    /// Prefetch distance in rows.
    const AHEAD: usize = 16;
    let at = |k: usize| {
        if k < inner.end { &from.data[k * from.inner + outer.start..][..outer.len()] } else { &[] }
    };
    for (i, k) in inner.clone().take(STEP).step_by(2).enumerate() {
        let (even, odd) = (at(k), at(k + 1));
        for next in [at(k + AHEAD), at(k + AHEAD + 1)] {
            for line in next.chunks(LANES) {
                prefetch(line.as_ptr());
            }
        }
        for half in 0..2 {
            // The rows are empty past the end.
            let values = |row: &'a [f32]| row.get(half * LANES..).unwrap_or(&[]);
            let (mut x, mut y) = (load(values(even)), load(values(odd)));
            for part in 0..PARTS {
                let (x0, y0) = (next_part::<PARTS>(x, part), next_part::<PARTS>(y, part));
                let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(x0));
                let both = _mm512_or_si512(low, _mm512_castps_si512(y0));
                put(&mut tiles[2 * part + half], i, both);
                (x, y) = (_mm512_sub_ps(x, x0), _mm512_sub_ps(y, y0));
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn put(tile: &mut Tile, line: usize, values: __m512i) {
    // SAFETY: a line is 64 bytes.
    unsafe { _mm512_store_si512(tile.line_mut(line).as_mut_ptr().cast(), values) };
}

/// Loads the first 16 values; zeros past the end.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(values: &[f32]) -> __m512 {
    let there = ((1u32 << values.len().min(LANES)) - 1) as __mmask16;
    // SAFETY: masked lanes are not read.
    unsafe { _mm512_maskz_loadu_ps(there, values.as_ptr()) }
}

/// Loads the first 32 values; zeros past the end.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load_bf16(values: &[bf16]) -> __m512i {
    let there = ((1u64 << values.len().min(2 * LANES)) - 1) as __mmask32;
    // SAFETY: masked lanes are not read.
    unsafe { _mm512_maskz_loadu_epi16(there, values.as_ptr().cast()) }
}

/// Returns part number `part` of `x`, from which the earlier parts are subtracted.
#[inline]
#[target_feature(enable = "avx512f")]
fn next_part<const PARTS: usize>(x: __m512, part: usize) -> __m512 {
    if PARTS == 1 { rounding::nearest_avx512(x) } else { top(x, part + 1 < PARTS) }
}

/// Returns the bf16 number nearest to `x` (ties away from zero), or a truncated `x`: the last of
/// three parts has no more bits than bf16.
#[inline]
#[target_feature(enable = "avx512f")]
fn top(x: __m512, round: bool) -> __m512 {
    let bits = _mm512_castps_si512(x);
    let bits = if round { _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)) } else { bits };
    _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000u32 as i32)))
}

/// Transposes several tiles like [`Tile::transpose`].
#[target_feature(enable = "avx512f")]
pub(super) fn transpose_all(tiles: &mut [Tile]) {
    tiles.iter_mut().for_each(|tile| transpose(tile));
}

/// Transposes a tile like [`Tile::transpose`], in registers.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(tile: &mut Tile) {
    let mut lines = [_mm512_setzero_si512(); LANES];
    for (number, line) in lines.iter_mut().enumerate() {
        // SAFETY: a line is 64 bytes, and a tile is aligned to as many.
        *line = unsafe { _mm512_load_si512(tile.line(number).as_ptr().cast()) };
    }
    let mut a = lines;
    for i in (0..LANES).step_by(2) {
        a[i] = _mm512_unpacklo_epi32(lines[i], lines[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(lines[i], lines[i + 1]);
    }
    // Within each 128 bits of b[4i + c]: column 4·quarter + c of rows 4i..4i + 4.
    let mut b = a;
    for i in (0..LANES).step_by(4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for c in 0..4 {
        let low =
            [_mm512_shuffle_i32x4::<0x88>(b[c], b[4 + c]), _mm512_shuffle_i32x4::<0xdd>(b[c], b[4 + c])];
        let high = [
            _mm512_shuffle_i32x4::<0x88>(b[8 + c], b[12 + c]),
            _mm512_shuffle_i32x4::<0xdd>(b[8 + c], b[12 + c]),
        ];
        for odd in 0..2 {
            put(tile, 4 * odd + c, _mm512_shuffle_i32x4::<0x88>(low[odd], high[odd]));
            put(tile, 4 * odd + 8 + c, _mm512_shuffle_i32x4::<0xdd>(low[odd], high[odd]));
        }
    }
}
