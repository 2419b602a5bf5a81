//! Causal attention over packed sequences, with grouped key/value heads, sliding window and score
//! soft-cap.
//!
//! Sequences are packed end to end. A [`Span`] marks one sequence, and no token sees another span,
//! so packing cannot leak. Forward returns the output and each row's log-sum-exp; backward
//! recomputes the probabilities from it, so no S × S tensor is stored (FlashAttention-2, arXiv
//! 2307.08691).
//!
//! | algorithm | on the CPU | where kernels run | elsewhere |
//! |---|---|---|---|
//! | `Flash` | `cpu`: tiles, online softmax, O(S) memory | `cuda`: bf16, heads of 64, 80, 96, 128, 256 | `reference`: candle primitives, 512 query rows at a time |
//! | `Eager` | `reference` with one tile: the definition | the same | the same |

use candle_core::Tensor;

pub use super::matmul::ColumnView;
pub use super::rotary::Heads;
use crate::backends::gpu::driver_of;
use crate::error::Result;
use crate::recipe::enums::Attention;
use crate::runtime::deferred::issue_deferred;
use crate::runtime::trace::{SpanInfo, span};

pub(super) mod cases;
mod cpu;
mod cuda;
mod reference;

/// One sequence: queries `q_start..q_start + q_len` see keys `k_start..k_start + k_len` of the same
/// sequence. The last query is aligned with the last key, so with a cache `k_len > q_len`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First row of the queries.
    pub q_start: usize,
    /// Number of queries.
    pub q_len: usize,
    /// First row of the keys and values.
    pub k_start: usize,
    /// Number of keys, including cached ones.
    pub k_len: usize,
}

impl Span {
    /// Returns a whole sequence of `len` tokens that begins at row `start`.
    pub fn sequence(start: usize, len: usize) -> Self {
        Span { q_start: start, q_len: len, k_start: start, k_len: len }
    }

    /// Returns its parts in blocks of `chunk` keys, counted from its first key: attention over them
    /// lets a token see its own block alone.
    pub fn in_chunks(self, chunk: usize) -> impl Iterator<Item = Span> {
        let first = self.k_len - self.q_len;
        (first / chunk..self.k_len.div_ceil(chunk)).map(move |block| {
            let start = block * chunk;
            let (from, to) = (start.max(first), (start + chunk).min(self.k_len));
            Span {
                q_start: self.q_start + from - first,
                q_len: to - from,
                k_start: self.k_start + start,
                k_len: to - start,
            }
        })
    }

    /// Returns the keys (relative to `k_start`) that query `i` sees: `from..to`.
    fn visible(&self, i: usize, window: Option<usize>) -> (usize, usize) {
        let to = self.k_len - self.q_len + i + 1;
        (window.map_or(0, |window| to.saturating_sub(window)), to)
    }
}

/// The settings of attention that are fixed for a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionKind {
    /// Head counts and width.
    pub heads: Heads,
    /// Factor on the scores, usually `1 / sqrt(head_dim)`.
    pub scale: f64,
    /// `cap · tanh(score / cap)` on the scaled scores (gemma2).
    pub softcap: Option<f64>,
    /// A token sees itself and the `window − 1` tokens before it.
    pub window: Option<usize>,
}

/// The result of attention, with the values that its backward needs.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// `[N, H · D]` in q's dtype.
    pub out: Tensor,
    /// Log-sum-exp of each row's scores, `[H, N]` f32.
    pub lse: Tensor,
}

/// The inputs of attention, as column ranges of wider tensors: q `[N, H · D]`, k and v `[M, K ·
/// D]`.
#[derive(Clone, Copy)]
pub struct Qkv<'a> {
    /// The rotated queries.
    pub q: ColumnView<'a>,
    /// The rotated keys.
    pub k: ColumnView<'a>,
    /// The values, as projected.
    pub v: ColumnView<'a>,
}

/// The head dims of the bf16 attention kernels; the composed form computes other head dims and f32.
pub const KERNEL_HEAD_DIMS: [usize; 5] = [64, 80, 96, 128, 256];

/// Query rows per tile of the composed form.
const COMPOSED_TILE: usize = 512;

/// Returns the trace info: tokens, number of query heads and key heads, and their width, with
/// `products` floating-point operations per score and head value.
fn attention_info(
    name: &'static str,
    qkv: &Qkv<'_>,
    spans: &[Span],
    kind: AttentionKind,
    products: usize,
) -> SpanInfo {
    let Heads { num_heads, num_kv_heads, head_dim } = kind.heads;
    let tokens = spans.iter().map(|span| span.q_len).sum();
    let half = |span: &Span| span.q_len * span.k_len.min(kind.window.unwrap_or(usize::MAX)).div_ceil(2);
    let scores: usize = spans.iter().map(half).sum();
    let size = qkv.q.tensor.dtype().size_in_bytes();
    let bytes = tokens * (2 * num_heads + 2 * num_kv_heads) * head_dim * size;
    let info = SpanInfo::op(name).dims(&[tokens, num_heads, num_kv_heads, head_dim]);
    info.bytes(bytes).flops(products * scores * num_heads * head_dim)
}

/// Computes attention within every span: returns out `[N, H · D]` in the dtype of q, and each row's
/// log-sum-exp.
///
/// # Errors
/// Fails if a tensor is not a contiguous matrix of floating-point values, or an operation of the
/// device fails.
pub fn attention(
    qkv: Qkv<'_>,
    spans: &[Span],
    kind: AttentionKind,
    algorithm: Attention,
) -> Result<AttentionOutput> {
    let _span = span(|| attention_info("attention", &qkv, spans, kind, 4));
    if let (Attention::Flash, Some(driver)) = (algorithm, driver_of(qkv.q.tensor))
        && cuda::is_supported(&qkv, &kind)
    {
        return cuda::forward(driver, qkv, spans, kind);
    }
    issue_deferred()?;
    match algorithm {
        Attention::Flash if qkv.q.tensor.device().is_cpu() => cpu::forward(qkv, spans, kind),
        Attention::Flash => reference::forward(qkv, spans, kind, COMPOSED_TILE),
        Attention::Eager => reference::forward(qkv, spans, kind, usize::MAX),
    }
}

/// Returns the gradients of q, k and v side by side, `[N, (H + 2 K) · D]` in their dtype, from
/// `dout: [N, H · D]`. Spans must be whole sequences.
///
/// # Errors
/// Fails if a tensor is not a contiguous matrix of floating-point values, or an operation of the
/// device fails.
pub fn attention_backward(
    qkv: Qkv<'_>,
    attended: &AttentionOutput,
    dout: &Tensor,
    spans: &[Span],
    kind: AttentionKind,
    algorithm: Attention,
) -> Result<Tensor> {
    let _span = span(|| attention_info("attention_backward", &qkv, spans, kind, 10));
    if let (Attention::Flash, Some(driver)) = (algorithm, driver_of(dout))
        && cuda::is_backward_supported(&qkv, attended, dout, &kind)
    {
        return cuda::backward(driver, qkv, attended, dout, spans, kind);
    }
    issue_deferred()?;
    match algorithm {
        Attention::Flash if dout.device().is_cpu() => cpu::backward(qkv, attended, dout, spans, kind),
        Attention::Flash => reference::backward(qkv, attended, dout, spans, kind, COMPOSED_TILE),
        Attention::Eager => reference::backward(qkv, attended, dout, spans, kind, usize::MAX),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::runtime::rng::RngStream;

    #[test]
    fn blocks_count_from_the_first_key() {
        let parts = |span: Span| span.in_chunks(4).collect::<Vec<_>>();
        let whole = [Span::sequence(5, 4), Span::sequence(9, 4), Span::sequence(13, 2)];
        assert_eq!(parts(Span::sequence(5, 10)), whole);
        assert_eq!(parts(Span::sequence(5, 0)), []);
        // Three tokens after six others.
        let later = Span { q_start: 0, q_len: 3, k_start: 0, k_len: 9 };
        let first = Span { q_start: 0, q_len: 2, k_start: 4, k_len: 4 };
        let second = Span { q_start: 2, q_len: 1, k_start: 8, k_len: 1 };
        assert_eq!(parts(later), [first, second]);
    }

    /// Other devices use the composed form with tiles of queries; on the CPU only this test does.
    #[test]
    fn composed_in_tiles_is_composed_at_once() -> Result<()> {
        let heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 8 };
        let normal = |seed, rows: usize, width: usize| {
            let stream = RngStream::new(seed);
            let values: Vec<f32> = (0..(rows * width) as u64).map(|i| stream.normal(i)).collect();
            Tensor::from_vec(values, (rows, width), &Device::Cpu)
        };
        let (x, dout) = (normal(1, 75, heads.qkv_width())?, normal(2, 75, heads.q_width())?);
        let range = |start, len| ColumnView { tensor: &x, start, len };
        let qkv = Qkv {
            q: range(0, heads.q_width()),
            k: range(heads.q_width(), heads.kv_width()),
            v: range(heads.qk_width(), heads.kv_width()),
        };
        let spans = [Span::sequence(0, 33), Span::sequence(33, 1), Span::sequence(34, 41)];
        for (window, softcap) in [(None, None), (Some(5), None), (Some(20), Some(2.0))] {
            let kind = AttentionKind { heads, scale: 0.4, softcap, window };
            let run = |tile| -> Result<[Tensor; 3]> {
                let attended = reference::forward(qkv, &spans, kind, tile)?;
                let d = reference::backward(qkv, &attended, &dout, &spans, kind, tile)?;
                Ok([attended.out, attended.lse, d])
            };
            for (tiled, whole) in run(16)?.into_iter().zip(run(usize::MAX)?) {
                assert_eq!((tiled.dims(), tiled.dtype()), (whole.dims(), DType::F32));
                let apart = (tiled - whole)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
                assert!(apart < 2e-6, "window {window:?}: {apart}");
            }
        }
        Ok(())
    }
}
