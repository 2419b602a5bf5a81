//! The blocks of GGUF files as a run keeps them: bytes row by row, decoded a block at a time.
//!
//! Their scales have several levels and differ in form, so that no grid of scales holds them.
//! Nothing is quantized to these formats.

use crate::error::{Error, Result};
use crate::quant::block_type::BlockType;
use crate::quant::element::DequantizedElement;
use crate::quant::runs::{QuantRun, RunMeaning, RunsView, RunsViewMut};
use crate::quant::scheme::{PanelKernel, ProductHint, QuantScheme, ReadValues};

/// The most elements of a block.
const MOST: usize = 256;

/// A block format of ggml. Rows are whole blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GgmlFormat {
    /// The type of the blocks.
    pub kind: BlockType,
}

impl QuantScheme for GgmlFormat {
    fn name(&self) -> &'static str {
        self.kind.name()
    }

    fn runs(&self, n: usize) -> Vec<QuantRun> {
        let elements = n.div_ceil(self.kind.elements()) * self.kind.bytes();
        vec![QuantRun { meaning: RunMeaning::Codes, elements }]
    }

    fn unit(&self) -> usize {
        self.kind.elements()
    }

    fn dequantize<T: DequantizedElement>(&self, runs: &RunsView<'_>, start: usize, out: &mut [T]) {
        let (size, bytes) = (self.kind.elements(), runs.bytes(RunMeaning::Codes));
        let mut values = [0f32; MOST];
        let values = &mut values[..size];
        let (mut block, mut within, mut rest) = (start / size, start % size, out);
        while !rest.is_empty() {
            let count = (size - within).min(rest.len());
            let (part, after) = rest.split_at_mut(count);
            self.kind.dequantize(&bytes[block * self.kind.bytes()..][..self.kind.bytes()], values);
            for (value, decoded) in part.iter_mut().zip(&values[within..]) {
                *value = T::nearest(*decoded);
            }
            (block, within, rest) = (block + 1, 0, after);
        }
    }

    fn fill(&self, _: usize, _: ReadValues<'_>, _: &mut RunsViewMut<'_>) -> Result<()> {
        Err(Error::internal(format!("a run quantizes no weights to {}", self.describe())))
    }

    fn hint(&self) -> ProductHint {
        let (size, bits) = (self.kind.elements(), self.kind.bytes() * 8);
        // The nearest whole number of bits, scales included.
        ProductHint {
            block_size: size,
            bits: (bits + size / 2) / size,
            table: self.kind.table(),
            divisor: None,
            kernel: Some(PanelKernel::Blocks),
        }
    }

    fn describe(&self) -> String {
        format!("{}, as stored", self.name())
    }
}
