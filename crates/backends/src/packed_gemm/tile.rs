//! The memory layout of packed operands: strips of 32 outer elements, step by step of 32 inner
//! elements, in tiles of 16 lines of 64 bytes. Outer elements are the rows of a left operand and
//! the columns of a right one.

use std::ops::Range;

use half::bf16;

/// Rows and columns of the sums of one kernel call; outer elements of a strip.
pub const SQUARE: usize = 32;
/// Inner elements of a step.
pub const STEP: usize = 32;
/// Lines of a tile, and 32-bit values of a line.
pub(super) const LANES: usize = 16;
/// Number of 32-bit values of a tile.
pub(super) const TILE_LEN: usize = LANES * LANES;

/// 16 lines of 16 f32 numbers or of 16 pairs of bf16 numbers.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Tile([[u32; LANES]; LANES]);

impl Tile {
    pub(super) const ZERO: Tile = Tile([[0; LANES]; LANES]);

    /// Returns the lines from `number` on.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn lines_from(&self, number: usize) -> &[[u32; LANES]] {
        &self.0[number..]
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn line(&self, number: usize) -> &[u32; LANES] {
        &self.0[number]
    }

    pub(super) fn line_mut(&mut self, number: usize) -> &mut [u32; LANES] {
        &mut self.0[number]
    }

    /// Moves lane j of line i to lane i of line j.
    #[inline(always)]
    pub(super) fn transpose(&mut self) {
        let lines = self.0;
        for (i, line) in self.0.iter_mut().enumerate() {
            for (lane, from) in line.iter_mut().zip(&lines) {
                *lane = from[i];
            }
        }
    }
}

/// The contents of a step of a strip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PackedFormat {
    /// Two tiles of bf16 pairs. A left tile has a line for each of 16 outer elements, a right one
    /// for each pair of inner elements.
    Bf16,
    /// The same for each of three parts whose sum is the f32 value.
    Bf16Parts,
    /// Two tiles for each half of the outer elements, with a line of 16 outer elements for each
    /// inner element.
    F32,
    /// The same with a line of 16 inner elements for each outer element.
    F32Rows,
}

impl PackedFormat {
    pub(super) const fn tiles_per_step(self) -> usize {
        match self {
            PackedFormat::Bf16 => 2,
            PackedFormat::Bf16Parts => 6,
            PackedFormat::F32 | PackedFormat::F32Rows => 4,
        }
    }

    /// Returns the number of tiles of a strip of `inner` inner elements.
    pub(super) const fn strip_len(self, inner: usize) -> usize {
        inner.div_ceil(STEP) * self.tiles_per_step()
    }
}

/// A part of an operand: element (outer, inner) is `data[outer * outer stride + inner * inner
/// stride]`; one of the strides is 1.
#[derive(Clone, Copy)]
pub(super) struct Strided<'a, T> {
    pub(super) data: &'a [T],
    /// Stride between outer elements.
    pub(super) outer: usize,
    /// Stride between inner elements.
    pub(super) inner: usize,
}

/// The source of packing.
#[derive(Clone, Copy)]
pub(super) enum PackSource<'a> {
    F32(Strided<'a, f32>),
    Bf16(Strided<'a, bf16>),
}

/// A strip of a packed operand.
#[derive(Clone, Copy)]
pub(super) struct Strip<'a> {
    pub(super) tiles: &'a [Tile],
    pub(super) format: PackedFormat,
    /// Number of valid outer elements, up to [`SQUARE`]; the rest are zeros, which a kernel may
    /// skip.
    pub(super) outer: usize,
    /// Number of valid inner elements.
    pub(super) inner: usize,
}

impl Strip<'_> {
    /// Returns the same strip with its padding counted as valid.
    #[cfg(all(test, target_arch = "x86_64"))]
    pub(super) fn whole(self) -> Self {
        Strip { outer: SQUARE, inner: self.steps() * STEP, ..self }
    }

    /// Returns a range of its steps.
    pub(super) fn part(self, steps: Range<usize>) -> Self {
        let tiles_per_step = self.format.tiles_per_step();
        let inner = self.inner.min(steps.end * STEP) - steps.start * STEP;
        Strip { tiles: &self.tiles[steps.start * tiles_per_step..steps.end * tiles_per_step], inner, ..self }
    }

    /// Returns the number of steps of [`STEP`] inner elements.
    pub(super) fn steps(self) -> usize {
        self.tiles.len() / self.format.tiles_per_step()
    }
}

/// Rows of a left operand in memory, bf16 with an even number of inner elements: kernels that read
/// them do not pack them.
#[derive(Clone, Copy)]
pub(super) struct RowsInMemory<'a> {
    data: &'a [bf16],
    /// Elements from a row to the next.
    stride: usize,
    pub(super) outer: usize,
    pub(super) inner: usize,
}

impl<'a> RowsInMemory<'a> {
    /// Returns the rows of `data`, which begins at the first element; none if the number of inner
    /// elements is odd or zero.
    pub(super) fn new(data: &'a [bf16], stride: usize, outer: usize, inner: usize) -> Option<Self> {
        let fits = outer > 0 && stride >= inner && data.len() >= (outer - 1) * stride + inner;
        (fits && inner > 0 && inner.is_multiple_of(2)).then_some(RowsInMemory { data, stride, outer, inner })
    }

    /// Returns the rows of strip number `number`.
    pub(super) fn strip(self, number: usize) -> Self {
        let first = number * SQUARE;
        let data = &self.data[first * self.stride..];
        RowsInMemory { data, outer: SQUARE.min(self.outer - first), ..self }
    }

    /// Returns the elements of a row.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn row(self, number: usize) -> &'a [bf16] {
        &self.data[number * self.stride..][..self.inner]
    }
}
