//! Rows on their way to experts and back: the order of the rows, their weights and their sums.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::{ExpertChoice, cuda};
use crate::error::{Error, Result};
use crate::instruction_set::vectorized;
use crate::ops::gpu::{self, Route, are_floats};
use crate::ops::simd;
use crate::rounding::Rounded;
use crate::runtime::TensorMut;
use crate::runtime::copy::to_device;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, unwritten, update, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// The rows of all experts, those of the first expert first, the tokens of an expert in order.
///
/// The copy `j` of token `n` has the number `n·k + j`.
#[derive(Debug, Clone)]
pub struct ExpertRows(Arc<Order>);

/// The rows of one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsOfExpert {
    /// The number of the expert.
    pub expert: usize,
    /// The first of its rows.
    pub start: usize,
    /// The number of its rows.
    pub len: usize,
}

#[derive(Debug)]
struct Order {
    /// Rows of expert e: `starts[e]..starts[e + 1]`.
    starts: Vec<usize>,
    /// The token of each row: `[R]`.
    tokens: Vec<u32>,
    /// The number of the copy in each row: `[R]`.
    copies: Vec<u32>,
    /// The rows of each token in ascending order: `[N, k]`.
    places: Vec<u32>,
    /// `copies` and `places` on the device, u32.
    on_device: [Tensor; 2],
}

impl ExpertRows {
    /// Orders the rows of `experts` experts by `choice`; waits for the device.
    ///
    /// # Errors
    /// Internal: an expert's number is too large. Or an operation of the device failed.
    pub fn of(choice: &ExpertChoice, experts: usize) -> Result<Self> {
        let (tokens, k) = choice.ids.dims2()?;
        let ids: Vec<u32> = gpu::read(&choice.ids.flatten_all()?)?;
        let mut starts = vec![0usize; experts + 1];
        for &id in &ids {
            let end = starts
                .get_mut(id as usize + 1)
                .ok_or_else(|| Error::internal(format!("a router chose expert {id} of {experts}")))?;
            *end += 1;
        }
        for e in 0..experts {
            starts[e + 1] += starts[e];
        }
        let mut next = starts.clone();
        let (mut copies, mut places) = (vec![0u32; ids.len()], vec![0u32; ids.len()]);
        for (copy, &id) in ids.iter().enumerate() {
            let row = next[id as usize];
            next[id as usize] += 1;
            (copies[row], places[copy]) = (copy as u32, row as u32);
        }
        places.chunks_mut(k.max(1)).for_each(<[u32]>::sort_unstable);
        let of_rows = copies.iter().map(|copy| copy / k as u32).collect();
        let device = choice.ids.device();
        let on_device =
            [gpu::upload(&copies, copies.len(), device)?, gpu::upload(&places, (tokens, k), device)?];
        Ok(ExpertRows(Arc::new(Order { starts, tokens: of_rows, copies, places, on_device })))
    }

    /// Returns one row for each of `tokens` tokens, in their order: those of one expert.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn of_tokens(tokens: usize, device: &Device) -> Result<Self> {
        let all: Vec<u32> = (0..tokens as u32).collect();
        let on_device = [gpu::upload(&all, tokens, device)?, gpu::upload(&all, (tokens, 1), device)?];
        let (tokens, copies) = (all.clone(), all.clone());
        Ok(ExpertRows(Arc::new(Order { starts: vec![0, all.len()], tokens, copies, places: all, on_device })))
    }

    /// Returns the token of each row, `[R]`.
    pub fn tokens(&self) -> &[u32] {
        &self.0.tokens
    }

    /// Returns the number of the copy in each row, `[R]`.
    pub fn copies(&self) -> &[u32] {
        &self.0.copies
    }

    /// Returns the number of rows of each expert, `[E]`.
    pub fn loads(&self) -> Vec<usize> {
        self.0.starts.windows(2).map(|ends| ends[1] - ends[0]).collect()
    }

    /// Returns the rows of each expert that has some.
    pub fn of_experts(&self) -> impl Iterator<Item = RowsOfExpert> + '_ {
        let ends = self.0.starts.windows(2).enumerate();
        let rows = ends.map(|(expert, ends)| RowsOfExpert { expert, start: ends[0], len: ends[1] - ends[0] });
        rows.filter(|rows| rows.len > 0)
    }

    /// Returns its tensors on the device, `[R]` and `[N, k]` u32, for counts of memory.
    pub fn tensors(&self) -> &[Tensor; 2] {
        &self.0.on_device
    }

    pub(super) fn copies_on_device(&self) -> &Tensor {
        &self.0.on_device[0]
    }

    pub(super) fn places_on_device(&self) -> &Tensor {
        &self.0.on_device[1]
    }

    /// Returns the number of copies of a token, k.
    pub(super) fn per_token(&self) -> Result<usize> {
        Ok(self.0.on_device[1].dim(1)?)
    }

    /// Returns the index of rows in a list, for candle.
    fn index(list: &[u32], device: &Device) -> Result<Tensor> {
        to_device(&Tensor::from_slice(list, list.len(), &Device::Cpu)?, device)
    }
}

/// Multiplies each row of `x: [R, F]` by the weight of its copy in `weights: [N, k]` f32: returns
/// `[R, F]` in the dtype of `x`.
///
/// # Errors
/// Fails if a tensor is not contiguous, or an operation of the device fails.
pub fn scale_rows(x: &Tensor, weights: &Tensor, rows: &ExpertRows) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("scale_rows").dims(x.dims()).moves(&[x, x]));
    match Route::of(x, are_floats([x.dtype()])) {
        Route::Kernel(driver) => return cuda::scale(driver, x, weights, rows),
        Route::Composed => return scale_reference(x, weights, rows),
        Route::Cpu => {}
    }
    let (count, width) = dims2(x)?;
    let weights = read::<f32>(weights)?;
    let weights: &[f32] = &weights;
    with_elem!(x.dtype(), T => {
        let x = read::<T>(x)?;
        let mut y = unwritten::<T>(count * width);
        let of_rows = y.par_chunks_mut(width).zip(x.par_chunks(width)).zip(&rows.0.copies);
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
    match Route::of(x, are_floats([x.dtype()])) {
        Route::Kernel(driver) => return cuda::scale_backward(driver, x, dy, weights, rows),
        Route::Composed => return scale_reference_backward(x, dy, weights, rows),
        Route::Cpu => {}
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
                let of_rows = pairs.zip(by_row.par_iter_mut()).zip(&rows.0.copies);
                of_rows.with_min_len(8).for_each(|(((x, dy), dweight), copy)| {
                    *dweight = scale_row_backward(x, dy, weights[*copy as usize]);
                });
            })
        }))??;
    }
    let mut dweights = vec![0f32; count];
    for (copy, dweight) in rows.0.copies.iter().zip(by_row) {
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
    match Route::of(x, are_floats([x.dtype()])) {
        Route::Kernel(driver) => return cuda::combine(driver, x, rows, added),
        Route::Composed => return combine_reference(x, rows, added),
        Route::Cpu => {}
    }
    let ((_, width), k) = (dims2(x)?, rows.per_token()?);
    with_elem!(x.dtype(), T => {
        let x = read::<T>(x)?;
        let x: &[T] = &x;
        let added = added.map(read::<T>).transpose()?;
        let added: Option<&[T]> = added.as_deref();
        let count = rows.0.places.len() / k.max(1);
        let mut y = unwritten::<T>(count * width);
        let of_tokens = y.par_chunks_mut(width).zip(rows.0.places.par_chunks(k)).enumerate();
        of_tokens.with_min_len(8).for_each_init(|| vec![0f32; width], |sum, (n, (y, places))| {
            sum.fill(0.0);
            for place in places {
                add_row(sum, &x[*place as usize * width..][..width]);
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
    let index = ExpertRows::index(&rows.0.copies, weights.device())?;
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
    let index = ExpertRows::index(&rows.0.copies, x.device())?;
    Ok(by_row.zeros_like()?.index_add(&index, &by_row, 0)?.reshape(weights.shape())?)
}

/// The definition of [`combine_rows`] in candle's primitives.
pub(crate) fn combine_reference(x: &Tensor, rows: &ExpertRows, added: Option<&Tensor>) -> Result<Tensor> {
    let ((_, width), k) = (x.dims2()?, rows.per_token()?);
    let count = rows.0.places.len() / k.max(1);
    let index = ExpertRows::index(&rows.0.tokens, x.device())?;
    let zeros = Tensor::zeros((count, width), DType::F32, x.device())?;
    let sum = zeros.index_add(&index, &x.to_dtype(DType::F32)?, 0)?;
    let sum = match added {
        Some(added) => (sum + added.to_dtype(DType::F32)?)?,
        None => sum,
    };
    Ok(sum.to_dtype(x.dtype())?)
}
