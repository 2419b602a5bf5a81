//! Rounds values to blocks of ggml: codes for given scales, and the scales of types that candle
//! does not write.
//!
//! The positions of codes are those of `block_type`, whose decoder gives the value of each code.
//! The search for scales of IQ4_NL and IQ4_XS follows `quantize_row_iq4_nl_impl` of ggml-quants.c,
//! with all weights equal; MXFP4 has the scale of [`super::to_mxfp4`].

use half::f16;

use super::block_type::{BlockType, IQ4};
use super::mxfp4::mx_exponent;

/// The most bytes of a quantized block.
const MOST_BYTES: usize = 210;
/// The most elements of a quantized block.
const MOST_ELEMENTS: usize = 256;
/// The divisors of the largest value that the search of ggml tries on both sides of that of the
/// first code.
const TRIES: i8 = 7;

/// Some bits of a code: the lowest in the byte, and their number.
#[derive(Clone, Copy)]
struct CodeBits {
    byte: usize,
    shift: usize,
    bits: usize,
}

impl BlockType {
    /// Returns the positions of the low and the high bits of the code of element `i`.
    fn code_bits(self, i: usize) -> [CodeBits; 2] {
        let at = |byte, shift, bits| CodeBits { byte, shift, bits };
        let none = at(0, 0, 0);
        // The elements of 32 in the halves of 16 bytes, or in every byte.
        let (nibble, g, j) = (i / 16 % 2 * 4, i / 32, i % 32);
        match self {
            Self::F32 | Self::F16 | Self::BF16 => [none; 2],
            Self::Q4_0 | Self::IQ4NL => [at(2 + i % 16, nibble, 4), none],
            Self::Q4_1 => [at(4 + i % 16, nibble, 4), none],
            Self::Q5_0 => [at(6 + i % 16, nibble, 4), at(2 + i / 8, i % 8, 1)],
            Self::Q5_1 => [at(8 + i % 16, nibble, 4), at(4 + i / 8, i % 8, 1)],
            Self::Q8_0 => [at(2 + i, 0, 8), none],
            Self::Q2K => [at(16 + g / 4 * 32 + j, g % 4 * 2, 2), none],
            Self::Q3K => [at(32 + g / 4 * 32 + j, g % 4 * 2, 2), at(j, g, 1)],
            Self::Q4K => [at(16 + g / 2 * 32 + j, g % 2 * 4, 4), none],
            Self::Q5K => [at(48 + g / 2 * 32 + j, g % 2 * 4, 4), at(16 + j, g, 1)],
            Self::Q6K => {
                let (half, quarter) = (g / 4, g % 4);
                let low = at(half * 64 + quarter % 2 * 32 + j, quarter / 2 * 4, 4);
                [low, at(128 + half * 32 + j, quarter * 2, 2)]
            }
            Self::IQ4XS => [at(8 + 16 * g + i % 16, nibble, 4), none],
            Self::MXFP4 => [at(1 + i % 16, nibble, 4), none],
        }
    }

    /// Returns the number of codes.
    fn codes(self) -> usize {
        1 << self.code_bits(0).map(|part| part.bits).iter().sum::<usize>()
    }

    /// Sets the code of element `i`, counted from that of the smallest value.
    fn set_code(self, block: &mut [u8], i: usize, code: usize) {
        // The codes of Q8_0 are signed bytes.
        let mut rest = if self == Self::Q8_0 { code ^ 0x80 } else { code };
        for CodeBits { byte, shift, bits } in self.code_bits(i) {
            let mask = (1usize << bits) - 1;
            block[byte] = block[byte] & !((mask << shift) as u8) | ((rest & mask) << shift) as u8;
            rest >>= bits;
        }
    }

    /// Writes the values of all elements of `block` if each had the code `code`.
    fn values_of(self, block: &[u8], code: usize, out: &mut [f32]) {
        let mut other = [0; MOST_BYTES];
        let other = &mut other[..block.len()];
        other.copy_from_slice(block);
        for i in 0..out.len() {
            self.set_code(other, i, code);
        }
        self.dequantize(other, out);
    }

    /// Gives each element of a block the code whose value is nearest to that in `values`, with the
    /// scales of the block. A code that has the value already stays.
    fn set_nearest(self, block: &mut [u8], values: &[f32]) {
        let n = values.len();
        let [mut old, mut low, mut high] = [[0f32; MOST_ELEMENTS]; 3];
        self.dequantize(block, &mut old[..n]);
        if matches!(self, Self::IQ4NL | Self::IQ4XS | Self::MXFP4) {
            for code in 0..self.codes() {
                self.values_of(block, code, &mut low[..n]);
                for i in 0..n {
                    if (low[i] - values[i]).abs() < (old[i] - values[i]).abs() {
                        old[i] = low[i];
                        self.set_code(block, i, code);
                    }
                }
            }
            return;
        }
        let last = self.codes() - 1;
        self.values_of(block, 0, &mut low[..n]);
        self.values_of(block, last, &mut high[..n]);
        for i in (0..n).filter(|i| old[*i] != values[*i]) {
            let step = (high[i] - low[i]) / last as f32;
            let code = ((values[i] - low[i]) / step).round_ties_even();
            // A scale of zero gives no number: each code has the same value.
            if step != 0.0 && !code.is_nan() {
                self.set_code(block, i, code.clamp(0.0, last as f32) as usize);
            }
        }
    }

    /// Returns blocks for new `values`: of each, that with the scales in `stored`, or that in
    /// `fresh` if its squared error is smaller. A block whose values did not change stays.
    ///
    /// # Panics
    /// `stored` or `fresh` does not hold exactly the blocks of `values`, or the type has no codes.
    pub fn choose_blocks(self, stored: &[u8], mut fresh: Vec<u8>, values: &[f32]) -> Vec<u8> {
        let (n, size) = (self.elements(), self.bytes());
        assert!(stored.len() == fresh.len() && stored.len() * n == values.len() * size, "whole blocks");
        let blocks = stored.chunks_exact(size).zip(fresh.chunks_exact_mut(size)).zip(values.chunks_exact(n));
        for ((stored, fresh), values) in blocks {
            let mut buffer = [0; MOST_BYTES];
            let before = &mut buffer[..size];
            before.copy_from_slice(stored);
            self.set_nearest(before, values);
            let errors = [&*before, &*fresh].map(|block| self.error(block, values));
            // A stored scale that is no number has no error.
            if !(errors[1] < errors[0] || errors[0].is_nan()) {
                fresh.copy_from_slice(before);
            }
        }
        fresh
    }

    /// Returns the sum of squared errors of a block, in f64.
    fn error(self, block: &[u8], values: &[f32]) -> f64 {
        let mut buffer = [0f32; MOST_ELEMENTS];
        let decoded = &mut buffer[..values.len()];
        self.dequantize(block, decoded);
        decoded
            .iter()
            .zip(values)
            .map(|(decoded, value)| (f64::from(*decoded) - f64::from(*value)).powi(2))
            .sum()
    }

    /// Rounds whole blocks of finite values to IQ4_NL, IQ4_XS or MXFP4; `None` for other types.
    ///
    /// # Panics
    /// `values` are not whole blocks.
    pub fn search_blocks(self, values: &[f32]) -> Option<Vec<u8>> {
        assert!(values.len().is_multiple_of(self.elements()), "whole blocks");
        let write: fn(&[f32], &mut [u8]) = match self {
            Self::IQ4NL => |values, block| {
                block[..2].copy_from_slice(&f16::from_f32(iq4_scale(values)).to_le_bytes());
            },
            Self::IQ4XS => iq4_scales,
            Self::MXFP4 => |values, block| {
                let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
                block[0] = mx_exponent(largest.to_bits());
            },
            _ => return None,
        };
        let mut bytes = vec![0; values.len() / self.elements() * self.bytes()];
        let blocks = values.chunks_exact(self.elements()).zip(bytes.chunks_exact_mut(self.bytes()));
        for (values, block) in blocks {
            write(values, block);
            self.set_nearest(block, values);
        }
        Some(bytes)
    }
}

/// Returns the scale of 32 values in IQ4 with the smallest squared error among those that ggml
/// tries.
fn iq4_scale(values: &[f32]) -> f32 {
    let largest =
        values.iter().fold(0f32, |most, value| if value.abs() > most.abs() { *value } else { most });
    if largest == 0.0 {
        return 0.0;
    }
    // The largest value gets about the code of -127, or, first, that of 113.
    let divisors = std::iter::once(127.0).chain((-TRIES..=TRIES).map(|t| IQ4[0] + f32::from(t)));
    let [mut scale, mut best] = [0f32; 2];
    for divisor in divisors {
        let factor = divisor / largest;
        let [mut products, mut squares] = [0f32; 2];
        for value in values {
            let code = nearest_iq4(factor * value);
            products += code * value;
            squares += code * code;
        }
        if squares > 0.0 && products * products > best * squares {
            scale = products / squares;
            best = scale * products;
        }
    }
    scale
}

/// Returns the number of IQ4 that is nearest to `x`.
fn nearest_iq4(x: f32) -> f32 {
    IQ4.into_iter()
        .fold(IQ4[0], |best, number| if (number - x).abs() < (best - x).abs() { number } else { best })
}

/// Writes the scales of a block in IQ4_XS: one of 6 bits for each 32 values, and their unit.
fn iq4_scales(values: &[f32], block: &mut [u8]) {
    let scales: Vec<f32> = values.chunks_exact(32).map(iq4_scale).collect();
    let largest =
        scales.iter().fold(0f32, |most, scale| if scale.abs() > most.abs() { *scale } else { most });
    let unit = f16::from_f32(-largest / 32.0);
    block[..2].copy_from_slice(&unit.to_le_bytes());
    let factor = if unit.to_f32() == 0.0 { 0.0 } else { 1.0 / unit.to_f32() };
    let mut high = 0u16;
    for (g, scale) in scales.into_iter().enumerate() {
        let code = ((factor * scale).round_ties_even().clamp(-32.0, 31.0) + 32.0) as u16;
        block[4 + g / 2] |= (code as u8 & 15) << (g % 2 * 4);
        high |= (code >> 4) << (2 * g);
    }
    block[2..4].copy_from_slice(&high.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantized() -> impl Iterator<Item = BlockType> {
        BlockType::ALL.into_iter().filter(|kind| kind.is_quantized())
    }

    /// Bytes without a pattern, whose scales are numbers.
    fn block(kind: BlockType, seed: usize) -> Vec<u8> {
        let noise = |i: usize| ((i + 31 * seed + 1).wrapping_mul(2_654_435_761) >> 13) as u8;
        let mut bytes: Vec<u8> = (0..kind.bytes()).map(noise).collect();
        let scales: &[usize] = match kind {
            BlockType::Q2K => &[80, 82],
            BlockType::Q3K => &[108],
            BlockType::Q6K => &[208],
            BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4K | BlockType::Q5K => &[0, 2],
            BlockType::MXFP4 => {
                bytes[0] = 120;
                &[]
            }
            _ => &[0],
        };
        for at in scales {
            bytes[*at..at + 2].copy_from_slice(&f16::from_f32(0.01).to_le_bytes());
        }
        bytes
    }

    fn decoded(kind: BlockType, block: &[u8]) -> Vec<f32> {
        let mut values = vec![0.0; kind.elements()];
        kind.dequantize(block, &mut values);
        values
    }

    /// Every code of every element is found again from its value, over other codes.
    #[test]
    fn codes_are_where_the_decoder_reads_them() {
        for kind in quantized() {
            for seed in 0..8 {
                let (stored, mut other) = (block(kind, seed), block(kind, seed));
                (0..kind.elements())
                    .for_each(|i| kind.set_code(&mut other, i, (i * 5 + seed) % kind.codes()));
                let values = decoded(kind, &other);
                let mut encoded = stored.clone();
                kind.set_nearest(&mut encoded, &values);
                assert_eq!(decoded(kind, &encoded), values, "{kind}");
                let mut same = stored.clone();
                kind.set_nearest(&mut same, &decoded(kind, &stored));
                assert_eq!(same, stored, "{kind}");
            }
        }
    }

    /// No other code is nearer to a value.
    #[test]
    fn codes_are_the_nearest() {
        for kind in quantized() {
            let mut encoded = block(kind, 3);
            let values: Vec<f32> = (0..kind.elements()).map(|i| (i as f32 * 0.7).sin() * 0.8).collect();
            kind.set_nearest(&mut encoded, &values);
            let ours = decoded(kind, &encoded);
            let mut other = vec![0.0; values.len()];
            for code in 0..kind.codes() {
                kind.values_of(&encoded, code, &mut other);
                for ((ours, other), value) in ours.iter().zip(&other).zip(&values) {
                    let [ours, other] = [ours, other].map(|encoded| (encoded - value).abs());
                    assert!(ours <= other * 1.0001 + 1e-6, "{kind}, {code}: {ours}, {other}");
                }
            }
        }
    }

    /// A stored scale that is no number is replaced; one that fits better than the new one stays.
    #[test]
    fn the_better_block_is_chosen() {
        for kind in [BlockType::Q8_0, BlockType::Q4_0, BlockType::IQ4NL] {
            let stored = block(kind, 5);
            let values = decoded(kind, &stored);
            let mut poor = stored.clone();
            poor[..2].copy_from_slice(&f16::from_f32(10.0).to_le_bytes());
            assert_eq!(kind.choose_blocks(&stored, poor.clone(), &values), stored, "{kind}");
            assert_eq!(kind.choose_blocks(&poor, stored.clone(), &values), stored, "{kind}");
            poor[..2].copy_from_slice(&f16::NAN.to_le_bytes());
            assert_eq!(kind.choose_blocks(&poor, stored.clone(), &values), stored, "{kind}");
        }
    }

    /// Values of a block are found with its own scale, whose last bit may differ.
    #[test]
    fn searched_scales_fit_the_values_of_a_block() {
        for kind in [BlockType::IQ4NL, BlockType::IQ4XS, BlockType::MXFP4] {
            let searched =
                |values: &[f32]| decoded(kind, &kind.search_blocks(values).expect("one of the three types"));
            for seed in 0..8 {
                let values = decoded(kind, &block(kind, seed));
                let encoded = searched(&values);
                let largest = values.iter().fold(0f32, |most, value| most.max(value.abs()));
                let far = encoded.iter().zip(&values).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
                assert!(far <= 0.04 * largest, "{kind}, {seed}: {far} of {largest}");
            }
            assert_eq!(searched(&vec![0.0; kind.elements()]), vec![0.0; kind.elements()], "{kind}");
        }
    }
}
