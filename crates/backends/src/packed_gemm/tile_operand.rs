//! Products of matrices of at most a few hundred rows and columns, one after another within a task:
//! the tiles of attention.

use std::ops::Range;

use super::micro_kernel::{MicroKernel, OpenKernel};
use super::packing::{self, DequantizedPart};
use super::tile::{PackSource, PackedFormat, SQUARE, Strip, Tile};
use crate::mat_view::{GemmMatrix, OperandRole};

/// A small matrix, packed for products by one kernel.
pub struct TileOperand {
    kernel: MicroKernel,
    role: OperandRole,
    tiles: Vec<Tile>,
    format: PackedFormat,
    outer: usize,
    inner: usize,
    /// Number of tiles of a strip.
    strip_len: usize,
}

impl TileOperand {
    /// Returns an operand without values, for [`TileOperand::fill`].
    pub fn new(kernel: MicroKernel, role: OperandRole) -> Self {
        TileOperand {
            kernel,
            role,
            tiles: Vec::new(),
            format: PackedFormat::F32,
            outer: 0,
            inner: 0,
            strip_len: 1,
        }
    }

    /// Packs `matrix`, which is f32 or bf16 in memory, for one side of products.
    pub fn of(kernel: MicroKernel, matrix: &impl GemmMatrix, role: OperandRole) -> Self {
        let mut operand = TileOperand::new(kernel, role);
        operand.fill(matrix);
        operand
    }

    /// Replaces the contents by `matrix`.
    pub fn fill(&mut self, matrix: &impl GemmMatrix) {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let (outer, inner) = if self.role == OperandRole::Left { (rows, cols) } else { (cols, rows) };
        self.format = self.kernel.format(matrix, self.role);
        let mut memory = DequantizedPart::EMPTY;
        let source = PackSource::of(matrix, 0..outer, 0..inner, self.role, self.format, &mut memory);
        (self.outer, self.inner) = (outer, inner);
        self.strip_len = self.format.strip_len(inner);
        let len = self.strip_len * outer.div_ceil(SQUARE);
        self.tiles.clear();
        self.tiles.reserve(len);
        // SAFETY: the capacity is reserved, and no tile is read before packing has written it:
        // packing writes all tiles of each strip, with zeros as padding.
        #[allow(clippy::uninit_vec)]
        unsafe {
            self.tiles.set_len(len);
        }
        for (tiles, start) in self.tiles.chunks_exact_mut(self.strip_len).zip((0..outer).step_by(SQUARE)) {
            let here = start..(start + SQUARE).min(outer);
            packing::pack(self.kernel, tiles, self.format, source, here, inner, self.role);
        }
    }

    /// Iterates over the strips with their numbers.
    fn strips(&self) -> impl Iterator<Item = (usize, Strip<'_>)> {
        let strips = self.tiles.chunks_exact(self.strip_len);
        strips.enumerate().map(|(number, tiles)| {
            let outer = SQUARE.min(self.outer - number * SQUARE);
            (number, Strip { tiles, format: self.format, outer, inner: self.inner })
        })
    }
}

impl OpenKernel {
    /// Computes `dst = [dst +] left · right`, with `stride` elements from row to row of `dst`,
    /// which has whole squares of 32 rows and columns; values outside the product may change.
    /// `steps` maps the numbers of a strip of `left` and one of `right` to the steps of 32 inner
    /// elements that are not all zeros; an empty range leaves the square unchanged.
    pub fn multiply_operands(
        &self,
        (left, right): (&TileOperand, &TileOperand),
        dst: &mut [f32],
        stride: usize,
        accumulate: bool,
        steps: impl Fn(usize, usize) -> Range<usize>,
    ) {
        for (j, b) in right.strips() {
            for (i, a) in left.strips() {
                let steps = steps(i, j);
                if !steps.is_empty() {
                    let square = &mut dst[i * SQUARE * stride + j * SQUARE..];
                    self.multiply(&a.part(steps.clone()), &b.part(steps), square, stride, accumulate);
                }
            }
        }
    }
}
