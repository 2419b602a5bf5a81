//! The values a weight has before an adapter changes it, in blocks: the base's, what quantizing leaves of them, or a
//! tensor that the adapter saved whole.

use rayon::prelude::*;

use crate::adapter::{Adapter, TensorKind};
use crate::error::{Error, Result};
use crate::quant::{self, Blocks, Format, Scales};
use crate::weights::ModelFiles;

/// Values quantized at once: 16 MiB of f32.
const PIECE: usize = 1 << 22;
/// Values a thread dequantizes at once.
const TASK: usize = 1 << 16;

/// Where a tensor of the merged model comes from.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    /// The base's tensor of this name.
    Base(&'a str),
    /// The adapter's tensor of this module.
    Adapter(&'a str, TensorKind),
}

/// A tensor to be read in blocks.
pub(super) enum Values<'a> {
    Base(&'a ModelFiles, &'a str),
    Adapter(&'a Adapter, &'a str, TensorKind),
    Quantized(Quantized),
}

impl<'a> Values<'a> {
    /// Opens the tensor; with `format`, as quantizing it leaves it.
    ///
    /// # Errors
    /// The user's: it cannot be read; it is to be quantized and holds NaN or infinity.
    pub(super) fn open(
        base: &'a ModelFiles,
        adapter: &'a Adapter,
        source: Source<'a>,
        (elements, format): (usize, Option<Format>),
    ) -> Result<Self> {
        let values = match source {
            Source::Base(name) => Self::Base(base, name),
            Source::Adapter(module, kind) => Self::Adapter(adapter, module, kind),
        };
        match format {
            None => Ok(values),
            Some(format) => Ok(Self::Quantized(Quantized::new(&values, elements, format)?)),
        }
    }

    /// Reads elements from `start` on.
    ///
    /// # Errors
    /// As [`ModelFiles::read_part`] and [`Adapter::read_part`].
    pub(super) fn read(&self, start: usize, out: &mut [f32]) -> Result<()> {
        match self {
            Self::Base(files, name) => {
                files.read_part(name, start, out)?;
                files.discard(name);
                Ok(())
            }
            Self::Adapter(adapter, module, kind) => adapter.read_part(module, *kind, start, out),
            Self::Quantized(quantized) => {
                let blocks = quantized.blocks();
                out.par_chunks_mut(TASK)
                    .enumerate()
                    .for_each(|(i, part)| blocks.dequantize(start + i * TASK, part));
                Ok(())
            }
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Base(_, name) | Self::Adapter(_, name, _) => name,
            Self::Quantized(_) => "",
        }
    }
}

/// A tensor, quantized.
pub(super) struct Quantized {
    format: Format,
    codes: Vec<u8>,
    /// One a block; with double quantization one for [`quant::NESTED_BLOCK`] of them.
    scales: Vec<f32>,
    nested: Vec<u8>,
    offset: f32,
}

impl Quantized {
    fn new(values: &Values<'_>, elements: usize, format: Format) -> Result<Self> {
        let mut codes = vec![0u8; format.code_bytes(elements)];
        let mut absmax = vec![0f32; format.blocks(elements)];
        // Whole blocks, and whole bytes of two codes.
        let piece = (PIECE / format.block_size).max(2) / 2 * 2 * format.block_size;
        let mut buffer = vec![0f32; piece.min(elements)];
        for start in (0..elements).step_by(piece) {
            let part = &mut buffer[..piece.min(elements - start)];
            values.read(start, part)?;
            if let Some(value) = part.iter().find(|value| !value.is_finite()) {
                return Err(Error::user(format!("cannot quantize `{}`", values.name()))
                    .because(format!("it holds {value}; accepted: finite numbers"))
                    .hint("download the model again, or give another"));
            }
            let end = start + part.len();
            let codes = &mut codes[format.code_bytes(start)..format.code_bytes(end)];
            let absmax = &mut absmax[format.blocks(start)..format.blocks(end)];
            quant::quantize(format.kind, format.block_size, part, codes, absmax);
        }
        if !format.double_quant {
            return Ok(Self { format, codes, scales: absmax, nested: Vec::new(), offset: 0.0 });
        }
        let mut nested = vec![0u8; absmax.len()];
        let mut scales = vec![0f32; absmax.len().div_ceil(quant::NESTED_BLOCK)];
        let offset = quant::nest(&absmax, &mut nested, &mut scales);
        Ok(Self { format, codes, scales, nested, offset })
    }

    fn blocks(&self) -> Blocks<'_> {
        Blocks {
            kind: self.format.kind,
            block_size: self.format.block_size,
            codes: &self.codes,
            scales: match self.format.double_quant {
                true => Scales::Nested { codes: &self.nested, absmax: &self.scales, offset: self.offset },
                false => Scales::Plain(&self.scales),
            },
        }
    }
}
