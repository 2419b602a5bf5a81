//! Block-quantized numbers, bit-compatible with bitsandbytes: NF4 and FP4 (QLoRA, arXiv
//! 2305.14314), blockwise int8 (arXiv 2110.02861), the rows of LLM.int8() (arXiv 2208.07339),
//! double quantization of scales.
//!
//! A tensor is flattened and cut into blocks. A block's scale is its largest magnitude, and a value
//! is its nearest code times that scale. A byte holds two 4-bit codes, the first in the high
//! nibble. This module has only slices and arithmetic: `weights` defines the names in files, `ops`
//! the products with codes.

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

/// Quantization format of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantFormat {
    /// Kind of the codes.
    pub kind: CodeKind,
    /// Values that share a scale.
    pub block_size: usize,
    /// True if the scales are quantized too.
    pub double_quant: bool,
}

impl Default for QuantFormat {
    /// Format of QLoRA's paper: nf4 in blocks of 64, with quantized scales.
    fn default() -> Self {
        QuantFormat { kind: CodeKind::NF4, block_size: 64, double_quant: true }
    }
}

impl QuantFormat {
    /// Bytes of the codes of `n` values.
    pub fn code_bytes(&self, n: usize) -> usize {
        (n * self.kind.bits()).div_ceil(8)
    }

    /// Number of scales of `n` values.
    pub fn blocks(&self, n: usize) -> usize {
        n.div_ceil(self.block_size)
    }
}
