//! A quantized tensor inside a checkpoint: where its parts are, and their values.
//!
//! Codes and scales are borrowed from the memory map, where nothing is aligned, so f32 scales are copied out for each
//! use. What the parts are called in files, and whether they fit each other, is for `bitsandbytes` to say.

use std::ops::Range;

use crate::error::Result;
use crate::quant::{self, Blocks, NESTED_BLOCK, QuantFormat, Scales};

/// Bytes of a file.
#[derive(Debug, Clone)]
pub(super) struct ShardRange {
    pub(super) shard: usize,
    pub(super) range: Range<usize>,
}

/// Where the scales of a quantized tensor are.
#[derive(Debug, Clone)]
pub(super) enum ScalePlaces {
    /// f32, one a block.
    Plain(ShardRange),
    /// u8, one a block; f32, one for [`NESTED_BLOCK`] of them.
    Nested { codes: ShardRange, absmax: ShardRange, offset: f32 },
}

/// What the list of tensors does not say of a quantized one, whose own place there is that of its codes.
#[derive(Debug, Clone)]
pub(super) struct QuantizedParts {
    pub(super) format: QuantFormat,
    pub(super) scales: ScalePlaces,
    /// Of codes and companions.
    pub(super) bytes: u64,
}

/// The scales of a quantized tensor as they lie in the file.
#[derive(Debug, Clone, Copy)]
enum StoredScales<'a> {
    Plain(&'a [u8]),
    Nested { codes: &'a [u8], absmax: &'a [u8], offset: f32 },
}

/// A quantized tensor of a checkpoint, borrowed from its files.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedTensor<'a> {
    format: QuantFormat,
    codes: &'a [u8],
    scales: StoredScales<'a>,
}

impl<'a> QuantizedTensor<'a> {
    /// `bytes` reads a place.
    pub(super) fn new(
        parts: &QuantizedParts,
        codes: &'a [u8],
        bytes: impl Fn(&ShardRange) -> Result<&'a [u8]>,
    ) -> Result<Self> {
        let scales = match &parts.scales {
            ScalePlaces::Plain(scales) => StoredScales::Plain(bytes(scales)?),
            ScalePlaces::Nested { codes, absmax, offset } => {
                StoredScales::Nested { codes: bytes(codes)?, absmax: bytes(absmax)?, offset: *offset }
            }
        };
        Ok(QuantizedTensor { format: parts.format, codes, scales })
    }

    /// How it is quantized. The block of LLM.int8() is a row.
    pub fn format(&self) -> QuantFormat {
        self.format
    }

    /// The codes of all values.
    pub fn codes(&self) -> &'a [u8] {
        self.codes
    }

    /// The scales as they lie in the file: with double quantization the codes of the scales, then the scales of those;
    /// without, the scales and nothing.
    pub(super) fn stored_scales(&self) -> [&'a [u8]; 2] {
        match self.scales {
            StoredScales::Plain(scales) => [scales, &[]],
            StoredScales::Nested { codes, absmax, .. } => [codes, absmax],
        }
    }

    /// The mean of the scales; 0 without double quantization.
    pub fn offset(&self) -> f32 {
        match self.scales {
            StoredScales::Plain(_) => 0.0,
            StoredScales::Nested { offset, .. } => offset,
        }
    }

    /// Copies all parts. With double quantization `nested` takes the codes of the scales and `scales` the scales of
    /// those; without, `nested` is empty.
    ///
    /// # Panics
    /// A slice has not the length that [`QuantizedTensor::format`] gives for the tensor's elements.
    pub fn copy_to(&self, codes: &mut [u8], nested: &mut [u8], scales: &mut [f32], offset: &mut f32) {
        codes.copy_from_slice(self.codes);
        let stored = match self.scales {
            StoredScales::Plain(scales) => {
                assert!(nested.is_empty(), "scales that are not quantized have no codes");
                scales
            }
            StoredScales::Nested { codes, absmax, .. } => {
                nested.copy_from_slice(codes);
                absmax
            }
        };
        assert_eq!(stored.len(), size_of_val(scales), "all scales");
        scales.iter_mut().zip(read_f32(stored)).for_each(|(scale, stored)| *scale = stored);
        *offset = self.offset();
    }

    /// Values `start..start + out.len()`, in f32.
    pub(super) fn dequantize(&self, start: usize, out: &mut [f32]) {
        // The block size of two codes a byte is even, so that a block starts on a byte.
        let QuantFormat { kind, block_size, .. } = self.format;
        let first = start / block_size;
        let scales = self.some_scales(first..(start + out.len()).div_ceil(block_size));
        let codes = &self.codes[self.format.code_bytes(first * block_size)..];
        let blocks = Blocks { kind, block_size, codes, scales: Scales::Plain(&scales) };
        blocks.dequantize(start - first * block_size, out);
    }

    /// The factors of some blocks.
    fn some_scales(&self, blocks: Range<usize>) -> Vec<f32> {
        match self.scales {
            StoredScales::Plain(scales) => read_f32(&scales[4 * blocks.start..4 * blocks.end]).collect(),
            StoredScales::Nested { codes, absmax, offset } => {
                let map = quant::dynamic_signed();
                let (first, last) = (blocks.start / NESTED_BLOCK, blocks.end.div_ceil(NESTED_BLOCK));
                let outer: Vec<f32> = read_f32(&absmax[4 * first..4 * last]).collect();
                let scale = |block: usize| {
                    map[usize::from(codes[block])] * outer[block / NESTED_BLOCK - first] + offset
                };
                blocks.map(scale).collect()
            }
        }
    }
}

/// Little-endian floats, at any address.
pub(super) fn read_f32(bytes: &[u8]) -> impl ExactSizeIterator<Item = f32> + '_ {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}
