//! Memory runs of a quantized tensor, and their contents.

use std::borrow::{Borrow, BorrowMut};

/// Contents of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunMeaning {
    /// Codes of the values: a byte holds two of 4 bits or one of 8.
    Codes,
    /// Scales, one per block.
    Scales,
    /// Codes of the scales with double quantization, one per block.
    ScaleCodes,
    /// Scales of the scales with double quantization, one per [`super::NESTED_BLOCK`] codes.
    NestedScales,
}

/// Element type of a run. Runs of one type may share a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RunDtype {
    /// Bytes: codes, or the bytes of any other type.
    U8,
    /// Numbers in f32.
    F32,
}

impl RunMeaning {
    /// Number of meanings.
    pub(super) const COUNT: usize = RunMeaning::NestedScales as usize + 1;

    /// Element type of such a run.
    pub fn dtype(self) -> RunDtype {
        match self {
            RunMeaning::Codes | RunMeaning::ScaleCodes => RunDtype::U8,
            RunMeaning::Scales | RunMeaning::NestedScales => RunDtype::F32,
        }
    }
}

impl RunDtype {
    /// Size of an element in bytes.
    pub fn size_bytes(self) -> usize {
        match self {
            RunDtype::U8 => 1,
            RunDtype::F32 => 4,
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
        self.elements * self.meaning.dtype().size_bytes()
    }
}

/// Memory of the runs of a quantized tensor: bytes in `B`, f32 numbers in `F`. Runs that its format
/// does not have are empty.
#[derive(Debug, Clone, Copy)]
pub struct QuantMemory<B, F, O> {
    pub(super) bytes: [B; RunMeaning::COUNT],
    pub(super) floats: [F; RunMeaning::COUNT],
    /// Mean of double-quantized scales.
    pub offset: O,
}

/// Runs for reading.
pub type RunsView<'a> = QuantMemory<&'a [u8], &'a [f32], f32>;
/// Runs for writing.
pub type RunsViewMut<'a> = QuantMemory<&'a mut [u8], &'a mut [f32], &'a mut f32>;

impl<B: Default, F: Default, O> QuantMemory<B, F, O> {
    /// Combines the memory of each run, by element type.
    pub fn new(
        bytes: impl IntoIterator<Item = (RunMeaning, B)>,
        floats: impl IntoIterator<Item = (RunMeaning, F)>,
        offset: O,
    ) -> Self {
        let mut memory = QuantMemory { bytes: Default::default(), floats: Default::default(), offset };
        bytes.into_iter().for_each(|(meaning, run)| memory.bytes[meaning as usize] = run);
        floats.into_iter().for_each(|(meaning, run)| memory.floats[meaning as usize] = run);
        memory
    }
}

impl<B: AsRef<[u8]>, F: AsRef<[f32]>, O: Borrow<f32>> QuantMemory<B, F, O> {
    /// A run of bytes.
    pub fn bytes(&self, meaning: RunMeaning) -> &[u8] {
        self.bytes[meaning as usize].as_ref()
    }

    /// A run of f32 numbers.
    pub fn floats(&self, meaning: RunMeaning) -> &[f32] {
        self.floats[meaning as usize].as_ref()
    }

    /// The same memory for reading.
    pub fn view(&self) -> RunsView<'_> {
        let (bytes, floats) = (self.bytes.each_ref().map(B::as_ref), self.floats.each_ref().map(F::as_ref));
        QuantMemory { bytes, floats, offset: *self.offset.borrow() }
    }
}

impl<B: AsMut<[u8]>, F: AsMut<[f32]>, O: BorrowMut<f32>> QuantMemory<B, F, O> {
    /// A run of bytes, for writing.
    pub fn bytes_mut(&mut self, meaning: RunMeaning) -> &mut [u8] {
        self.bytes[meaning as usize].as_mut()
    }

    /// A run of f32 numbers, for writing.
    pub fn floats_mut(&mut self, meaning: RunMeaning) -> &mut [f32] {
        self.floats[meaning as usize].as_mut()
    }

    /// The same memory for writing.
    pub fn view_mut(&mut self) -> RunsViewMut<'_> {
        let (bytes, floats) = (self.bytes.each_mut().map(B::as_mut), self.floats.each_mut().map(F::as_mut));
        QuantMemory { bytes, floats, offset: self.offset.borrow_mut() }
    }
}
