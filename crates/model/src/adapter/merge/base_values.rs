//! The values of a weight before the adapter changes it, in blocks: the base's, the same after
//! quantization, or a tensor that the adapter saved whole.

use rayon::prelude::*;

use crate::adapter::{SavedAdapter, TensorKind};
use crate::error::{Error, Result};
use crate::quant::{QuantBuffer, QuantFormat};
use crate::weights::{ModelFiles, ResizedEmbedding};

/// Number of values that a thread dequantizes at once.
const TASK: usize = 1 << 16;

/// The source of a tensor of the merged model.
#[derive(Clone, Copy)]
pub(super) enum ValueSource<'a> {
    /// The base's tensor of this name.
    Base(&'a str),
    /// The adapter's tensor of this module.
    Adapter(&'a str, TensorKind),
}

/// A tensor that is read in blocks.
pub(super) enum MergeValues<'a> {
    Base(ResizedEmbedding<'a>),
    Adapter(&'a SavedAdapter, &'a str, TensorKind),
    Quantized(QuantBuffer),
}

impl<'a> MergeValues<'a> {
    /// Opens the tensor; with `format`, as quantized to it and dequantized.
    ///
    /// # Errors
    /// User: it cannot be read; it is to be quantized and holds NaN or infinity.
    pub(super) fn open(
        base: &'a ModelFiles,
        adapter: &'a SavedAdapter,
        source: ValueSource<'a>,
        (elements, format): (usize, Option<QuantFormat>),
    ) -> Result<Self> {
        let values = match source {
            ValueSource::Base(name) => Self::Base(ResizedEmbedding::new(base, name)),
            ValueSource::Adapter(module, kind) => Self::Adapter(adapter, module, kind),
        };
        match format {
            None => Ok(values),
            Some(format) => Ok(Self::Quantized(quantized(&values, elements, format)?)),
        }
    }

    /// Reads elements from `start` on.
    ///
    /// # Errors
    /// The same as for [`ModelFiles::read_part`] and [`SavedAdapter::read_part`].
    pub(super) fn read(&self, start: usize, out: &mut [f32]) -> Result<()> {
        self.peek(start, out)?;
        self.let_go();
        Ok(())
    }

    /// Releases the pages that were read.
    fn let_go(&self) {
        if let Self::Base(tensor) = self {
            tensor.discard();
        }
    }

    /// Works like [`MergeValues::read`], for several threads, and keeps the pages.
    fn peek(&self, start: usize, out: &mut [f32]) -> Result<()> {
        match self {
            Self::Base(tensor) => tensor.read_part(start, out),
            Self::Adapter(adapter, module, kind) => adapter.read_part(module, *kind, start, out),
            Self::Quantized(quantized) => {
                let view = quantized.view();
                out.par_chunks_mut(TASK)
                    .enumerate()
                    .for_each(|(i, part)| view.dequantize(start + i * TASK, part));
                Ok(())
            }
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Base(tensor) => tensor.name(),
            Self::Adapter(_, name, _) => name,
            Self::Quantized(_) => "",
        }
    }

    /// Returns the hint for a value that is not finite, by the file that holds it.
    fn hint(&self) -> &'static str {
        match self {
            Self::Adapter(..) => {
                "the saved adapter is damaged, or its training diverged: merge an earlier checkpoint"
            }
            Self::Base(_) | Self::Quantized(_) => "download the model again",
        }
    }
}

/// Quantizes a tensor of `elements` values.
fn quantized(values: &MergeValues<'_>, elements: usize, format: QuantFormat) -> Result<QuantBuffer> {
    let quantized = QuantBuffer::new(format, elements, &|start, part| {
        values.peek(start, part)?;
        match part.iter().find(|value| !value.is_finite()) {
            None => Ok(()),
            Some(value) => Err(Error::user(format!("cannot quantize `{}`", values.name()))
                .because(format!("it holds {value}; accepted: finite numbers"))
                .hint(values.hint())),
        }
    });
    values.let_go();
    quantized
}
