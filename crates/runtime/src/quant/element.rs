//! Types of dequantized values, and the look-up of 4-bit codes.

use half::bf16;

#[cfg(target_arch = "x86_64")]
use crate::instruction_set::InstructionSet;
use crate::rounding::Rounded;

/// Type of dequantized values: f32, or bf16 for products in bf16.
pub trait DequantizedElement: Rounded {
    /// Writes both values of each byte of 4-bit `codes` of a block: `table[code] * scale`, rounded
    /// to f32 and then to this type.
    fn look_up_pairs(table: &[f32], codes: &[u8], scale: f32, out: &mut [Self]);
}

impl DequantizedElement for f32 {
    fn look_up_pairs(table: &[f32], codes: &[u8], scale: f32, out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if let Ok(table) = <&[f32; 16]>::try_from(table) {
            let set = InstructionSet::in_use();
            if set >= InstructionSet::Avx512 {
                // SAFETY: the processor has the instructions of the set in use.
                return unsafe { x86::avx512(table, codes, scale, out) };
            }
            if set >= InstructionSet::Avx2 {
                // SAFETY: as above.
                return unsafe { x86::avx2(table, codes, scale, out) };
            }
        }
        plain_pairs(table, codes, scale, out);
    }
}

impl DequantizedElement for bf16 {
    fn look_up_pairs(table: &[f32], codes: &[u8], scale: f32, out: &mut [bf16]) {
        #[cfg(target_arch = "x86_64")]
        if let Ok(table) = <&[f32; 16]>::try_from(table)
            && InstructionSet::in_use() >= InstructionSet::Avx512
        {
            // SAFETY: the processor has the instructions of the set in use.
            return unsafe { x86::avx512_bf16(table, codes, scale, out) };
        }
        plain_pairs(table, codes, scale, out);
    }
}

fn plain_pairs<T: DequantizedElement>(table: &[f32], codes: &[u8], scale: f32, out: &mut [T]) {
    for (pair, &code) in out.chunks_exact_mut(2).zip(codes) {
        pair[0] = T::nearest(table[usize::from(code >> 4)] * scale);
        pair[1] = T::nearest(table[usize::from(code & 15)] * scale);
    }
}

/// Keeps the table in registers: a permutation looks up 16 (8) codes at once. The products equal
/// the plain loop's exactly.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::bf16;

    use crate::rounding::nearest_avx512;

    /// Converts eight bytes to sixteen values at a time.
    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512(table: &[f32; 16], codes: &[u8], scale: f32, out: &mut [f32]) {
        // SAFETY: the table has 16 values.
        let table_register = unsafe { _mm512_loadu_ps(table.as_ptr()) };
        // The scaled table gives the same products with one multiplication per block instead of one
        // per value.
        let scaled = _mm512_mul_ps(table_register, _mm512_set1_ps(scale));
        // Each 32-bit lane uses one nibble of its byte: even lanes the high one.
        let shifts = _mm512_set_epi32(0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4);
        let low = _mm512_set1_epi32(15);
        let mut outs = out.chunks_exact_mut(16);
        let mut bytes = codes.chunks_exact(8);
        for (out, bytes) in (&mut outs).zip(&mut bytes) {
            // SAFETY: each chunk has eight bytes.
            let bytes = unsafe { _mm_loadl_epi64(bytes.as_ptr().cast()) };
            // Every byte twice, then widened to 32 bits.
            let twice = _mm_unpacklo_epi8(bytes, bytes);
            let nibbles = _mm512_and_si512(_mm512_srlv_epi32(_mm512_cvtepu8_epi32(twice), shifts), low);
            // SAFETY: each chunk has sixteen values.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), _mm512_permutexvar_ps(nibbles, scaled)) };
        }
        super::plain_pairs(table, bytes.remainder(), scale, outs.into_remainder());
    }

    /// Converts sixteen bytes to 32 values at a time; the table is rounded once per block.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn avx512_bf16(table: &[f32; 16], codes: &[u8], scale: f32, out: &mut [bf16]) {
        // SAFETY: the table has 16 values.
        let table_register = unsafe { _mm512_loadu_ps(table.as_ptr()) };
        let rounded = nearest_avx512(_mm512_mul_ps(table_register, _mm512_set1_ps(scale)));
        let upper_halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(rounded)));
        // A permutation reads five bits of each 16-bit lane. The fifth belongs to the byte's other
        // code, or is zero; a doubled table makes it irrelevant.
        let twice = _mm512_broadcast_i64x4(upper_halves);
        let mut outs = out.chunks_exact_mut(32);
        let mut bytes = codes.chunks_exact(16);
        for (out, bytes) in (&mut outs).zip(&mut bytes) {
            // SAFETY: each chunk has sixteen bytes.
            let bytes = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) });
            // The lower half of a 32-bit lane is a byte's first value, whose code is the high
            // nibble.
            let nibbles = _mm512_or_si512(_mm512_srli_epi32::<4>(bytes), _mm512_slli_epi32::<16>(bytes));
            // SAFETY: each chunk has 32 values.
            unsafe {
                _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_permutexvar_epi16(nibbles, twice));
            }
        }
        super::plain_pairs(table, bytes.remainder(), scale, outs.into_remainder());
    }

    /// Converts four bytes to eight values at a time.
    #[target_feature(enable = "avx2")]
    pub(super) fn avx2(table: &[f32; 16], codes: &[u8], scale: f32, out: &mut [f32]) {
        let factor = _mm256_set1_ps(scale);
        // SAFETY: the table has 16 values.
        let (first, second) =
            unsafe { (_mm256_loadu_ps(table.as_ptr()), _mm256_loadu_ps(table.as_ptr().add(8))) };
        let (first, second) = (_mm256_mul_ps(first, factor), _mm256_mul_ps(second, factor));
        let shifts = _mm256_set_epi32(0, 4, 0, 4, 0, 4, 0, 4);
        let mut outs = out.chunks_exact_mut(8);
        let mut bytes = codes.chunks_exact(4);
        for (out, bytes) in (&mut outs).zip(&mut bytes) {
            let four = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            let four = _mm_cvtsi32_si128(four);
            let twice = _mm_unpacklo_epi8(four, four);
            let shifted = _mm256_srlv_epi32(_mm256_cvtepu8_epi32(twice), shifts);
            // A permutation reads three bits of each lane; bit 3 chooses the half.
            let half = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(shifted));
            let low = _mm256_permutevar8x32_ps(first, shifted);
            let high = _mm256_permutevar8x32_ps(second, shifted);
            // SAFETY: each chunk has eight values.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), _mm256_blendv_ps(low, high, half)) };
        }
        super::plain_pairs(table, bytes.remainder(), scale, outs.into_remainder());
    }
}
