//! Operands as the kernels read them: strips of 32 outer elements, step by step of 32 inner elements, in tiles of 16 lines
//! of 64 bytes. Outer are the rows of a left operand and the columns of a right one.

use std::ops::Range;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::bf16_tiles;
use super::f32_tiles;
use super::micro_kernel::MicroKernel;
use crate::ops::mat_view::{GemmMatrix, GemmOperand, OperandRole};
use crate::runtime::cpu_tensor::first;

/// Inner elements of a step.
pub(super) const STEP: usize = 32;
/// Lines of a tile, and 32-bit values of a line.
pub(super) const LANES: usize = 16;

/// 16 lines of 16 f32 numbers or of 16 pairs of bf16 numbers.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Tile([[u32; LANES]; LANES]);

impl Tile {
    pub(super) const ZERO: Tile = Tile([[0; LANES]; LANES]);

    pub(super) fn line(&self, number: usize) -> &[u32; LANES] {
        &self.0[number]
    }

    pub(super) fn line_mut(&mut self, number: usize) -> &mut [u32; LANES] {
        &mut self.0[number]
    }

    /// Lane j of line i becomes lane i of line j.
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

/// What a step of a strip consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PackedFormat {
    /// Two tiles of bf16 pairs. A left tile has a line for each of 16 outer elements, a right one for each pair of inner elements.
    Bf16,
    /// The same for each of three parts whose sum is the f32 value.
    Bf16Parts,
    /// Two tiles for each half of the outer elements, with a line of 16 outer elements for each inner element.
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

    /// Tiles of a strip of so many inner elements.
    pub(super) const fn strip_len(self, inner: usize) -> usize {
        inner.div_ceil(STEP) * self.tiles_per_step()
    }
}

/// A part of an operand: element (outer, inner) is `data[outer * outer stride + inner * inner stride]`, one of which is 1.
#[derive(Clone, Copy)]
pub(super) struct Strided<'a, T> {
    pub(super) data: &'a [T],
    /// Stride between outer elements.
    pub(super) outer: usize,
    /// Stride between inner elements.
    pub(super) inner: usize,
}

/// What is packed.
#[derive(Clone, Copy)]
pub(super) enum PackSource<'a> {
    F32(Strided<'a, f32>),
    Bf16(Strided<'a, bf16>),
}

impl<'a> PackSource<'a> {
    /// A part of an operand: where it lies, or widened into `widened`.
    pub(super) fn of(
        from: &'a impl GemmMatrix,
        outer: Range<usize>,
        inner: Range<usize>,
        role: OperandRole,
        widened: &'a mut Vec<f32>,
    ) -> Self {
        if let Some(dense) = from.dense() {
            return PackSource::F32(dense.part(&outer, &inner, role));
        }
        if let Some(dense) = from.dense_bf16() {
            return PackSource::Bf16(dense.part(&outer, &inner, role));
        }
        // Lines of the memory go along the inner elements of a left matrix, and of a right one that is transposed.
        let along = (role == OperandRole::Left) != from.is_transposed();
        let (lines, elements) = if along { (&outer, &inner) } else { (&inner, &outer) };
        let values = first(widened, lines.len() * elements.len());
        for (line, values) in lines.clone().zip(values.chunks_exact_mut(elements.len())) {
            from.widen(line, elements.start, values);
        }
        let (outer, inner) = if along { (elements.len(), 1) } else { (1, elements.len()) };
        PackSource::F32(Strided { data: &*values, outer, inner })
    }
}

impl<'a, T> GemmOperand<'a, T> {
    /// Some outer and inner elements: rows and columns of a left operand, columns and rows of a right one.
    fn part(self, outer: &Range<usize>, inner: &Range<usize>, role: OperandRole) -> Strided<'a, T> {
        let (rows, columns) = self.strides;
        let (by_outer, by_inner) = if role == OperandRole::Left { (rows, columns) } else { (columns, rows) };
        let data = &self.data[outer.start * by_outer + inner.start * by_inner..];
        Strided { data, outer: by_outer, inner: by_inner }
    }
}

/// Fills a strip with up to 32 outer elements; zeros where there is nothing.
pub(super) fn pack(
    kernel: MicroKernel,
    tiles: &mut [Tile],
    format: PackedFormat,
    from: PackSource<'_>,
    outer: Range<usize>,
    inner: usize,
    role: OperandRole,
) {
    let by_rows = format == PackedFormat::F32Rows;
    match (format, from) {
        (PackedFormat::F32 | PackedFormat::F32Rows, PackSource::F32(from)) => {
            f32_tiles::pack(kernel.set(), tiles, from, outer, inner, by_rows);
        }
        (PackedFormat::F32 | PackedFormat::F32Rows, PackSource::Bf16(from)) => {
            f32_tiles::pack(kernel.set(), tiles, from, outer, inner, by_rows);
        }
        #[cfg(target_arch = "x86_64")]
        (PackedFormat::Bf16 | PackedFormat::Bf16Parts, _) => {
            // SAFETY: kernels that take bf16 run on processors with AVX-512 alone.
            unsafe { bf16_tiles::pack(tiles, format, from, outer, inner, role) }
        }
        #[cfg(not(target_arch = "x86_64"))]
        (PackedFormat::Bf16 | PackedFormat::Bf16Parts, _) => {
            unreachable!("no kernel takes bf16 here ({role:?})")
        }
    }
}
