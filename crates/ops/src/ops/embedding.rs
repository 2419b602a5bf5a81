//! Token embedding: rows of the table times a factor (Gemma's √hidden), the table's gradient, and
//! for LoRA the columns of A by token (PEFT's `lora_embedding_A`).

pub(super) mod cases;
mod cuda;

use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use crate::backends::gpu::{self, Route, are_floats};
use crate::error::Result;
use crate::rounding::Rounded;
use crate::runtime::TensorMut;
use crate::runtime::copy::to_device;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, unwritten, update, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// Looks up rows of `table: [V, D]` and multiplies them by `factor`: returns `[N, D]` in `dtype`,
/// for any dtype of the table. The N ids are below V.
///
/// # Errors
/// Fails if `table` is not a contiguous matrix of floating-point values, or an operation of the
/// device fails.
pub fn embed(table: &Tensor, ids: &[u32], factor: f64, dtype: DType) -> Result<Tensor> {
    let _span = span(|| {
        let values = ids.len() * table.dims().last().copied().unwrap_or_default();
        let sizes = table.dtype().size_in_bytes() + dtype.size_in_bytes();
        SpanInfo::op("embedding").dims(table.dims()).bytes(values * sizes)
    });
    match Route::of(table, are_floats([table.dtype(), dtype])) {
        Route::Kernel(driver) => return cuda::embed(driver, table, ids, factor, dtype),
        Route::Composed => return reference(table, ids, factor, dtype),
        Route::Cpu => {}
    }
    let (_, width) = dims2(table)?;
    with_elem!(table.dtype(), T => with_elem!(dtype, Y => {
        let table = read::<T>(table)?;
        let mut out = unwritten::<Y>(ids.len() * width);
        out.par_chunks_mut(width).zip(ids).with_min_len(16).for_each(|(row, &id)| {
            let source = &table[id as usize * width..(id as usize + 1) * width];
            for (y, x) in row.iter_mut().zip(source) {
                *y = Y::nearest(x.widen() * factor as f32);
            }
        });
        tensor(out, (ids.len(), width))
    }))
}

/// Returns the rows `ids` of each of two tables, `[V, D]` f32 both: `[N, D]`. Uploads the ids to a
/// GPU once.
///
/// # Errors
/// Fails if a table is not a contiguous matrix of floating-point values, or an operation of the
/// device fails.
pub fn rows_of(tables: [&Tensor; 2], ids: &[u32]) -> Result<[Tensor; 2]> {
    if let Some(driver) = gpu::driver_of(tables[0])
        && tables.iter().all(|table| are_floats([table.dtype(), DType::F32]))
    {
        return cuda::rows_of(driver, tables, ids);
    }
    // A factor of one keeps the bits.
    let [first, second] = tables.map(|table| embed(table, ids, 1.0, DType::F32));
    Ok([first?, second?])
}

/// Returns the column of each token: `a: [r, V]` f32 → `[N, r]`.
///
/// # Errors
/// Fails if `a` is not a contiguous f32 matrix, or an operation of the device fails.
pub fn columns_of(a: &Tensor, ids: &[u32]) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("columns_of").dims(a.dims()));
    match Route::of(a, true) {
        Route::Kernel(driver) => return cuda::columns_of(driver, a, ids),
        Route::Composed => return columns_of_reference(a, ids),
        Route::Cpu => {}
    }
    let (r, vocab) = dims2(a)?;
    let a = read::<f32>(a)?;
    let values = ids.iter().flat_map(|&id| (0..r).map(move |j| (j, id as usize)));
    tensor(values.map(|(j, id)| a[j * vocab + id]).collect::<Vec<f32>>(), (ids.len(), r))
}

/// The definition of [`columns_of`] in candle's primitives.
pub(crate) fn columns_of_reference(a: &Tensor, ids: &[u32]) -> Result<Tensor> {
    Ok(a.index_select(&indices(ids, a.device())?, 1)?.t()?.contiguous()?)
}

/// Computes `grad[j, id] += du[n, j]` for every token n except those equal to `skip`: the gradient
/// of `a` in [`columns_of`]; all f32.
///
/// # Errors
/// Fails if a tensor is not contiguous f32, or an operation of the device fails.
pub fn columns_of_backward(grad: &TensorMut, ids: &[u32], du: &Tensor, skip: Option<u32>) -> Result<()> {
    let _span = span(|| SpanInfo::op("columns_of_backward").dims(grad.dims()));
    match Route::of(grad, true) {
        Route::Kernel(driver) => return cuda::columns_of_backward(driver, grad, ids, du, skip),
        Route::Composed => return columns_of_backward_reference(grad, ids, du, skip),
        Route::Cpu => {}
    }
    let (r, vocab) = dims2(grad)?;
    let du = read::<f32>(du)?;
    let du: &[f32] = &du;
    update(grad, |grad: &mut [f32]| {
        for (du, &id) in du.chunks_exact(r.max(1)).zip(ids).filter(|(_, id)| Some(**id) != skip) {
            for (j, du) in du.iter().enumerate() {
                grad[j * vocab + id as usize] += du;
            }
        }
    })
}

/// The definition of [`columns_of_backward`] in candle's primitives.
pub(crate) fn columns_of_backward_reference(
    grad: &TensorMut,
    ids: &[u32],
    du: &Tensor,
    skip: Option<u32>,
) -> Result<()> {
    let (kept, kept_ids) = without(ids, skip);
    let du = du.index_select(&indices(&kept, du.device())?, 0)?.t()?.contiguous()?;
    let sum = grad.contiguous()?.index_add(&indices(&kept_ids, grad.device())?, &du, 1)?;
    Ok(grad.slice_set(&sum, 0, 0)?)
}

/// Returns the positions of all tokens not equal to `skip`, and the tokens themselves.
fn without(ids: &[u32], skip: Option<u32>) -> (Vec<u32>, Vec<u32>) {
    (0u32..).zip(ids).filter(|(_, id)| Some(**id) != skip).map(|(n, id)| (n, *id)).unzip()
}

/// Computes `grad[id] += factor · dy[n]` for every token n, in order; `grad: [V, D]` f32. Tokens
/// equal to `skip` add nothing, as with `padding_idx` in torch's embedding.
///
/// # Errors
/// Fails if `grad` is not a contiguous f32 matrix, `dy` is not contiguous, or an operation of the
/// device fails.
pub fn embed_backward(
    grad: &TensorMut,
    ids: &[u32],
    dy: &Tensor,
    factor: f64,
    skip: Option<u32>,
) -> Result<()> {
    let _span = span(|| SpanInfo::op("embedding_backward").dims(dy.dims()).moves(&[dy, dy, dy]));
    match Route::of(grad, are_floats([dy.dtype(); 2])) {
        Route::Kernel(driver) => return cuda::embed_backward(driver, grad, ids, dy, factor, skip),
        Route::Composed => return reference_backward(grad, ids, dy, factor, skip),
        Route::Cpu => {}
    }
    let (_, width) = dims2(grad)?;
    with_elem!(dy.dtype(), T => {
        let dy = read::<T>(dy)?;
        let dy: &[T] = &dy;
        update(grad, |grad: &mut [f32]| {
            for (dy, &id) in dy.chunks_exact(width).zip(ids).filter(|(_, id)| Some(**id) != skip) {
                for (g, dy) in grad[id as usize * width..(id as usize + 1) * width].iter_mut().zip(dy) {
                    *g += dy.widen() * factor as f32;
                }
            }
        })
    })
}

fn indices(ids: &[u32], device: &Device) -> Result<Tensor> {
    to_device(&Tensor::from_slice(ids, ids.len(), &Device::Cpu)?, device)
}

/// The definition, in candle's primitives.
pub(crate) fn reference(table: &Tensor, ids: &[u32], factor: f64, dtype: DType) -> Result<Tensor> {
    let rows = table.index_select(&indices(ids, table.device())?, 0)?;
    Ok((rows.to_dtype(DType::F32)? * factor)?.to_dtype(dtype)?)
}

/// The backward formula in candle's primitives (f32: candle's bf16 `index_add` adds up in bf16).
pub(crate) fn reference_backward(
    grad: &TensorMut,
    ids: &[u32],
    dy: &Tensor,
    factor: f64,
    skip: Option<u32>,
) -> Result<()> {
    let (kept, kept_ids) = without(ids, skip);
    let dy = (dy.index_select(&indices(&kept, dy.device())?, 0)?.to_dtype(DType::F32)? * factor)?;
    let sum = grad.contiguous()?.index_add(&indices(&kept_ids, grad.device())?, &dy, 0)?;
    grad.slice_set(&sum, 0, 0)?;
    Ok(())
}
