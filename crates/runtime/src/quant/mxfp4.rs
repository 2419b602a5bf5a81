//! Rounds to MXFP4 (OCP MX 1.0): blocks of 32 values in e2m1 with a power of two as their scale.
//!
//! The scale is that of section 6.3 of the specification: the largest power of two that does not
//! exceed the block's largest magnitude, divided by 4, the largest power of two of e2m1. Values
//! above 6 times the scale become 6 times the scale.

use rayon::prelude::*;

use super::magnitude::largest_bits;
use super::small_floats::to_e2m1;
use crate::instruction_set::vectorized;

/// Values with a common scale.
pub const MXFP4_BLOCK: usize = 32;
/// Values of a thread's task: whole blocks.
const TASK: usize = 1 << 14;

/// Rounds whole blocks of finite values. A byte of `codes` holds two, the first in the low half;
/// `exponents` have a bias of 127.
///
/// # Panics
/// `codes` has not half as many bytes as `values`, or `exponents` not one for each block.
pub fn to_mxfp4(values: &[f32], codes: &mut [u8], exponents: &mut [u8]) {
    assert!(values.len().is_multiple_of(MXFP4_BLOCK), "whole blocks");
    assert_eq!(codes.len(), values.len() / 2, "codes of all values");
    assert_eq!(exponents.len(), values.len() / MXFP4_BLOCK, "one exponent a block");
    let codes = codes.par_chunks_mut(TASK / 2);
    let exponents = exponents.par_chunks_mut(TASK / MXFP4_BLOCK);
    values.par_chunks(TASK).zip(codes).zip(exponents).for_each(|((values, codes), exponents)| {
        round_blocks(values, codes, exponents);
    });
}

/// Returns the biased exponent of the scale for a largest magnitude with these bits.
pub(super) fn mx_exponent(largest: u32) -> u8 {
    ((largest >> 23) as u8).saturating_sub(2)
}

vectorized! {
    fn round_blocks(values: &[f32], codes: &mut [u8], exponents: &mut [u8]) {
        let blocks = values.chunks_exact(MXFP4_BLOCK).zip(codes.chunks_exact_mut(MXFP4_BLOCK / 2));
        for ((values, codes), exponent) in blocks.zip(exponents) {
            *exponent = mx_exponent(largest_bits(values));
            // The reciprocal of the scale, exactly.
            let factor = f32::from_bits((254 - u32::from(*exponent)) << 23);
            for (code, pair) in codes.iter_mut().zip(values.chunks_exact(2)) {
                *code = to_e2m1(pair[0] * factor) | to_e2m1(pair[1] * factor) << 4;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::{CodeLayout, PackedFormat, PackedTensor, ScaleDtype};

    /// Returns the codes, the exponents, and the values that they stand for.
    fn rounded(values: &[f32]) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
        let (mut codes, mut exponents) = (vec![0; values.len() / 2], vec![0; values.len() / MXFP4_BLOCK]);
        to_mxfp4(values, &mut codes, &mut exponents);
        let format = PackedFormat {
            codes: CodeLayout::E2m1,
            bits: 4,
            rows: 1,
            columns: values.len(),
            row_block: 1,
            column_block: MXFP4_BLOCK,
            groups: exponents.len(),
            scales: ScaleDtype::E8m0,
            zero_offset: 0,
        };
        let tensor = PackedTensor {
            format,
            codes: &codes,
            scales: &exponents,
            zeros: None,
            groups: None,
            factor: 1.0,
        };
        let mut decoded = vec![0f32; values.len()];
        tensor.decode(0..1, 0..values.len(), &mut decoded);
        (codes, exponents, decoded)
    }

    fn block(first: &[f32]) -> Vec<f32> {
        first.iter().copied().chain(std::iter::repeat(0.0)).take(MXFP4_BLOCK).collect()
    }

    #[test]
    fn the_scale_is_the_power_of_two_below_a_quarter_of_the_largest() {
        for (largest, exponent, stands_for) in [
            (4.0, 127, 4.0),
            (5.0, 127, 4.0),
            (5.1, 127, 6.0),
            (7.9, 127, 6.0),
            (-8.0, 128, -8.0),
            (1.0, 125, 1.0),
            (3.999, 126, 3.0),
            (f32::MAX, 252, 6.0 * 2f32.powi(125)),
            (f32::MIN_POSITIVE, 0, f32::MIN_POSITIVE),
            (0.0, 0, 0.0),
        ] {
            let (_, exponents, decoded) = rounded(&block(&[largest]));
            assert_eq!((exponents[0], decoded[0]), (exponent, stands_for), "{largest}");
        }
    }

    #[test]
    fn the_first_value_is_in_the_low_half_and_zeros_keep_their_sign() {
        let (codes, _, decoded) = rounded(&block(&[4.0, -0.1, -0.0, 1.0]));
        assert_eq!(codes[..2], [0x86, 0x28]);
        assert_eq!(decoded[..4], [4.0, 0.0, 0.0, 1.0]);
    }

    /// Several tasks, and values that are already in the format.
    #[test]
    fn values_of_the_format_stay() {
        let values: Vec<f32> = (0..3 * TASK + 5 * MXFP4_BLOCK).map(|i| ((i as f32) * 0.37).sin()).collect();
        let (codes, exponents, decoded) = rounded(&values);
        let scale = |at: usize| f32::from_bits(u32::from(exponents[at / MXFP4_BLOCK]) << 23);
        for (at, (value, decoded)) in values.iter().zip(&decoded).enumerate() {
            // Half the widest gap, from 4 to 6, and up to 8 from 6 for the largest.
            assert!((value - decoded).abs() <= 2.0 * scale(at), "{at}: {value}, {decoded}");
            assert!(value.abs() > 6.0 * scale(at) || (value - decoded).abs() <= scale(at), "{at}");
        }
        assert_eq!(rounded(&decoded), (codes, exponents, decoded));
    }
}
