//! The registry of quantized formats.

use super::element::DequantizedElement;
use super::runs::RunsView;
use super::scheme::QuantScheme;
use super::schemes::{BlockFormat, FourBit, GgmlFormat, GridFormat, Int8, Int8Rows};
use crate::recipe::enums::QuantKind;

/// Quantization format of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantFormat {
    /// NF4 or FP4.
    FourBit(BlockFormat<FourBit>),
    /// Blockwise int8 of bitsandbytes.
    Int8(BlockFormat<Int8>),
    /// LLM.int8(), whose block is a row.
    Int8Rows(BlockFormat<Int8Rows>),
    /// A format of another tool, kept as it is stored.
    Grid(GridFormat),
    /// A block format of GGUF, kept as it is stored.
    Ggml(GgmlFormat),
}

impl Default for QuantFormat {
    /// Format of QLoRA's paper: nf4 in blocks of 64, with quantized scales.
    fn default() -> Self {
        QuantFormat::FourBit(BlockFormat::default())
    }
}

impl QuantFormat {
    /// Format of a recipe.
    pub const fn of_kind(kind: QuantKind, block_size: usize, double_quant: bool) -> Self {
        let codes = match kind {
            QuantKind::Nf4 => FourBit::Nf4,
            QuantKind::Fp4 => FourBit::Fp4,
            QuantKind::Int8 => return Self::Int8(BlockFormat { codes: Int8, block_size, double_quant }),
        };
        Self::FourBit(BlockFormat { codes, block_size, double_quant })
    }

    /// LLM.int8() for matrices with this number of columns.
    pub const fn int8_rows(columns: usize) -> Self {
        Self::Int8Rows(BlockFormat { codes: Int8Rows, block_size: columns, double_quant: false })
    }

    /// Returns whether another tool quantized to this format, and a run keeps it as it is stored.
    pub fn is_kept(&self) -> bool {
        matches!(self, QuantFormat::Grid(_) | QuantFormat::Ggml(_))
    }

    /// Implementation of the format.
    pub fn scheme(&self) -> &dyn QuantScheme {
        match self {
            QuantFormat::FourBit(format) => format,
            QuantFormat::Int8(format) => format,
            QuantFormat::Int8Rows(format) => format,
            QuantFormat::Grid(format) => format,
            QuantFormat::Ggml(format) => format,
        }
    }

    /// Writes the values from the value `start` on into `out` ([`QuantScheme::dequantize`]).
    pub(super) fn dequantize<T: DequantizedElement>(&self, runs: &RunsView<'_>, start: usize, out: &mut [T]) {
        match self {
            QuantFormat::FourBit(format) => format.dequantize(runs, start, out),
            QuantFormat::Int8(format) => format.dequantize(runs, start, out),
            QuantFormat::Int8Rows(format) => format.dequantize(runs, start, out),
            QuantFormat::Grid(format) => format.dequantize(runs, start, out),
            QuantFormat::Ggml(format) => format.dequantize(runs, start, out),
        }
    }
}
