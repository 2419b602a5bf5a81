//! A quantized tensor in a checkpoint: the positions of its runs, and their values.
//!
//! Codes and scales are borrowed from the memory map, which is unaligned, so f32 scales are copied
//! for each use. `bitsandbytes` defines the names of the runs in files and checks that they match.

use std::ops::Range;

use crate::error::Result;
use crate::quant::{self, Blocks, BlocksMut, NESTED_BLOCK, QuantFormat, RunMeaning, RunMut, Scales};

/// A range of bytes of a file.
#[derive(Debug, Clone)]
pub(super) struct ShardRange {
    pub(super) shard: usize,
    pub(super) range: Range<usize>,
}

/// The data of a quantized tensor besides its entry in the list of tensors, which has the position
/// of its codes.
#[derive(Debug, Clone)]
pub(super) struct QuantizedParts {
    pub(super) format: QuantFormat,
    /// The positions of the other runs of [`QuantFormat::layout`], in its order.
    pub(super) runs: Vec<(RunMeaning, ShardRange)>,
    /// The mean of double-quantized scales.
    pub(super) offset: f32,
    /// Bytes of codes and companions.
    pub(super) bytes: u64,
}

/// A quantized tensor of a checkpoint, borrowed from its files.
#[derive(Debug, Clone)]
pub struct QuantizedTensor<'a> {
    format: QuantFormat,
    codes: &'a [u8],
    /// The raw bytes of the other runs.
    runs: Vec<(RunMeaning, &'a [u8])>,
    offset: f32,
}

impl<'a> QuantizedTensor<'a> {
    /// Creates the tensor; `bytes` reads a range.
    pub(super) fn new(
        parts: &QuantizedParts,
        codes: &'a [u8],
        bytes: impl Fn(&ShardRange) -> Result<&'a [u8]>,
    ) -> Result<Self> {
        let run = |(meaning, place): &(RunMeaning, ShardRange)| Ok((*meaning, bytes(place)?));
        let runs = parts.runs.iter().map(run).collect::<Result<_>>()?;
        Ok(QuantizedTensor { format: parts.format, codes, runs, offset: parts.offset })
    }

    /// Returns its format. The block of LLM.int8() is a row.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// Returns the codes of all values.
    pub fn codes(&self) -> &'a [u8] {
        self.codes
    }

    /// Returns the mean of the scales; 0 without double quantization.
    pub fn offset(&self) -> f32 {
        self.offset
    }

    /// Copies all runs.
    ///
    /// # Panics
    /// The length of a run's memory differs from the length that [`QuantizedTensor::format`] gives
    /// for the tensor's elements.
    pub fn copy_to(&self, to: &mut BlocksMut<'_>) {
        for &(meaning, stored) in [(RunMeaning::Codes, self.codes)].iter().chain(&self.runs) {
            match to.run(meaning) {
                RunMut::U8(to) => to.copy_from_slice(stored),
                RunMut::F32(to) => {
                    assert_eq!(stored.len(), size_of_val(to), "all scales");
                    to.iter_mut().zip(read_f32(stored)).for_each(|(value, stored)| *value = stored);
                }
            }
        }
        to.set_offset(self.offset);
    }

    /// Computes the values `start..start + out.len()` in f32.
    pub(super) fn dequantize(&self, start: usize, out: &mut [f32]) {
        // With two codes per byte the block size is even, so a block starts on a byte.
        let QuantFormat { kind, block_size, .. } = self.format;
        let first = start / block_size;
        let scales = self.some_scales(first..(start + out.len()).div_ceil(block_size));
        let codes = &self.codes[self.format.code_bytes(first * block_size)..];
        let blocks = Blocks { kind, block_size, codes, scales: Scales::Plain(&scales) };
        blocks.dequantize(start - first * block_size, out);
    }

    /// Returns the scales of some blocks.
    fn some_scales(&self, blocks: Range<usize>) -> Vec<f32> {
        if !self.format.double_quant {
            return read_f32(&self.stored(RunMeaning::Scales)[4 * blocks.start..4 * blocks.end]).collect();
        }
        let (codes, absmax) = (self.stored(RunMeaning::ScaleCodes), self.stored(RunMeaning::NestedScales));
        let map = quant::dynamic_signed();
        let (first, last) = (blocks.start / NESTED_BLOCK, blocks.end.div_ceil(NESTED_BLOCK));
        let outer: Vec<f32> = read_f32(&absmax[4 * first..4 * last]).collect();
        let scale =
            |block: usize| map[usize::from(codes[block])] * outer[block / NESTED_BLOCK - first] + self.offset;
        blocks.map(scale).collect()
    }

    /// Returns the bytes of a run beside the codes; empty if the run does not exist.
    fn stored(&self, meaning: RunMeaning) -> &'a [u8] {
        self.runs.iter().find(|(found, _)| *found == meaning).map_or(&[], |(_, stored)| *stored)
    }
}

/// Reads little-endian floats at any address.
pub(super) fn read_f32(bytes: &[u8]) -> impl ExactSizeIterator<Item = f32> + '_ {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}
