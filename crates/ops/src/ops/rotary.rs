//! Rotary positions (arXiv 2104.09864) on the q and k columns of a fused projection, after the
//! per-head RMSNorm of the families that have one (qwen3, gemma3).
//!
//! `y1 = x1 cos − x2 sin`, `y2 = x2 cos + x1 sin` on the first `rotary_dim` values of a head. A
//! pair is a value of the first half and one of the second, or two neighbours (glm4, ernie4_5). The
//! backward rotates by the negative angle, then applies the norm's backward from the raw
//! projection; nothing else is saved.

pub(super) mod cases;
mod cuda;

use candle_core::{DType, Tensor};
use candle_nn::rotary_emb::{rope_i_slow, rope_slow};
use rayon::prelude::*;

use super::rms_norm::{self, NormKind};
use crate::backends::gpu::Route;
use crate::error::Result;
use crate::instruction_set::vectorized;
use crate::runtime::TensorMut;
use crate::runtime::cpu_tensor::{FloatElement, dims2, read, tensor, unwritten, update, with_elem};
use crate::runtime::trace::{SpanInfo, span};

/// The heads of a fused projection `[N, (H + 2 K) · D]`: its columns are H heads of q, K of k, K of
/// v.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// H, the query heads.
    pub num_heads: usize,
    /// K, the key and value heads; divides H. 0 in the rotation of queries alone.
    pub num_kv_heads: usize,
    /// D, the width of a head.
    pub head_dim: usize,
}

impl Heads {
    /// Returns the number of columns of q and k together.
    pub fn qk_width(&self) -> usize {
        (self.num_heads + self.num_kv_heads) * self.head_dim
    }
    /// Returns the number of columns of q, k and v.
    pub fn qkv_width(&self) -> usize {
        self.qk_width() + self.kv_width()
    }
    /// Returns the number of columns of q.
    pub fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }
    /// Returns the number of columns of k (or v).
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }
}

/// cos and sin of every token's angles: `[N, rotary_dim / 2]` f32 each.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    /// Cosines (times the attention factor of yarn).
    pub cos: Tensor,
    /// Sines (times the same factor).
    pub sin: Tensor,
    /// True if neighbours are pairs, not the halves of a head.
    pub interleaved: bool,
}

/// The per-head norms of q and k: weights `[D]`.
#[derive(Clone, Copy)]
pub struct QkNorm<'a> {
    /// `q_norm.weight` and the destination of its gradient.
    pub q: (&'a Tensor, Option<&'a TensorMut>),
    /// `k_norm.weight` and the destination of its gradient.
    pub k: (&'a Tensor, Option<&'a TensorMut>),
    /// Epsilon and offset.
    pub kind: NormKind,
}

/// Returns the rotated (and before that, if `norm` is given, normed) q and k columns of the raw
/// projection: `[N, (H + K) · D]` in the dtype of `qkv`, which is `[N, (H + 2 K) · D]`. The table
/// has f32 angles, `[N, rotary_dim / 2]`.
///
/// # Errors
/// Fails if a tensor is not contiguous or of floating-point values, or an operation of the device
/// fails.
pub fn rotary(qkv: &Tensor, heads: Heads, norm: Option<QkNorm<'_>>, table: &RotaryTable) -> Result<Tensor> {
    let _span = span(|| SpanInfo::op("rotary").dims(qkv.dims()).moves(&[qkv, qkv]));
    match Route::of(qkv, cuda::is_supported(qkv, heads, norm.as_ref())) {
        Route::Kernel(driver) => return cuda::forward(driver, qkv, heads, norm, table),
        Route::Composed => return reference(qkv, heads, norm, table),
        Route::Cpu => {}
    }
    let (rows, width) = dims2(qkv)?;
    let (out_width, dim) = (heads.qk_width(), heads.head_dim);
    with_elem!(qkv.dtype(), T => {
        let gains = Gains::new(norm)?;
        let (qkv, cos, sin) = (read::<T>(qkv)?, read::<f32>(&table.cos)?, read::<f32>(&table.sin)?);
        let half = cos.len() / rows.max(1);
        let mut out = unwritten::<T>(rows * out_width);
        out.par_chunks_mut(out_width).enumerate().with_min_len(8).for_each(|(n, row)| {
            let raw = &qkv[n * width..n * width + out_width];
            let (cos, sin) = (&cos[n * half..(n + 1) * half], &sin[n * half..(n + 1) * half]);
            for (head, (y, x)) in row.chunks_exact_mut(dim).zip(raw.chunks_exact(dim)).enumerate() {
                match gains.of(head, heads) {
                    Some(gain) => rms_norm::forward_row(y, x, gain, gains.eps),
                    None => y.copy_from_slice(x),
                }
                turn_head(y, cos, sin, 1.0, table.interleaved);
            }
        });
        tensor(out, (rows, out_width))
    })
}

/// Converts the gradient of the rotated q and k to that of the raw projection, in place. It is in
/// the q and k columns of `dqkv: [N, (H + 2 K) · D]`, of the dtype of `qkv`; v's columns stay. Adds
/// the gradients of the norms' weights, `[D]` f32, on the CPU also bf16.
///
/// # Errors
/// Fails if a tensor is not contiguous, the dtypes differ, or an operation of the device fails.
pub fn rotary_backward(
    qkv: &Tensor,
    dqkv: &TensorMut,
    heads: Heads,
    norm: Option<QkNorm<'_>>,
    table: &RotaryTable,
) -> Result<()> {
    let _span = span(|| SpanInfo::op("rotary_backward").dims(qkv.dims()).moves(&[qkv, dqkv, dqkv]));
    match Route::of(qkv, cuda::is_supported(qkv, heads, norm.as_ref())) {
        Route::Kernel(driver) => return cuda::backward(driver, qkv, dqkv, heads, norm, table),
        Route::Composed => return reference_backward(qkv, dqkv, heads, norm, table),
        Route::Cpu => {}
    }
    let (rows, width) = dims2(qkv)?;
    let (qk_width, dim) = (heads.qk_width(), heads.head_dim);
    with_elem!(qkv.dtype(), T => {
        let gains = Gains::new(norm)?;
        let (raw, cos, sin) = (read::<T>(qkv)?, read::<f32>(&table.cos)?, read::<f32>(&table.sin)?);
        let half = cos.len() / rows.max(1);
        update(dqkv, |d: &mut [T]| {
            d.par_chunks_mut(width).enumerate().with_min_len(8).for_each(|(n, row)| {
                let (cos, sin) = (&cos[n * half..(n + 1) * half], &sin[n * half..(n + 1) * half]);
                let back = |head: &mut [T]| turn_head(head, cos, sin, -1.0, table.interleaved);
                row[..qk_width].chunks_exact_mut(dim).for_each(back);
            });
        })?;
        let Some(norm) = norm else { return Ok(()) };
        for (range, dgain) in [(0..heads.q_width(), norm.q.1), (heads.q_width()..qk_width, norm.k.1)] {
            if let Some(dgain) = dgain {
                let gather = |values: &[T]| -> Vec<T> {
                    values.chunks_exact(width).flat_map(|row| row[range.clone()].iter().copied()).collect()
                };
                let dy = gather(&read::<T>(dqkv)?);
                rms_norm::add_gain_gradient::<T>(dgain, &gather(&raw), &dy, dim, gains.eps)?;
            }
        }
        update(dqkv, |d: &mut [T]| {
            d.par_chunks_mut(width).zip(raw.par_chunks(width)).with_min_len(8).for_each_init(
                || (vec![T::default(); dim], vec![0f32; dim]),
                |(dx, q), (row, raw)| {
                    let pairs = row[..qk_width].chunks_exact_mut(dim).zip(raw.chunks_exact(dim));
                    for (head, (dy, x)) in pairs.enumerate() {
                        if let Some(gain) = gains.of(head, heads) {
                            rms_norm::backward_row(dx, x, dy, gain, None, q, gains.eps);
                            dy.copy_from_slice(dx);
                        }
                    }
                },
            );
        })
    })
}

struct Gains {
    q: Option<Vec<f32>>,
    k: Option<Vec<f32>>,
    eps: f32,
}

impl Gains {
    fn new(norm: Option<QkNorm<'_>>) -> Result<Self> {
        let Some(norm) = norm else { return Ok(Gains { q: None, k: None, eps: 0.0 }) };
        Ok(Gains {
            q: Some(rms_norm::gain(norm.q.0, norm.kind)?),
            k: Some(rms_norm::gain(norm.k.0, norm.kind)?),
            eps: norm.kind.eps as f32,
        })
    }

    fn of(&self, head: usize, heads: Heads) -> Option<&[f32]> {
        let gain = if head < heads.num_heads { &self.q } else { &self.k };
        gain.as_deref()
    }
}

/// Rotates one head in place; `direction` −1 rotates back.
fn turn_head<T: FloatElement>(head: &mut [T], cos: &[f32], sin: &[f32], direction: f32, interleaved: bool) {
    if interleaved {
        rotate_neighbours(head, cos, sin, direction);
    } else {
        rotate_halves(head, cos, sin, direction);
    }
}

vectorized! {
    fn rotate_neighbours<T: FloatElement>(head: &mut [T], cos: &[f32], sin: &[f32], direction: f32) {
        let (pairs, _) = head.as_chunks_mut::<2>();
        for (([a, b], cos), sin) in pairs.iter_mut().zip(cos).zip(sin) {
            let (x, y, sin) = (a.widen(), b.widen(), sin * direction);
            *a = T::nearest(x * cos - y * sin);
            *b = T::nearest(y * cos + x * sin);
        }
    }
}

vectorized! {
    fn rotate_halves<T: FloatElement>(head: &mut [T], cos: &[f32], sin: &[f32], direction: f32) {
        let (left, right) = head.split_at_mut(cos.len());
        for (((a, b), cos), sin) in left.iter_mut().zip(right).zip(cos).zip(sin) {
            let (x, y, sin) = (a.widen(), b.widen(), sin * direction);
            *a = T::nearest(x * cos - y * sin);
            *b = T::nearest(y * cos + x * sin);
        }
    }
}

/// The definition, in candle's primitives.
pub(crate) fn reference(
    qkv: &Tensor,
    heads: Heads,
    norm: Option<QkNorm<'_>>,
    table: &RotaryTable,
) -> Result<Tensor> {
    let (rows, _) = dims2(qkv)?;
    let dim = heads.head_dim;
    let part = |start: usize, count: usize, weight: Option<&Tensor>| -> Result<Tensor> {
        let x = qkv.narrow(1, start * dim, count * dim)?.contiguous()?.reshape((rows * count, dim))?;
        let x = match (weight, norm) {
            (Some(weight), Some(norm)) => rms_norm::reference(&x, weight, norm.kind)?,
            _ => x,
        };
        turn(&x.reshape((rows, count, dim))?, table, 1.0)?.reshape((rows, count * dim)).map_err(Into::into)
    };
    let q = part(0, heads.num_heads, norm.map(|n| n.q.0))?;
    if heads.num_kv_heads == 0 {
        return Ok(q.to_dtype(qkv.dtype())?);
    }
    let k = part(heads.num_heads, heads.num_kv_heads, norm.map(|n| n.k.0))?;
    Ok(Tensor::cat(&[q, k], 1)?.to_dtype(qkv.dtype())?)
}

/// The backward formula in candle's primitives.
pub(crate) fn reference_backward(
    qkv: &Tensor,
    dqkv: &TensorMut,
    heads: Heads,
    norm: Option<QkNorm<'_>>,
    table: &RotaryTable,
) -> Result<()> {
    let (rows, _) = dims2(qkv)?;
    let dim = heads.head_dim;
    let parts =
        [(0, heads.num_heads, norm.map(|n| n.q)), (heads.num_heads, heads.num_kv_heads, norm.map(|n| n.k))];
    for (start, count, weights) in parts.into_iter().filter(|(_, count, _)| *count > 0) {
        let flat = |t: &Tensor| -> Result<Tensor> {
            Ok(t.narrow(1, start * dim, count * dim)?.contiguous()?.reshape((rows * count, dim))?)
        };
        let dy = turn(&flat(dqkv)?.reshape((rows, count, dim))?, table, -1.0)?;
        let dy = dy.reshape((rows * count, dim))?.to_dtype(qkv.dtype())?;
        let dx = match (weights, norm) {
            (Some((weight, dweight)), Some(norm)) => {
                rms_norm::reference_backward(&flat(qkv)?, weight, &dy, None, dweight, norm.kind)?
            }
            _ => dy,
        };
        dqkv.slice_set(&dx.reshape((rows, count * dim))?.contiguous()?, 1, start * dim)?;
    }
    Ok(())
}

/// Rotates `x: [N, heads, D]` by the table's angles times `direction`, in f32, in candle's
/// differentiable form.
fn turn(x: &Tensor, table: &RotaryTable, direction: f64) -> Result<Tensor> {
    let x = x.to_dtype(DType::F32)?;
    let (_, _, dim) = x.dims3()?;
    let rotary_dim = 2 * table.cos.dim(1)?;
    // candle expects `[batch, heads, N, D]`.
    let heads_first = x.narrow(2, 0, rotary_dim)?.transpose(0, 1)?.unsqueeze(0)?;
    let turn = if table.interleaved { rope_i_slow } else { rope_slow };
    let turned = turn(&heads_first, &table.cos, &(&table.sin * direction)?)?;
    let turned = turned.squeeze(0)?.transpose(0, 1)?;
    let rest = dim - rotary_dim;
    let whole = if rest > 0 { Tensor::cat(&[turned, x.narrow(2, rotary_dim, rest)?], 2)? } else { turned };
    Ok(whole.contiguous()?)
}
