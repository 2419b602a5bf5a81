//! Compares the backward of every reference with candle's tape over plain forms, or candle-nn's
//! form if it exists and the reference does not use it. The plain forms use only ops that the tape
//! follows (candle-nn's fused norm, rope and softmax cut it). A gradient that is missing, zero or
//! not finite fails.

mod activations;

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, Var};

use crate::error::Result;
use crate::ops::attention::{AttentionKind, ColumnView, Heads, Qkv, Span, attention, attention_backward};
use crate::ops::attention_sinks;
use crate::ops::case::TensorPair;
use crate::ops::causal_conv::cases::packed;
use crate::ops::causal_conv::{self, ConvWeight};
use crate::ops::cross_entropy::{self, Delta, IGNORE, LossKind, LossTargets, Output, OutputGrads};
use crate::ops::dora;
use crate::ops::dropout::{Dropout, dropout};
use crate::ops::embedding;
use crate::ops::experts::{self, ExpertGroups, ExpertRows, Router, RouterScores};
use crate::ops::gated_delta::{self, DeltaHeads, DeltaInputs, DeltaParamGrads, GateGrads};
use crate::ops::gated_norm;
use crate::ops::glu;
use crate::ops::glu::Activation;
use crate::ops::layer_norm::{self, LayerNorm};
use crate::ops::matmul;
use crate::ops::matmul::{Addend, ColumnViewMut, Transpose};
use crate::ops::matmul_quantized::Weight;
use crate::ops::rms_norm::{self, NormKind};
use crate::ops::rotary::{self, QkNorm, RotaryTable};
use crate::recipe::enums::Attention;
use crate::runtime::TensorMut;
use crate::runtime::rng::RngStream;

/// An op that returns a given gradient to its input.
struct Pull(Tensor);

impl CustomOp1 for Pull {
    fn name(&self) -> &'static str {
        "pull"
    }
    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }
    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

/// Returns the gradients of `vars` for the gradient `dy` of `y`.
fn pulled<const N: usize>(y: &Tensor, dy: &Tensor, vars: [&Var; N]) -> Result<[Tensor; N]> {
    assert_eq!(y.dims(), dy.dims());
    let store = y.apply_op1(Pull(dy.clone()))?.backward()?;
    Ok(vars.map(|var| {
        let grad = store.get(var).expect("the tape has a gradient").detach();
        let largest = grad.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
        assert!(largest.is_finite() && largest > 0.0, "gradient {largest}");
        grad
    }))
}

fn normal(name: &str, shape: impl Into<Shape>) -> Result<Tensor> {
    let (shape, stream) = (shape.into(), RngStream::new(1).named(name));
    let values: Vec<f32> = (0..shape.elem_count() as u64).map(|i| stream.normal(i)).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

fn var(name: &str, shape: impl Into<Shape>) -> Result<Var> {
    Ok(Var::from_tensor(&normal(name, shape)?)?)
}

fn zeros(shape: impl Into<Shape>) -> Result<TensorMut> {
    TensorMut::zeros(shape, DType::F32, &Device::Cpu)
}

fn close(what: &str, got: &Tensor, want: &Tensor) -> Result<()> {
    let error = TensorPair::new(got.clone(), want.clone()).error()?;
    assert!(error < 1e-5, "{what}: error {error:e}");
    Ok(())
}

#[test]
fn linear_layer() -> Result<()> {
    let (x, w, b) = (var("x", (11, 7))?, var("w", (5, 7))?, var("b", 5)?);
    let dy = normal("dy", (11, 5))?;
    let y = x.matmul(&w.t()?)?.broadcast_add(&b)?;
    let [want_dx, want_dw, want_db] = pulled(&y, &dy, [&x, &w, &b])?;

    for matmul in [matmul::matmul, matmul::reference] {
        let out = zeros((11, 5))?;
        matmul(
            ColumnViewMut::all(&out),
            ColumnView::all(&x),
            ColumnView::all(&w),
            Transpose::Nt,
            1.0,
            Addend::Nothing,
        )?;
        matmul::add_bias_reference(ColumnViewMut::all(&out), &b)?;
        close("y", &out, &y)?;
        let (dx, dw) = (zeros((11, 7))?, zeros((5, 7))?);
        matmul(
            ColumnViewMut::all(&dx),
            ColumnView::all(&dy),
            ColumnView::all(&w),
            Transpose::Nn,
            1.0,
            Addend::Nothing,
        )?;
        close("dx", &dx, &want_dx)?;
        let [dy, x] = [&dy, &x].map(ColumnView::all);
        matmul(ColumnViewMut::all(&dw), dy, x, Transpose::Tn, 1.0, Addend::Destination)?;
        close("dw", &dw, &want_dw)?;
    }
    let db = zeros(5)?;
    matmul::sum_rows_reference(&db, ColumnView::all(&dy))?;
    close("db", &db, &want_db)
}

#[test]
fn rms_norm() -> Result<()> {
    for unit_offset in [false, true] {
        let kind = NormKind { eps: 1e-3, unit_offset };
        let (x, w, dy) = (var("x", (9, 16))?, var("w", 16)?, normal("dy", (9, 16))?);
        let inverse = (x.sqr()?.mean_keepdim(1)? + kind.eps)?.sqrt()?.recip()?;
        let gain = (w.as_tensor() + if unit_offset { 1.0 } else { 0.0 })?;
        let y = x.broadcast_mul(&inverse)?.broadcast_mul(&gain)?;
        close("y", &rms_norm::reference(&x, &w, kind)?, &y)?;
        let [want_dx, want_dw] = pulled(&y, &dy, [&x, &w])?;
        let dw = zeros(16)?;
        let dx = rms_norm::reference_backward(&x, &w, &dy, None, Some(&dw), kind)?;
        close("dx", &dx, &want_dx)?;
        close("dw", &dw, &want_dw)?;
        let around = normal("around", (9, 16))?;
        let dx = rms_norm::reference_backward(&x, &w, &dy, Some(&around), None, kind)?;
        close("dx + residual", &dx, &(want_dx + around)?)?;
    }
    Ok(())
}

#[test]
fn layer_norm() -> Result<()> {
    for unit_offset in [false, true] {
        let kind = NormKind { eps: 1e-3, unit_offset };
        let (x, w, b, dy) = (var("x", (9, 16))?, var("w", 16)?, var("b", 16)?, normal("dy", (9, 16))?);
        let centered = x.broadcast_sub(&x.mean_keepdim(1)?)?;
        let deviation = (centered.sqr()?.mean_keepdim(1)? + kind.eps)?.sqrt()?;
        let gain = (w.as_tensor() + if unit_offset { 1.0 } else { 0.0 })?;
        let y = centered.broadcast_div(&deviation)?.broadcast_mul(&gain)?.broadcast_add(&b)?;
        let norm = LayerNorm { weight: &w, bias: Some(&b), kind };
        close("y", &layer_norm::reference(&x, norm)?, &y)?;
        let [want_dx, want_dw, want_db] = pulled(&y, &dy, [&x, &w, &b])?;
        let (dw, db) = (zeros(16)?, zeros(16)?);
        let dx = layer_norm::reference_backward(&x, norm, &dy, None, Some(&dw))?;
        close("dx", &dx, &want_dx)?;
        close("dw", &dw, &want_dw)?;
        matmul::sum_rows_reference(&db, ColumnView::all(&dy))?;
        close("db", &db, &want_db)?;
        let around = normal("around", (9, 16))?;
        let dx = layer_norm::reference_backward(&x, norm, &dy, Some(&around), None)?;
        close("dx + residual", &dx, &(want_dx + around)?)?;
    }
    Ok(())
}

#[test]
fn rotary_with_and_without_norms() -> Result<()> {
    let heads = Heads { num_heads: 3, num_kv_heads: 1, head_dim: 8 };
    let qk = heads.qk_width();
    for (half, kind) in [
        (4, None),
        (3, None),
        (4, Some(NormKind { eps: 1e-5, unit_offset: false })),
        (2, Some(NormKind { eps: 1e-5, unit_offset: true })),
    ] {
        let angles = normal("angles", (10, half))?;
        let table = RotaryTable { cos: angles.cos()?, sin: angles.sin()?, interleaved: false };
        let (qkv, q, k) = (var("qkv", (10, heads.qkv_width()))?, var("q", 8)?, var("k", 8)?);
        let dy = normal("dy", (10, heads.qkv_width()))?;
        let (dq, dk) = (zeros(8)?, zeros(8)?);
        let norm = kind.map(|kind| QkNorm { q: (&q, Some(&dq)), k: (&k, Some(&dk)), kind });

        // The reference's own forward is a plain form that the tape follows.
        let rotated = rotary::reference(&qkv, heads, norm, &table)?;
        let dy_qk = dy.narrow(1, 0, qk)?.contiguous()?;
        let d = TensorMut::new(dy.copy()?);
        rotary::reference_backward(&qkv, &d, heads, norm, &table)?;
        let v_columns = |t: &Tensor| t.narrow(1, qk, heads.kv_width());
        close("v's columns", &v_columns(&d)?, &v_columns(&dy)?)?;
        let d = d.narrow(1, 0, qk)?;
        if norm.is_some() {
            let [want, want_dq, want_dk] = pulled(&rotated, &dy_qk, [&qkv, &q, &k])?;
            close("dqkv", &d, &want.narrow(1, 0, qk)?)?;
            close("dq_norm", &dq, &want_dq)?;
            close("dk_norm", &dk, &want_dk)?;
        } else {
            let [want] = pulled(&rotated, &dy_qk, [&qkv])?;
            close("dqkv", &d, &want.narrow(1, 0, qk)?)?;
        }
    }
    Ok(())
}

#[test]
fn gated_products() -> Result<()> {
    for activation in [Activation::Silu, Activation::GeluTanh, Activation::Sigmoid] {
        let (x, dh) = (var("gate_up", (9, 24))?, normal("dh", (9, 12))?);
        let (gate, up) = (x.narrow(1, 0, 12)?, x.narrow(1, 12, 12)?);
        let act = match activation {
            Activation::Silu => (&gate / (gate.neg()?.exp()? + 1.0)?)?,
            Activation::GeluTanh => {
                let inner =
                    ((&gate + (gate.powf(3.0)? * 0.044_715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
                ((inner.tanh()? + 1.0)? * (&gate * 0.5)?)?
            }
            Activation::Sigmoid | Activation::ClampedSilu => (gate.neg()?.exp()? + 1.0)?.recip()?,
        };
        let h = (act * up)?;
        close("h", &glu::reference(&x, activation)?, &h)?;
        let [want] = pulled(&h, &dh, [&x])?;
        close("dgate_up", &glu::reference_backward(&x, &dh, activation)?, &want)?;
    }
    Ok(())
}

/// Some gates and ups are outside their limits, where the tape's minimum and maximum have slope 0.
#[test]
fn clamped_products() -> Result<()> {
    let x = Var::from_tensor(&(normal("gate_up", (9, 24))? * 6.0)?)?;
    let dh = normal("dh", (9, 12))?;
    let pairs = x.reshape((9, 12, 2))?;
    let limit = Tensor::full(glu::CLAMP, (9, 12), &Device::Cpu)?;
    let gate = pairs.narrow(2, 0, 1)?.squeeze(2)?.minimum(&limit)?;
    let up = pairs.narrow(2, 1, 1)?.squeeze(2)?.minimum(&limit)?.maximum(&limit.neg()?)?;
    let s = ((&gate * -1.702)?.exp()? + 1.0)?.recip()?;
    let h = ((up + 1.0)? * (gate * s)?)?;
    close("h", &glu::reference(&x, Activation::ClampedSilu)?, &h)?;
    let [want] = pulled(&h, &dh, [&x])?;
    close("dgate_up", &glu::reference_backward(&x, &dh, Activation::ClampedSilu)?, &want)
}

/// Attention with sinks is a softmax with one more key, whose value is 0.
#[test]
fn sinks_of_attention() -> Result<()> {
    let heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 8 };
    let kind = AttentionKind { heads, scale: 0.3, softcap: None, window: Some(5) };
    let (x, sinks) = (var("qkv", (20, heads.qkv_width()))?, var("sinks", 4)?);
    let dout = normal("dout", (20, heads.q_width()))?;
    let column = |at: usize| -> Result<Tensor> { Ok(x.narrow(1, at, 8)?.contiguous()?) };
    let mask: Vec<f32> = (0..400)
        .map(|i| (i / 20, i % 20))
        .map(|(q, k)| if k <= q && k + 5 > q { 0.0 } else { -1e30 })
        .collect();
    let mask = Tensor::from_vec(mask, (20, 20), &Device::Cpu)?;
    let head = |h: usize| -> Result<Tensor> {
        let (q, k, v) = (column(h * 8)?, column(32 + h / 2 * 8)?, column(48 + h / 2 * 8)?);
        let e = ((q.matmul(&k.t()?)? * 0.3)? + &mask)?.exp()?;
        let sink = sinks.narrow(0, h, 1)?.exp()?;
        Ok(e.matmul(&v)?.broadcast_div(&e.sum_keepdim(1)?.broadcast_add(&sink)?)?)
    };
    let out = Tensor::cat(&(0..4).map(head).collect::<Result<Vec<_>>>()?, 1)?;
    let [want, want_dsinks] = pulled(&out, &dout, [&x, &sinks])?;
    let range = |start, len| ColumnView { tensor: &x, start, len };
    let qkv = Qkv { q: range(0, 32), k: range(32, 16), v: range(48, 16) };
    let spans = [Span::sequence(0, 20)];
    for algorithm in [Attention::Flash, Attention::Eager] {
        let plain = attention(qkv, &spans, kind, algorithm)?;
        let attended = attention_sinks::reference(&plain, &sinks)?;
        close("out", &attended.out, &out)?;
        let d = attention_backward(qkv, &attended, &dout, &spans, kind, algorithm)?;
        close("dqkv", &d, &want)?;
        let dsinks = zeros(4)?;
        attention_sinks::reference_backward(&attended, &dout, &sinks, &dsinks)?;
        close("dsinks", &dsinks, &want_dsinks)?;
    }
    Ok(())
}

/// The tape goes from each token's experts, weighted and summed, to the router's logits.
#[test]
fn weighted_experts() -> Result<()> {
    let groups = Some(ExpertGroups { count: 3, chosen: 2 });
    let sigmoid = Router {
        scores: RouterScores::Sigmoid,
        groups,
        factor: 2.5,
        sum_offset: 0.25,
        ..Router::softmax(3, true)
    };
    let grouped = Router { groups, factor: 1.5, ..Router::softmax(3, true) };
    for router in [
        Router::softmax(3, false),
        Router::softmax(3, true),
        grouped,
        sigmoid,
        Router { renormalize: false, ..sigmoid },
    ] {
        let (shape, renormalize) = ((9, 6), router.renormalize);
        let (logits, x, dy) = (var("logits", shape)?, var("x", (27, 8))?, normal("dy", (9, 8))?);
        let bias = router.groups.map(|_| normal("bias", 6)).transpose()?;
        let choice = experts::choice_reference(&logits.detach(), bias.as_ref(), router)?;
        let rows = ExpertRows::of(&choice, 6)?;
        let scores = match router.scores {
            RouterScores::Softmax => candle_nn::ops::softmax(&logits, 1)?,
            RouterScores::Sigmoid => candle_nn::ops::sigmoid(&logits)?,
        };
        let all = scores.gather(&choice.ids, 1)?;
        let sum = (all.sum_keepdim(1)? + f64::from(router.sum_offset))?;
        let weights = if renormalize { all.broadcast_div(&sum)? } else { all };
        let weights = (weights * f64::from(router.factor))?;
        close("weights", &choice.weights, &weights)?;
        // Row r of x is the copy that stands there.
        let index = |list: &[u32]| Tensor::from_slice(list, list.len(), &Device::Cpu);
        let copies: Vec<u32> = rows.copies().to_vec();
        let of_rows = weights.flatten_all()?.index_select(&index(&copies)?, 0)?.unsqueeze(1)?;
        let weighted = x.broadcast_mul(&of_rows)?;
        let zeros = Tensor::zeros((9, 8), DType::F32, &Device::Cpu)?;
        let y = zeros.index_add(&index(rows.tokens())?, &weighted, 0)?;
        let scaled = experts::scale_reference(&x, &choice.weights, &rows)?;
        close("y", &experts::combine_reference(&scaled, &rows, None)?, &y)?;

        let [want_logits, want_x] = pulled(&y, &dy, [&logits, &x])?;
        let d = TensorMut::new(dy.index_select(&index(rows.tokens())?, 0)?);
        let product = TensorMut::new(x.copy()?.detach());
        let dweights = experts::scale_reference_backward(&product, &d, &choice.weights, &rows)?;
        close("dx", &d, &want_x)?;
        close("the product", &product, &scaled)?;
        close(
            "dlogits",
            &experts::choice_reference_backward(&logits, &choice, &dweights, router)?,
            &want_logits,
        )?;
    }
    Ok(())
}

#[test]
fn balanced_experts() -> Result<()> {
    let (logits, pull) = (var("logits", (9, 6))?, normal("pull", 6)?);
    let value = candle_nn::ops::softmax(&logits, 1)?.broadcast_mul(&pull)?.sum_all()?;
    let [want] = pulled(&value, &Tensor::new(1f32, &Device::Cpu)?, [&logits])?;
    let d = zeros((9, 6))?;
    let got = experts::balance_reference(&logits, &pull, &d)?;
    assert!((got - f64::from(value.to_scalar::<f32>()?)).abs() < 1e-5, "{got}");
    close("dlogits", &d, &want)
}

/// The tape goes from all rows of each span, weighted by their distance, to the inputs.
#[test]
fn causal_convolutions() -> Result<()> {
    let (spans, taps, channels) = (packed(&[5, 1, 9], 0), 4, 7);
    let (x, w, dy) = (var("x", (15, channels))?, var("w", (channels, taps))?, normal("dy", (15, channels))?);
    let mut rows = Vec::new();
    for (n, span) in
        spans.iter().flat_map(|span| (span.q_start..span.q_start + span.q_len).map(move |n| (n, span)))
    {
        let mut sum = x.narrow(0, n, 1)?.zeros_like()?;
        for m in span.q_start.max((n + 1).saturating_sub(taps))..=n {
            let weights = w.narrow(1, taps - 1 - (n - m), 1)?.t()?;
            sum = (sum + x.narrow(0, m, 1)?.mul(&weights)?)?;
        }
        rows.push(sum);
    }
    let sums = Tensor::cat(&rows, 0)?;
    let silu = (&sums / (sums.neg()?.exp()? + 1.0)?)?;
    let view = ColumnView::all(&x);
    for (conv, y) in [(ConvWeight::silu(&w), silu), (ConvWeight::plain(&w), sums)] {
        close("y", &causal_conv::reference(view, conv, &spans, None)?, &y)?;
        let [want_dx, want_dw] = pulled(&y, &dy, [&x, &w])?;
        let (dx, dw) = (zeros((15, channels))?, zeros((channels, taps))?);
        causal_conv::reference_backward(view, conv, &dy, &spans, Some(&dw), ColumnViewMut::all(&dx))?;
        close("dx", &dx, &want_dx)?;
        close("dw", &dw, &want_dw)?;
    }
    Ok(())
}

#[test]
fn gated_norms() -> Result<()> {
    let (x, z, w) = (var("x", (9, 12))?, var("z", (9, 12))?, var("w", 4)?);
    let dy = normal("dy", (9, 12))?;
    let heads = x.reshape((27, 4))?;
    let rms = (heads.sqr()?.mean_keepdim(1)? + 1e-3)?.sqrt()?;
    let gate = (z.as_tensor() / (z.neg()?.exp()? + 1.0)?)?;
    let y = (heads.broadcast_div(&rms)?.broadcast_mul(&w)?.reshape((9, 12))? * gate)?;
    let gates = ColumnView::all(&z);
    close("y", &gated_norm::reference(&x, gates, &w, 1e-3)?, &y)?;
    let [want_dx, want_dz, want_dw] = pulled(&y, &dy, [&x, &z, &w])?;
    let (dz, dw) = (zeros((9, 12))?, zeros(4)?);
    let to = ColumnViewMut::all(&dz);
    let dx = gated_norm::reference_backward(&x, gates, &w, &dy, Some(&dw), 1e-3, to)?;
    close("dx", &dx, &want_dx)?;
    close("dz", &dz, &want_dz)?;
    close("dw", &dw, &want_dw)
}

/// The reference's own forward is a plain form that the tape follows.
#[test]
fn gated_delta_rules() -> Result<()> {
    let heads = DeltaHeads { num_key_heads: 2, num_value_heads: 4, key_dim: 5, value_dim: 3 };
    let (rows, spans) = (79, packed(&[9, 1, 69], 0));
    let qkv = var("qkv", (rows, heads.conv_width()))?;
    let (a, b) = (var("a", (rows, 4))?, var("b", (rows, 4))?);
    let (a_log, dt_bias) = (var("a_log", 4)?, var("dt_bias", 4)?);
    let [a_view, b_view] = [&a, &b].map(|gates| ColumnView::all(gates));
    let inputs = DeltaInputs { qkv: &qkv, a: a_view, b: b_view, a_log: &a_log, dt_bias: &dt_bias };
    let output = gated_delta::reference(inputs, heads, &spans, None)?;
    assert_eq!(output.states.dims(), [1, 4, 5, 3]);
    let dout = normal("dout", (rows, heads.value_width()))?;
    let [want, want_a, want_b, want_log, want_bias] =
        pulled(&output.out, &dout, [&qkv, &a, &b, &a_log, &dt_bias])?;
    let (da, db) = (zeros((rows, 4))?, zeros((rows, 4))?);
    let (dlog, dbias) = (zeros(4)?, zeros(4)?);
    let params = DeltaParamGrads { a_log: Some(&dlog), dt_bias: Some(&dbias) };
    let gates = GateGrads { params, da: ColumnViewMut::all(&da), db: ColumnViewMut::all(&db) };
    let dqkv = gated_delta::reference_backward(inputs, &output, &dout, heads, &spans, gates)?;
    close("dqkv", &dqkv, &want)?;
    close("da", &da, &want_a)?;
    close("db", &db, &want_b)?;
    close("da_log", &dlog, &want_log)?;
    close("ddt_bias", &dbias, &want_bias)
}

/// Computes attention of one head of one span, from its definition.
fn plain_head(q: &Tensor, k: &Tensor, v: &Tensor, kind: AttentionKind) -> Result<Tensor> {
    let len = q.dim(0)?;
    let mut scores = (q.matmul(&k.t()?)? * kind.scale)?;
    if let Some(cap) = kind.softcap {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    let seen = |i: usize, j: usize| j <= i && kind.window.is_none_or(|window| i - j < window);
    let mask = (0..len * len).map(|at| if seen(at / len, at % len) { 0f32 } else { f32::NEG_INFINITY });
    let mask = Tensor::from_vec(mask.collect::<Vec<_>>(), (len, len), &Device::Cpu)?;
    Ok(candle_nn::ops::softmax(&(scores + mask)?, 1)?.matmul(v)?)
}

#[test]
fn attention_of_packed_spans() -> Result<()> {
    let grouped = AttentionKind {
        heads: Heads { num_heads: 4, num_kv_heads: 2, head_dim: 8 },
        scale: 0.3,
        softcap: None,
        window: None,
    };
    let one = Heads { num_kv_heads: 1, ..grouped.heads };
    for kind in [
        grouped,
        AttentionKind { heads: one, ..grouped },
        AttentionKind { window: Some(5), ..grouped },
        AttentionKind { softcap: Some(1.0), ..grouped },
        AttentionKind { softcap: Some(2.0), window: Some(20), ..grouped },
    ] {
        let (heads, dim) = (kind.heads, kind.heads.head_dim);
        let spans = [Span::sequence(0, 9), Span::sequence(9, 1), Span::sequence(10, 70)];
        let x = var("qkv", (80, heads.qkv_width()))?;
        let dout = normal("dout", (80, heads.q_width()))?;
        let head = |span: Span, column: usize| -> Result<Tensor> {
            Ok(x.narrow(0, span.q_start, span.q_len)?.narrow(1, column, dim)?.contiguous()?)
        };
        let mut rows = Vec::new();
        for span in spans {
            let outs = (0..heads.num_heads).map(|h| {
                let kv = h / (heads.num_heads / heads.num_kv_heads) * dim;
                let (k, v) = (head(span, heads.q_width() + kv)?, head(span, heads.qk_width() + kv)?);
                plain_head(&head(span, h * dim)?, &k, &v, kind)
            });
            rows.push(Tensor::cat(&outs.collect::<Result<Vec<_>>>()?, 1)?);
        }
        let out = Tensor::cat(&rows, 0)?;
        let [want] = pulled(&out, &dout, [&x])?;
        let range = |start, len| ColumnView { tensor: &x, start, len };
        let qkv = Qkv {
            q: range(0, heads.q_width()),
            k: range(heads.q_width(), heads.kv_width()),
            v: range(heads.qk_width(), heads.kv_width()),
        };
        for algorithm in [Attention::Flash, Attention::Eager] {
            let attended = attention(qkv, &spans, kind, algorithm)?;
            close("out", &attended.out, &out)?;
            let d = attention_backward(qkv, &attended, &dout, &spans, kind, algorithm)?;
            close("dqkv", &d, &want)?;
        }
    }
    Ok(())
}

#[test]
fn cross_entropy_of_a_linear_layer() -> Result<()> {
    let weights: Vec<f32> = (0..12u8).map(|n| f32::from(n) / 5.0 - 0.7).collect();
    for (softcap, coefficients) in [(None, None), (Some(1.5), None), (Some(1.5), Some(&weights[..]))] {
        let (x, w) = (var("x", (12, 8))?, var("w", (19, 8))?);
        // An adapter on the output layer, and rows of it that train beside all of them.
        let (u, b) = (var("u", (12, 3))?, var("b", (19, 3))?);
        let rows = [4u32, 11];
        let targets: Vec<u32> = (0..12).map(|i| if i % 4 == 1 { IGNORE } else { i * 5 % 19 }).collect();
        let positions: Vec<u32> = (0..12).filter(|&i| targets[i as usize] != IGNORE).collect();
        let hits: Vec<u32> = positions.iter().map(|&i| targets[i as usize]).collect();
        let index = |values: &[u32]| Tensor::from_slice(values, values.len(), &Device::Cpu);
        let mut logits = x.index_select(&index(&positions)?, 0)?.matmul(&w.t()?)?;
        logits = (logits + (u.index_select(&index(&positions)?, 0)?.matmul(&b.t()?)? * 0.6)?)?;
        if let Some(cap) = softcap {
            logits = ((logits / cap)?.tanh()? * cap)?;
        }
        let loss = match coefficients {
            None => (candle_nn::loss::cross_entropy(&logits, &index(&hits)?)? * hits.len() as f64)?,
            Some(coefficients) => {
                let at_target = logits.gather(&index(&hits)?.unsqueeze(1)?, 1)?.squeeze(1)?;
                let losses = (logits.exp()?.sum(1)?.log()? - at_target)?;
                let coefficients = Tensor::from_slice(coefficients, 12, &Device::Cpu)?;
                (losses * coefficients.index_select(&index(&positions)?, 0)?)?.sum_all()?
            }
        };
        let scale = 0.125;
        let dloss = Tensor::new(scale as f32, &Device::Cpu)?;
        let [want_dx, want_dw, want_du, want_db] = pulled(&loss, &dloss, [&x, &w, &u, &b])?;
        let (dw, drows, db) = (zeros((19, 8))?, zeros((2, 8))?, zeros((19, 3))?);
        let kind = LossKind { scale, softcap };
        let output = Output { weight: &w, delta: Some(Delta { u: &u, b: &b, scale: 0.6 }) };
        let grads = OutputGrads { weight: Some(&dw), rows: Some((&rows, &drows)), b: Some(&db) };
        let got =
            cross_entropy::reference(&x, output, LossTargets { ids: &targets, coefficients }, kind, grads)?;
        assert!((got.loss.read()? - f64::from(loss.to_scalar::<f32>()?)).abs() < 1e-4, "{got:?}");
        close("dx", &got.dx, &want_dx)?;
        close("dw", &dw, &want_dw)?;
        close("drows", &drows, &want_dw.index_select(&index(&rows)?, 0)?)?;
        close("du", &got.du.ok_or_else(|| crate::error::Error::internal("no du"))?, &want_du)?;
        close("db", &db, &want_db)?;
    }
    Ok(())
}

#[test]
fn embedding_and_dropout() -> Result<()> {
    let (table, dy) = (var("table", (6, 8))?, normal("dy", (7, 8))?);
    let ids = [3u32, 0, 3, 5, 1, 3, 0];
    let y = (table.index_select(&Tensor::new(&ids, &Device::Cpu)?, 0)? * 2.5)?;
    close("y", &embedding::reference(&table, &ids, 2.5, DType::F32)?, &y)?;
    let [want] = pulled(&y, &dy, [&table])?;
    let grad = zeros((6, 8))?;
    embedding::reference_backward(&grad, &ids, &dy, 2.5, None)?;
    close("dtable", &grad, &want)?;

    let (a, du) = (var("a", (3, 6))?, normal("du", (7, 3))?);
    let u = a.index_select(&Tensor::new(&ids, &Device::Cpu)?, 1)?.t()?.contiguous()?;
    close("columns", &embedding::columns_of_reference(&a, &ids)?, &u)?;
    let [want] = pulled(&u, &du, [&a])?;
    let grad = zeros((3, 6))?;
    embedding::columns_of_backward_reference(&grad, &ids, &du, None)?;
    close("da", &grad, &want)?;

    // The mask does not depend on the values: the op on ones gives the mask, and the op on dy the
    // gradient.
    let site = Dropout { p: 0.4, stream: RngStream::new(5), first_token: 2 };
    let mask = dropout(&table.ones_like()?, site)?;
    let y = (table.as_tensor() * &mask)?;
    close("dropped", &dropout(&table, site)?, &y)?;
    let dy = normal("dy", (6, 8))?;
    let [want] = pulled(&y, &dy, [&table])?;
    close("dx of dropout", &dropout(&dy, site)?, &want)
}

/// DoRA's layer with a constant norm: magnitudes, both matrices and the input.
#[test]
fn magnitudes_of_dora() -> Result<()> {
    let (x, w, m) = (var("x", (9, 6))?, normal("w", (5, 6))?, var("m", 5)?);
    let (a, b, dy) = (var("a", (2, 6))?, var("b", (5, 2))?, normal("dy", (9, 5))?);
    let norm = (&w + (b.matmul(&a)? * 0.7)?)?.sqr()?.sum(1)?.sqrt()?.detach();
    close("norm", &dora::weight_norm_reference(Weight::Dense(&w), &a, &b, 0.7)?, &norm)?;
    let unscaled = (x.matmul(&w.t()?)? + (x.matmul(&a.t()?)?.matmul(&b.t()?)? * 0.7)?)?;
    let y = unscaled.broadcast_mul(&(m.as_tensor() / &norm)?)?;
    let [want] = pulled(&y, &dy, [&m])?;
    let grad = zeros(5)?;
    dora::magnitude_backward_reference(&grad, ColumnView::all(&dy), &unscaled.detach(), &norm)?;
    close("dm", &grad, &want)
}
