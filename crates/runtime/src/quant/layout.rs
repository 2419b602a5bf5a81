//! Memory runs of a quantized tensor, and their contents.

use super::{NESTED_BLOCK, QuantFormat};

/// Contents of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunMeaning {
    /// Codes of the values: a byte holds two of 4 bits or one of 8.
    Codes,
    /// Scales, one per block.
    Scales,
    /// Codes of the scales with double quantization, one per block.
    ScaleCodes,
    /// Scales of the scales with double quantization, one per [`NESTED_BLOCK`] codes.
    NestedScales,
}

/// Element type of a run. Runs of one type may share a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RunDtype {
    /// Bytes of codes.
    U8,
    /// Numbers in f32.
    F32,
}

impl RunMeaning {
    /// Element type of such a run.
    pub fn dtype(self) -> RunDtype {
        match self {
            RunMeaning::Codes | RunMeaning::ScaleCodes => RunDtype::U8,
            RunMeaning::Scales | RunMeaning::NestedScales => RunDtype::F32,
        }
    }
}

/// One run of a quantized tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantRun {
    /// Contents of the run.
    pub meaning: RunMeaning,
    /// Number of elements.
    pub elements: usize,
}

impl QuantRun {
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        match self.meaning.dtype() {
            RunDtype::U8 => self.elements,
            RunDtype::F32 => 4 * self.elements,
        }
    }
}

impl QuantFormat {
    /// Runs of a tensor of `n` values, the codes first. The mean of double-quantized scales is
    /// stored beside them.
    pub fn layout(&self, n: usize) -> Vec<QuantRun> {
        let run = |meaning, elements| QuantRun { meaning, elements };
        let (codes, blocks) = (run(RunMeaning::Codes, self.code_bytes(n)), self.blocks(n));
        if self.double_quant {
            let nested = run(RunMeaning::NestedScales, blocks.div_ceil(NESTED_BLOCK));
            vec![codes, run(RunMeaning::ScaleCodes, blocks), nested]
        } else {
            vec![codes, run(RunMeaning::Scales, blocks)]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::CodeKind;

    #[test]
    fn runs_of_a_short_last_block() {
        let sizes = |kind, double_quant| {
            let layout = QuantFormat { kind, block_size: 64, double_quant }.layout(64 * 300 + 1);
            layout.iter().map(|run| (run.elements, run.bytes())).collect::<Vec<_>>()
        };
        assert_eq!(sizes(CodeKind::NF4, false), [(9601, 9601), (301, 1204)]);
        assert_eq!(sizes(CodeKind::NF4, true), [(9601, 9601), (301, 301), (2, 8)]);
        assert_eq!(sizes(CodeKind::INT8, false), [(19201, 19201), (301, 1204)]);
    }
}
