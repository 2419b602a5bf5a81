//! A whole quantized tensor, which quantizes its values piece by piece.

use rayon::prelude::*;

use super::layout::{QuantRun, RunDtype, RunMeaning};
use super::{Blocks, QuantFormat, Scales, nest, quantize};

/// Values that a thread holds in f32: 64 KiB, which stay in its cache from reading to the codes.
const PIECE: usize = 1 << 14;

/// Writable memory of one run of a quantized tensor.
#[derive(Debug)]
pub enum RunMut<'a> {
    /// Bytes of codes.
    U8(&'a mut [u8]),
    /// Numbers in f32.
    F32(&'a mut [f32]),
}

/// One run of a quantized tensor that owns its memory.
#[derive(Debug)]
pub enum RunBuffer {
    /// Bytes of codes.
    U8(Vec<u8>),
    /// Numbers in f32.
    F32(Vec<f32>),
}

impl RunBuffer {
    /// Allocates zeros for the elements of `run`.
    pub fn zeros(run: &QuantRun) -> Self {
        match run.meaning.dtype() {
            RunDtype::U8 => RunBuffer::U8(vec![0; run.elements]),
            RunDtype::F32 => RunBuffer::F32(vec![0.0; run.elements]),
        }
    }

    /// The same memory for writing.
    pub fn as_mut(&mut self) -> RunMut<'_> {
        match self {
            RunBuffer::U8(values) => RunMut::U8(values),
            RunBuffer::F32(values) => RunMut::F32(values),
        }
    }
}

/// Destination of the runs of a quantized tensor.
#[derive(Debug)]
pub struct BlocksMut<'a> {
    format: QuantFormat,
    codes: &'a mut [u8],
    /// Empty without double quantization.
    scale_codes: &'a mut [u8],
    /// The scales, or the scales of the scales with double quantization.
    scales: &'a mut [f32],
    /// Mean of the scales with double quantization.
    offset: &'a mut f32,
}

impl<'a> BlocksMut<'a> {
    /// Combines the memory of each run of [`QuantFormat::layout`]; `offset` receives the mean of
    /// double-quantized scales. Memory of the wrong type is ignored.
    pub fn new(
        format: QuantFormat,
        runs: impl IntoIterator<Item = (RunMeaning, RunMut<'a>)>,
        offset: &'a mut f32,
    ) -> Self {
        let (mut codes, mut scale_codes): (&mut [u8], &mut [u8]) = (&mut [], &mut []);
        let mut scales: &mut [f32] = &mut [];
        for run in runs {
            match run {
                (RunMeaning::Codes, RunMut::U8(memory)) => codes = memory,
                (RunMeaning::ScaleCodes, RunMut::U8(memory)) => scale_codes = memory,
                (RunMeaning::Scales | RunMeaning::NestedScales, RunMut::F32(memory)) => scales = memory,
                (_, RunMut::U8(_) | RunMut::F32(_)) => {}
            }
        }
        BlocksMut { format, codes, scale_codes, scales, offset }
    }

    /// Memory of a run.
    pub fn run(&mut self, meaning: RunMeaning) -> RunMut<'_> {
        match meaning {
            RunMeaning::Codes => RunMut::U8(self.codes),
            RunMeaning::ScaleCodes => RunMut::U8(self.scale_codes),
            RunMeaning::Scales | RunMeaning::NestedScales => RunMut::F32(self.scales),
        }
    }

    /// Sets the mean of double-quantized scales.
    pub fn set_offset(&mut self, offset: f32) {
        *self.offset = offset;
    }

    /// Quantizes `n` values; `read` writes the values from an index into the given slice, piece by
    /// piece on all threads.
    ///
    /// # Errors
    /// The error of `read` for the first piece that has one; `read` also checks that values are
    /// finite.
    pub fn fill<E: Send>(
        &mut self,
        n: usize,
        read: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let format = self.format;
        let mut own = vec![0f32; if format.double_quant { format.blocks(n) } else { 0 }];
        let absmax: &mut [f32] = if format.double_quant { &mut own } else { self.scales };
        // Whole blocks, and whole bytes of two codes each.
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
            *self.offset = nest(&own, self.scale_codes, self.scales);
        }
        Ok(())
    }

    /// The tensor in its present state.
    pub fn blocks(&self) -> Blocks<'_> {
        together(self.format, self.codes, self.scale_codes, self.scales, *self.offset)
    }
}

/// A quantized tensor that owns its memory.
#[derive(Debug)]
pub struct OwnedBlocks {
    format: QuantFormat,
    /// Runs in the order of [`QuantFormat::layout`].
    runs: Vec<(RunMeaning, RunBuffer)>,
    offset: f32,
}

impl OwnedBlocks {
    /// Quantizes `n` values; see [`BlocksMut::fill`].
    ///
    /// # Errors
    /// The errors of `read`.
    pub fn new<E: Send>(
        format: QuantFormat,
        n: usize,
        read: impl Fn(usize, &mut [f32]) -> Result<(), E> + Sync,
    ) -> Result<Self, E> {
        let runs = format.layout(n).iter().map(|run| (run.meaning, RunBuffer::zeros(run))).collect();
        let mut tensor = OwnedBlocks { format, runs, offset: 0.0 };
        let runs = tensor.runs.iter_mut().map(|(meaning, run)| (*meaning, run.as_mut()));
        BlocksMut::new(format, runs, &mut tensor.offset).fill(n, read)?;
        Ok(tensor)
    }

    /// View for products and dequantization.
    pub fn blocks(&self) -> Blocks<'_> {
        let (mut codes, mut scale_codes, mut scales): (&[u8], &[u8], &[f32]) = (&[], &[], &[]);
        for (meaning, run) in &self.runs {
            match (meaning, run) {
                (RunMeaning::Codes, RunBuffer::U8(values)) => codes = values,
                (RunMeaning::ScaleCodes, RunBuffer::U8(values)) => scale_codes = values,
                (RunMeaning::Scales | RunMeaning::NestedScales, RunBuffer::F32(values)) => scales = values,
                (_, RunBuffer::U8(_) | RunBuffer::F32(_)) => {}
            }
        }
        together(self.format, codes, scale_codes, scales, self.offset)
    }
}

fn together<'a>(
    QuantFormat { kind, block_size, double_quant }: QuantFormat,
    codes: &'a [u8],
    scale_codes: &'a [u8],
    scales: &'a [f32],
    offset: f32,
) -> Blocks<'a> {
    let scales = if double_quant {
        Scales::Nested { codes: scale_codes, absmax: scales, offset }
    } else {
        Scales::Plain(scales)
    };
    Blocks { kind, block_size, codes, scales }
}
