//! Block-quantized numbers, bit-compatible with bitsandbytes: NF4 and FP4 (QLoRA, arXiv 2305.14314), blockwise int8
//! (arXiv 2110.02861), the rows of LLM.int8() (arXiv 2208.07339), double quantization of scales.
//!
//! A tensor is flattened and cut into blocks; a block's scale is its largest magnitude, a value its nearest code times
//! that scale. 4-bit codes lie two in a byte, the first in the high nibble. Here are slices and arithmetic alone: how
//! files name the parts is `weights`', products with codes are `ops`'.

mod codes;
mod dequantize;
mod layout;
mod magnitude;
mod quantize;
mod table;
mod tensor;

pub use codes::{CodeKind, DynamicMap, dynamic_signed, dynamic_unsigned, nearest};
pub use dequantize::{Blocks, DequantizedElement, Scales};
pub use layout::{QuantRun, RunDtype, RunMeaning};
pub use quantize::{first_not_finite, nest, quantize};
pub use tensor::{BlocksMut, OwnedBlocks, RunBuffer, RunMut};

/// Scales that share an outer scale in double quantization.
pub const NESTED_BLOCK: usize = 256;

/// How a tensor is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantFormat {
    /// What a code stands for.
    pub kind: CodeKind,
    /// Values that share a scale.
    pub block_size: usize,
    /// Whether the scales are quantized too.
    pub double_quant: bool,
}

impl Default for QuantFormat {
    /// The format of QLoRA's paper: nf4 in blocks of 64, the scales quantized too.
    fn default() -> Self {
        QuantFormat { kind: CodeKind::NF4, block_size: 64, double_quant: true }
    }
}

impl QuantFormat {
    /// Bytes of the codes of `n` values.
    pub fn code_bytes(&self, n: usize) -> usize {
        (n * self.kind.bits()).div_ceil(8)
    }

    /// Scales of `n` values.
    pub fn blocks(&self, n: usize) -> usize {
        n.div_ceil(self.block_size)
    }
}
