//! Products of matrices of at most some hundred rows and columns, one after another within a task: the tiles of attention.
//! They run on the matrix unit where there is one, else by the `gemm` crate.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::amx::{Amx, AmxOperand, Unit};
use super::gemm::{MatView, MatViewMut, Threads, matmul};
use super::mat_view::{GemmMatrix, OperandRole};

/// Rows and columns of a destination are multiples of this.
pub(super) const SQUARE: usize = 32;

/// A small matrix, laid out for products.
pub(super) struct TileOperand {
    #[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))]
    role: OperandRole,
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    packed: AmxOperand,
    /// Without a matrix unit: the values line by line of the memory that they came from.
    values: Vec<f32>,
    rows: usize,
    cols: usize,
    /// The lines are columns.
    transposed: bool,
}

impl TileOperand {
    pub(super) fn new(role: OperandRole) -> Self {
        TileOperand {
            role,
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            packed: AmxOperand::default(),
            values: Vec::new(),
            rows: 0,
            cols: 0,
            transposed: false,
        }
    }

    /// `matrix`, which is f32 or bf16 in memory, for one side of products.
    pub(super) fn of(matrix: &impl GemmMatrix, role: OperandRole) -> Self {
        let mut operand = TileOperand::new(role);
        operand.fill(matrix, false);
        operand
    }

    /// Takes `matrix` instead; its values may be rounded to bf16 if `rounded`.
    pub(super) fn fill(&mut self, matrix: &impl GemmMatrix, rounded: bool) {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if let Some(amx) = Amx::here() {
            return self.packed.fill(amx, matrix, self.role, rounded);
        }
        let _ = rounded;
        (self.rows, self.cols, self.transposed) = (matrix.rows(), matrix.cols(), matrix.is_transposed());
        let width = if self.transposed { self.rows } else { self.cols };
        self.values.resize(self.rows * self.cols, 0.0);
        for (i, line) in self.values.chunks_exact_mut(width).enumerate() {
            matrix.widen(i, 0, line);
        }
    }

    fn view(&self) -> MatView<'_, f32> {
        if self.transposed {
            MatView::new(&self.values, self.cols, self.rows, self.rows).t()
        } else {
            MatView::new(&self.values, self.rows, self.cols, self.cols)
        }
    }
}

/// What multiplies, set up on one thread. One at a time on a thread.
pub(super) struct TileMultiplier {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    unit: Option<Unit>,
}

impl TileMultiplier {
    pub(super) fn open() -> Self {
        TileMultiplier {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            unit: Amx::here().map(Amx::open),
        }
    }

    /// `dst = [dst +] left · right`, with `stride` elements from row to row of `dst`, which has room for multiples of
    /// [`SQUARE`] rows and columns.
    pub(super) fn multiply(
        &self,
        left: &TileOperand,
        right: &TileOperand,
        dst: &mut [f32],
        stride: usize,
        accumulate: bool,
    ) {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if let Some(unit) = &self.unit {
            return unit.multiply_operands(&left.packed, &right.packed, dst, stride, accumulate);
        }
        let dst = MatViewMut { data: dst, stride, accumulate };
        matmul(dst, left.view(), right.view(), 1.0, Threads::One);
    }
}
