//! Rows on their way to experts and back: their weights and their sums.

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::cuda;
use super::order::ExpertRows;
use crate::backends::gpu::{Implementation, are_floats};
use crate::backends::simd;
use crate::error::Result;
use crate::instruction_set::vectorized;
use crate::rounding::Rounded;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, unwritten, update, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// Multiplies each row of `x: [R, F]` by the weight of its copy in `weights: [N, k]` f32: returns
/// `[R, F]` in the dtype of `x`.
///
/// # Errors
/// Fails if a tensor is not contiguous, or an operation of the device fails.
pub fn scale_rows(x: &Tensor, weights: &Tensor, rows: &ExpertRows) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("scale_rows").dims(x.dims()).moves(&[x, x]));
    match Implementation::of(x, are_floats([x.dtype()])) {
        Implementation::Kernel(driver) => return cuda::scale(driver, x, weights, rows),
        Implementation::Composed => return scale_reference(x, weights, rows),
        Implementation::Cpu => {}
    }
    let (count, width) = dims2(x)?;
    let weights = read::<f32>(weights)?;
    let weights: &[f32] = &weights;
    with_elem!(x.dtype(), T => {
        let x = read::<T>(x)?;
        let mut y = unwritten::<T>(count * width);
        let of_rows = y.par_chunks_mut(width).zip(x.par_chunks(width)).zip(rows.copies());
        of_rows.with_min_len(8).for_each(|((y, x), copy)| {
            scale_row(y, x, weights[*copy as usize]);
        });
        tensor(y, (count, width))
    })
}

/// Computes the backward of [`scale_rows`] in place: replaces `x: [R, F]` by the result of
/// [`scale_rows`], and `dy: [R, F]`, the gradient of this result, by the gradient of `x`. Returns
/// the gradient of `weights`, `[N, k]` f32.
///
/// # Errors
/// Fails if a tensor is not contiguous, the dtypes differ, or an operation of the device fails.
pub fn scale_rows_backward(
    x: &TensorMut,
    dy: &TensorMut,
    weights: &Tensor,
    rows: &ExpertRows,
) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("scale_rows_backward").dims(x.dims()).moves(&[x, x, dy, dy]));
    match Implementation::of(x, are_floats([x.dtype()])) {
        Implementation::Kernel(driver) => return cuda::scale_backward(driver, x, dy, weights, rows),
        Implementation::Composed => return scale_reference_backward(x, dy, weights, rows),
        Implementation::Cpu => {}
    }
    let (count, width) = dims2(x)?;
    let shape = weights.dims2()?;
    let mut by_row = vec![0f32; count];
    {
        let weights = read::<f32>(weights)?;
        let weights: &[f32] = &weights;
        with_elem!(x.dtype(), T => update(x, |x: &mut [T]| {
            update(dy, |dy: &mut [T]| {
                let pairs = x.par_chunks_mut(width).zip(dy.par_chunks_mut(width));
                let of_rows = pairs.zip(by_row.par_iter_mut()).zip(rows.copies());
                of_rows.with_min_len(8).for_each(|(((x, dy), dweight), copy)| {
                    *dweight = scale_row_backward(x, dy, weights[*copy as usize]);
                });
            })
        }))??;
    }
    let mut dweights = vec![0f32; count];
    for (copy, dweight) in rows.copies().iter().zip(by_row) {
        dweights[*copy as usize] = dweight;
    }
    tensor(dweights, shape)
}

/// Sums the rows of each token: returns `added: [N, D]` plus, for each token, its rows of `x: [R,
/// D]`, in the order of the experts; `[N, D]` in the same dtype.
///
/// # Errors
/// Fails if a tensor is not contiguous, the dtypes differ, or an operation of the device fails.
pub fn combine_rows(x: &Tensor, rows: &ExpertRows, added: Option<&Tensor>) -> Result<Tensor> {
    let _span = span(|| {
        let moved = [Some(x), added, added].into_iter().flatten().collect::<Vec<_>>();
        SpanInfo::op("combine_rows").dims(x.dims()).moves(&moved)
    });
    match Implementation::of(x, are_floats([x.dtype()])) {
        Implementation::Kernel(driver) => return cuda::combine(driver, x, rows, added),
        Implementation::Composed => return combine_reference(x, rows, added),
        Implementation::Cpu => {}
    }
    let ((_, width), k) = (dims2(x)?, rows.per_token()?);
    with_elem!(x.dtype(), T => {
        let x = read::<T>(x)?;
        let x: &[T] = &x;
        let added = added.map(read::<T>).transpose()?;
        let added: Option<&[T]> = added.as_deref();
        let count = rows.places().len() / k.max(1);
        let mut y = unwritten::<T>(count * width);
        let of_tokens = y.par_chunks_mut(width).zip(rows.places().par_chunks(k)).enumerate();
        of_tokens.with_min_len(8).for_each_init(|| vec![0f32; width], |sum, (n, (y, places))| {
            sum.fill(0.0);
            for row in places {
                add_row(sum, &x[*row as usize * width..][..width]);
            }
            if let Some(added) = added {
                add_row(sum, &added[n * width..][..width]);
            }
            y.iter_mut().zip(sum.iter()).for_each(|(y, sum)| *y = T::nearest(*sum));
        });
        tensor(y, (count, width))
    })
}

vectorized! {
    fn scale_row<T: FloatElement>(y: &mut [T], x: &[T], weight: f32) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::nearest(x.widen() * weight);
        }
    }
}

vectorized! {
    /// Multiplies both rows by the weight. Returns the weight's gradient.
    fn scale_row_backward<T: FloatElement>(x: &mut [T], dy: &mut [T], weight: f32) -> f32 {
        let sum = simd::sum_of2(x, dy, |x, dy| x.widen() * dy.widen());
        for (x, dy) in x.iter_mut().zip(dy) {
            (*x, *dy) = (T::nearest(x.widen() * weight), T::nearest(dy.widen() * weight));
        }
        sum
    }
}

vectorized! {
    fn add_row<T: FloatElement>(sum: &mut [f32], x: &[T]) {
        for (sum, x) in sum.iter_mut().zip(x) {
            *sum += x.widen();
        }
    }
}

/// Returns the weight of each row, `[R, 1]` f32.
fn weights_of_rows(weights: &Tensor, rows: &ExpertRows) -> Result<Tensor> {
    let index = ExpertRows::index(rows.copies(), weights.device())?;
    Ok(weights.flatten_all()?.index_select(&index, 0)?.unsqueeze(1)?)
}

/// The definition of [`scale_rows`] in candle's primitives.
pub(crate) fn scale_reference(x: &Tensor, weights: &Tensor, rows: &ExpertRows) -> Result<Tensor> {
    let scaled = x.to_dtype(DType::F32)?.broadcast_mul(&weights_of_rows(weights, rows)?)?;
    Ok(scaled.to_dtype(x.dtype())?)
}

/// The definition of [`scale_rows_backward`] in candle's primitives.
pub(crate) fn scale_reference_backward(
    x: &TensorMut,
    dy: &TensorMut,
    weights: &Tensor,
    rows: &ExpertRows,
) -> Result<Tensor> {
    let by_row = (x.to_dtype(DType::F32)? * dy.to_dtype(DType::F32)?)?.sum(1)?;
    for tensor in [x, dy] {
        tensor.slice_set(&scale_reference(tensor, weights, rows)?, 0, 0)?;
    }
    let index = ExpertRows::index(rows.copies(), x.device())?;
    Ok(by_row.zeros_like()?.index_add(&index, &by_row, 0)?.reshape(weights.shape())?)
}

/// The definition of [`combine_rows`] in candle's primitives.
pub(crate) fn combine_reference(x: &Tensor, rows: &ExpertRows, added: Option<&Tensor>) -> Result<Tensor> {
    let ((_, width), k) = (x.dims2()?, rows.per_token()?);
    let count = rows.places().len() / k.max(1);
    let index = ExpertRows::index(rows.tokens(), x.device())?;
    let zeros = Tensor::zeros((count, width), DType::F32, x.device())?;
    let sum = zeros.index_add(&index, &x.to_dtype(DType::F32)?, 0)?;
    let sum = match added {
        Some(added) => (sum + added.to_dtype(DType::F32)?)?,
        None => sum,
    };
    Ok(sum.to_dtype(x.dtype())?)
}
