//! Packing of operands as f32, with every instruction set.

use std::ops::Range;

use super::tile::{LANES, STEP, Strided, Tile};
use crate::instruction_set::InstructionSet;
use crate::ops::simd::prefetch;
use crate::runtime::cpu_tensor::FloatElement;

/// Number of tiles of a step.
const STEP_TILES: usize = 4;
/// Prefetch distance in lines of memory: each is in another page.
const AHEAD: usize = 16;

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
                tiles.iter_mut().for_each(Tile::transpose);
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
                for (q, values) in values.chunks(LANES).enumerate() {
                    fill(tiles[i / LANES * 2 + q].line_mut(i % LANES), values);
                }
            }
        } else {
            for (k, line) in inner.enumerate() {
                let values = &from.data[line * from.inner + outer.start..][..outer.len()];
                prefetch(values.as_ptr().wrapping_add(AHEAD * from.inner));
                prefetch(values.as_ptr().wrapping_add(AHEAD * from.inner + LANES));
                for (half, values) in values.chunks(LANES).enumerate() {
                    fill(tiles[half * 2 + k / LANES].line_mut(k % LANES), values);
                }
            }
        }
        if along != by_rows {
            transpose(tiles);
        }
    }
}

#[inline(always)]
fn fill<T: FloatElement>(line: &mut [u32; LANES], values: &[T]) {
    for (to, value) in line.iter_mut().zip(values) {
        *to = value.widen().to_bits();
    }
}
