//! From codes and scales to f32.

use super::{CodeKind, NESTED_BLOCK, dynamic_signed};
#[cfg(target_arch = "x86_64")]
use crate::instruction_set::InstructionSet;
use crate::instruction_set::vectorized;

/// One scale for each block.
#[derive(Debug, Clone, Copy)]
pub enum Scales<'a> {
    /// As they are.
    Plain(&'a [f32]),
    /// Quantized themselves: codes of the signed dynamic map, a scale for [`NESTED_BLOCK`] of them, their mean.
    Nested {
        /// One per block.
        codes: &'a [u8],
        /// One per [`NESTED_BLOCK`] blocks.
        absmax: &'a [f32],
        /// Added to each.
        offset: f32,
    },
}

/// A quantized tensor, flattened.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    /// What codes stand for.
    pub kind: CodeKind,
    /// Values that share a scale.
    pub block_size: usize,
    /// The codes of all blocks, one after the other.
    pub codes: &'a [u8],
    /// The scales of the blocks.
    pub scales: Scales<'a>,
}

impl Blocks<'_> {
    /// The factor of a block's codes.
    pub fn scale(&self, block: usize) -> f32 {
        match self.scales {
            Scales::Plain(scales) => scales[block],
            Scales::Nested { codes, absmax, offset } => {
                dynamic_signed()[usize::from(codes[block])] * absmax[block / NESTED_BLOCK] + offset
            }
        }
    }

    /// Elements `start..start + out.len()` of the tensor: each its code's value times its block's scale, rounded once.
    pub fn dequantize(&self, start: usize, out: &mut [f32]) {
        let table = self.kind.table();
        let mut done = 0;
        while done < out.len() {
            let at = start + done;
            let block = at / self.block_size;
            let len = (self.block_size - at % self.block_size).min(out.len() - done);
            let part = &mut out[done..done + len];
            let scale = self.scale(block);
            match self.kind {
                CodeKind::NF4 | CodeKind::FP4 => four_bits(table, self.codes, at, scale, part),
                CodeKind::INT8 => eight_bits(table, &self.codes[at..at + len], scale, part),
                CodeKind::Int8Rows => rows(&self.codes[at..at + len], scale, part),
            }
            done += len;
        }
    }
}

fn eight_bits(table: &[f32], codes: &[u8], scale: f32, out: &mut [f32]) {
    for (value, &code) in out.iter_mut().zip(codes) {
        *value = table[usize::from(code)] * scale;
    }
}

vectorized! {
    /// LLM.int8(): scales belong to 127. Two products in this order, as bitsandbytes' `int8_vectorwise_dequant`.
    fn rows(codes: &[u8], scale: f32, out: &mut [f32]) {
        for (value, &code) in out.iter_mut().zip(codes) {
            *value = f32::from(code as i8) * scale * (1.0 / 127.0);
        }
    }
}

/// Values `at..at + out.len()` of one block.
fn four_bits(table: &[f32], codes: &[u8], at: usize, scale: f32, out: &mut [f32]) {
    // To whole bytes first.
    let (head, out) = out.split_at_mut((at % 2).min(out.len()));
    for value in head {
        *value = table[usize::from(codes[at / 2] & 15)] * scale;
    }
    let codes = &codes[at.div_ceil(2)..];
    let whole = out.len() / 2;
    let (pairs, tail) = out.split_at_mut(2 * whole);
    for value in tail {
        *value = table[usize::from(codes[whole] >> 4)] * scale;
    }
    pairs_of(table, &codes[..whole], scale, pairs);
}

/// Both values of each byte.
fn pairs_of(table: &[f32], codes: &[u8], scale: f32, out: &mut [f32]) {
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

fn plain_pairs(table: &[f32], codes: &[u8], scale: f32, out: &mut [f32]) {
    for (pair, &code) in out.chunks_exact_mut(2).zip(codes) {
        pair[0] = table[usize::from(code >> 4)] * scale;
        pair[1] = table[usize::from(code & 15)] * scale;
    }
}

/// The table in registers: a permutation looks 16 (8) codes up at once. The products are the plain loop's to the bit.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// Eight bytes to sixteen values.
    #[target_feature(enable = "avx512f")]
    pub(super) fn avx512(table: &[f32; 16], codes: &[u8], scale: f32, out: &mut [f32]) {
        // SAFETY: the table has 16 values.
        let table_register = unsafe { _mm512_loadu_ps(table.as_ptr()) };
        // Scaling the table first gives the same products, once per block instead of once per value.
        let scaled = _mm512_mul_ps(table_register, _mm512_set1_ps(scale));
        // Each 32-bit lane takes its byte's nibble: even lanes the high one.
        let shifts = _mm512_set_epi32(0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4);
        let low = _mm512_set1_epi32(15);
        let mut outs = out.chunks_exact_mut(16);
        let mut bytes = codes.chunks_exact(8);
        for (out, bytes) in (&mut outs).zip(&mut bytes) {
            // SAFETY: eight bytes are there.
            let bytes = unsafe { _mm_loadl_epi64(bytes.as_ptr().cast()) };
            // Every byte twice, then widened to 32 bits.
            let twice = _mm_unpacklo_epi8(bytes, bytes);
            let nibbles = _mm512_and_si512(_mm512_srlv_epi32(_mm512_cvtepu8_epi32(twice), shifts), low);
            // SAFETY: sixteen values are there.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), _mm512_permutexvar_ps(nibbles, scaled)) };
        }
        super::plain_pairs(table, bytes.remainder(), scale, outs.into_remainder());
    }

    /// Four bytes to eight values.
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
            // SAFETY: eight values are there.
            unsafe { _mm256_storeu_ps(out.as_mut_ptr(), _mm256_blendv_ps(low, high, half)) };
        }
        super::plain_pairs(table, bytes.remainder(), scale, outs.into_remainder());
    }
}
