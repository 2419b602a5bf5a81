//! Attention over packed rows, forward and backward, measured by its products.

use candle_core::DType;

use super::inputs::BenchInputs;
use super::{BenchShapes, TimedOp};
use crate::error::Result;
use crate::ops::attention::{
    AttentionKind, AttentionOutput, ColumnView, Heads, Qkv, Span, attention, attention_backward,
};
use crate::ops::attention_sinks::{attention_sinks, attention_sinks_backward};
use crate::recipe::enums::Attention;
use crate::runtime::TensorMut;

pub(super) fn ops(shapes: &BenchShapes) -> Vec<TimedOp> {
    vec![attention_forward(shapes), attention_gradients(shapes), sunk(shapes), sunk_gradients(shapes)]
}

/// Returns rows of at most `max_seq_len` tokens, end to end.
pub(super) fn packed(shapes: &BenchShapes) -> Vec<Span> {
    let (n, row) = (shapes.tokens, shapes.max_seq_len);
    (0..n).step_by(row).map(|start| Span::sequence(start, row.min(n - start))).collect()
}

/// Returns the floating-point operations of both products of attention's forward, over all visible
/// pairs of query and key.
fn attention_flops(spans: &[Span], heads: Heads) -> u64 {
    let pairs: usize = spans.iter().map(|span| span.q_len * (span.q_len + 1) / 2).sum();
    (4 * pairs * heads.q_width()) as u64
}

/// q and k from a rotation and v from the projection, as a transformer block passes them.
struct PackedQkv {
    qk: TensorMut,
    projected: TensorMut,
    kind: AttentionKind,
}

impl PackedQkv {
    fn new(inputs: &BenchInputs<'_>, n: usize, heads: Heads) -> Result<Self> {
        let scale = 1.0 / (heads.head_dim as f64).sqrt();
        Ok(PackedQkv {
            qk: inputs.normal(1.0, (n, heads.qk_width()))?,
            projected: inputs.normal(1.0, (n, heads.qkv_width()))?,
            kind: AttentionKind { heads, scale, softcap: None, window: None },
        })
    }

    fn qkv(&self) -> Qkv<'_> {
        let heads = self.kind.heads;
        Qkv {
            q: ColumnView { tensor: &self.qk, start: 0, len: heads.q_width() },
            k: ColumnView { tensor: &self.qk, start: heads.q_width(), len: heads.kv_width() },
            v: ColumnView { tensor: &self.projected, start: heads.qk_width(), len: heads.kv_width() },
        }
    }
}

fn attention_shape(shapes: &BenchShapes) -> String {
    let Heads { num_heads, num_kv_heads, head_dim } = shapes.widths.heads;
    let row = shapes.max_seq_len.min(shapes.tokens);
    format!("{} in rows of {row}, {num_heads}/{num_kv_heads} heads of {head_dim}, causal", shapes.tokens)
}

fn attention_forward(shapes: &BenchShapes) -> TimedOp {
    let (spans, n, heads) = (packed(shapes), shapes.tokens, shapes.widths.heads);
    let what = ("attention", attention_shape(shapes), shapes.dtype);
    TimedOp::multiplying(attention_flops(&spans, heads), what, move |inputs| {
        let (x, spans) = (PackedQkv::new(inputs, n, heads)?, spans.clone());
        Ok(Box::new(move || attention(x.qkv(), &spans, x.kind, Attention::Flash).map(drop)))
    })
}

/// Times the backward, counted as two and a half forwards: five products instead of two.
fn attention_gradients(shapes: &BenchShapes) -> TimedOp {
    let (spans, n, heads) = (packed(shapes), shapes.tokens, shapes.widths.heads);
    let what = ("attention_backward", attention_shape(shapes), shapes.dtype);
    TimedOp::multiplying(attention_flops(&spans, heads) / 2 * 5, what, move |inputs| {
        let (x, spans) = (PackedQkv::new(inputs, n, heads)?, spans.clone());
        let attended = attention(x.qkv(), &spans, x.kind, Attention::Flash)?;
        let dout = inputs.normal(1.0, (n, heads.q_width()))?;
        Ok(Box::new(move || {
            attention_backward(x.qkv(), &attended, &dout, &spans, x.kind, Attention::Flash).map(drop)
        }))
    })
}

fn sinks_shape(shapes: &BenchShapes) -> String {
    let Heads { num_heads, head_dim, .. } = shapes.widths.heads;
    format!("{}, {num_heads} heads of {head_dim}", shapes.tokens)
}

/// Returns an output of attention, whose tensors an operation may overwrite.
fn attended(inputs: &BenchInputs<'_>, n: usize, heads: Heads) -> Result<AttentionOutput> {
    let out = inputs.normal(1.0, (n, heads.q_width()))?.into_tensor();
    Ok(AttentionOutput { out, lse: inputs.normal_as(DType::F32, 1.0, (heads.num_heads, n))?.into_tensor() })
}

/// Times the sinks in place: from the second run on, the values shrink.
fn sunk(shapes: &BenchShapes) -> TimedOp {
    let (n, heads) = (shapes.tokens, shapes.widths.heads);
    let what = ("attention_sinks", sinks_shape(shapes), shapes.dtype);
    TimedOp::moving(shapes.bytes(2 * n * heads.q_width()), what, move |inputs| {
        let sinks = inputs.normal(1.0, heads.num_heads)?;
        let sets = inputs.sets(|_| attended(inputs, n, heads))?;
        sets.calls(move |given| attention_sinks(given.clone(), &sinks).map(drop))
    })
}

fn sunk_gradients(shapes: &BenchShapes) -> TimedOp {
    let (n, heads) = (shapes.tokens, shapes.widths.heads);
    let what = ("attention_sinks_backward", sinks_shape(shapes), shapes.dtype);
    TimedOp::moving(shapes.bytes(2 * n * heads.q_width()), what, move |inputs| {
        let (sinks, d) = (inputs.normal(1.0, heads.num_heads)?, inputs.zeros(heads.num_heads)?);
        let sets =
            inputs.sets(|_| Ok((attended(inputs, n, heads)?, inputs.normal(1.0, (n, heads.q_width()))?)))?;
        sets.calls(move |(given, dout)| attention_sinks_backward(given, dout, &sinks, &d))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::bench::{ModelWidths, OpWork};

    #[test]
    fn attention_counts_what_queries_see() {
        let heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 8 };
        let widths = ModelWidths { heads, ..ModelWidths::QWEN3_8B };
        let shapes = BenchShapes {
            widths,
            tokens: 10,
            max_seq_len: 4,
            dtype: DType::F32,
            secs: 0.1,
            memory: u64::MAX,
        };
        let spans = packed(&shapes);
        assert_eq!(spans, [Span::sequence(0, 4), Span::sequence(4, 4), Span::sequence(8, 2)]);
        // 10 + 10 + 3 pairs; the scores take a product of 2 · 32, the values another.
        assert_eq!(attention_flops(&spans, heads), 23 * 2 * 2 * 32);
        let backward = attention_gradients(&shapes);
        assert_eq!(backward.work, OpWork::Flops(23 * 5 * 2 * 32));
    }
}
