//! Quantized tensors: a format with the memory of its runs.

use super::element::DequantizedElement;
use super::format::QuantFormat;
use super::runs::{QuantMemory, RunDtype, RunsView, RunsViewMut};
use super::scheme::ReadValues;
use crate::error::Result;

/// A quantized tensor, flattened.
#[derive(Debug, Clone, Copy)]
pub struct QuantTensor<M> {
    /// Format of the tensor.
    pub format: QuantFormat,
    /// Memory of its runs.
    pub runs: M,
}

/// A tensor for reading.
pub type QuantView<'a> = QuantTensor<RunsView<'a>>;
/// A tensor for writing.
pub type QuantViewMut<'a> = QuantTensor<RunsViewMut<'a>>;
/// A tensor that owns its memory.
pub type QuantBuffer = QuantTensor<QuantMemory<Vec<u8>, Vec<f32>, f32>>;

impl QuantView<'_> {
    /// Dequantizes values `start..start + out.len()`: computed in f32, then rounded to `T` if that
    /// is bf16.
    pub fn dequantize<T: DequantizedElement>(&self, start: usize, out: &mut [T]) {
        self.format.dequantize(&self.runs, start, out);
    }
}

impl QuantViewMut<'_> {
    /// Quantizes `n` values ([`super::QuantScheme::fill`]).
    ///
    /// # Errors
    /// The errors of `read`.
    pub fn fill(&mut self, n: usize, read: ReadValues<'_>) -> Result<()> {
        self.format.scheme().fill(n, read, &mut self.runs)
    }

    /// The tensor in its present state.
    pub fn view(&self) -> QuantView<'_> {
        QuantTensor { format: self.format, runs: self.runs.view() }
    }
}

impl QuantBuffer {
    /// Allocates zeros for `n` values.
    pub fn zeros(format: QuantFormat, n: usize) -> Self {
        let runs = format.scheme().runs(n);
        let of = |dtype| runs.iter().filter(move |run| run.meaning.dtype() == dtype);
        let bytes = of(RunDtype::U8).map(|run| (run.meaning, vec![0; run.elements]));
        let floats = of(RunDtype::F32).map(|run| (run.meaning, vec![0.0; run.elements]));
        QuantTensor { format, runs: QuantMemory::new(bytes, floats, 0.0) }
    }

    /// Quantizes `n` values ([`super::QuantScheme::fill`]).
    ///
    /// # Errors
    /// The errors of `read`.
    pub fn new(format: QuantFormat, n: usize, read: ReadValues<'_>) -> Result<Self> {
        let mut tensor = Self::zeros(format, n);
        tensor.view_mut().fill(n, read)?;
        Ok(tensor)
    }

    /// The tensor for reading.
    pub fn view(&self) -> QuantView<'_> {
        QuantTensor { format: self.format, runs: self.runs.view() }
    }

    /// The tensor for writing.
    pub fn view_mut(&mut self) -> QuantViewMut<'_> {
        QuantTensor { format: self.format, runs: self.runs.view_mut() }
    }
}
