//! Products of matrices of a few tiles each, within a task.

use super::kernel::{Amx, PAIR, Unit};
use super::pack::{AmxTile, PackSource, STEP};
use crate::ops::mat_view::{GemmMatrix, OperandRole};

/// A small matrix as the unit reads it.
#[derive(Default)]
pub(in crate::ops) struct AmxOperand {
    tiles: Vec<AmxTile>,
    /// Tiles of [`PAIR`] outer elements.
    strip: usize,
    num_splits: usize,
}

impl AmxOperand {
    /// Packs `matrix`, which is f32 or bf16 in memory: f32 rounded to bf16 if `rounded`, else in three parts.
    pub(in crate::ops) fn fill(
        &mut self,
        amx: Amx,
        matrix: &impl GemmMatrix,
        role: OperandRole,
        rounded: bool,
    ) {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let (outer, inner) = if role == OperandRole::Left { (rows, cols) } else { (cols, rows) };
        let source = match (matrix.dense(), matrix.dense_bf16()) {
            (Some(dense), _) if rounded => PackSource::Rounded(dense.part(&(0..outer), &(0..inner), role)),
            (Some(dense), _) => PackSource::F32(dense.part(&(0..outer), &(0..inner), role)),
            (None, Some(dense)) => PackSource::Bf16(dense.part(&(0..outer), &(0..inner), role)),
            (None, None) => unreachable!("a tile of a matrix that is neither f32 nor bf16"),
        };
        self.num_splits = if matches!(source, PackSource::F32(_)) { 3 } else { 1 };
        self.strip = inner.div_ceil(STEP) * 2 * self.num_splits;
        let len = self.strip * outer.div_ceil(PAIR);
        if self.tiles.len() < len {
            self.tiles.resize(len, AmxTile::ZERO);
        }
        self.tiles.truncate(len);
        for (tiles, start) in self.tiles.chunks_exact_mut(self.strip).zip((0..outer).step_by(PAIR)) {
            amx.pack(tiles, source, start..(start + PAIR).min(outer), inner, role);
        }
    }
}

impl Unit {
    /// `dst = [dst +] left · right`, with `stride` elements from row to row of `dst`, which has whole squares of 32 rows and
    /// columns; what is outside the product comes out as it was, or as zero.
    pub(in crate::ops) fn multiply_operands(
        &self,
        left: &AmxOperand,
        right: &AmxOperand,
        dst: &mut [f32],
        stride: usize,
        accumulate: bool,
    ) {
        let num_splits = (left.num_splits, right.num_splits);
        for (j, b) in right.tiles.chunks_exact(right.strip).enumerate() {
            for (i, a) in left.tiles.chunks_exact(left.strip).enumerate() {
                let square = &mut dst[i * PAIR * stride + j * PAIR..];
                self.multiply_into(a, b, num_splits, square, stride, accumulate);
            }
        }
    }
}
