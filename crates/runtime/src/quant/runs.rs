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
    /// Bytes of scales of another type than f32, little-endian.
    ScaleBytes,
    /// Zeros, one per scale: a byte, or a number of the type of the scales.
    Zeros,
    /// Group of each column, in 16 bits, little-endian.
    ColumnGroups,
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
    /// Number of meanings with bytes.
    const BYTES: usize = 5;
    /// Number of meanings with f32 numbers.
    const FLOATS: usize = 2;

    /// Position among the meanings of its element type.
    fn slot(self) -> usize {
        match self {
            RunMeaning::Codes | RunMeaning::Scales => 0,
            RunMeaning::ScaleCodes | RunMeaning::NestedScales => 1,
            RunMeaning::ScaleBytes => 2,
            RunMeaning::Zeros => 3,
            RunMeaning::ColumnGroups => 4,
        }
    }

    /// Position among the meanings with elements of type `dtype`, if it is one.
    fn slot_of(self, dtype: RunDtype) -> Option<usize> {
        (self.dtype() == dtype).then(|| self.slot())
    }

    /// Element type of such a run.
    pub fn dtype(self) -> RunDtype {
        match self {
            RunMeaning::Codes
            | RunMeaning::ScaleCodes
            | RunMeaning::ScaleBytes
            | RunMeaning::Zeros
            | RunMeaning::ColumnGroups => RunDtype::U8,
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
    bytes: [B; RunMeaning::BYTES],
    floats: [F; RunMeaning::FLOATS],
    /// Mean of double-quantized scales.
    pub offset: O,
}

/// Runs for reading.
pub type RunsView<'a> = QuantMemory<&'a [u8], &'a [f32], f32>;
impl<'a> RunsView<'a> {
    /// A run of bytes, for as long as the memory lives.
    pub(super) fn bytes_of(&self, meaning: RunMeaning) -> &'a [u8] {
        self.bytes[meaning.slot()]
    }

    /// A run of f32 numbers, for as long as the memory lives.
    pub(super) fn floats_of(&self, meaning: RunMeaning) -> &'a [f32] {
        self.floats[meaning.slot()]
    }
}

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
        bytes.into_iter().for_each(|(meaning, run)| memory.bytes[meaning.slot()] = run);
        floats.into_iter().for_each(|(meaning, run)| memory.floats[meaning.slot()] = run);
        memory
    }
}

impl<B: AsRef<[u8]>, F: AsRef<[f32]>, O: Borrow<f32>> QuantMemory<B, F, O> {
    /// A run of bytes.
    pub fn bytes(&self, meaning: RunMeaning) -> &[u8] {
        meaning.slot_of(RunDtype::U8).map_or(&[], |slot| self.bytes[slot].as_ref())
    }

    /// A run of f32 numbers.
    pub fn floats(&self, meaning: RunMeaning) -> &[f32] {
        meaning.slot_of(RunDtype::F32).map_or(&[], |slot| self.floats[slot].as_ref())
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
        self.bytes[meaning.slot()].as_mut()
    }

    /// A run of f32 numbers, for writing.
    pub fn floats_mut(&mut self, meaning: RunMeaning) -> &mut [f32] {
        self.floats[meaning.slot()].as_mut()
    }

    /// The same memory for writing.
    pub fn view_mut(&mut self) -> RunsViewMut<'_> {
        let (bytes, floats) = (self.bytes.each_mut().map(B::as_mut), self.floats.each_mut().map(F::as_mut));
        QuantMemory { bytes, floats, offset: self.offset.borrow_mut() }
    }
}
