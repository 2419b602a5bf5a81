//! 4-bit codes of bitsandbytes: NF4 and FP4. A byte holds two codes, the first in the high nibble.

use super::blocks::{BlockCodes, BlockFormat, blocks_of};
use crate::instruction_set::vectorized;
use crate::quant::element::DequantizedElement;
use crate::quant::magnitude::largest_bits;
use crate::quant::scheme::PanelKernel;
use crate::recipe::enums::QuantKind;

/// The sets of 4-bit codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FourBit {
    /// 4-bit NormalFloat: quantiles of the normal distribution.
    Nf4,
    /// 4-bit float: sign, two bits of exponent, one of mantissa.
    Fp4,
}

/// Appendix E of QLoRA, in f32.
static NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Twelfths of 1/16, 8, 12, 4, 6, 2, 3; the second half is negative, so code 8 is a second zero.
static FP4: [f32; 16] = [
    0.0,
    0.005_208_333_5,
    0.666_666_7,
    1.0,
    0.333_333_34,
    0.5,
    0.166_666_67,
    0.25,
    0.0,
    -0.005_208_333_5,
    -0.666_666_7,
    -1.0,
    -0.333_333_34,
    -0.5,
    -0.166_666_67,
    -0.25,
];

impl Default for BlockFormat<FourBit> {
    /// Format of QLoRA's paper: nf4 in blocks of 64, with quantized scales.
    fn default() -> Self {
        BlockFormat { codes: FourBit::Nf4, block_size: 64, double_quant: true }
    }
}

impl FourBit {
    /// Every set of codes.
    pub const ALL: [FourBit; 2] = [FourBit::Nf4, FourBit::Fp4];
}

impl BlockCodes for FourBit {
    const BITS: usize = 4;
    const KERNEL: Option<PanelKernel> = Some(PanelKernel::FourBits);

    fn name(self) -> &'static str {
        match self {
            FourBit::Nf4 => QuantKind::Nf4.as_str(),
            FourBit::Fp4 => QuantKind::Fp4.as_str(),
        }
    }

    fn table(self) -> &'static [f32] {
        match self {
            FourBit::Nf4 => &NF4,
            FourBit::Fp4 => &FP4,
        }
    }

    fn quantize(self, block_size: usize, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        quantize_blocks(self, block_size, values, codes, scales);
    }

    fn dequantize<T: DequantizedElement>(table: &[f32], codes: &[u8], at: usize, scale: f32, out: &mut [T]) {
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
}

vectorized! {
    /// Quantizes a run of blocks in one function: a call per block would cost as much as its work.
    fn quantize_blocks(kind: FourBit, block_size: usize, values: &[f32], codes: &mut [u8], absmax: &mut [f32]) {
        let ladder = CodeThresholds::new(kind);
        // One code per byte first, then two: whole blocks may end in the middle of a byte.
        let mut wide = vec![0u8; values.len()];
        for ((values, wide), absmax) in blocks_of(block_size, values, &mut wide).zip(absmax) {
            *absmax = f32::from_bits(largest_bits(values));
            // bitsandbytes multiplies by the reciprocal, whose last bit may differ from the
            // quotient's, but divides in the incomplete block at a tensor's end. The divisor is at
            // least this.
            let divisor = absmax.max(1e-38);
            if values.len() == block_size {
                let factor = 1.0 / divisor;
                count_below(values.iter().map(|value| value * factor), &ladder.midpoints, wide);
            } else {
                count_below(values.iter().map(|value| value / divisor), &ladder.midpoints, wide);
            }
        }
        if kind != FourBit::Nf4 {
            // NF4's codes ascend with their values.
            wide.iter_mut().for_each(|code| *code = ladder.by_rank[usize::from(*code & 15)]);
        }
        pack(&wide, codes, ladder.zero);
    }
}

#[inline(always)]
fn pack(wide: &[u8], codes: &mut [u8], zero: u8) {
    let pairs = wide.chunks_exact(2);
    if let (Some(last), [odd]) = (codes.last_mut(), pairs.remainder()) {
        *last = odd << 4 | zero;
    }
    for (code, pair) in codes.iter_mut().zip(pairs) {
        *code = pair[0] << 4 | pair[1];
    }
}

/// Codes of a 4-bit kind in ascending order of their values, and the midpoints between them.
struct CodeThresholds {
    midpoints: [f32; 15],
    by_rank: [u8; 16],
    /// Code of 0, which fills the last byte of an odd count.
    zero: u8,
}

impl CodeThresholds {
    fn new(kind: FourBit) -> Self {
        let table = kind.table();
        let mut by_rank: [u8; 16] = std::array::from_fn(|code| code as u8);
        by_rank.sort_by(|&a, &b| table[usize::from(a)].total_cmp(&table[usize::from(b)]));
        let value = |rank: usize| table[usize::from(by_rank[rank])];
        let midpoints = std::array::from_fn(|rank| (value(rank) + value(rank + 1)) / 2.0);
        let zero = if kind == FourBit::Nf4 { 7 } else { 0 };
        CodeThresholds { midpoints, by_rank, zero }
    }
}

/// Counts the midpoints below each value: its code's rank, the lower of two at a tie.
#[inline(always)]
fn count_below(values: impl Iterator<Item = f32>, midpoints: &[f32; 15], counts: &mut [u8]) {
    for (count, scaled) in counts.iter_mut().zip(values) {
        let mut below = 0u32;
        for midpoint in midpoints {
            below += u32::from(scaled > *midpoint);
        }
        *count = below as u8;
    }
}
