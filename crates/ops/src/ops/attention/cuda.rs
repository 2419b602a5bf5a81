//! Attention by the kernels of `kernels/attention_forward.cu` and `kernels/attention_backward.cu`,
//! in bf16.
//!
//! A launch runs one block per entry of a tile list and head. The lists assign rows of spans to
//! blocks, longest first, so that the last blocks to run are short. They are built once for the
//! spans of a micro-batch and reused by all layers.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::rc::Rc;

use candle_core::{DType, Device, Tensor};
use half::bf16;

use super::{AttentionKind, AttentionOutput, Qkv, Span};
use crate::backends::gpu::{Driver, In, LaunchShape, Out, kernels, number, upload};
use crate::error::{Error, Result};
use crate::ops::matmul::{ColumnView, empty};
use crate::ops::rotary::Heads;

/// Partition of the work by the kernels of one head width; `kernels/*.cu` hold the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HeadShape {
    head_dim: usize,
    /// Queries per block, and keys per block of the first backward kernel.
    tile: usize,
    /// Keys that the forward loads at a time.
    forward_keys: usize,
    /// Rows that the backward loads at a time.
    backward_rows: usize,
    /// Threads per block of the first backward kernel; all others have 128.
    keys_threads: u32,
    /// Blocks that share the columns of a tile of keys.
    parts: usize,
}

impl HeadShape {
    fn of(head_dim: usize) -> Option<Self> {
        let shape = |tile, forward_keys, backward_rows, keys_threads, parts| {
            Some(HeadShape { head_dim, tile, forward_keys, backward_rows, keys_threads, parts })
        };
        match head_dim {
            64 => shape(128, 64, 32, 128, 1),
            80 | 96 => shape(128, 64, 32, 256, 1),
            128 => shape(128, 48, 32, 256, 1),
            256 => shape(64, 64, 16, 128, 2),
            _ => None,
        }
    }

    /// Returns the bytes of a row in shared memory.
    fn row_bytes(self) -> usize {
        size_of::<bf16>() * self.head_dim
    }

    fn forward_bytes(self) -> usize {
        (self.tile + 2 * self.forward_keys) * self.row_bytes()
    }

    fn backward_keys_bytes(self) -> usize {
        (2 * self.tile + 4 * self.backward_rows) * self.row_bytes() + 16 * self.backward_rows
    }

    fn backward_queries_bytes(self) -> usize {
        (2 * self.tile + 4 * self.backward_rows) * self.row_bytes() + 8 * self.tile
    }
}

/// Returns true if the kernels support this forward; the composed form computes the rest.
pub(super) fn is_supported(qkv: &Qkv<'_>, kind: &AttentionKind) -> bool {
    // A 16-byte copy must start at a multiple of 16.
    let aligned = |view: &ColumnView<'_>| {
        view.tensor.dtype() == DType::BF16
            && In::<bf16>::columns(view)
                .is_ok_and(|at| at.arg().value.is_multiple_of(16) && at.arg().pitch.is_multiple_of(16))
    };
    HeadShape::of(kind.heads.head_dim).is_some()
        && [qkv.q, qkv.k, qkv.v].iter().all(aligned)
        && kind.scale > 0.0
        && kind.softcap.is_none_or(|cap| cap > 0.0)
        && kind.window != Some(0)
}

/// Returns true if the kernels support this backward.
pub(super) fn is_backward_supported(
    qkv: &Qkv<'_>,
    attended: &AttentionOutput,
    dout: &Tensor,
    kind: &AttentionKind,
) -> bool {
    let aligned = |tensor: &Tensor| In::<bf16>::all(tensor).is_ok_and(|at| at.arg().value.is_multiple_of(16));
    is_supported(qkv, kind) && aligned(&attended.out) && aligned(dout)
}

pub(super) fn forward(
    driver: &dyn Driver,
    qkv: Qkv<'_>,
    spans: &[Span],
    kind: AttentionKind,
) -> Result<AttentionOutput> {
    let shape = shape_of(kind)?;
    let launch = AttentionLaunch::of(&qkv, kind)?;
    let lists = tile_lists(spans, &qkv, shape.tile)?;
    let (rows, device) = (launch.rows as usize, qkv.q.tensor.device());
    let out = empty(rows, kind.heads.q_width(), DType::BF16, device)?;
    let lse = empty(kind.heads.num_heads, rows, DType::F32, device)?;
    driver.record_attention(&|| products_of(spans, kind));
    let kernel = match shape.head_dim {
        64 => kernels::attention_forward_64,
        80 => kernels::attention_forward_80,
        96 => kernels::attention_forward_96,
        128 => kernels::attention_forward_128,
        _ => kernels::attention_forward_256,
    };
    kernel(
        driver,
        blocks(lists.queries.dim(0)? * kind.heads.num_heads, 128, shape.forward_bytes()),
        In::columns(&qkv.q)?,
        In::columns(&qkv.k)?,
        In::columns(&qkv.v)?,
        Out::all(&out)?,
        Out::all(&lse)?,
        In::all(&lists.queries)?,
        launch.heads,
        launch.group,
        launch.rows,
        launch.q_stride,
        launch.k_stride,
        launch.v_stride,
        launch.factor,
        launch.bend,
        launch.window,
    )?;
    Ok(AttentionOutput { out: out.into_tensor(), lse: lse.into_tensor() })
}

/// Returns the operations of a forward's two products over all visible pairs of query and key.
fn products_of(spans: &[Span], kind: AttentionKind) -> f64 {
    let seen = |span: &Span| -> f64 {
        let keys = |query: usize| (span.k_len + query + 1).saturating_sub(span.q_len);
        (0..span.q_len).map(|query| keys(query).min(kind.window.unwrap_or(usize::MAX)) as f64).sum()
    };
    4.0 * kind.heads.q_width() as f64 * spans.iter().map(seen).sum::<f64>()
}

pub(super) fn backward(
    driver: &dyn Driver,
    qkv: Qkv<'_>,
    attended: &AttentionOutput,
    dout: &Tensor,
    spans: &[Span],
    kind: AttentionKind,
) -> Result<Tensor> {
    let (shape, heads) = (shape_of(kind)?, kind.heads);
    let launch = AttentionLaunch::of(&qkv, kind)?;
    let lists = tile_lists(spans, &qkv, shape.tile)?;
    let delta = delta(driver, attended, dout, &launch, shape)?;
    // The backward recomputes the scores, and multiplies their gradient with k, q and dout.
    driver.record_attention(&|| 2.5 * products_of(spans, kind));
    let d = empty(launch.rows as usize, heads.qkv_width(), DType::BF16, dout.device())?;
    let step = BackwardStep { driver, qkv, lse: &attended.lse, dout, delta: &delta, shape, launch };
    step.keys(&lists.keys, heads, &d)?;
    step.queries(&lists.queries, heads, &d)?;
    Ok(d.into_tensor())
}

/// Inputs of both backward kernels.
struct BackwardStep<'a> {
    driver: &'a dyn Driver,
    qkv: Qkv<'a>,
    lse: &'a Tensor,
    dout: &'a Tensor,
    delta: &'a Tensor,
    shape: HeadShape,
    launch: AttentionLaunch,
}

impl BackwardStep<'_> {
    /// Writes the gradients of k and v to their columns of `d`, over tiles of keys.
    fn keys(&self, tiles: &Tensor, heads: Heads, d: &Tensor) -> Result<()> {
        let (shape, launch, qkv) = (self.shape, self.launch, &self.qkv);
        let range = |start| ColumnView { tensor: d, start, len: heads.kv_width() };
        let kernel = match shape.head_dim {
            64 => kernels::attention_backward_keys_64,
            80 => kernels::attention_backward_keys_80,
            96 => kernels::attention_backward_keys_96,
            128 => kernels::attention_backward_keys_128,
            _ => kernels::attention_backward_keys_256,
        };
        let count = tiles.dim(0)? * heads.num_kv_heads * shape.parts;
        kernel(
            self.driver,
            blocks(count, shape.keys_threads, shape.backward_keys_bytes()),
            In::columns(&qkv.q)?,
            In::columns(&qkv.k)?,
            In::columns(&qkv.v)?,
            In::all(self.dout)?,
            In::all(self.lse)?,
            In::all(self.delta)?,
            Out::columns(&range(heads.q_width()))?,
            Out::columns(&range(heads.qk_width()))?,
            In::all(tiles)?,
            launch.heads,
            launch.group,
            launch.rows,
            launch.q_stride,
            launch.k_stride,
            launch.v_stride,
            number(heads.qkv_width())?,
            launch.factor,
            launch.bend,
            launch.scale,
            launch.window,
        )
    }

    /// Writes the gradient of q to its columns of `d`, over tiles of queries.
    fn queries(&self, tiles: &Tensor, heads: Heads, d: &Tensor) -> Result<()> {
        let (shape, launch, qkv) = (self.shape, self.launch, &self.qkv);
        let kernel = match shape.head_dim {
            64 => kernels::attention_backward_queries_64,
            80 => kernels::attention_backward_queries_80,
            96 => kernels::attention_backward_queries_96,
            128 => kernels::attention_backward_queries_128,
            _ => kernels::attention_backward_queries_256,
        };
        kernel(
            self.driver,
            blocks(tiles.dim(0)? * heads.num_heads, 128, shape.backward_queries_bytes()),
            In::columns(&qkv.q)?,
            In::columns(&qkv.k)?,
            In::columns(&qkv.v)?,
            In::all(self.dout)?,
            In::all(self.lse)?,
            In::all(self.delta)?,
            Out::columns(&ColumnView { tensor: d, start: 0, len: heads.q_width() })?,
            In::all(tiles)?,
            launch.heads,
            launch.group,
            launch.rows,
            launch.q_stride,
            launch.k_stride,
            launch.v_stride,
            number(heads.qkv_width())?,
            launch.factor,
            launch.bend,
            launch.scale,
            launch.window,
        )
    }
}

/// Returns the sums of `out · dout` over each head's columns: `[H, N]`.
fn delta(
    driver: &dyn Driver,
    attended: &AttentionOutput,
    dout: &Tensor,
    launch: &AttentionLaunch,
    shape: HeadShape,
) -> Result<Tensor> {
    /// Rows per block.
    const ROWS: usize = 32;
    let (heads, rows) = (launch.heads as usize, launch.rows as usize);
    let delta = empty(heads, rows, DType::F32, dout.device())?;
    let (blocks, dim) = (blocks(rows.div_ceil(ROWS) * heads, 256, 0), number(shape.head_dim)?);
    let (out, dout, to) = (In::all(&attended.out)?, In::all(dout)?, Out::all(&delta)?);
    kernels::attention_delta(driver, blocks, out, dout, to, launch.heads, launch.rows, dim)?;
    Ok(delta.into_tensor())
}

fn shape_of(kind: AttentionKind) -> Result<HeadShape> {
    let head_dim = kind.heads.head_dim;
    HeadShape::of(head_dim)
        .ok_or_else(|| Error::internal(format!("no attention kernel has heads of {head_dim} values")))
}

fn blocks(count: usize, threads: u32, shared_bytes: usize) -> LaunchShape {
    LaunchShape { shared_bytes: shared_bytes as u32, ..LaunchShape::line(count, threads) }
}

/// The scalar arguments of the kernels.
#[derive(Debug, Clone, Copy)]
struct AttentionLaunch {
    heads: u32,
    group: u32,
    rows: u32,
    q_stride: u32,
    k_stride: u32,
    v_stride: u32,
    /// Factor that turns a score, or its tanh under a soft-cap, into an exponent of 2.
    factor: f32,
    /// With `t = 2^(bend · score)`, the tanh under a soft-cap is `1 − 2 / (1 + t)`; 0 without a
    /// soft-cap.
    bend: f32,
    scale: f32,
    window: u32,
}

impl AttentionLaunch {
    fn of(qkv: &Qkv<'_>, kind: AttentionKind) -> Result<Self> {
        /// The kernels' value for no window: positions plus this stay below 2^31.
        const NO_WINDOW: usize = 1 << 30;
        let ((rows, q_stride), (kv_rows, k_stride)) = (qkv.q.tensor.dims2()?, qkv.k.tensor.dims2()?);
        if rows.max(kv_rows) >= NO_WINDOW {
            return Err(Error::internal(format!(
                "attention over {} rows; a kernel supports fewer than {NO_WINDOW}",
                rows.max(kv_rows)
            )));
        }
        let log2_e = std::f64::consts::LOG2_E;
        Ok(AttentionLaunch {
            heads: number(kind.heads.num_heads)?,
            group: number(kind.heads.num_heads / kind.heads.num_kv_heads)?,
            rows: number(rows)?,
            q_stride: number(q_stride)?,
            k_stride: number(k_stride)?,
            v_stride: number(qkv.v.tensor.dim(1)?)?,
            factor: (kind.softcap.unwrap_or(kind.scale) * log2_e) as f32,
            bend: kind.softcap.map_or(0.0, |cap| 2.0 * log2_e * kind.scale / cap) as f32,
            scale: kind.scale as f32,
            window: number(kind.window.unwrap_or(NO_WINDOW).min(NO_WINDOW))?,
        })
    }
}

/// The tile lists of a micro-batch, `[tiles, 5]` u32 on the device.
#[derive(Debug)]
struct TileLists {
    /// Tiles of queries.
    queries: Tensor,
    /// Tiles of keys.
    keys: Tensor,
}

/// Cache key of the tile lists of a device.
#[derive(Debug, Clone, PartialEq)]
struct ListsKey {
    spans: Vec<Span>,
    rows: usize,
    kv_rows: usize,
    tile: usize,
}

thread_local! {
    /// The latest lists, shared by the layers of a micro-batch.
    static LISTS: RefCell<Option<(ListsKey, Rc<TileLists>)>> = const { RefCell::new(None) };
}

fn tile_lists(spans: &[Span], qkv: &Qkv<'_>, tile: usize) -> Result<Rc<TileLists>> {
    let device = qkv.q.tensor.device();
    let (rows, kv_rows) = (qkv.q.tensor.dim(0)?, qkv.k.tensor.dim(0)?);
    let key = ListsKey { spans: spans.to_vec(), rows, kv_rows, tile };
    // The number of a GPU does not identify the device: opened anew, it has another stream.
    let is_same =
        |(of, lists): &&(ListsKey, Rc<TileLists>)| *of == key && lists.queries.device().same_device(device);
    let cached =
        LISTS.with_borrow(|cached| cached.as_ref().filter(is_same).map(|(_, lists)| Rc::clone(lists)));
    if let Some(lists) = cached {
        return Ok(lists);
    }
    let upload = |list: Vec<[u32; 5]>| upload_list(&list, device);
    let lists = Rc::new(TileLists {
        queries: upload(query_tiles(spans, rows, tile))?,
        keys: upload(key_tiles(spans, kv_rows, tile))?,
    });
    LISTS.set(Some((key, Rc::clone(&lists))));
    Ok(lists)
}

fn upload_list(list: &[[u32; 5]], device: &Device) -> Result<Tensor> {
    upload(list.as_flattened(), (list.len(), 5), device)
}

/// Returns tiles of `tile` queries: the span and the first query of each, longest first. Rows
/// outside every span become spans without keys.
fn query_tiles(spans: &[Span], rows: usize, tile: usize) -> Vec<[u32; 5]> {
    let gaps = gaps(spans.iter().map(|s| (s.q_start, s.q_len)), rows);
    let gaps = gaps.into_iter().map(|(start, len)| Span { q_start: start, q_len: len, k_start: 0, k_len: 0 });
    tiles(
        spans.iter().copied().chain(gaps),
        tile,
        |s| s.q_len,
        |s, first| {
            // Number of keys that the last query of the tile sees.
            (s.k_len + (first + tile).min(s.q_len)).saturating_sub(s.q_len)
        },
    )
}

/// Returns tiles of `tile` keys, likewise; rows outside every span become spans without queries.
fn key_tiles(spans: &[Span], rows: usize, tile: usize) -> Vec<[u32; 5]> {
    let gaps = gaps(spans.iter().map(|s| (s.k_start, s.k_len)), rows);
    let gaps = gaps.into_iter().map(|(start, len)| Span { q_start: 0, q_len: 0, k_start: start, k_len: len });
    tiles(spans.iter().copied().chain(gaps), tile, |s| s.k_len, |s, first| s.q_len.saturating_sub(first))
}

/// Returns one entry per `tile` rows of each span, those with the most `work` first.
fn tiles(
    spans: impl Iterator<Item = Span>,
    tile: usize,
    len: impl Fn(&Span) -> usize,
    work: impl Fn(&Span, usize) -> usize,
) -> Vec<[u32; 5]> {
    let mut list: Vec<(usize, [u32; 5])> = Vec::new();
    for span in spans {
        for first in (0..len(&span)).step_by(tile) {
            let entry = [span.q_start, span.q_len, span.k_start, span.k_len, first].map(|x| x as u32);
            list.push((work(&span, first), entry));
        }
    }
    list.sort_by_key(|&(work, _)| Reverse(work));
    list.into_iter().map(|(_, entry)| entry).collect()
}

/// Returns the ranges (start, length) of `0..rows` that `ranges` do not cover.
fn gaps(ranges: impl Iterator<Item = (usize, usize)>, rows: usize) -> Vec<(usize, usize)> {
    let mut ranges: Vec<(usize, usize)> = ranges.collect();
    ranges.sort_unstable();
    let (mut at, mut gaps) = (0, Vec::new());
    for (start, len) in ranges.into_iter().chain([(rows, 0)]) {
        if start > at {
            gaps.push((at, start - at));
        }
        at = at.max(start + len);
    }
    gaps
}

#[cfg(all(test, feature = "kernel-emu"))]
mod tests;
