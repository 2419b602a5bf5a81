//! Matrix products between column ranges of tensors, in place: the one primitive under every linear layer, its
//! input gradient, its weight gradient and the LoRA branch.
//!
//! A fused projection (q, k and v in one buffer; gate and up in another) is several products into neighbouring
//! column ranges, so that the block is written once for families that store these weights apart and together.
//! On a GPU the product is cuBLAS's, with sums in f32.

pub(super) mod cases;
pub(super) mod cuda;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::gemm::{MatView, MatViewMut, Threads, matmul as gemm};
use super::gpu;
use crate::error::Result;
use crate::runtime::TensorMut;
use crate::runtime::copy::copy_into;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, unwritten, update, with_elem};
#[cfg(feature = "cuda")]
use crate::runtime::device::unwritten_on_gpu;
use crate::runtime::device_memory::requested;

/// Columns `start..start + len` of a contiguous `[rows, width]` tensor.
#[derive(Clone, Copy)]
pub struct ColumnView<'a> {
    /// The whole tensor.
    pub tensor: &'a Tensor,
    /// The first column.
    pub start: usize,
    /// How many columns.
    pub len: usize,
}

impl<'a> ColumnView<'a> {
    /// All columns of `tensor: [rows, cols]` of any dtype.
    pub fn all(tensor: &'a Tensor) -> Self {
        ColumnView { tensor, start: 0, len: tensor.dims().last().copied().unwrap_or(0) }
    }

    /// The range as a tensor of its own (a view; not contiguous in general).
    pub(crate) fn narrow(&self) -> Result<Tensor> {
        Ok(self.tensor.narrow(1, self.start, self.len)?)
    }
}

/// The columns `start..start + len` of a contiguous `[rows, width]` tensor that an operation writes.
#[derive(Clone, Copy)]
pub struct ColumnViewMut<'a> {
    /// The whole tensor.
    pub tensor: &'a TensorMut,
    /// The first column.
    pub start: usize,
    /// How many columns.
    pub len: usize,
}

impl<'a> ColumnViewMut<'a> {
    /// All columns of `tensor: [rows, cols]` of any dtype.
    pub fn all(tensor: &'a TensorMut) -> Self {
        ColumnViewMut { tensor, start: 0, len: tensor.dims().last().copied().unwrap_or(0) }
    }

    /// The same columns, to be read.
    pub fn as_view(self) -> ColumnView<'a> {
        ColumnView { tensor: self.tensor, start: self.start, len: self.len }
    }
}

/// What a product is added to: C of BLAS's `D = alpha · A · B + beta · C`, with beta 1 where there is one.
#[derive(Debug, Clone, Copy)]
pub enum Addend<'a> {
    /// Nothing: the destination is overwritten.
    Nothing,
    /// What the destination holds.
    Destination,
    /// A contiguous matrix of the destination's dtype and of the shape of its columns.
    Matrix(&'a Tensor),
}

impl Addend<'_> {
    /// The destination if `accumulate`, else nothing.
    pub fn destination_if(accumulate: bool) -> Self {
        if accumulate { Addend::Destination } else { Addend::Nothing }
    }

    /// Brings a matrix to its place in `dst`; whether the product is then to be added to what is there.
    ///
    /// # Errors
    /// The matrix is of another shape or dtype, or a copy fails.
    pub fn place_in(self, dst: ColumnViewMut<'_>) -> Result<bool> {
        match self {
            Addend::Nothing => return Ok(false),
            Addend::Destination => {}
            Addend::Matrix(matrix) if matrix.dims() == dst.tensor.dims() => copy_into(dst.tensor, matrix)?,
            Addend::Matrix(matrix) => dst.tensor.slice_set(matrix, 1, dst.start)?,
        }
        Ok(true)
    }
}

/// Which operand is transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transpose {
    /// `a · bᵀ`: a linear layer forward (`x: [N, in]`, `w: [out, in]`).
    Nt,
    /// `a · b`: the gradient of its input (`dy: [N, out]`, `w: [out, in]`).
    Nn,
    /// `aᵀ · b`: the gradient of its weight (`dy: [N, out]`, `x: [N, in]`).
    Tn,
}

/// A tensor `[rows, cols]` of this dtype, whose contents the caller writes in full before they are read.
///
/// # Errors
/// When the dtype is not one that the ops know, or the device has not enough memory.
pub fn empty(rows: usize, cols: usize, dtype: DType, device: &Device) -> Result<TensorMut> {
    let made = || match device {
        Device::Cpu => {
            with_elem!(dtype, T => tensor(unwritten::<T>(rows * cols), (rows, cols)).map(TensorMut::new))
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) if rows * cols > 0 => {
            with_elem!(dtype, T => Ok(TensorMut::new(unwritten_on_gpu::<T>(device, (rows, cols))?)))
        }
        _ => TensorMut::zeros((rows, cols), dtype, device),
    };
    requested(rows * cols * dtype.size_in_bytes(), made)
}

/// `dst = [addend +] alpha · form(a, b)`; sums in f32. `dst` must not share memory with `a`, `b` or a matrix to add to.
///
/// # Errors
/// When a tensor is no contiguous matrix of floating-point values, or an operation of the device fails.
pub fn matmul(
    dst: ColumnViewMut<'_>,
    a: ColumnView<'_>,
    b: ColumnView<'_>,
    form: Transpose,
    alpha: f64,
    addend: Addend<'_>,
) -> Result<()> {
    if let Some(driver) = gpu::driver_of(dst.tensor) {
        return cuda::matmul(driver, dst, a, b, form, alpha, addend);
    }
    if !dst.tensor.device().is_cpu() {
        return reference(dst, a, b, form, alpha, addend);
    }
    let accumulate = addend.place_in(dst)?;
    let (rows_a, width_a) = dims2(a.tensor)?;
    let (rows_b, width_b) = dims2(b.tensor)?;
    let (_, width) = dims2(dst.tensor)?;
    with_elem!(a.tensor.dtype(), A => with_elem!(b.tensor.dtype(), B => with_elem!(dst.tensor.dtype(), D => {
        let a_data = read::<A>(a.tensor)?;
        let b_data = read::<B>(b.tensor)?;
        let a_mat = MatView::new(a_data.get(a.start..).unwrap_or(&[]), rows_a, a.len, width_a);
        let b_mat = MatView::new(b_data.get(b.start..).unwrap_or(&[]), rows_b, b.len, width_b);
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
    // Widened unless all three are of one type: an f32 adapter beside bf16 activations, logits and weight gradients
    // (f32 from bf16 operands) would otherwise be rounded to bf16 on the way.
    let dtype = a.tensor.dtype();
    let dtype = if b.tensor.dtype() == dtype && dst.tensor.dtype() == dtype { dtype } else { DType::F32 };
    let load =
        |columns: &ColumnView<'_>| -> Result<Tensor> { Ok(columns.narrow()?.to_dtype(dtype)?.contiguous()?) };
    let (a, b) = (load(&a)?, load(&b)?);
    // The transpose of dense rows is an operand as it is: cuBLAS transposes on the way in.
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
/// When a tensor is not contiguous, or an operation of the device fails.
pub fn add_bias(dst: ColumnViewMut<'_>, bias: &Tensor) -> Result<()> {
    if let Some(driver) = gpu::driver_of(dst.tensor)
        && cuda::is_supported(dst.tensor.dtype())
        && cuda::is_supported(bias.dtype())
    {
        return cuda::add_bias(driver, dst, bias);
    }
    if !dst.tensor.device().is_cpu() {
        return add_bias_reference(dst, bias);
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

/// `grad[j] += Σ rows dy[., j]` in f32: the gradient of a bias. `grad: [len]` f32.
///
/// # Errors
/// When a tensor is not contiguous, `grad` is not f32, or an operation of the device fails.
pub fn sum_rows(grad: &TensorMut, dy: ColumnView<'_>) -> Result<()> {
    if let Some(driver) = gpu::driver_of(grad)
        && cuda::is_supported(dy.tensor.dtype())
    {
        return cuda::sum_rows(driver, grad, dy);
    }
    if !grad.device().is_cpu() {
        return sum_rows_reference(grad, dy);
    }
    let (_, width) = dims2(dy.tensor)?;
    with_elem!(dy.tensor.dtype(), T => {
        let data = read::<T>(dy.tensor)?;
        let data: &[T] = &data;
        update(grad, |grad: &mut [f32]| {
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
