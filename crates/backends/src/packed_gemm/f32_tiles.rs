//! Packing of operands as f32, with every instruction set.

use std::ops::Range;

use super::tile::{LANES, STEP, Strided, Tile};
use crate::instruction_set::InstructionSet;
use crate::runtime::cpu_tensor::FloatElement;
use crate::simd::prefetch;

/// Number of tiles of a step.
const STEP_TILES: usize = 4;
/// Prefetch distance in lines of memory, which are in different pages.
const AHEAD: usize = 32;

/// Fills a strip with up to 32 outer elements as [`super::tile::PackedFormat::F32Rows`] if
/// `by_rows`, else as [`super::tile::PackedFormat::F32`].
pub(super) fn pack<T: FloatElement>(
    set: InstructionSet,
    tiles: &mut [Tile],
    from: Strided<'_, T>,
    outer: Range<usize>,
    inner: usize,
    by_rows: bool,
) {
    assert!(set <= InstructionSet::detected());
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
        fn avx512<T: FloatElement>(
            tiles: &mut [Tile],
            from: Strided<'_, T>,
            outer: Range<usize>,
            inner: usize,
            by_rows: bool,
        ) {
            pack_steps(tiles, from, outer, inner, by_rows, |tiles| super::bf16_tiles::transpose_all(tiles));
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2<T: FloatElement>(
            tiles: &mut [Tile],
            from: Strided<'_, T>,
            outer: Range<usize>,
            inner: usize,
            by_rows: bool,
        ) {
            pack_steps(tiles, from, outer, inner, by_rows, |tiles| {
                tiles.iter_mut().for_each(|tile| transpose_avx2(tile));
            });
        }
        if set >= InstructionSet::Avx512 {
            // SAFETY: the processor has the instructions, by the assertion.
            return unsafe { avx512(tiles, from, outer, inner, by_rows) };
        }
        if set >= InstructionSet::Avx2 {
            // SAFETY: as above.
            return unsafe { avx2(tiles, from, outer, inner, by_rows) };
        }
    }
    pack_steps(tiles, from, outer, inner, by_rows, |tiles| tiles.iter_mut().for_each(Tile::transpose));
}

/// Fills the tiles of each step line by line of memory, and transposes them if the format's lines
/// run the other way.
#[inline(always)]
fn pack_steps<T: FloatElement>(
    tiles: &mut [Tile],
    from: Strided<'_, T>,
    outer: Range<usize>,
    inner: usize,
    by_rows: bool,
    transpose: impl Fn(&mut [Tile]),
) {
    let along = from.inner == 1;
    for (tiles, first) in tiles.chunks_exact_mut(STEP_TILES).zip((0..inner).step_by(STEP)) {
        let inner = first..inner.min(first + STEP);
        if outer.len() < 2 * LANES || inner.len() < STEP {
            tiles.fill(Tile::ZERO);
        }
        if along {
            for (i, o) in outer.clone().enumerate() {
                let values = &from.data[o * from.outer..][inner.clone()];
                prefetch(values.as_ptr().wrapping_add(2 * STEP));
                prefetch(values.as_ptr().wrapping_add(2 * STEP + LANES));
                let (whole, rest) = values.as_chunks::<LANES>();
                for (q, values) in whole.iter().enumerate() {
                    fill(tiles[i / LANES * 2 + q].line_mut(i % LANES), values);
                }
                if !rest.is_empty() {
                    fill_some(tiles[i / LANES * 2 + whole.len()].line_mut(i % LANES), rest);
                }
            }
        } else {
            for (k, line) in inner.enumerate() {
                let values = &from.data[line * from.inner + outer.start..][..outer.len()];
                // Also prefetch for the next strip, which reads the same pages next.
                let next = values.as_ptr().wrapping_add(AHEAD * from.inner);
                for at in (0..4 * LANES).step_by(64 / size_of::<T>()) {
                    prefetch(next.wrapping_add(at));
                }
                let (whole, rest) = values.as_chunks::<LANES>();
                for (half, values) in whole.iter().enumerate() {
                    fill(tiles[half * 2 + k / LANES].line_mut(k % LANES), values);
                }
                if !rest.is_empty() {
                    fill_some(tiles[whole.len() * 2 + k / LANES].line_mut(k % LANES), rest);
                }
            }
        }
        if along != by_rows {
            transpose(tiles);
        }
    }
}

/// Fills a whole line.
#[inline(always)]
fn fill<T: FloatElement>(line: &mut [u32; LANES], values: &[T; LANES]) {
    // The compiler makes vectors of this loop, but not of zipped iterators.
    for i in 0..LANES {
        line[i] = values[i].widen().to_bits();
    }
}

/// Fills the beginning of a line.
#[inline(always)]
fn fill_some<T: FloatElement>(line: &mut [u32; LANES], values: &[T]) {
    for (to, value) in line.iter_mut().zip(values) {
        *to = value.widen().to_bits();
    }
}

/// Transposes a tile like [`Tile::transpose`], in registers.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_avx2(tile: &mut Tile) {
    use std::arch::x86_64::*;
    let from = *tile;
    for i in (0..LANES).step_by(8) {
        for c in 0..LANES / 4 {
            // Four lanes of a line, and of the line after the next three.
            let rows: [__m256i; 4] = std::array::from_fn(|row| {
                let quarter = |line: usize| from.line(line).as_chunks::<4>().0[c];
                // SAFETY: arrays and vectors of the same bits.
                unsafe { std::mem::transmute([quarter(i + row), quarter(i + row + 4)]) }
            });
            let low = [_mm256_unpacklo_epi32(rows[0], rows[1]), _mm256_unpacklo_epi32(rows[2], rows[3])];
            let high = [_mm256_unpackhi_epi32(rows[0], rows[1]), _mm256_unpackhi_epi32(rows[2], rows[3])];
            let lines = [
                _mm256_unpacklo_epi64(low[0], low[1]),
                _mm256_unpackhi_epi64(low[0], low[1]),
                _mm256_unpacklo_epi64(high[0], high[1]),
                _mm256_unpackhi_epi64(high[0], high[1]),
            ];
            for (number, line) in lines.into_iter().enumerate() {
                let to = &mut tile.line_mut(4 * c + number).as_chunks_mut::<8>().0[i / 8];
                // SAFETY: as above.
                *to = unsafe { std::mem::transmute::<__m256i, [u32; 8]>(line) };
            }
        }
    }
}
