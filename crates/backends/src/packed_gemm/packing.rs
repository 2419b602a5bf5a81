//! Packing: converts a part of an operand, of any layout, to a strip of tiles.

use std::ops::Range;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::bf16_tiles;
use super::f32_tiles;
use super::micro_kernel::MicroKernel;
use super::tile::{PackSource, PackedFormat, Strided, Tile};
use crate::instruction_set::InstructionSet;
use crate::mat_view::{GemmMatrix, GemmOperand, OperandRole};
use crate::runtime::cpu_tensor::{FloatElement, first};

/// Buffer for the dequantized part of a quantized operand, in its dequantized type.
#[derive(Default)]
pub(super) struct DequantizedPart {
    f32: Vec<f32>,
    bf16: Vec<bf16>,
}

impl DequantizedPart {
    pub(super) const EMPTY: DequantizedPart = DequantizedPart { f32: Vec::new(), bf16: Vec::new() };
}

impl<'a> PackSource<'a> {
    /// Returns a part of an operand: in place, or dequantized into `memory`. Values to pack as bf16
    /// are rounded there.
    pub(super) fn of(
        from: &'a impl GemmMatrix,
        outer: Range<usize>,
        inner: Range<usize>,
        role: OperandRole,
        format: PackedFormat,
        memory: &'a mut DequantizedPart,
    ) -> Self {
        if let Some(dense) = from.dense() {
            return PackSource::F32(dense.part(&outer, &inner, role));
        }
        if let Some(dense) = from.dense_bf16() {
            return PackSource::Bf16(dense.part(&outer, &inner, role));
        }
        if format == PackedFormat::Bf16 {
            PackSource::Bf16(Strided::copy_of(from, &outer, &inner, role, &mut memory.bf16))
        } else {
            PackSource::F32(Strided::copy_of(from, &outer, &inner, role, &mut memory.f32))
        }
    }
}

impl<'a, T: FloatElement> Strided<'a, T> {
    /// Copies a part of an operand, line by line, into `memory`.
    fn copy_of(
        from: &impl GemmMatrix,
        outer: &Range<usize>,
        inner: &Range<usize>,
        role: OperandRole,
        memory: &'a mut Vec<T>,
    ) -> Self {
        // Lines run along the inner elements for a left matrix, and for a right one that is
        // transposed.
        let along = (role == OperandRole::Left) != from.is_transposed();
        let (lines, elements) = if along { (outer, inner) } else { (inner, outer) };
        let values = first(memory, lines.len() * elements.len());
        for (line, values) in lines.clone().zip(values.chunks_exact_mut(elements.len())) {
            from.copy_line(line, elements.start, values);
        }
        let (outer, inner) = if along { (elements.len(), 1) } else { (1, elements.len()) };
        Strided { data: &*values, outer, inner }
    }
}

impl<'a, T> GemmOperand<'a, T> {
    /// Returns a range of outer and inner elements: rows and columns of a left operand, columns and
    /// rows of a right one.
    fn part(self, outer: &Range<usize>, inner: &Range<usize>, role: OperandRole) -> Strided<'a, T> {
        let (rows, columns) = self.strides;
        let (by_outer, by_inner) = if role == OperandRole::Left { (rows, columns) } else { (columns, rows) };
        let data = &self.data[outer.start * by_outer + inner.start * by_inner..];
        Strided { data, outer: by_outer, inner: by_inner }
    }
}

/// Fills a strip with up to 32 outer elements; zeros past the end.
pub(super) fn pack(
    kernel: MicroKernel,
    tiles: &mut [Tile],
    format: PackedFormat,
    from: PackSource<'_>,
    outer: Range<usize>,
    inner: usize,
    role: OperandRole,
) {
    assert!(kernel.set() <= InstructionSet::detected());
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
            // SAFETY: kernels that take bf16 run only on processors with AVX-512, and the assertion
            // checked the kernel.
            unsafe { bf16_tiles::pack(tiles, format, from, outer, inner, role) }
        }
        #[cfg(not(target_arch = "x86_64"))]
        (PackedFormat::Bf16 | PackedFormat::Bf16Parts, _) => {
            unreachable!("no kernel takes bf16 here ({role:?})")
        }
    }
}
