//! Token embedding: rows of the table times a factor (Gemma's √hidden), and the table's gradient.

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::access::{Elem, dims2, read, tensor, unwritten, update, with_elem};
use crate::error::Result;

/// `table: [V, D]`, ids below V → `[N, D]` in the table's dtype.
pub fn embed(table: &Tensor, ids: &[u32], factor: f64) -> Result<Tensor> {
    if !table.device().is_cpu() {
        return reference(table, ids, factor);
    }
    let (_, width) = dims2(table)?;
    with_elem!(table.dtype(), T => {
        let table = read::<T>(table)?;
        let mut out = unwritten::<T>(ids.len() * width);
        out.par_chunks_mut(width).zip(ids).with_min_len(16).for_each(|(row, &id)| {
            let source = &table[id as usize * width..(id as usize + 1) * width];
            for (y, x) in row.iter_mut().zip(source) {
                *y = T::nearest(x.widen() * factor as f32);
            }
        });
        tensor(out, (ids.len(), width))
    })
}

/// `grad[id] += factor · dy[n]` for every token n, in order; `grad: [V, D]` f32.
pub fn embed_backward(grad: &Tensor, ids: &[u32], dy: &Tensor, factor: f64) -> Result<()> {
    if !grad.device().is_cpu() {
        return reference_backward(grad, ids, dy, factor);
    }
    let (_, width) = dims2(grad)?;
    with_elem!(dy.dtype(), T => {
        let dy = read::<T>(dy)?;
        let dy: &[T] = &dy;
        update(grad, |grad: &mut [f32]| {
            for (dy, &id) in dy.chunks_exact(width).zip(ids) {
                for (g, dy) in grad[id as usize * width..(id as usize + 1) * width].iter_mut().zip(dy) {
                    *g += dy.widen() * factor as f32;
                }
            }
        })
    })
}

fn indices(ids: &[u32], device: &candle_core::Device) -> Result<Tensor> {
    Ok(Tensor::from_slice(ids, ids.len(), device)?)
}

/// The definition, in candle's primitives.
pub(crate) fn reference(table: &Tensor, ids: &[u32], factor: f64) -> Result<Tensor> {
    let rows = table.index_select(&indices(ids, table.device())?, 0)?;
    Ok((rows.to_dtype(DType::F32)? * factor)?.to_dtype(table.dtype())?)
}

/// The backward formula in candle's primitives (f32: candle's bf16 `index_add` adds up in bf16).
pub(crate) fn reference_backward(grad: &Tensor, ids: &[u32], dy: &Tensor, factor: f64) -> Result<()> {
    let dy = (dy.to_dtype(DType::F32)? * factor)?;
    let sum = grad.contiguous()?.index_add(&indices(ids, grad.device())?, &dy, 0)?;
    grad.slice_set(&sum, 0, 0)?;
    Ok(())
}
