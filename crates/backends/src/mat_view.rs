//! Matrices on CPU slices, as operands and destinations of products: dense ones of any strides,
//! quantized ones, and their transposes. All of them can be converted to `f32` part by part.

use half::bf16;
use rayon::prelude::*;

use crate::instruction_set::vectorized;
use crate::quant::QuantView;
use crate::runtime::cpu_tensor::{FloatElement, PlainElement, first as first_of};

/// An operand of a product: `f32` in memory, or convertible to `f32` part by part.
pub trait GemmMatrix: Copy + Sync {
    /// Returns the number of rows.
    fn rows(&self) -> usize;
    /// Returns the number of columns.
    fn cols(&self) -> usize;
    /// Returns the values and both strides, if they are `f32` in memory.
    fn dense(&self) -> Option<GemmOperand<'_, f32>>;
    /// Returns the values and both strides, if they are `bf16` in memory.
    fn dense_bf16(&self) -> Option<GemmOperand<'_, bf16>>;
    /// Returns true if its columns are contiguous in memory, instead of its rows.
    fn is_transposed(&self) -> bool;
    /// Returns true if every value is a bf16 number.
    fn is_bf16(&self) -> bool;
    /// Copies the values from `from` on of a line, each rounded to `T` once. A line is a row, or a
    /// column of a transposed matrix.
    fn copy_line<T: FloatElement>(&self, line: usize, from: usize, out: &mut [T]);

    /// Converts columns `start..start + len` to `f32` in `panel`; returns its strides.
    fn widen_columns(&self, start: usize, len: usize, panel: &mut Vec<f32>) -> (usize, usize) {
        let (lines, first, from, width) =
            if self.is_transposed() { (len, start, 0, self.rows()) } else { (self.rows(), 0, start, len) };
        let panel = first_of(panel, lines * width);
        panel
            .par_chunks_mut(width.max(1))
            .with_min_len(8)
            .enumerate()
            .for_each(|(i, line)| self.copy_line(first + i, from, line));
        if self.is_transposed() { (1, width) } else { (width, 1) }
    }
}

/// A quantized matrix, row by row, or its transpose.
#[derive(Clone, Copy)]
pub struct QuantMat<'a> {
    view: QuantView<'a>,
    rows: usize,
    cols: usize,
    transposed: bool,
}

impl<'a> QuantMat<'a> {
    /// Returns the matrix `[rows, cols]` of a quantized tensor.
    pub fn new(view: QuantView<'a>, rows: usize, cols: usize) -> Self {
        QuantMat { view, rows, cols, transposed: false }
    }

    /// Returns the transpose; no element moves.
    pub fn t(self) -> Self {
        QuantMat { transposed: !self.transposed, ..self }
    }
}

impl GemmMatrix for QuantMat<'_> {
    fn rows(&self) -> usize {
        if self.transposed { self.cols } else { self.rows }
    }

    fn cols(&self) -> usize {
        if self.transposed { self.rows } else { self.cols }
    }

    fn dense(&self) -> Option<GemmOperand<'_, f32>> {
        None
    }

    fn dense_bf16(&self) -> Option<GemmOperand<'_, bf16>> {
        None
    }

    fn is_transposed(&self) -> bool {
        self.transposed
    }

    fn is_bf16(&self) -> bool {
        false
    }

    fn copy_line<T: FloatElement>(&self, line: usize, from: usize, out: &mut [T]) {
        self.view.dequantize(line * self.cols + from, out);
    }
}

/// A matrix on a slice: element `(i, j)` is `data[i * stride + j]`, or `data[j * stride + i]` when
/// it is transposed.
#[derive(Clone, Copy)]
pub struct MatView<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    stride: usize,
    transposed: bool,
}

impl<'a, T: PlainElement> MatView<'a, T> {
    /// Returns a row-major matrix whose rows begin `stride` elements apart; `data` begins at
    /// element (0, 0).
    pub fn new(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(
            stride >= cols && (rows == 0 || data.len() >= (rows - 1) * stride + cols),
            "matrix outside its slice"
        );
        MatView { data, rows, cols, stride, transposed: false }
    }

    /// Returns the transpose; no element moves.
    pub fn t(self) -> Self {
        MatView { rows: self.cols, cols: self.rows, transposed: !self.transposed, ..self }
    }

    /// Returns the distances from a row to the next, and from a column to the next.
    fn strides(&self) -> (usize, usize) {
        if self.transposed { (1, self.stride) } else { (self.stride, 1) }
    }
}

impl<T: FloatElement> GemmMatrix for MatView<'_, T> {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn dense(&self) -> Option<GemmOperand<'_, f32>> {
        is_f32::<T>().then(|| GemmOperand { data: as_f32(self.data), strides: self.strides() })
    }

    fn dense_bf16(&self) -> Option<GemmOperand<'_, bf16>> {
        as_bf16(self.data).map(|data| GemmOperand { data, strides: self.strides() })
    }

    fn is_transposed(&self) -> bool {
        self.transposed
    }

    fn is_bf16(&self) -> bool {
        !is_f32::<T>()
    }

    fn copy_line<D: FloatElement>(&self, line: usize, from: usize, out: &mut [D]) {
        convert(out, &self.data[line * self.stride + from..][..out.len()]);
    }
}

vectorized! {
    fn convert<D: FloatElement, T: FloatElement>(dst: &mut [D], src: &[T]) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = D::nearest(src.widen());
        }
    }
}

vectorized! {
    /// Writes a row of results, or adds it to the destination.
    pub fn store<T: FloatElement>(dst: &mut [T], src: &[f32], accumulate: bool) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = T::nearest(if accumulate { dst.widen() + src } else { *src });
        }
    }
}

/// The destination of a product: `rows × cols` at `data[i * stride + j]`.
pub struct MatViewMut<'a, T> {
    /// The memory of the destination.
    pub data: &'a mut [T],
    /// The elements from a row to the next.
    pub stride: usize,
    /// True to add to the destination instead of overwriting it.
    pub accumulate: bool,
}

/// A low-rank matrix to add to a product: `u · factor`, with `u: [m, r]` and `factor: [r, n]`.
#[derive(Clone, Copy)]
pub struct LowRankTerm<'a> {
    /// The left factor.
    pub u: MatView<'a, f32>,
    /// The right factor.
    pub factor: MatView<'a, f32>,
}

impl LowRankTerm<'_> {
    /// Returns the number of columns of `u`.
    pub fn r(&self) -> usize {
        self.u.cols()
    }
}

/// The threads available to a product.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread only, inside a parallel loop.
    One,
    /// All threads of the pool.
    All,
}

/// The side of an operand in a product. Its outer elements are the rows of a left operand and the
/// columns of a right one; the product sums over its inner elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperandRole {
    /// `a` of `a · b`.
    Left,
    /// `b` of `a · b`.
    Right,
}

/// A matrix in memory: element `(i, j)` is `data[i * strides.0 + j * strides.1]`; one of the
/// strides is 1.
#[derive(Clone, Copy)]
pub struct GemmOperand<'a, T> {
    /// The memory of the matrix.
    pub data: &'a [T],
    /// The elements from a row to the next, and from a column to the next.
    pub strides: (usize, usize),
}

impl<T> GemmOperand<'_, T> {
    /// Returns true if a matrix of this shape fits in the slice.
    pub(crate) fn holds(&self, rows: usize, cols: usize) -> bool {
        (rows.max(1) - 1) * self.strides.0 + (cols.max(1) - 1) * self.strides.1 < self.data.len()
    }
}

/// Returns true if values of this type need no widening.
pub fn is_f32<T: FloatElement>() -> bool {
    T::DTYPE == candle_core::DType::F32
}

fn as_f32<T: FloatElement>(data: &[T]) -> &[f32] {
    assert!(is_f32::<T>());
    // SAFETY: `FloatElement` is implemented for f32 and bf16 alone, and the assertion says that T
    // is f32.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) }
}

/// Returns the same values, if they are bf16.
fn as_bf16<T: FloatElement>(data: &[T]) -> Option<&[bf16]> {
    // SAFETY: `FloatElement` is implemented for f32 and bf16 alone, and T is not f32.
    (!is_f32::<T>()).then(|| unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) })
}

/// Returns the same values, if they are `f32`.
pub(crate) fn as_f32_mut<T: FloatElement>(data: &mut [T]) -> Option<&mut [f32]> {
    // SAFETY: as above; the mutable borrow is passed on.
    is_f32::<T>().then(|| unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), data.len()) })
}
