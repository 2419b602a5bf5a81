//! A whole tensor in codes and scales, quantized as its values stream by.

use rayon::prelude::*;

use super::{Blocks, NESTED_BLOCK, QuantFormat, Scales, nest, quantize};

/// Values that a thread holds in f32: 64 KiB, which stay in its own cache from reading to the codes.
const PIECE: usize = 1 << 14;

/// Memory that the parts of a quantized tensor go to.
#[derive(Debug)]
pub struct BlocksMut<'a> {
    /// What they are.
    pub format: QuantFormat,
    /// Codes of the values: [`QuantFormat::code_bytes`].
    pub codes: &'a mut [u8],
    /// Codes of the scales, one a block; empty without double quantization.
    pub nested: &'a mut [u8],
    /// The scales: [`QuantFormat::scales`].
    pub scales: &'a mut [f32],
    /// The mean of the scales, with double quantization.
    pub offset: &'a mut f32,
}

impl BlocksMut<'_> {
    /// Quantizes `n` values; `read` writes those from an index on into the slice it is given, piece by piece on all threads.
    ///
    /// # Errors
    /// Those of `read`, which also answers for the values being finite: that of the first piece that has one.
    pub fn fill<E: Send>(
        &mut self,
        n: usize,
        read: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let format = self.format;
        let mut own = vec![0f32; if format.double_quant { format.blocks(n) } else { 0 }];
        let absmax: &mut [f32] = if format.double_quant { &mut own } else { self.scales };
        // Whole blocks, and whole bytes of two codes.
        let piece = (PIECE / format.block_size).max(2) / 2 * 2 * format.block_size;
        let codes = self.codes[..format.code_bytes(n)].par_chunks_mut(format.code_bytes(piece));
        let absmax = absmax[..format.blocks(n)].par_chunks_mut(format.blocks(piece));
        let failed = codes.zip(absmax).enumerate().map_init(
            || vec![0f32; piece.min(n)],
            |values, (i, (codes, absmax))| {
                let start = i * piece;
                let values = &mut values[..piece.min(n - start)];
                read(start, values)?;
                quantize(format.kind, format.block_size, values, codes, absmax);
                Ok(())
            },
        );
        if let Some(failed) = failed.find_first(Result::is_err) {
            return failed;
        }
        if format.double_quant {
            *self.offset = nest(&own, self.nested, self.scales);
        }
        Ok(())
    }

    /// The tensor as it is now.
    pub fn blocks(&self) -> Blocks<'_> {
        together(self.format, self.codes, self.nested, self.scales, *self.offset)
    }
}

/// A quantized tensor with memory of its own.
#[derive(Debug)]
pub struct OwnedBlocks {
    format: QuantFormat,
    codes: Vec<u8>,
    nested: Vec<u8>,
    scales: Vec<f32>,
    offset: f32,
}

impl OwnedBlocks {
    /// Quantizes `n` values, as [`BlocksMut::fill`].
    ///
    /// # Errors
    /// Those of `read`.
    pub fn new<E: Send>(
        format: QuantFormat,
        n: usize,
        read: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<Self, E> {
        let nested = vec![0; if format.double_quant { format.blocks(n) } else { 0 }];
        let (codes, scales) = (vec![0; format.code_bytes(n)], vec![0.0; format.scales(n)]);
        let mut tensor = OwnedBlocks { format, codes, nested, scales, offset: 0.0 };
        tensor.parts().fill(n, read)?;
        Ok(tensor)
    }

    fn parts(&mut self) -> BlocksMut<'_> {
        let OwnedBlocks { format, codes, nested, scales, offset } = self;
        BlocksMut { format: *format, codes, nested, scales, offset }
    }

    /// What products and dequantizing take.
    pub fn blocks(&self) -> Blocks<'_> {
        together(self.format, &self.codes, &self.nested, &self.scales, self.offset)
    }
}

fn together<'a>(
    QuantFormat { kind, block_size, double_quant }: QuantFormat,
    codes: &'a [u8],
    nested: &'a [u8],
    scales: &'a [f32],
    offset: f32,
) -> Blocks<'a> {
    let scales = if double_quant {
        Scales::Nested { codes: nested, absmax: scales, offset }
    } else {
        Scales::Plain(scales)
    };
    Blocks { kind, block_size, codes, scales }
}

impl QuantFormat {
    /// f32 values beside the codes: the scales of `n` values, or with double quantization the scales of their codes.
    pub fn scales(&self, n: usize) -> usize {
        if self.double_quant { self.blocks(n).div_ceil(NESTED_BLOCK) } else { self.blocks(n) }
    }
}
