//! LLM.int8(): whole numbers from -127 to 127 with one scale per row, which is the block.

use std::sync::LazyLock;

use super::blocks::{BlockCodes, blocks_of};
use crate::instruction_set::vectorized;
use crate::quant::element::DequantizedElement;
use crate::quant::magnitude::largest;
use crate::quant::scheme::PanelKernel;

/// Integers as two's complement. Their scales belong to 127.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Int8Rows;

static INTEGERS: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|i| f32::from(i as u8 as i8)));

impl BlockCodes for Int8Rows {
    const BITS: usize = 8;
    const DIVISOR: Option<f32> = Some(127.0);
    const KERNEL: Option<PanelKernel> = Some(PanelKernel::Int8Rows);

    fn name(self) -> &'static str {
        "int8 rows"
    }

    fn table(self) -> &'static [f32] {
        &*INTEGERS
    }

    fn quantize(self, block_size: usize, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        for ((values, codes), scale) in blocks_of(block_size, values, codes).zip(scales) {
            *scale = largest(values);
            // torch divides a number by a tensor in these two steps, which decide ties.
            let factor = if *scale > 0.0 { 1.0 / *scale * 127.0 } else { 0.0 };
            round_all(values, factor, codes);
        }
    }

    fn dequantize<T: DequantizedElement>(_: &[f32], codes: &[u8], at: usize, scale: f32, out: &mut [T]) {
        integers(&codes[at..at + out.len()], scale, out);
    }
}

vectorized! {
    /// Rounds to integers, ties to even, as two's complement.
    fn round_all(values: &[f32], factor: f32, codes: &mut [u8]) {
        for (code, value) in codes.iter_mut().zip(values) {
            *code = (value * factor).round_ties_even() as i8 as u8;
        }
    }
}

vectorized! {
    /// Dequantizes with two products in the order of bitsandbytes' `int8_vectorwise_dequant`.
    fn integers<T: DequantizedElement>(codes: &[u8], scale: f32, out: &mut [T]) {
        for (value, &code) in out.iter_mut().zip(codes) {
            *value = T::nearest(f32::from(code as i8) * scale * (1.0 / 127.0));
        }
    }
}
