//! Blockwise 8 bits of bitsandbytes: codes of the signed dynamic map.

use super::blocks::{BlockCodes, blocks_of};
use crate::quant::codes::{dynamic_signed, quantize_signed};
use crate::quant::element::DequantizedElement;
use crate::quant::scheme::PanelKernel;
use crate::recipe::enums::QuantKind;

/// Codes of the signed dynamic map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Int8;

impl BlockCodes for Int8 {
    const BITS: usize = 8;
    const KERNEL: Option<PanelKernel> = Some(PanelKernel::Int8);

    fn name(self) -> &'static str {
        QuantKind::Int8.as_str()
    }

    fn table(self) -> &'static [f32] {
        dynamic_signed()
    }

    fn quantize(self, block_size: usize, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        for ((values, codes), scale) in blocks_of(block_size, values, codes).zip(scales) {
            *scale = quantize_signed(values, codes);
        }
    }

    fn dequantize<T: DequantizedElement>(table: &[f32], codes: &[u8], at: usize, scale: f32, out: &mut [T]) {
        let codes = &codes[at..at + out.len()];
        for (value, &code) in out.iter_mut().zip(codes) {
            *value = T::nearest(table[usize::from(code)] * scale);
        }
    }
}
