//! Products through a driver: converts the engine's row-major products to the column-major form of
//! cublasLtMatmul.
//!
//! cuBLAS supports only column-major matrices. Row-major memory read as column-major is the
//! transpose, hence `d = a · b` becomes `dᵀ = bᵀ · aᵀ`: the operands are swapped, each keeps its
//! leading dimension, and no data moves.

use candle_core::{DType, Tensor};
use half::bf16;

use super::{Arg, In};
use crate::column_view::{Addend, ColumnView, ColumnViewMut, Transpose};
use crate::error::{Error, Result};
use crate::runtime::TensorMut;

/// The type of a matrix's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GemmElement {
    /// Numbers of 16 bits, bf16.
    Bf16,
    /// Numbers of 32 bits, f32.
    F32,
    /// Codes of an 8-bit float, operands alone.
    E4m3,
}

impl GemmElement {
    /// Returns the type of the numbers in `tensor`; none if products do not support it.
    pub fn of(tensor: &Tensor) -> Option<Self> {
        match tensor.dtype() {
            DType::BF16 => Some(GemmElement::Bf16),
            DType::F32 => Some(GemmElement::F32),
            _ => None,
        }
    }

    /// Returns the bytes of an element; only the emulator computes addresses itself.
    #[cfg(feature = "kernel-emu")]
    pub fn bytes(self) -> usize {
        match self {
            GemmElement::Bf16 => 2,
            GemmElement::F32 => 4,
            GemmElement::E4m3 => 1,
        }
    }
}

/// A column-major matrix in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMatrix {
    /// The address and the accessible memory.
    pub arg: Arg,
    /// Number of elements of a column.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Elements from one column to the next (`ld`).
    pub leading: usize,
}

impl DeviceMatrix {
    /// Returns row-major columns of a tensor, read as the column-major transpose.
    fn of(view: &ColumnView<'_>, element: GemmElement) -> Result<Self> {
        let (rows, leading) = view.tensor.dims2()?;
        let arg = match element {
            GemmElement::Bf16 => In::<bf16>::columns(view)?.arg(),
            GemmElement::F32 => In::<f32>::columns(view)?.arg(),
            GemmElement::E4m3 => In::<u8>::columns(view)?.arg(),
        };
        Ok(DeviceMatrix { arg, rows: view.len, cols: rows, leading })
    }
}

/// Computes `d = alpha · op(a) · op(b) + beta · c` on column-major matrices, as cublasLtMatmul
/// does; sums in f32.
#[derive(Debug, Clone, Copy)]
pub struct Gemm {
    /// The first operand, as stored in memory.
    pub a: DeviceMatrix,
    /// The second operand, as stored in memory.
    pub b: DeviceMatrix,
    /// True if `op` transposes the first and the second operand, respectively.
    pub transposed: [bool; 2],
    /// The type of both operands.
    pub operands: GemmElement,
    /// The addend: `d` itself if no other is given.
    pub c: DeviceMatrix,
    /// The destination matrix.
    pub d: DeviceMatrix,
    /// The type of `c` and `d`.
    pub result: GemmElement,
    /// The factor of the product.
    pub alpha: f32,
    /// 1 to add `c`, 0 to skip reading it.
    pub beta: f32,
    /// Factors of the product, f32: one for each row of the result, and one for each column.
    pub scales: Option<[Arg; 2]>,
}

impl Gemm {
    /// Returns `dst = [addend +] alpha · form(a, b)`, or none for an unsupported combination of
    /// types. Supported are operands of one type with a result of f32 or of the operands' type.
    ///
    /// # Errors
    /// Fails if a tensor is not a contiguous matrix, or the shapes do not fit.
    pub fn new(
        dst: &ColumnViewMut<'_>,
        a: &ColumnView<'_>,
        b: &ColumnView<'_>,
        form: Transpose,
        alpha: f32,
        addend: Addend<'_>,
    ) -> Result<Option<Self>> {
        let elements = [GemmElement::of(a.tensor), GemmElement::of(b.tensor), GemmElement::of(dst.tensor)];
        let [Some(operands), Some(other), Some(result)] = elements else { return Ok(None) };
        if operands != other || (result != GemmElement::F32 && result != operands) {
            return Ok(None);
        }
        let inputs = [DeviceMatrix::of(b, operands)?, DeviceMatrix::of(a, operands)?];
        let d = (DeviceMatrix::of(&dst.as_view(), result)?, result);
        Self::of(inputs, operands, d, form, alpha, addend).map(Some)
    }

    /// Returns `dst = [addend +] form(a, b)`; `a` is bf16 values in the front half of each row of
    /// f32 memory, and `b` is bf16.
    ///
    /// # Errors
    /// Fails like [`Gemm::new`], and if `b` is not bf16 or the result neither bf16 nor f32.
    pub fn of_front_halves(
        dst: &TensorMut,
        a: &ColumnView<'_>,
        b: &Tensor,
        form: Transpose,
        addend: Addend<'_>,
    ) -> Result<Self> {
        let result = GemmElement::of(dst)
            .ok_or_else(|| Error::internal("the result of a product is neither f32 nor bf16"))?;
        let mut halves = DeviceMatrix::of(a, GemmElement::F32)?;
        (halves.arg.row_bytes, halves.leading) = (halves.arg.row_bytes / 2, 2 * halves.leading);
        let operands = [DeviceMatrix::of(&ColumnView::all(b), GemmElement::Bf16)?, halves];
        let d = (DeviceMatrix::of(&ColumnView::all(dst), result)?, result);
        Self::of(operands, GemmElement::Bf16, d, form, 1.0, addend)
    }

    /// Returns `dst = [addend +] a · bᵀ` of two matrices of codes in e4m3. With `scales`, of the
    /// rows of `a` and of `b`, the result is multiplied by both.
    ///
    /// # Errors
    /// Fails like [`Gemm::new`], and if the result is neither bf16 nor f32.
    pub fn of_codes(
        dst: &ColumnViewMut<'_>,
        [a, b]: [&Tensor; 2],
        scales: Option<[&Tensor; 2]>,
        addend: Addend<'_>,
    ) -> Result<Self> {
        let result = GemmElement::of(dst.tensor)
            .ok_or_else(|| Error::internal("the result of a product is neither f32 nor bf16"))?;
        let codes = |tensor| DeviceMatrix::of(&ColumnView::all(tensor), GemmElement::E4m3);
        let d = (DeviceMatrix::of(&dst.as_view(), result)?, result);
        let gemm = Self::of([codes(b)?, codes(a)?], GemmElement::E4m3, d, Transpose::Nt, 1.0, addend)?;
        // A row of `dst` is a column here.
        let scale = |tensor| Ok::<_, Error>(In::<f32>::all(tensor)?.arg());
        let scales = scales.map(|[a, b]| Ok::<_, Error>([scale(b)?, scale(a)?])).transpose()?;
        Ok(Gemm { scales, ..gemm })
    }

    fn of(
        [a, b]: [DeviceMatrix; 2],
        operands: GemmElement,
        (d, result): (DeviceMatrix, GemmElement),
        form: Transpose,
        alpha: f32,
        addend: Addend<'_>,
    ) -> Result<Self> {
        let transposed = match form {
            Transpose::Nt => [true, false],
            Transpose::Nn => [false, false],
            Transpose::Tn => [false, true],
        };
        let (c, beta) = match addend {
            Addend::Nothing => (d, 0.0),
            Addend::Destination => (d, 1.0),
            Addend::Matrix(matrix) => (DeviceMatrix::of(&ColumnView::all(matrix), result)?, 1.0),
        };
        let gemm = Gemm { a, b, transposed, operands, c, d, result, alpha, beta, scales: None };
        gemm.check()?;
        Ok(gemm)
    }

    /// Returns whether both multiply the same memory in the same way: all numbers have equal bits.
    pub(super) fn is_same(&self, other: &Gemm) -> bool {
        let numbers = |gemm: &Gemm| [gemm.alpha, gemm.beta].map(f32::to_bits);
        let memory = |gemm: &Gemm| (gemm.a, gemm.b, gemm.c, gemm.d, gemm.scales);
        self.is_alike(other) && numbers(self) == numbers(other) && memory(self) == memory(other)
    }

    /// Returns whether both have the same sizes, types and form.
    pub(super) fn is_alike(&self, other: &Gemm) -> bool {
        let matrices = |gemm: &Gemm| {
            [gemm.a, gemm.b, gemm.c, gemm.d].map(|matrix| (matrix.rows, matrix.cols, matrix.leading))
        };
        let form = |gemm: &Gemm| (gemm.transposed, gemm.operands, gemm.result, gemm.scales.is_some());
        matrices(self) == matrices(other) && form(self) == form(other)
    }

    /// Returns m, n and k: rows and columns of the result, and elements of each sum.
    pub fn size(&self) -> [usize; 3] {
        let k = if self.transposed[0] { self.a.rows } else { self.a.cols };
        [self.d.rows, self.d.cols, k]
    }

    fn check(&self) -> Result<()> {
        let [m, n, k] = self.size();
        let shape = |matrix: &DeviceMatrix, transposed: bool| {
            if transposed { (matrix.cols, matrix.rows) } else { (matrix.rows, matrix.cols) }
        };
        let [a, b] = [shape(&self.a, self.transposed[0]), shape(&self.b, self.transposed[1])];
        if a == (m, k) && b == (k, n) && shape(&self.c, false) == (m, n) {
            return Ok(());
        }
        let c = shape(&self.c, false);
        let shapes = format!("column by column, {a:?} times {b:?} plus {c:?} gives no {:?}", (m, n));
        Err(Error::internal("the shapes of a product do not match").because(shapes))
    }
}
