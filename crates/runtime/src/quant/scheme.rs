//! The interface of a quantized format.

use std::fmt::Debug;
use std::ops::Range;

use super::element::DequantizedElement;
use super::runs::{QuantRun, RunMeaning, RunsView, RunsViewMut};
use crate::error::Result;

/// Function that writes the values of a tensor from an index into the given slice, on several
/// threads at once.
pub type ReadValues<'a> = &'a (dyn Fn(usize, &mut [f32]) -> Result<()> + Sync);

/// A quantized format. It describes the flattened tensor; a format whose blocks depend on the width
/// of a matrix holds this width.
pub trait QuantScheme: Debug + Send + Sync {
    /// Name in recipes, messages and checkpoints.
    fn name(&self) -> &'static str;

    /// Runs of a tensor of `n` values, the codes first. Checkpoints store, and buckets shard and
    /// offload, these runs. One number of the whole tensor, such as the mean of double-quantized
    /// scales, is stored beside them as the offset.
    fn runs(&self, n: usize) -> Vec<QuantRun>;

    /// Smallest number of values at whose multiples a tensor can be cut: whole blocks. The parts
    /// of all runs then have whole elements.
    fn unit(&self) -> usize;

    /// Writes the values from the value `start` on into a tile, each computed in f32 and rounded
    /// once.
    fn dequantize<T: DequantizedElement>(&self, runs: &RunsView<'_>, start: usize, tile: &mut [T])
    where
        Self: Sized;

    /// Quantizes `n` finite values, piece by piece on all threads.
    ///
    /// # Errors
    /// The error of `read` for the first piece that has one; `read` also checks that values are
    /// finite.
    fn fill(&self, n: usize, read: ReadValues<'_>, to: &mut RunsViewMut<'_>) -> Result<()>;

    /// Facts that select and configure the product with a matrix.
    fn hint(&self) -> ProductHint;

    /// Size of a tensor of `n` values in bytes.
    fn bytes(&self, n: usize) -> usize {
        self.runs(n).iter().map(QuantRun::bytes).sum()
    }

    /// The elements of each run that hold a range of values, such as those of some rows, and the
    /// first value that they hold.
    fn part(&self, values: Range<usize>) -> (usize, Vec<Range<usize>>) {
        let start = values.start / self.unit() * self.unit();
        let (before, all) = (self.runs(start), self.runs(values.end));
        (start, before.iter().zip(all).map(|(before, all)| before.elements..all.elements).collect())
    }

    /// True if the scales are quantized too.
    fn double_quant(&self) -> bool {
        self.runs(1).iter().any(|run| run.meaning == RunMeaning::ScaleCodes)
    }

    /// The format in words: `nf4 in blocks of 64 with f32 scales`.
    fn describe(&self) -> String {
        let scales = if self.double_quant() { "double-quantized" } else { "f32" };
        format!("{} {} with {scales} scales", self.name(), self.blocks_in_words())
    }

    /// The values that share a scale, in words: `in blocks of 64`.
    fn blocks_in_words(&self) -> String {
        format!("in blocks of {}", self.hint().block_size)
    }

    /// Text that differs between any two formats. The identity of a model includes it, so it never
    /// changes.
    fn fingerprint(&self) -> String {
        format!("{} {} {}", self.name(), self.hint().block_size, self.double_quant())
    }
}

/// Facts of a format for products. A value in a format of blocks is
/// `table[code] * scale / divisor`.
#[derive(Debug, Clone, Copy)]
pub struct ProductHint {
    /// Consecutive values that share a scale.
    pub block_size: usize,
    /// Bits of a code.
    pub bits: usize,
    /// Value of each code: 16 or 256 values; none if the format has no table.
    pub table: &'static [f32],
    /// Divisor of all values, if it is not 1.
    pub divisor: Option<f32>,
    /// Kernel that dequantizes a matrix on a GPU; without it, candle's primitives do.
    pub kernel: Option<PanelKernel>,
}

/// Kernels of `kernels/dequantize.cu`, and of the two files beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PanelKernel {
    /// Table of 16 values, two codes in a byte.
    FourBits,
    /// Table of 256 values.
    Int8,
    /// Integers whose scales belong to 127.
    Int8Rows,
    /// A grid of scales ([`super::GridFormat`]): dequantize_grid.cu.
    Grid,
    /// Blocks of GGUF ([`super::GgmlFormat`]): dequantize_blocks.cu.
    Blocks,
}
