//! Packing of operands as f32, with every instruction set.

use std::ops::Range;

use super::tile::{LANES, STEP, Strided, Tile};
use crate::instruction_set::InstructionSet;
#[cfg(target_arch = "x86_64")]
use crate::mat_view::is_f32;
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
            pack_steps(tiles, from, outer, inner, by_rows);
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2<T: FloatElement>(
            tiles: &mut [Tile],
            from: Strided<'_, T>,
            outer: Range<usize>,
            inner: usize,
            by_rows: bool,
        ) {
            pack_steps(tiles, from, outer, inner, by_rows);
        }
        let fits = if by_rows { (inner, outer.len()) } else { (outer.len(), inner) };
        let is_transposed = (from.inner == 1) != by_rows;
        if set >= InstructionSet::Avx2
            && is_transposed
            && fits.0.is_multiple_of(8)
            && fits.1.is_multiple_of(4)
        {
            // SAFETY: the processor has the instructions, by the assertion.
            return unsafe {
                if by_rows {
                    pack_transposed::<_, true>(tiles, from, outer, inner);
                } else {
                    pack_transposed::<_, false>(tiles, from, outer, inner);
                }
            };
        }
        if set >= InstructionSet::Avx512 {
            // SAFETY: as above.
            return unsafe { avx512(tiles, from, outer, inner, by_rows) };
        }
        if set >= InstructionSet::Avx2 {
            // SAFETY: as above.
            return unsafe { avx2(tiles, from, outer, inner, by_rows) };
        }
    }
    pack_steps(tiles, from, outer, inner, by_rows);
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
            tiles.iter_mut().for_each(Tile::transpose);
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

/// Fills a strip like [`pack_steps`] from memory whose lines run across those of the format: blocks
/// of eight lines by four elements are transposed in registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn pack_transposed<T: FloatElement, const BY_ROWS: bool>(
    tiles: &mut [Tile],
    from: Strided<'_, T>,
    outer: Range<usize>,
    inner: usize,
) {
    use std::arch::x86_64::*;
    for (tiles, first) in tiles.chunks_exact_mut(STEP_TILES).zip((0..inner).step_by(STEP)) {
        let inner = first..inner.min(first + STEP);
        if outer.len() < 2 * LANES || inner.len() < STEP {
            tiles.fill(Tile::ZERO);
        }
        let (lines, elements, stride) =
            if BY_ROWS { (inner, outer.clone(), from.inner) } else { (outer.clone(), inner, from.outer) };
        // Lines of inner elements go on; of those of outer elements the next strip reads the same
        // pages.
        let (ahead, prefetched) = if BY_ROWS { (AHEAD * stride, 4 * LANES) } else { (2 * STEP, STEP) };
        for (block, start) in lines.step_by(8).enumerate() {
            let mut lines = [from.data; 8];
            for (i, line) in lines.iter_mut().enumerate() {
                *line = &from.data[(start + i) * stride + elements.start..][..elements.len()];
                for at in (0..prefetched).step_by(64 / size_of::<T>()) {
                    prefetch(line.as_ptr().wrapping_add(ahead + at));
                }
            }
            for at in (0..elements.len()).step_by(4) {
                let four =
                    |line: usize| widened(lines[line][at..].first_chunk().expect("a multiple of four"));
                let mut rows = [_mm256_setzero_si256(); 4];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(four(i)), four(i + 4));
                }
                let low = [_mm256_unpacklo_epi32(rows[0], rows[1]), _mm256_unpacklo_epi32(rows[2], rows[3])];
                let high = [_mm256_unpackhi_epi32(rows[0], rows[1]), _mm256_unpackhi_epi32(rows[2], rows[3])];
                let columns = [
                    _mm256_unpacklo_epi64(low[0], low[1]),
                    _mm256_unpackhi_epi64(low[0], low[1]),
                    _mm256_unpacklo_epi64(high[0], high[1]),
                    _mm256_unpackhi_epi64(high[0], high[1]),
                ];
                for (column, number) in columns.into_iter().zip(at..) {
                    let (of_lines, of_elements) = (block / 2, number / LANES);
                    let (half, quarter) =
                        if BY_ROWS { (of_elements, of_lines) } else { (of_lines, of_elements) };
                    let line = tiles[half * 2 + quarter].line_mut(number % LANES);
                    // SAFETY: an array and a vector of the same bits.
                    line.as_chunks_mut::<8>().0[block % 2] =
                        unsafe { std::mem::transmute::<__m256i, [u32; 8]>(column) };
                }
            }
        }
    }
}

/// Returns four values as the bits of f32.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn widened<T: FloatElement>(values: &[T; 4]) -> std::arch::x86_64::__m128i {
    use std::arch::x86_64::*;
    // SAFETY: `FloatElement` is implemented for f32 and bf16 alone: four values have as many bits
    // as the vector, or as the number.
    unsafe {
        if is_f32::<T>() {
            return std::mem::transmute_copy::<[T; 4], __m128i>(values);
        }
        let bits = std::mem::transmute_copy::<[T; 4], i64>(values);
        _mm_slli_epi32::<16>(_mm_cvtepu16_epi32(_mm_cvtsi64_si128(bits)))
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// Returns the bits of a strip of `outer` outer elements, from the third on.
    fn packed<T: FloatElement>(
        set: InstructionSet,
        outer: usize,
        inner: usize,
        layout: (bool, bool),
    ) -> Vec<u32> {
        let (along, by_rows) = layout;
        let data: Vec<T> = (0..(outer + 3) * (inner + 5)).map(|i| T::nearest(i as f32 - 900.0)).collect();
        let (of_outer, of_inner) = if along { (inner + 5, 1) } else { (1, outer + 3) };
        let from = Strided { data: &data, outer: of_outer, inner: of_inner };
        // Numbers that packing must overwrite.
        let mut tiles = vec![Tile::ZERO; inner.div_ceil(STEP) * STEP_TILES];
        for tile in &mut tiles {
            (0..LANES).for_each(|line| tile.line_mut(line).fill(f32::NAN.to_bits()));
        }
        pack(set, &mut tiles, from, 3..outer + 3, inner, by_rows);
        tiles
            .iter_mut()
            .flat_map(|tile| (0..LANES).flat_map(|i| *tile.line_mut(i)).collect::<Vec<_>>())
            .collect()
    }

    #[test]
    fn every_instruction_set_packs_the_same_tiles() {
        for (outer, inner) in
            [(32, 64), (32, 100), (24, 36), (8, 4), (16, 32), (31, 64), (32, 33), (20, 40), (1, 1)]
        {
            for layout in [(true, false), (true, true), (false, false), (false, true)] {
                let want = packed::<f32>(InstructionSet::Baseline, outer, inner, layout);
                let short = packed::<bf16>(InstructionSet::Baseline, outer, inner, layout);
                for set in InstructionSet::ALL.into_iter().filter(|set| *set <= InstructionSet::detected()) {
                    assert_eq!(packed::<f32>(set, outer, inner, layout), want, "{set:?} {outer} x {inner}");
                    assert_eq!(packed::<bf16>(set, outer, inner, layout), short, "{set:?} {outer} x {inner}");
                }
            }
        }
    }
}
