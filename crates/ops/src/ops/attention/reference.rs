//! Attention in candle's primitives, on any device: a tile of query rows against its visible keys,
//! in f32. With one tile per span this is the textbook form (`Eager`).

use candle_core::{DType, Device, Tensor};

use super::{AttentionKind, AttentionOutput, Qkv, Span};
use crate::error::Result;
use crate::ops::matmul::ColumnView;
use crate::runtime::TensorMut;
use crate::runtime::copy::to_device;

/// Query rows `from..to` of a span and the keys `k_from..k_to` visible to any of them (all relative
/// to the span).
struct ScoreTile {
    from: usize,
    to: usize,
    k_from: usize,
    k_to: usize,
}

fn tiles(span: Span, kind: AttentionKind, tile: usize) -> impl Iterator<Item = ScoreTile> {
    (0..span.q_len).step_by(tile.min(span.q_len.max(1))).map(move |from| {
        let to = from.saturating_add(tile).min(span.q_len);
        let (k_from, _) = span.visible(from, kind.window);
        let (_, k_to) = span.visible(to - 1, kind.window);
        ScoreTile { from, to, k_from, k_to }
    })
}

pub(super) fn forward(
    qkv: Qkv<'_>,
    spans: &[Span],
    kind: AttentionKind,
    tile: usize,
) -> Result<AttentionOutput> {
    let heads = kind.heads;
    let (rows, _) = qkv.q.tensor.dims2()?;
    let (dtype, device) = (qkv.q.tensor.dtype(), qkv.q.tensor.device());
    let out = Tensor::zeros((rows, heads.q_width()), dtype, device)?;
    let lse = Tensor::zeros((heads.num_heads, rows), DType::F32, device)?;
    for &span in spans {
        for t in tiles(span, kind, tile) {
            let q = heads_first(qkv.q, span.q_start + t.from, t.to - t.from, heads.num_heads)?;
            let k = repeated(qkv.k, span, &t, kind)?;
            let v = repeated(qkv.v, span, &t, kind)?;
            let (scores, _) = scores(&q, &k, span, &t, kind)?;
            // candle's softmax does not return the sums, which the backward needs.
            let max = scores.max_keepdim(2)?;
            let exp = scores.broadcast_sub(&max)?.exp()?;
            let sum = exp.sum_keepdim(2)?;
            let o = exp.matmul(&v)?.broadcast_div(&sum)?;
            let o = o.transpose(0, 1)?.contiguous()?.reshape((t.to - t.from, heads.q_width()))?;
            out.slice_set(&o.to_dtype(dtype)?, 0, span.q_start + t.from)?;
            let row_lse = (max + sum.log()?)?.squeeze(2)?;
            lse.slice_set(&row_lse.contiguous()?, 1, span.q_start + t.from)?;
        }
    }
    Ok(AttentionOutput { out, lse })
}

pub(super) fn backward(
    qkv: Qkv<'_>,
    attended: &AttentionOutput,
    dout: &Tensor,
    spans: &[Span],
    kind: AttentionKind,
    tile: usize,
) -> Result<Tensor> {
    let heads = kind.heads;
    let (rows, _) = dout.dims2()?;
    let d = TensorMut::zeros((rows, heads.qkv_width()), DType::F32, dout.device())?;
    for &span in spans {
        for t in tiles(span, kind, tile) {
            let (start, len) = (span.q_start + t.from, t.to - t.from);
            let q = heads_first(qkv.q, start, len, heads.num_heads)?;
            let (k, v) = (repeated(qkv.k, span, &t, kind)?, repeated(qkv.v, span, &t, kind)?);
            let do_ = heads_first(ColumnView::all(dout), start, len, heads.num_heads)?;
            let o = heads_first(ColumnView::all(&attended.out), start, len, heads.num_heads)?;
            let lse = attended.lse.narrow(1, start, len)?.unsqueeze(2)?;
            let (scores, slope) = scores(&q, &k, span, &t, kind)?;
            let p = scores.broadcast_sub(&lse)?.exp()?;
            let dv = p.transpose(1, 2)?.matmul(&do_)?;
            let dp = do_.matmul(&v.transpose(1, 2)?)?;
            let delta = (&do_ * &o)?.sum_keepdim(2)?;
            let mut ds = ((p * dp.broadcast_sub(&delta)?)? * kind.scale)?;
            if let Some(slope) = slope {
                ds = (ds * slope)?;
            }
            let dq = ds.matmul(&k)?;
            let dk = ds.transpose(1, 2)?.matmul(&q)?;
            add(&d, &dq, start, 0)?;
            let k_start = span.k_start + t.k_from;
            add(&d, &grouped(&dk, kind)?, k_start, heads.q_width())?;
            add(&d, &grouped(&dv, kind)?, k_start, heads.qk_width())?;
        }
    }
    Ok(d.to_dtype(dout.dtype())?)
}

/// Returns rows `start..start + len` of some columns as `[heads, len, D]` f32.
fn heads_first(columns: ColumnView<'_>, start: usize, len: usize, heads: usize) -> Result<Tensor> {
    let dim = columns.len / heads;
    let rows = columns.narrow()?.narrow(0, start, len)?.contiguous()?;
    Ok(rows.reshape((len, heads, dim))?.transpose(0, 1)?.contiguous()?.to_dtype(DType::F32)?)
}

/// Returns the tile's keys (or values), with each key/value head repeated for the query heads of
/// its group.
fn repeated(columns: ColumnView<'_>, span: Span, t: &ScoreTile, kind: AttentionKind) -> Result<Tensor> {
    let (kv, group) = (kind.heads.num_kv_heads, kind.heads.num_heads / kind.heads.num_kv_heads);
    let x = heads_first(columns, span.k_start + t.k_from, t.k_to - t.k_from, kv)?;
    let (_, len, dim) = x.dims3()?;
    Ok(x.unsqueeze(1)?.broadcast_as((kv, group, len, dim))?.contiguous()?.reshape((kv * group, len, dim))?)
}

/// Returns the sum over each group of query heads: `[H, len, D]` → `[K, len, D]`.
fn grouped(x: &Tensor, kind: AttentionKind) -> Result<Tensor> {
    let (heads, len, dim) = x.dims3()?;
    let kv = kind.heads.num_kv_heads;
    Ok(x.reshape((kv, heads / kv, len, dim))?.sum(1)?)
}

/// Returns the masked scores `[H, rows, keys]`, and the slope of the soft-cap if any.
fn scores(
    q: &Tensor,
    k: &Tensor,
    span: Span,
    t: &ScoreTile,
    kind: AttentionKind,
) -> Result<(Tensor, Option<Tensor>)> {
    let mut scores = (q.matmul(&k.transpose(1, 2)?)? * kind.scale)?;
    let mut slope = None;
    if let Some(cap) = kind.softcap {
        let tanh = (scores / cap)?.tanh()?;
        slope = Some((1.0 - tanh.sqr()?)?);
        scores = (tanh * cap)?;
    }
    Ok((scores.broadcast_add(&mask(span, t, kind, q.device())?)?, slope))
}

/// Returns the mask `[rows, keys]`: 0 for visible keys, −∞ elsewhere.
fn mask(span: Span, t: &ScoreTile, kind: AttentionKind, device: &Device) -> Result<Tensor> {
    let keys = t.k_to - t.k_from;
    let mut mask = vec![f32::NEG_INFINITY; (t.to - t.from) * keys];
    for (row, i) in mask.chunks_exact_mut(keys).zip(t.from..t.to) {
        let (from, to) = span.visible(i, kind.window);
        row[from.max(t.k_from) - t.k_from..to.min(t.k_to) - t.k_from].fill(0.0);
    }
    to_device(&Tensor::from_vec(mask, (t.to - t.from, keys), &Device::Cpu)?, device)
}

/// Computes `d[start.., column..] += x`, with `x: [heads, len, D]`.
fn add(d: &TensorMut, x: &Tensor, start: usize, column: usize) -> Result<()> {
    let (heads, len, dim) = x.dims3()?;
    let x = x.transpose(0, 1)?.contiguous()?.reshape((len, heads * dim))?;
    // Copy the rows: candle sets a column range only over all rows of its destination.
    let rows = d.narrow(0, start, len)?.contiguous()?.copy()?;
    let sum = (rows.narrow(1, column, heads * dim)? + x)?;
    rows.slice_set(&sum.contiguous()?, 1, column)?;
    d.slice_set(&rows, 0, start)?;
    Ok(())
}
