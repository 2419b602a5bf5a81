//! Operands as the unit reads them: tiles of 16 rows of 32 bf16 numbers, for each part of the values.

use std::arch::x86_64::*;
use std::ops::Range;

use super::Source;

/// Inner elements of a tile.
pub(super) const STEP: usize = 32;
/// Outer elements of a tile, and values in a register.
const LANES: usize = 16;

/// 16 rows of 16 pairs of bf16 numbers.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Tile([[u32; LANES]; LANES]);

impl Tile {
    pub(super) const ZERO: Tile = Tile([[0; LANES]; LANES]);
}

/// A left tile has a row for each outer element, a right one for each pair of inner elements.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Left,
    Right,
}

/// Fills `tiles` with up to 32 outer elements, step by step; in a step part by part, two tiles each. Zeros where there is nothing.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn pack(
    tiles: &mut [Tile],
    from: Source<'_>,
    outer: Range<usize>,
    inner: Range<usize>,
    role: Role,
) {
    match from.is_bf16 {
        true => pack_parts::<1>(tiles, from, outer, inner, role),
        false => pack_parts::<3>(tiles, from, outer, inner, role),
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn pack_parts<const PARTS: usize>(
    tiles: &mut [Tile],
    from: Source<'_>,
    outer: Range<usize>,
    inner: Range<usize>,
    role: Role,
) {
    for (tiles, k) in tiles.chunks_exact_mut(2 * PARTS).zip(inner.clone().step_by(STEP)) {
        let ks = k..(k + STEP).min(inner.end);
        for half in 0..2 {
            let start = (outer.start + half * LANES).min(outer.end);
            let lines = match from.outer {
                1 => pairs::<PARTS>(from, start..(start + LANES).min(outer.end), ks.clone()),
                _ => rows::<PARTS>(from, start..(start + LANES).min(outer.end), ks.clone()),
            };
            // `rows` has a line for each outer element, `pairs` for each pair of inner ones.
            let turn = (from.outer == 1) == (role == Role::Left);
            for (part, lines) in lines.into_iter().enumerate() {
                let lines = if turn { transposed(lines) } else { lines };
                for (row, line) in tiles[2 * part + half].0.iter_mut().zip(lines) {
                    // SAFETY: a row is 64 bytes.
                    unsafe { _mm512_storeu_si512(row.as_mut_ptr().cast(), line) };
                }
            }
        }
    }
}

type Lines = [__m512i; LANES];

/// Line i holds the inner elements of outer element i.
#[target_feature(enable = "avx512f,avx512bw")]
fn rows<const PARTS: usize>(from: Source<'_>, outer: Range<usize>, inner: Range<usize>) -> [Lines; PARTS] {
    // The upper half of each of 32 lanes.
    let upper = _mm512_set_epi16(
        63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19, 17, 15,
        13, 11, 9, 7, 5, 3, 1,
    );
    let mut lines = [[_mm512_setzero_si512(); LANES]; PARTS];
    for (i, o) in outer.enumerate() {
        let line = &from.data[o * from.outer + inner.start..][..inner.len()];
        let (first, second) = line.split_at(line.len().min(LANES));
        let (mut x, mut y) = (load(first), load(second));
        for part in 0..PARTS {
            let (x0, y0) = (top(x, part + 1 < PARTS), top(y, part + 1 < PARTS));
            lines[part][i] =
                _mm512_permutex2var_epi16(_mm512_castps_si512(x0), upper, _mm512_castps_si512(y0));
            (x, y) = (_mm512_sub_ps(x, x0), _mm512_sub_ps(y, y0));
        }
    }
    lines
}

/// Line i holds inner elements 2i and 2i + 1 of each outer element.
#[target_feature(enable = "avx512f,avx512bw")]
fn pairs<const PARTS: usize>(from: Source<'_>, outer: Range<usize>, inner: Range<usize>) -> [Lines; PARTS] {
    let mut lines = [[_mm512_setzero_si512(); LANES]; PARTS];
    let at = |k: usize| match k < inner.end {
        true => &from.data[k * from.inner + outer.start..][..outer.len()],
        false => &[],
    };
    for i in 0..inner.len().div_ceil(2) {
        let k = inner.start + 2 * i;
        let (mut x, mut y) = (load(at(k)), load(at(k + 1)));
        for part in 0..PARTS {
            let (x0, y0) = (top(x, part + 1 < PARTS), top(y, part + 1 < PARTS));
            let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(x0));
            lines[part][i] = _mm512_or_si512(low, _mm512_castps_si512(y0));
            (x, y) = (_mm512_sub_ps(x, x0), _mm512_sub_ps(y, y0));
        }
    }
    lines
}

/// Up to 16 values, then zeros.
#[target_feature(enable = "avx512f")]
fn load(values: &[f32]) -> __m512 {
    let there = ((1u32 << values.len().min(LANES)) - 1) as __mmask16;
    // SAFETY: lanes that are not there are not read.
    unsafe { _mm512_maskz_loadu_ps(there, values.as_ptr()) }
}

/// The bf16 number nearest to `x` (ties away from zero), or what `x` begins with: the last part has no more bits than that.
#[target_feature(enable = "avx512f")]
fn top(x: __m512, round: bool) -> __m512 {
    let bits = _mm512_castps_si512(x);
    let bits = if round { _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)) } else { bits };
    _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000u32 as i32)))
}

/// Lane j of line i becomes lane i of line j.
#[target_feature(enable = "avx512f")]
fn transposed(lines: Lines) -> Lines {
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
    let mut done = b;
    for c in 0..4 {
        let low =
            [_mm512_shuffle_i32x4::<0x88>(b[c], b[4 + c]), _mm512_shuffle_i32x4::<0xdd>(b[c], b[4 + c])];
        let high = [
            _mm512_shuffle_i32x4::<0x88>(b[8 + c], b[12 + c]),
            _mm512_shuffle_i32x4::<0xdd>(b[8 + c], b[12 + c]),
        ];
        for odd in 0..2 {
            done[4 * odd + c] = _mm512_shuffle_i32x4::<0x88>(low[odd], high[odd]);
            done[4 * odd + 8 + c] = _mm512_shuffle_i32x4::<0xdd>(low[odd], high[odd]);
        }
    }
    done
}
