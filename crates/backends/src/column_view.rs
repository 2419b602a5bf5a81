//! The operands of products between tensors: ranges of columns, the addend, and the operand that is
//! transposed.

use candle_core::Tensor;

use crate::error::Result;
use crate::mat_view::MatView;
use crate::runtime::TensorMut;
use crate::runtime::copy::copy_into;
use crate::runtime::cpu_tensor::PlainElement;
use crate::runtime::deferred::issue_deferred;

/// Columns `start..start + len` of a contiguous `[rows, width]` tensor.
#[derive(Clone, Copy)]
pub struct ColumnView<'a> {
    /// The whole tensor.
    pub tensor: &'a Tensor,
    /// The first column.
    pub start: usize,
    /// The number of columns.
    pub len: usize,
}

impl<'a> ColumnView<'a> {
    /// Returns all columns of `tensor: [rows, cols]` of any dtype.
    pub fn all(tensor: &'a Tensor) -> Self {
        ColumnView { tensor, start: 0, len: tensor.dims().last().copied().unwrap_or(0) }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.tensor.dims().first().copied().unwrap_or_default()
    }

    /// Returns the bytes of the columns.
    pub fn bytes(&self) -> usize {
        self.rows() * self.len * self.tensor.dtype().size_in_bytes()
    }

    /// Returns the columns of `rows` rows as a matrix.
    pub fn matrix<T: PlainElement>(self, data: &'a [T], (rows, width): (usize, usize)) -> MatView<'a, T> {
        MatView::new(data.get(self.start..).unwrap_or(&[]), rows, self.len, width)
    }

    /// Returns the range as a separate tensor (a view; not contiguous in general).
    ///
    /// # Errors
    /// Fails if the tensor has not these columns.
    pub fn narrow(&self) -> Result<Tensor> {
        Ok(self.tensor.narrow(1, self.start, self.len)?)
    }
}

/// The columns `start..start + len` of a contiguous `[rows, width]` tensor that an operation
/// writes.
#[derive(Clone, Copy)]
pub struct ColumnViewMut<'a> {
    /// The whole tensor.
    pub tensor: &'a TensorMut,
    /// The first column.
    pub start: usize,
    /// The number of columns.
    pub len: usize,
}

impl<'a> ColumnViewMut<'a> {
    /// Returns all columns of `tensor: [rows, cols]` of any dtype.
    pub fn all(tensor: &'a TensorMut) -> Self {
        ColumnViewMut { tensor, start: 0, len: tensor.dims().last().copied().unwrap_or(0) }
    }

    /// Returns the same columns for reading.
    pub fn as_view(self) -> ColumnView<'a> {
        ColumnView { tensor: self.tensor, start: self.start, len: self.len }
    }
}

/// The addend of a product: C of BLAS's `D = alpha · A · B + beta · C`, with beta 1 if present.
#[derive(Debug, Clone, Copy)]
pub enum Addend<'a> {
    /// Nothing: the destination is overwritten.
    Nothing,
    /// The present contents of the destination.
    Destination,
    /// A contiguous matrix of the destination's dtype and of the shape of its columns.
    Matrix(&'a Tensor),
}

impl Addend<'_> {
    /// Returns the destination if `accumulate`, else nothing.
    pub fn destination_if(accumulate: bool) -> Self {
        if accumulate { Addend::Destination } else { Addend::Nothing }
    }

    /// Copies a matrix to `dst`; returns true if the product must be added to `dst`.
    ///
    /// # Errors
    /// Fails if the matrix is of another shape or dtype, or a copy fails.
    pub fn place_in(self, dst: ColumnViewMut<'_>) -> Result<bool> {
        match self {
            Addend::Nothing => return Ok(false),
            Addend::Destination => {}
            Addend::Matrix(matrix) if matrix.dims() == dst.tensor.dims() => copy_into(dst.tensor, matrix)?,
            Addend::Matrix(matrix) => {
                issue_deferred()?;
                dst.tensor.slice_set(matrix, 1, dst.start)?;
            }
        }
        Ok(true)
    }
}

/// The operand that is transposed, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transpose {
    /// `a · bᵀ`: a linear layer forward (`x: [N, in]`, `w: [out, in]`).
    Nt,
    /// `a · b`: the gradient of its input (`dy: [N, out]`, `w: [out, in]`).
    Nn,
    /// `aᵀ · b`: the gradient of its weight (`dy: [N, out]`, `x: [N, in]`).
    Tn,
}

impl Transpose {
    /// Returns the name in a trace.
    pub fn name(self) -> &'static str {
        match self {
            Transpose::Nt => "nt",
            Transpose::Nn => "nn",
            Transpose::Tn => "tn",
        }
    }
}
