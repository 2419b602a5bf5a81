//! Converts codes and scales to numbers.

use half::bf16;

use super::{CodeKind, NESTED_BLOCK, dynamic_signed};
#[cfg(target_arch = "x86_64")]
use crate::instruction_set::InstructionSet;
use crate::instruction_set::vectorized;
use crate::rounding::Rounded;

/// Scales of the blocks, one each.
#[derive(Debug, Clone, Copy)]
pub enum Scales<'a> {
    /// Scales without quantization.
    Plain(&'a [f32]),
    /// Quantized scales: codes of the signed dynamic map, a scale for each [`NESTED_BLOCK`] of
    /// them, and their mean.
    Nested {
        /// One per block.
        codes: &'a [u8],
        /// One per [`NESTED_BLOCK`] blocks.
        absmax: &'a [f32],
        /// Added to each scale.
        offset: f32,
    },
}

/// A quantized tensor, flattened.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    /// Kind of the codes.
    pub kind: CodeKind,
    /// Values that share a scale.
    pub block_size: usize,
    /// Codes of all blocks, in order.
    pub codes: &'a [u8],
    /// Scales of the blocks.
    pub scales: Scales<'a>,
}

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

impl Blocks<'_> {
    /// Scale of the block `block`.
    pub fn scale(&self, block: usize) -> f32 {
        match self.scales {
            Scales::Plain(scales) => scales[block],
            Scales::Nested { codes, absmax, offset } => {
                dynamic_signed()[usize::from(codes[block])] * absmax[block / NESTED_BLOCK] + offset
            }
        }
    }

    /// Dequantizes elements `start..start + out.len()` of the tensor: each code's value times its
    /// block's scale, rounded to f32, and then to `T` if that is bf16.
    pub fn dequantize<T: DequantizedElement>(&self, start: usize, out: &mut [T]) {
        let table = self.kind.table();
        let (mut block, within) = (start / self.block_size, start % self.block_size);
        let first = (self.block_size - within).min(out.len());
        let (head, rest) = out.split_at_mut(first);
        let mut at = start;
        for part in [head].into_iter().chain(rest.chunks_mut(self.block_size)).filter(|part| !part.is_empty())
        {
            let scale = self.scale(block);
            match self.kind {
                CodeKind::NF4 | CodeKind::FP4 => four_bits(table, self.codes, at, scale, part),
                CodeKind::INT8 => eight_bits(table, &self.codes[at..at + part.len()], scale, part),
                CodeKind::Int8Rows => rows(&self.codes[at..at + part.len()], scale, part),
            }
            at += part.len();
            block += 1;
        }
    }
}

fn eight_bits<T: DequantizedElement>(table: &[f32], codes: &[u8], scale: f32, out: &mut [T]) {
    for (value, &code) in out.iter_mut().zip(codes) {
        *value = T::nearest(table[usize::from(code)] * scale);
    }
}

vectorized! {
    /// Dequantizes LLM.int8(), whose scales belong to 127. The order of the two products is that of
    /// bitsandbytes' `int8_vectorwise_dequant`.
    fn rows<T: DequantizedElement>(codes: &[u8], scale: f32, out: &mut [T]) {
        for (value, &code) in out.iter_mut().zip(codes) {
            *value = T::nearest(f32::from(code as i8) * scale * (1.0 / 127.0));
        }
    }
}

/// Dequantizes values `at..at + out.len()` of one block.
fn four_bits<T: DequantizedElement>(table: &[f32], codes: &[u8], at: usize, scale: f32, out: &mut [T]) {
    // Up to a whole byte first.
    let (head, out) = out.split_at_mut((at % 2).min(out.len()));
    for value in head {
        *value = T::nearest(table[usize::from(codes[at / 2] & 15)] * scale);
    }
    let codes = &codes[at.div_ceil(2)..];
    let whole = out.len() / 2;
    let (pairs, tail) = out.split_at_mut(2 * whole);
    for value in tail {
        *value = T::nearest(table[usize::from(codes[whole] >> 4)] * scale);
    }
    T::look_up_pairs(table, &codes[..whole], scale, pairs);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::quantize;

    /// Covers every kind of code, blocks that are no multiple of a vector, parts with arbitrary
    /// bounds, and scales that are not finite, are below 2⁻¹²⁶ or cause ties.
    #[test]
    fn bf16_is_f32_rounded() {
        let kinds = [CodeKind::NF4, CodeKind::FP4, CodeKind::INT8, CodeKind::Int8Rows];
        let scales = [0.731, f32::INFINITY, f32::NAN, -3.0, 0.0, 1e-39, 1.0 + 2f32.powi(-8), 3e38];
        for (kind, block_size) in kinds.into_iter().flat_map(|kind| [64, 70, 256].map(|size| (kind, size))) {
            let n = scales.len() * block_size;
            let codes: Vec<u8> = (0..n).map(|i| (i * 167 + i / 256) as u8).collect();
            let blocks = Blocks { kind, block_size, codes: &codes, scales: Scales::Plain(&scales) };
            for (start, len) in [(0, n), (0, 0), (n, 0), (1, 1), (63, 2), (5, n - 5), (64, 64), (3, 130)] {
                let (mut wide, mut narrow) = (vec![0f32; len], vec![bf16::ONE; len]);
                blocks.dequantize(start, &mut wide);
                blocks.dequantize(start, &mut narrow);
                for (i, (wide, narrow)) in wide.iter().zip(&narrow).enumerate() {
                    let want = bf16::from_f32(*wide);
                    assert_eq!(want.to_bits(), narrow.to_bits(), "{kind:?} {block_size} {start}+{i}: {wide}");
                }
            }
        }
    }

    /// Parts of a tensor equal the whole.
    #[test]
    fn parts_are_those_of_the_whole() {
        let values: Vec<f32> = (0..640).map(|i| (i as f32 * 0.37).sin()).collect();
        let (mut codes, mut absmax) = (vec![0u8; 320], vec![0f32; 10]);
        quantize(CodeKind::NF4, 64, &values, &mut codes, &mut absmax);
        let scales = Scales::Plain(&absmax);
        let blocks = Blocks { kind: CodeKind::NF4, block_size: 64, codes: &codes, scales };
        let mut whole = vec![0f32; 640];
        blocks.dequantize(0, &mut whole);
        assert!(values.iter().zip(&whole).all(|(value, got)| (value - got).abs() < 0.16));
        for (start, len) in [(0, 1), (1, 63), (63, 3), (64, 64), (129, 400), (639, 1)] {
            let mut part = vec![0f32; len];
            blocks.dequantize(start, &mut part);
            assert_eq!(part, whole[start..start + len]);
        }
    }
}
