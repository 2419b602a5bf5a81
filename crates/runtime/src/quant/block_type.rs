//! The block formats of ggml, in which GGUF files store tensors, decoded to f32.
//!
//! A block holds a fixed number of consecutive elements of a row: codes, with a scale or several.
//! Layouts are those of ggml-common.h, arithmetic and its order that of gguf-py's `dequantize`, so
//! that both give the same bits. Everything is little-endian and unaligned.

use std::fmt;

use half::{bf16, f16};

/// The storage type of a tensor: blocks of a fixed number of elements and bytes. The numbers are
/// those in a tensor's entry (`ggml_type` in ggml.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each name is the type's own")]
pub enum BlockType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2K = 10,
    Q3K = 11,
    Q4K = 12,
    Q5K = 13,
    Q6K = 14,
    IQ4NL = 20,
    IQ4XS = 23,
    BF16 = 30,
    MXFP4 = 39,
}

impl BlockType {
    /// Every type that finetune reads.
    pub const ALL: [BlockType; 16] = {
        use BlockType::*;
        [F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2K, Q3K, Q4K, Q5K, Q6K, IQ4NL, IQ4XS, MXFP4]
    };

    /// Returns the type of this number; `None` if it is not supported.
    pub fn of_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u32 == number)
    }

    /// Returns its name in llama.cpp, the elements of a block and its bytes.
    const fn facts(self) -> BlockFacts {
        let (name, elements, bytes) = match self {
            Self::F32 => ("f32", 1, 4),
            Self::F16 => ("f16", 1, 2),
            Self::BF16 => ("bf16", 1, 2),
            Self::Q4_0 => ("q4_0", 32, 18),
            Self::Q4_1 => ("q4_1", 32, 20),
            Self::Q5_0 => ("q5_0", 32, 22),
            Self::Q5_1 => ("q5_1", 32, 24),
            Self::Q8_0 => ("q8_0", 32, 34),
            Self::Q2K => ("q2_K", 256, 84),
            Self::Q3K => ("q3_K", 256, 110),
            Self::Q4K => ("q4_K", 256, 144),
            Self::Q5K => ("q5_K", 256, 176),
            Self::Q6K => ("q6_K", 256, 210),
            Self::IQ4NL => ("iq4_nl", 32, 18),
            Self::IQ4XS => ("iq4_xs", 256, 136),
            Self::MXFP4 => ("mxfp4", 32, 17),
        };
        BlockFacts { name, elements, bytes }
    }

    /// Returns its name in llama.cpp.
    pub fn name(self) -> &'static str {
        self.facts().name
    }

    /// Returns the elements of a block.
    pub fn elements(self) -> usize {
        self.facts().elements
    }

    /// Returns the bytes of a block.
    pub fn bytes(self) -> usize {
        self.facts().bytes
    }

    /// Returns the values of its 16 codes, if they are in a table.
    pub(super) fn table(self) -> &'static [f32] {
        match self {
            Self::IQ4NL | Self::IQ4XS => &IQ4,
            Self::MXFP4 => &E2M1,
            _ => &[],
        }
    }

    /// Returns whether its blocks have several elements.
    pub fn is_quantized(self) -> bool {
        self.elements() > 1
    }

    /// Returns whether rows of this length consist of whole blocks.
    pub fn divides(self, row: usize) -> bool {
        row.is_multiple_of(self.elements())
    }

    /// Decodes whole blocks.
    ///
    /// # Panics
    /// `bytes` does not hold exactly the blocks of `out`.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        let BlockFacts { elements, bytes: size, .. } = self.facts();
        assert_eq!(bytes.len() * elements, out.len() * size, "whole blocks");
        let decode: fn(&[u8], &mut [f32]) = match self {
            Self::F32 => |block, out| out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            Self::F16 => |block, out| out[0] = half(block, 0),
            Self::BF16 => |block, out| out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
            Self::Q4_0 => q4_0,
            Self::Q4_1 => q4_1,
            Self::Q5_0 => q5_0,
            Self::Q5_1 => q5_1,
            Self::Q8_0 => q8_0,
            Self::Q2K => q2_k,
            Self::Q3K => q3_k,
            Self::Q4K => q4_k,
            Self::Q5K => q5_k,
            Self::Q6K => q6_k,
            Self::IQ4NL => iq4_nl,
            Self::IQ4XS => iq4_xs,
            Self::MXFP4 => mxfp4,
        };
        for (block, out) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(elements)) {
            decode(block, out);
        }
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The name and the sizes of a block.
struct BlockFacts {
    name: &'static str,
    elements: usize,
    bytes: usize,
}

/// Values of four bits in IQ4_NL and IQ4_XS.
pub(super) static IQ4: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];
/// Twice the values of e2m1; no zero has a sign.
static E2M1: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn signed(byte: u8) -> f32 {
    f32::from(byte.cast_signed())
}

/// Writes `value` of each code of four bits: the low halves of all bytes, then the high ones.
fn nibbles(codes: &[u8], out: &mut [f32], value: impl Fn(usize, u8) -> f32) {
    let (low, high) = out.split_at_mut(codes.len());
    for (i, ((low, high), code)) in low.iter_mut().zip(high).zip(codes).enumerate() {
        (*low, *high) = (value(i, code & 15), value(i + codes.len(), code >> 4));
    }
}

fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    nibbles(&block[2..], out, |_, code| d * (f32::from(code) - 8.0));
}

fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    nibbles(&block[4..], out, |_, code| d * f32::from(code) + m);
}

/// Returns the fifth bit of the element `i`, in its place; `at` is the first byte of all.
fn fifth(block: &[u8], at: usize, i: usize) -> u8 {
    (block[at + i / 8] >> (i % 8) & 1) << 4
}

fn q5_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    nibbles(&block[6..], out, |i, code| d * (f32::from(code | fifth(block, 2, i)) - 16.0));
}

fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    nibbles(&block[8..], out, |i, code| d * f32::from(code | fifth(block, 4, i)) + m);
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    out.iter_mut().zip(&block[2..]).for_each(|(value, code)| *value = signed(*code) * d);
}

/// Writes the values of 32 elements from their index among them.
fn group(out: &mut [f32], value: impl Fn(usize) -> f32) {
    out.iter_mut().enumerate().for_each(|(i, out)| *out = value(i));
}

fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, codes) = (&block[..16], &block[16..80]);
    let (d, dmin) = (half(block, 80), half(block, 82));
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let (codes, shift) = (&codes[g / 4 * 32..][..32], g % 4 * 2);
        let [first, second] = [scales[2 * g], scales[2 * g + 1]]
            .map(|scale| (d * f32::from(scale & 15), dmin * f32::from(scale >> 4)));
        group(out, |i| {
            let (scale, min) = if i < 16 { first } else { second };
            scale * f32::from(codes[i] >> shift & 3) - min
        });
    }
}

fn q3_k(block: &[u8], out: &mut [f32]) {
    let (mask, codes, scales, d) = (&block[..32], &block[32..96], &block[96..108], half(block, 108));
    let scale = |i: usize| {
        let low = scales[i % 8] >> (i / 8 * 4) & 15;
        let high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
        d * (f32::from(low | high << 4) - 32.0)
    };
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let (codes, shift, [first, second]) =
            (&codes[g / 4 * 32..][..32], g % 4 * 2, [scale(2 * g), scale(2 * g + 1)]);
        group(out, |i| {
            // The offset is zero where the bit of the mask is set.
            let offset = if mask[i] >> g & 1 == 0 { 4.0 } else { 0.0 };
            (if i < 16 { first } else { second }) * (f32::from(codes[i] >> shift & 3) - offset)
        });
    }
}

/// Returns scale and minimum of a group, by 6 bits each in 12 bytes.
fn scale_and_min(block: &[u8], g: usize) -> (f32, f32) {
    let (d, dmin, s) = (half(block, 0), half(block, 2), &block[4..16]);
    let (scale, min) = if g < 4 {
        (s[g] & 63, s[g + 4] & 63)
    } else {
        (s[g + 4] & 15 | s[g - 4] >> 2 & 0x30, s[g + 4] >> 4 | s[g] >> 2 & 0x30)
    };
    (d * f32::from(scale), dmin * f32::from(min))
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let (codes, shift) = (&block[16 + g / 2 * 32..][..32], g % 2 * 4);
        let (scale, min) = scale_and_min(block, g);
        group(out, |i| scale * f32::from(codes[i] >> shift & 15) - min);
    }
}

fn q5_k(block: &[u8], out: &mut [f32]) {
    let high = &block[16..48];
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let (codes, shift) = (&block[48 + g / 2 * 32..][..32], g % 2 * 4);
        let (scale, min) = scale_and_min(block, g);
        group(out, |i| scale * f32::from(codes[i] >> shift & 15 | (high[i] >> g & 1) << 4) - min);
    }
}

fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales, d) = (&block[..128], &block[128..192], &block[192..208], half(block, 208));
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let (half, quarter) = (g / 4, g % 4);
        let (low, high) = (&low[half * 64 + quarter % 2 * 32..][..32], &high[half * 32..][..32]);
        let [first, second] = [d * signed(scales[2 * g]), d * signed(scales[2 * g + 1])];
        group(out, |i| {
            let code = low[i] >> (quarter / 2 * 4) & 15 | (high[i] >> (quarter * 2) & 3) << 4;
            (if i < 16 { first } else { second }) * (f32::from(code) - 32.0)
        });
    }
}

fn iq4_nl(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    nibbles(&block[2..], out, |_, code| d * IQ4[usize::from(code)]);
}

fn iq4_xs(block: &[u8], out: &mut [f32]) {
    let (d, high) = (half(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let low = block[4 + g / 2] >> (g % 2 * 4) & 15;
        let scale = d * (f32::from(u16::from(low) | (high >> (2 * g) & 3) << 4) - 32.0);
        nibbles(&block[8 + 16 * g..][..16], out, |_, code| scale * IQ4[usize::from(code)]);
    }
}

fn mxfp4(block: &[u8], out: &mut [f32]) {
    // Half of 2^(e - 127), since the values are doubled; subnormal for the two smallest.
    let e = u32::from(block[0]);
    let d = f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 });
    nibbles(&block[1..], out, |_, code| d * E2M1[usize::from(code)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_sizes_are_ggml_s() {
        // Bytes and elements of a block: ggml-common.h.
        for (kind, number, elements, bytes) in [
            (BlockType::F32, 0, 1, 4),
            (BlockType::BF16, 30, 1, 2),
            (BlockType::Q4_0, 2, 32, 18),
            (BlockType::Q5_0, 6, 32, 22),
            (BlockType::Q5_1, 7, 32, 24),
            (BlockType::Q8_0, 8, 32, 34),
            (BlockType::Q4K, 12, 256, 144),
            (BlockType::Q5K, 13, 256, 176),
            (BlockType::Q6K, 14, 256, 210),
            (BlockType::MXFP4, 39, 32, 17),
        ] {
            assert_eq!((kind.elements(), kind.bytes()), (elements, bytes), "{kind}");
            assert_eq!(BlockType::of_number(number), Some(kind));
        }
        assert_eq!(BlockType::of_number(16), None);
    }

    /// Scale 2 and the codes 0 to 15 in the low halves, 15 in the high ones, by the definition.
    #[test]
    fn a_block_of_q4_0_by_hand() {
        let mut block = f16::from_f32(2.0).to_le_bytes().to_vec();
        block.extend((0..16).map(|code| 0xf0 | code));
        let mut out = [0.0; 32];
        BlockType::Q4_0.dequantize(&block, &mut out);
        assert!((0..16).all(|i| out[i] == 2.0 * (i as f32 - 8.0) && out[i + 16] == 14.0), "{out:?}");
    }
}
