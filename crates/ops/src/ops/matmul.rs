//! In-place matrix products between column ranges of tensors: the one primitive under every linear
//! layer, its input gradient, its weight gradient and the LoRA branch.
//!
//! A fused projection (q, k and v in one buffer; gate and up in another) is several products into
//! neighbouring column ranges, so that one block implementation serves families that store these
//! weights separately or fused. On a GPU cuBLAS computes the product, with sums in f32.

pub(super) mod cases;
pub(super) mod cuda;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

pub use crate::backends::column_view::{Addend, ColumnView, ColumnViewMut, Transpose};
use crate::backends::gemm::{LowRankTerm, MatView, MatViewMut, Threads, matmul as gemm, matmul_plus};
use crate::backends::gpu::{Route, are_floats};
use crate::error::Result;
use crate::rounding::Rounded;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{
    FloatElement, dims2, read, tensor, unwritten, update, update_in_f32, with_elem,
};
#[cfg(feature = "cuda")]
use crate::runtime::device::unwritten_on_gpu;
use crate::runtime::device_memory::{allocated, allocated_if_free};
use crate::runtime::trace::{SpanInfo, span};

/// A low-rank matrix to add to a product: `scale · form(u, factor)`, by the form of the product.
#[derive(Clone, Copy)]
pub struct LowRank<'a> {
    /// `[N, r]` in the dtype of `factor`.
    pub u: ColumnView<'a>,
    /// `[out, r]` for [`Transpose::Nt`], `[r, in]` for [`Transpose::Nn`].
    pub factor: &'a Tensor,
    /// Factor on the product.
    pub scale: f64,
}

impl LowRank<'_> {
    /// Adds it to `dst`, as a separate product.
    ///
    /// # Errors
    /// Fails like [`matmul`].
    pub(super) fn add_to(self, dst: ColumnViewMut<'_>, form: Transpose) -> Result<()> {
        matmul(dst, self.u, ColumnView::all(self.factor), form, self.scale, Addend::Destination)
    }

    /// Calls `product` with it as a term, in f32 on the CPU.
    pub(super) fn with_term<R>(
        self,
        form: Transpose,
        product: impl FnOnce(LowRankTerm<'_>) -> R,
    ) -> Result<R> {
        let (rows, width) = dims2(self.u.tensor)?;
        let (factor_rows, factor_columns) = dims2(self.factor)?;
        let u = read::<f32>(self.u.tensor)?;
        let factor = read::<f32>(self.factor)?;
        let mut scaled: Vec<f32> = unwritten(rows * self.u.len);
        let parts = scaled.par_chunks_mut(self.u.len).with_min_len(64).zip(u.par_chunks(width));
        parts.for_each(|(to, from)| {
            let from = &from[self.u.start..][..self.u.len];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from * self.scale as f32);
        });
        let factor = MatView::new(&factor, factor_rows, factor_columns, factor_columns);
        let factor = if form == Transpose::Nt { factor.t() } else { factor };
        Ok(product(LowRankTerm { u: MatView::new(&scaled, rows, self.u.len, self.u.len), factor }))
    }
}

/// Returns the trace info of a product: rows and columns of the result, and the depth.
fn product_info(
    name: &'static str,
    dst: ColumnViewMut<'_>,
    a: ColumnView<'_>,
    b: ColumnView<'_>,
    form: Transpose,
) -> SpanInfo {
    let (rows, depth) = if form == Transpose::Tn { (a.len, a.rows()) } else { (a.rows(), a.len) };
    let bytes: usize = [a, b, dst.as_view()].iter().map(ColumnView::bytes).sum();
    let info = SpanInfo::op(name).detail(form.name()).dims(&[rows, dst.len, depth]);
    info.bytes(bytes).flops(2 * rows * dst.len * depth)
}

/// Returns an uninitialized tensor `[rows, cols]` of this dtype; the caller must write all of it
/// before it is read.
///
/// # Errors
/// Fails if the dtype is not supported by the ops, or the device has not enough memory.
pub fn empty(rows: usize, cols: usize, dtype: DType, device: &Device) -> Result<TensorMut> {
    let made = || unwritten_matrix(rows, cols, dtype, device);
    allocated(device, rows * cols * dtype.size_in_bytes(), made)
}

/// Works like [`empty`] for a tensor that the caller can do without: returns none if the device has
/// not enough memory at once.
///
/// # Errors
/// Fails if the dtype is not supported by the ops.
pub(super) fn empty_if_free(
    rows: usize,
    cols: usize,
    dtype: DType,
    device: &Device,
) -> Result<Option<TensorMut>> {
    allocated_if_free(|| unwritten_matrix(rows, cols, dtype, device))
}

fn unwritten_matrix(rows: usize, cols: usize, dtype: DType, device: &Device) -> Result<TensorMut> {
    match device {
        Device::Cpu => {
            with_elem!(dtype, T => tensor(unwritten::<T>(rows * cols), (rows, cols)).map(TensorMut::new))
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) if rows * cols > 0 => {
            with_elem!(dtype, T => Ok(TensorMut::new(unwritten_on_gpu::<T>(device, (rows, cols))?)))
        }
        _ => TensorMut::zeros((rows, cols), dtype, device),
    }
}

/// Computes `dst = [addend +] alpha · form(a, b)`; sums in f32. `dst` must not share memory with
/// `a`, `b` or an addend.
///
/// # Errors
/// Fails if a tensor is not a contiguous matrix of floating-point values, or an operation of the
/// device fails.
pub fn matmul(
    dst: ColumnViewMut<'_>,
    a: ColumnView<'_>,
    b: ColumnView<'_>,
    form: Transpose,
    alpha: f64,
    addend: Addend<'_>,
) -> Result<()> {
    let _span = span(|| product_info("matmul", dst, a, b, form));
    match Route::of(dst.tensor, true) {
        Route::Kernel(driver) => return cuda::matmul(driver, dst, a, b, form, alpha, addend),
        Route::Composed => return reference(dst, a, b, form, alpha, addend),
        Route::Cpu => {}
    }
    let accumulate = addend.place_in(dst)?;
    let (shape_a, shape_b) = (dims2(a.tensor)?, dims2(b.tensor)?);
    let (_, width) = dims2(dst.tensor)?;
    with_elem!(a.tensor.dtype(), A => with_elem!(b.tensor.dtype(), B => with_elem!(dst.tensor.dtype(), D => {
        let a_data = read::<A>(a.tensor)?;
        let b_data = read::<B>(b.tensor)?;
        let (a_mat, b_mat) = (a.matrix(&a_data, shape_a), b.matrix(&b_data, shape_b));
        let (a_mat, b_mat) = match form {
            Transpose::Nt => (a_mat, b_mat.t()),
            Transpose::Nn => (a_mat, b_mat),
            Transpose::Tn => (a_mat.t(), b_mat),
        };
        update(dst.tensor, |data: &mut [D]| {
            let data = data.get_mut(dst.start..).unwrap_or(&mut []);
            gemm(MatViewMut { data, stride: width, accumulate }, a_mat, b_mat, alpha as f32, Threads::All);
        })
    })))
}

/// Computes `dst = [dst +] form(a, b) + low_rank` on the CPU, in one pass over `dst` if that is
/// faster.
///
/// # Errors
/// Fails like [`matmul`].
pub(super) fn matmul_plus_low_rank(
    dst: ColumnViewMut<'_>,
    a: ColumnView<'_>,
    b: &Tensor,
    form: Transpose,
    accumulate: bool,
    low_rank: LowRank<'_>,
) -> Result<()> {
    let _span = span(|| {
        let info = product_info("matmul_plus_low_rank", dst, a, ColumnView::all(b), form);
        info.flops(2 * a.rows() * dst.len * low_rank.u.len)
    });
    let (shape_a, shape_b) = (dims2(a.tensor)?, dims2(b)?);
    let (_, width) = dims2(dst.tensor)?;
    with_elem!(a.tensor.dtype(), A => with_elem!(b.dtype(), B => with_elem!(dst.tensor.dtype(), D => {
        let (a_data, b_data) = (read::<A>(a.tensor)?, read::<B>(b)?);
        let (a, b) = (a.matrix(&a_data, shape_a), ColumnView::all(b).matrix(&b_data, shape_b));
        let b = if form == Transpose::Nt { b.t() } else { b };
        low_rank.with_term(form, |term| {
            update(dst.tensor, |data: &mut [D]| {
                let data = data.get_mut(dst.start..).unwrap_or(&mut []);
                matmul_plus(MatViewMut { data, stride: width, accumulate }, a, b, term, Threads::All);
            })
        })?
    })))
}

/// The definition of [`matmul`] in candle's primitives.
pub(crate) fn reference(
    dst: ColumnViewMut<'_>,
    a: ColumnView<'_>,
    b: ColumnView<'_>,
    form: Transpose,
    alpha: f64,
    addend: Addend<'_>,
) -> Result<()> {
    let accumulate = addend.place_in(dst)?;
    // Widen unless all three have one type: otherwise an f32 adapter beside bf16 activations,
    // logits and weight gradients (f32 from bf16 operands) would be rounded to bf16 on the way.
    let dtype = a.tensor.dtype();
    let dtype = if b.tensor.dtype() == dtype && dst.tensor.dtype() == dtype { dtype } else { DType::F32 };
    let load =
        |columns: &ColumnView<'_>| -> Result<Tensor> { Ok(columns.narrow()?.to_dtype(dtype)?.contiguous()?) };
    let (a, b) = (load(&a)?, load(&b)?);
    // No copy is needed for the transpose of dense rows: cuBLAS transposes while reading.
    let mut out = match form {
        Transpose::Nt => a.matmul(&b.t()?)?,
        Transpose::Nn => a.matmul(&b)?,
        Transpose::Tn => a.t()?.matmul(&b)?,
    };
    if alpha != 1.0 || accumulate {
        out = (out.to_dtype(DType::F32)? * alpha)?;
    }
    if accumulate {
        out = (dst.as_view().narrow()?.to_dtype(DType::F32)? + out)?;
    }
    dst.tensor.slice_set(&out.to_dtype(dst.tensor.dtype())?.contiguous()?, 1, dst.start)?;
    Ok(())
}

/// Adds `bias: [len]` to every row of `dst: [N, len]`; the dtypes may differ.
///
/// # Errors
/// Fails if a tensor is not contiguous, or an operation of the device fails.
pub fn add_bias(dst: ColumnViewMut<'_>, bias: &Tensor) -> Result<()> {
    let _span = span(|| SpanInfo::op("add_bias").dims(dst.tensor.dims()).moves(&[dst.tensor, dst.tensor]));
    match Route::of(dst.tensor, are_floats([dst.tensor.dtype(), bias.dtype()])) {
        Route::Kernel(driver) => return cuda::add_bias(driver, dst, bias),
        Route::Composed => return add_bias_reference(dst, bias),
        Route::Cpu => {}
    }
    let (_, width) = dims2(dst.tensor)?;
    with_elem!(dst.tensor.dtype(), D => with_elem!(bias.dtype(), B => {
        let bias = read::<B>(bias)?;
        let bias: &[B] = &bias;
        update(dst.tensor, |data: &mut [D]| {
            data.par_chunks_mut(width).with_min_len(16).for_each(|row| {
                for (y, b) in row[dst.start..dst.start + dst.len].iter_mut().zip(bias) {
                    *y = D::nearest(y.widen() + b.widen());
                }
            });
        })
    }))
}

pub(crate) fn add_bias_reference(dst: ColumnViewMut<'_>, bias: &Tensor) -> Result<()> {
    let sum = dst.as_view().narrow()?.to_dtype(DType::F32)?.broadcast_add(&bias.to_dtype(DType::F32)?)?;
    dst.tensor.slice_set(&sum.to_dtype(dst.tensor.dtype())?.contiguous()?, 1, dst.start)?;
    Ok(())
}

/// Computes `grad[j] += Σ rows dy[., j]` in f32: the gradient of a bias. `grad: [len]` is f32, on
/// the CPU also bf16, rounded once.
///
/// # Errors
/// Fails if a tensor is not contiguous, `grad` is of another type, or an operation of the device
/// fails.
pub fn sum_rows(grad: &TensorMut, dy: ColumnView<'_>) -> Result<()> {
    let _span = span(|| SpanInfo::op("sum_rows").dims(dy.tensor.dims()).moves(&[dy.tensor]));
    match Route::of(grad, are_floats([dy.tensor.dtype()])) {
        Route::Kernel(driver) => return cuda::sum_rows(driver, grad, dy),
        Route::Composed => return sum_rows_reference(grad, dy),
        Route::Cpu => {}
    }
    let (_, width) = dims2(dy.tensor)?;
    with_elem!(dy.tensor.dtype(), T => {
        let data = read::<T>(dy.tensor)?;
        let data: &[T] = &data;
        update_in_f32(grad, |grad| {
            for row in data.chunks_exact(width) {
                for (sum, value) in grad.iter_mut().zip(&row[dy.start..dy.start + dy.len]) {
                    *sum += value.widen();
                }
            }
        })
    })
}

pub(crate) fn sum_rows_reference(grad: &TensorMut, dy: ColumnView<'_>) -> Result<()> {
    let sum = (dy.narrow()?.to_dtype(DType::F32)?.sum(0)? + &**grad)?;
    grad.slice_set(&sum.contiguous()?, 0, 0)?;
    Ok(())
}
