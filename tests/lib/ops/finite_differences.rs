//! Definitions written out in f64, loop by loop and without candle: the ops' results are compared
//! with them, and the ops' gradients with their central differences.

use candle_core::{Device, Tensor};
use finetune::ops::ColumnViewMut;
use finetune::ops::activation::{PlainActivation, activate, activate_backward};
use finetune::ops::attention::{
    AttentionKind, AttentionOutput, ColumnView, Heads, Qkv, Span, attention, attention_backward,
};
use finetune::ops::attention_sinks::{attention_sinks, attention_sinks_backward};
use finetune::ops::causal_conv::{ConvWeight, causal_conv, causal_conv_backward};
use finetune::ops::cross_entropy::{
    IGNORE, LossAndGrad, LossKind, LossTargets, Output, OutputGrads, TokenScore, linear_cross_entropy,
    score_targets,
};
use finetune::ops::experts::{
    ExpertRows, Router, RouterScores, balance_experts, choose_experts, choose_experts_backward, combine_rows,
    scale_rows, scale_rows_backward,
};
use finetune::ops::gated_delta::{
    DeltaHeads, DeltaInputs, DeltaParamGrads, gated_delta, gated_delta_backward,
};
use finetune::ops::gated_norm::{gated_rms_norm, gated_rms_norm_backward};
use finetune::ops::glu::{Activation, glu, glu_backward};
use finetune::ops::layer_norm::{LayerNorm, LayerNormGradients, layer_norm, layer_norm_backward};
use finetune::ops::rms_norm::{NormKind, rms_norm, rms_norm_backward};
use finetune::ops::rotary::{RotaryTable, rotary, rotary_backward};
use finetune::ops::xielu::{xielu, xielu_backward};
use finetune::recipe::enums::Attention;
use finetune::runtime::TensorMut;

use super::{normal, values, zeros};

/// Returns the gradient of `f` at `x` by central differences.
fn differences(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let mut moved = x.to_vec();
    (0..x.len())
        .map(|i| {
            moved[i] = x[i] + STEP;
            let above = f(&moved);
            moved[i] = x[i] - STEP;
            let below = f(&moved);
            moved[i] = x[i];
            (above - below) / (2.0 * STEP)
        })
        .collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Checks equality to f32's accuracy, relative to the largest value.
fn close(what: &str, got: &Tensor, want: &[f64]) {
    let got = values(got);
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(0f64, |largest, x| largest.max(x.abs()));
    assert!(largest > 1e-3, "{what}: nothing to compare with, {largest:e}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() < 5e-6 * largest, "{what}[{i}]: {got}, by definition {want}");
    }
}

fn norm_f64(x: &[f64], w: &[f64], kind: NormKind) -> Vec<f64> {
    let offset = if kind.unit_offset { 1.0 } else { 0.0 };
    let rows = x.chunks(w.len()).flat_map(|row| {
        let rms = (dot(row, row) / row.len() as f64 + kind.eps).sqrt();
        row.iter().zip(w).map(move |(x, w)| x / rms * (w + offset))
    });
    rows.collect()
}

#[test]
fn of_rms_norm() {
    for unit_offset in [false, true] {
        let kind = NormKind { eps: 1e-2, unit_offset };
        let (x, w, dy) = (normal("x", (4, 19)), normal("w", 19), normal("dy", (4, 19)));
        let (x64, w64, dy64) = (values(&x), values(&w), values(&dy));
        close("y", &rms_norm(&x, &w, kind).unwrap(), &norm_f64(&x64, &w64, kind));
        let dw = zeros(19);
        let dx = rms_norm_backward(&x, &w, &dy, None, Some(&dw), None, kind).unwrap();
        close("dx", &dx, &differences(&x64, |x| dot(&norm_f64(x, &w64, kind), &dy64)));
        close("dw", &dw, &differences(&w64, |w| dot(&norm_f64(&x64, w, kind), &dy64)));
    }
}

fn layer_norm_f64(x: &[f64], w: &[f64], b: &[f64], kind: NormKind) -> Vec<f64> {
    let rows = x.chunks(w.len()).flat_map(|row| {
        let mean = row.iter().sum::<f64>() / row.len() as f64;
        let centered: Vec<f64> = row.iter().map(|x| x - mean).collect();
        // The RMS norm of centered values.
        norm_f64(&centered, w, kind).into_iter().zip(b).map(|(y, b)| y + b).collect::<Vec<_>>()
    });
    rows.collect()
}

#[test]
fn of_layer_norm() {
    for unit_offset in [false, true] {
        let kind = NormKind { eps: 1e-2, unit_offset };
        let (x, w, b, dy) = (normal("x", (4, 19)), normal("w", 19), normal("b", 19), normal("dy", (4, 19)));
        let (x64, w64, b64, dy64) = (values(&x), values(&w), values(&b), values(&dy));
        let norm = LayerNorm { weight: &w, bias: Some(&b), kind };
        close("y", &layer_norm(&x, norm).unwrap(), &layer_norm_f64(&x64, &w64, &b64, kind));
        let (dw, db) = (zeros(19), zeros(19));
        let grads = LayerNormGradients { weight: Some(&dw), bias: Some(&db) };
        let dx = layer_norm_backward(&x, norm, &dy, None, grads, None).unwrap();
        close("dx", &dx, &differences(&x64, |x| dot(&layer_norm_f64(x, &w64, &b64, kind), &dy64)));
        close("dw", &dw, &differences(&w64, |w| dot(&layer_norm_f64(&x64, w, &b64, kind), &dy64)));
        close("db", &db, &differences(&b64, |b| dot(&layer_norm_f64(&x64, &w64, b, kind), &dy64)));
    }
}

fn gated_f64(x: &[f64], half: usize, activation: Activation) -> Vec<f64> {
    let act = |x: f64| match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::ClampedSilu => x.min(7.0) / (1.0 + (-1.702 * x.min(7.0)).exp()),
    };
    if activation == Activation::ClampedSilu {
        return x.chunks(2).map(|pair| act(pair[0]) * (pair[1].clamp(-7.0, 7.0) + 1.0)).collect();
    }
    let rows = x.chunks(2 * half).flat_map(|row| {
        let (gate, up) = row.split_at(half);
        gate.iter().zip(up).map(move |(gate, up)| act(*gate) * up)
    });
    rows.collect()
}

#[test]
fn of_gated_products() {
    let all = [Activation::Silu, Activation::GeluTanh, Activation::Sigmoid, Activation::ClampedSilu];
    for activation in all {
        let (x, dh) = ((normal("gate_up", (5, 2 * 18)) * 2.0).unwrap(), normal("dh", (5, 18)));
        let (x64, dh64) = (values(&x), values(&dh));
        close("h", &glu(&x, activation).unwrap(), &gated_f64(&x64, 18, activation));
        let want = differences(&x64, |x| dot(&gated_f64(x, 18, activation), &dh64));
        close("dgate_up", &glu_backward(&x, &TensorMut::new(dh), activation).unwrap(), &want);
    }
}

/// Returns erf(x) by Simpson's rule on the integral of its definition.
fn erf_f64(x: f64) -> f64 {
    const STEPS: usize = 2000;
    let step = x / STEPS as f64;
    let density = |i: usize| (-(i as f64 * step).powi(2)).exp();
    let weight = |i: usize| if i == 0 || i == STEPS { 1.0 } else { 2.0 + 2.0 * (i % 2) as f64 };
    let sum: f64 = (0..=STEPS).map(|i| weight(i) * density(i)).sum();
    sum * step / 3.0 * 2.0 / std::f64::consts::PI.sqrt()
}

fn activated_f64(x: &[f64], activation: PlainActivation) -> Vec<f64> {
    let act = |x: f64| match activation {
        PlainActivation::Relu2 => x.max(0.0).powi(2),
        PlainActivation::Gelu => 0.5 * x * (1.0 + erf_f64(x / std::f64::consts::SQRT_2)),
        PlainActivation::GeluTanh => gated_f64(&[x, 1.0], 1, Activation::GeluTanh)[0],
    };
    x.iter().map(|x| act(*x)).collect()
}

#[test]
fn of_xielus() {
    let curve = Tensor::new(&[0.8f32, 1.3, 0.5, -0.3], &Device::Cpu).unwrap();
    let act = |x: f64, c: &[f64]| {
        let curved = if x > 0.0 { c[0] * x * x } else { c[1] * (x.min(c[3]).exp_m1() - x) };
        curved + c[2] * x
    };
    for spread in [0.05, 2.0] {
        let (x, dh) = ((normal("x", (3, 18)) * spread).unwrap(), normal("dh", (3, 18)));
        let (x64, dh64, curve64) = (values(&x), values(&dh), values(&curve));
        let h: Vec<f64> = x64.iter().map(|x| act(*x, &curve64)).collect();
        close("h", &xielu(&x, &curve).unwrap(), &h);
        let dcurve = zeros(2);
        let dx = xielu_backward(&x, &TensorMut::new(dh), &curve, Some(&dcurve)).unwrap();
        // Each result depends on one value.
        let of = |(x, dh): (&f64, &f64)| differences(&[*x], |x| dh * act(x[0], &curve64))[0];
        close("dx", &dx, &x64.iter().zip(&dh64).map(of).collect::<Vec<_>>());
        let sum = |c: &[f64]| {
            let all = [c, &curve64[2..]].concat();
            x64.iter().zip(&dh64).map(|(x, dh)| dh * act(*x, &all)).sum::<f64>()
        };
        close("dcurve", &dcurve, &differences(&curve64[..2], sum));
    }
}

#[test]
fn of_activations() {
    for activation in [PlainActivation::Relu2, PlainActivation::Gelu, PlainActivation::GeluTanh] {
        let (x, dh) = ((normal("x", (3, 18)) * 2.0).unwrap(), normal("dh", (3, 18)));
        let (x64, dh64) = (values(&x), values(&dh));
        close("h", &activate(&x, activation).unwrap(), &activated_f64(&x64, activation));
        // Each result depends on one value.
        let want: Vec<f64> = x64
            .iter()
            .zip(&dh64)
            .map(|(x, dh)| differences(&[*x], |x| dh * activated_f64(x, activation)[0])[0])
            .collect();
        close("dx", &activate_backward(&x, &TensorMut::new(dh), activation).unwrap(), &want);
    }
}

/// Sums the weighted values of each token's experts; copy `c` of token n is row `places[n·k + c]`
/// of `x`.
fn experts_f64(logits: &[f64], x: &[f64], places: &[usize], (experts, router): (usize, Router)) -> Vec<f64> {
    let (k, tokens) = (router.chosen, logits.len() / experts);
    let score = |logit: f64| match router.scores {
        RouterScores::Softmax => logit.exp(),
        RouterScores::Sigmoid => 1.0 / (1.0 + (-logit).exp()),
    };
    let factor = f64::from(router.factor);
    let width = x.len() / (tokens * k);
    let mut y = vec![0.0; tokens * width];
    for ((logits, y), places) in logits.chunks(experts).zip(y.chunks_mut(width)).zip(places.chunks(k)) {
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        let sum_of = |ids: &[usize]| ids.iter().map(|id| score(logits[*id])).sum::<f64>();
        let sum = match router.scores {
            _ if router.renormalize => sum_of(&order[..k]) + f64::from(router.sum_offset),
            RouterScores::Softmax => sum_of(&order),
            RouterScores::Sigmoid => 1.0,
        };
        for (id, row) in order[..k].iter().zip(places) {
            let row = &x[row * width..][..width];
            y.iter_mut().zip(row).for_each(|(y, x)| *y += score(logits[*id]) / sum * factor * x);
        }
    }
    y
}

#[test]
fn of_experts() {
    let sigmoid =
        Router { scores: RouterScores::Sigmoid, factor: 2.5, sum_offset: 0.25, ..Router::softmax(3, true) };
    let plain = Router { renormalize: false, ..sigmoid };
    for router in [Router::softmax(3, false), Router::softmax(3, true), sigmoid, plain] {
        let (tokens, experts) = (5, 7);
        let (logits, dy) = (normal("logits", (tokens, experts)), normal("dy", (tokens, 4)));
        let x = normal("x", (tokens * router.chosen, 4));
        let choice = choose_experts(&logits, None, router).unwrap();
        let rows = ExpertRows::of(&choice, experts).unwrap();
        let mut places = vec![0; tokens * router.chosen];
        rows.copies().iter().enumerate().for_each(|(row, copy)| places[*copy as usize] = row);
        let (logits64, x64, dy64) = (values(&logits), values(&x), values(&dy));
        let of = |logits: &[f64], x: &[f64]| experts_f64(logits, x, &places, (experts, router));
        let y = combine_rows(&scale_rows(&x, &choice.weights, &rows).unwrap(), &rows, None).unwrap();
        close("y", &y, &of(&logits64, &x64));

        let tokens_of_rows = Tensor::new(rows.tokens(), &Device::Cpu).unwrap();
        let d = TensorMut::new(dy.index_select(&tokens_of_rows, 0).unwrap());
        let product = TensorMut::new(x.copy().unwrap());
        let dweights = scale_rows_backward(&product, &d, &choice.weights, &rows).unwrap();
        close("dx", &d, &differences(&x64, |x| dot(&of(&logits64, x), &dy64)));
        let dlogits = choose_experts_backward(&logits, &choice, &dweights, router).unwrap();
        close("dlogits", &dlogits, &differences(&logits64, |logits| dot(&of(logits, &x64), &dy64)));
    }
}

#[test]
fn of_balanced_experts() {
    let (logits, pull) = (normal("logits", (5, 7)), normal("pull", 7));
    let pull64 = values(&pull);
    let value = |logits: &[f64]| -> f64 {
        let of_token = |logits: &[f64]| {
            let sum: f64 = logits.iter().map(|x| x.exp()).sum();
            logits.iter().zip(&pull64).map(|(x, pull)| x.exp() / sum * pull).sum::<f64>()
        };
        logits.chunks(7).map(of_token).sum()
    };
    let (logits64, d) = (values(&logits), zeros((5, 7)));
    let got = balance_experts(&logits, &pull, &d).unwrap();
    assert!((got - value(&logits64)).abs() < 1e-5, "{got}");
    close("dlogits", &d, &differences(&logits64, value));
}

/// Spans of 3 and 5 rows.
const TWO_SPANS: [Span; 2] = [
    Span { q_start: 0, q_len: 3, k_start: 0, k_len: 3 },
    Span { q_start: 3, q_len: 5, k_start: 3, k_len: 5 },
];

fn silu_f64(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Convolves the rows of both spans.
fn conv_f64(x: &[f64], w: &[f64], (channels, taps): (usize, usize), has_silu: bool) -> Vec<f64> {
    let mut y = vec![0.0; x.len()];
    for span in TWO_SPANS {
        for (n, c) in
            (span.q_start..span.q_start + span.q_len).flat_map(|n| (0..channels).map(move |c| (n, c)))
        {
            let terms = (0..taps).filter(|back| n >= span.q_start + back);
            let sum = terms.map(|back| x[(n - back) * channels + c] * w[c * taps + taps - 1 - back]).sum();
            y[n * channels + c] = if has_silu { silu_f64(sum) } else { sum };
        }
    }
    y
}

#[test]
fn of_causal_convolutions() {
    let shape = (6, 4);
    let (x, w, dy) = (normal("x", (8, 6)), normal("w", shape), normal("dy", (8, 6)));
    let (x64, w64, dy64) = (values(&x), values(&w), values(&dy));
    let view = ColumnView::all(&x);
    for conv in [ConvWeight::silu(&w), ConvWeight::plain(&w)] {
        let conv_f64 = |x: &[f64], w: &[f64]| conv_f64(x, w, shape, conv.has_silu);
        close("y", &causal_conv(view, conv, &TWO_SPANS, None).unwrap(), &conv_f64(&x64, &w64));
        let (dx, dw) = (zeros((8, 6)), zeros(shape));
        causal_conv_backward(view, conv, &dy, &TWO_SPANS, Some(&dw), ColumnViewMut::all(&dx)).unwrap();
        close("dx", &dx, &differences(&x64, |x| dot(&conv_f64(x, &w64), &dy64)));
        close("dw", &dw, &differences(&w64, |w| dot(&conv_f64(&x64, w), &dy64)));
    }
}

#[test]
fn of_sinks() {
    // Three rows of two heads.
    let (out, lse) = (normal("out", (3, 8)), normal("lse", (2, 3)));
    let (sinks, dout) = (normal("sinks", 2), normal("dout", (3, 8)));
    let [out64, lse64, sinks64, dout64] = [&out, &lse, &sinks, &dout].map(values);
    let of = |sinks: &[f64]| -> Vec<f64> {
        let factor = |row: usize, head: usize| 1.0 / (1.0 + (sinks[head] - lse64[head * 3 + row]).exp());
        out64.iter().enumerate().map(|(i, x)| x * factor(i / 8, i % 8 / 4)).collect()
    };
    let want = differences(&sinks64, |sinks| dot(&of(sinks), &dout64));
    let attended = attention_sinks(AttentionOutput { out, lse }, &sinks).unwrap();
    close("out", &attended.out, &of(&sinks64));
    let d = zeros(2);
    attention_sinks_backward(&attended, &dout, &sinks, &d).unwrap();
    close("dsinks", &d, &want);
}

#[test]
fn of_gated_norms() {
    let kind = NormKind { eps: 1e-2, unit_offset: false };
    let (x, z, w, dy) = (normal("x", (4, 21)), normal("z", (4, 21)), normal("w", 7), normal("dy", (4, 21)));
    let (x64, z64, w64, dy64) = (values(&x), values(&z), values(&w), values(&dy));
    let of = |x: &[f64], z: &[f64], w: &[f64]| -> Vec<f64> {
        norm_f64(x, w, kind).iter().zip(z).map(|(normed, z)| normed * silu_f64(*z)).collect()
    };
    let gates = ColumnView::all(&z);
    close("y", &gated_rms_norm(&x, gates, &w, 1e-2).unwrap(), &of(&x64, &z64, &w64));
    let (dz, dw) = (zeros((4, 21)), zeros(7));
    let to = ColumnViewMut::all(&dz);
    let dx = gated_rms_norm_backward(&x, gates, &w, &dy, Some(&dw), 1e-2, to).unwrap();
    close("dx", &dx, &differences(&x64, |x| dot(&of(x, &z64, &w64), &dy64)));
    close("dz", &dz, &differences(&z64, |z| dot(&of(&x64, z, &w64), &dy64)));
    close("dw", &dw, &differences(&w64, |w| dot(&of(&x64, &z64, w), &dy64)));
}

const DELTA_HEADS: DeltaHeads = DeltaHeads { num_key_heads: 1, num_value_heads: 2, key_dim: 3, value_dim: 2 };

/// The inputs of the delta rule: qkv, a, b, a_log and dt_bias.
type DeltaValues = [Vec<f64>; 5];

/// Applies the delta rule token by token.
fn delta_f64([qkv, a, b, a_log, dt_bias]: &DeltaValues) -> Vec<f64> {
    let DeltaHeads { num_value_heads, key_dim, value_dim, .. } = DELTA_HEADS;
    let mut out = vec![0.0; qkv.len() / DELTA_HEADS.conv_width() * DELTA_HEADS.value_width()];
    let unit = |x: &[f64]| -> Vec<f64> {
        let norm = (dot(x, x) + 1e-6).sqrt();
        x.iter().map(|x| x / norm).collect()
    };
    for (span, head) in TWO_SPANS.iter().flat_map(|span| (0..num_value_heads).map(move |head| (span, head))) {
        let mut state = vec![0.0; key_dim * value_dim];
        for n in span.q_start..span.q_start + span.q_len {
            let row = &qkv[n * DELTA_HEADS.conv_width()..];
            let (q, k) = (unit(&row[..key_dim]), unit(&row[key_dim..2 * key_dim]));
            let v = &row[2 * key_dim + head * value_dim..][..value_dim];
            let gate = n * num_value_heads + head;
            let beta = 1.0 / (1.0 + (-b[gate]).exp());
            let rate = a_log[head].exp() * (a[gate] + dt_bias[head]).exp().ln_1p();
            state.iter_mut().for_each(|s| *s *= (-rate).exp());
            for j in 0..value_dim {
                let read: f64 = (0..key_dim).map(|i| state[i * value_dim + j] * k[i]).sum();
                (0..key_dim).for_each(|i| state[i * value_dim + j] += k[i] * beta * (v[j] - read));
                let seen: f64 = (0..key_dim).map(|i| state[i * value_dim + j] * q[i]).sum();
                out[n * DELTA_HEADS.value_width() + head * value_dim + j] = seen / (key_dim as f64).sqrt();
            }
        }
    }
    out
}

#[test]
fn of_gated_delta() {
    let (qkv, dout) =
        (normal("qkv", (8, DELTA_HEADS.conv_width())), normal("dout", (8, DELTA_HEADS.value_width())));
    let (a, b) = (normal("a", (8, 2)), normal("b", (8, 2)));
    let (a_log, dt_bias) = (normal("a_log", 2), normal("dt_bias", 2));
    let given: DeltaValues = [&qkv, &a, &b, &a_log, &dt_bias].map(values);
    let dout64 = values(&dout);
    let [a, b] = [&a, &b].map(ColumnView::all);
    let inputs = DeltaInputs { qkv: &qkv, a, b, a_log: &a_log, dt_bias: &dt_bias };
    let output = gated_delta(inputs, DELTA_HEADS, &TWO_SPANS, None).unwrap();
    close("out", &output.out, &delta_f64(&given));

    let (da, db, dlog, dbias) = (zeros((8, 2)), zeros((8, 2)), zeros(2), zeros(2));
    let grads = DeltaParamGrads { a_log: Some(&dlog), dt_bias: Some(&dbias) };
    let [to_a, to_b] = [&da, &db].map(ColumnViewMut::all);
    let dqkv =
        gated_delta_backward(inputs, &output, &dout, DELTA_HEADS, &TWO_SPANS, grads, to_a, to_b).unwrap();
    for (i, (what, got)) in
        [("dqkv", &dqkv), ("da", &da), ("db", &db), ("da_log", &dlog), ("ddt_bias", &dbias)]
            .into_iter()
            .enumerate()
    {
        let want = differences(&given[i], |x| {
            let mut moved = given.clone();
            moved[i] = x.to_vec();
            dot(&delta_f64(&moved), &dout64)
        });
        close(what, got, &want);
    }
}

/// Rotates the q and k columns of each row by its angles; v's columns stay.
fn rotary_f64(x: &[f64], heads: Heads, angles: &[f64], half: usize) -> Vec<f64> {
    let mut y = x.to_vec();
    for (row, angles) in y.chunks_mut(heads.qkv_width()).zip(angles.chunks(half)) {
        for head in row[..heads.qk_width()].chunks_mut(heads.head_dim) {
            for (i, angle) in angles.iter().enumerate() {
                let (a, b) = (head[i], head[i + half]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + half] = b * angle.cos() + a * angle.sin();
            }
        }
    }
    y
}

#[test]
fn of_rotary() {
    let heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim: 6 };
    for half in [3, 2] {
        let (x, dy) = (normal("qkv", (4, heads.qkv_width())), normal("dy", (4, heads.qkv_width())));
        let angles = normal("angles", (4, half));
        let table =
            RotaryTable { cos: angles.cos().unwrap(), sin: angles.sin().unwrap(), interleaved: false };
        let (x64, dy64, angles) = (values(&x), values(&dy), values(&angles));
        let by_definition = Tensor::new(rotary_f64(&x64, heads, &angles, half), &Device::Cpu).unwrap();
        let by_definition = by_definition.reshape((4, heads.qkv_width())).unwrap();
        let qk = by_definition.narrow(1, 0, heads.qk_width()).unwrap();
        close("q and k", &rotary(&x, heads, None, &table).unwrap(), &values(&qk));
        let d = TensorMut::new(dy.copy().unwrap());
        rotary_backward(&x, &d, heads, None, &table).unwrap();
        close("dqkv", &d, &differences(&x64, |x| dot(&rotary_f64(x, heads, &angles, half), &dy64)));
    }
}

/// Computes attention of packed rows `[q | k | v]`.
fn attention_f64(x: &[f64], spans: &[Span], kind: AttentionKind) -> Vec<f64> {
    let (heads, dim) = (kind.heads, kind.heads.head_dim);
    let width = heads.qkv_width();
    let mut out = vec![0.0; x.len() / width * heads.q_width()];
    for span in spans {
        for (h, i) in (0..heads.num_heads).flat_map(|h| (0..span.q_len).map(move |i| (h, i))) {
            let kv = h / (heads.num_heads / heads.num_kv_heads);
            let at = |row: usize, column: usize| &x[(span.q_start + row) * width + column..][..dim];
            let q = at(i, h * dim);
            let first = kind.window.map_or(0, |window| (i + 1).saturating_sub(window));
            let score = |j: usize| {
                let score = kind.scale * dot(q, at(j, heads.q_width() + kv * dim));
                kind.softcap.map_or(score, |cap| cap * (score / cap).tanh())
            };
            let weights: Vec<f64> = (first..=i).map(|j| score(j).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let o = &mut out[(span.q_start + i) * heads.q_width() + h * dim..][..dim];
            for (j, weight) in (first..=i).zip(weights) {
                let v = at(j, heads.qk_width() + kv * dim);
                o.iter_mut().zip(v).for_each(|(o, v)| *o += weight / sum * v);
            }
        }
    }
    out
}

#[test]
fn of_attention() {
    let grouped = AttentionKind {
        heads: Heads { num_heads: 4, num_kv_heads: 2, head_dim: 4 },
        scale: 0.5,
        softcap: None,
        window: None,
    };
    let kinds = [
        grouped,
        AttentionKind { heads: Heads { num_kv_heads: 1, ..grouped.heads }, ..grouped },
        AttentionKind { window: Some(3), ..grouped },
        AttentionKind { softcap: Some(1.0), ..grouped },
        AttentionKind { softcap: Some(1.5), window: Some(4), ..grouped },
    ];
    let spans = [Span::sequence(0, 5), Span::sequence(5, 1), Span::sequence(6, 8)];
    for kind in kinds {
        let heads = kind.heads;
        let (x, dout) = (normal("qkv", (14, heads.qkv_width())), normal("dout", (14, heads.q_width())));
        let (x64, dout64) = (values(&x), values(&dout));
        let want = attention_f64(&x64, &spans, kind);
        let want_d = differences(&x64, |x| dot(&attention_f64(x, &spans, kind), &dout64));
        let range = |start, len| ColumnView { tensor: &x, start, len };
        let qkv = Qkv {
            q: range(0, heads.q_width()),
            k: range(heads.q_width(), heads.kv_width()),
            v: range(heads.qk_width(), heads.kv_width()),
        };
        for algorithm in [Attention::Flash, Attention::Eager] {
            let attended = attention(qkv, &spans, kind, algorithm).unwrap();
            close("out", &attended.out, &want);
            let d = attention_backward(qkv, &attended, &dout, &spans, kind, algorithm).unwrap();
            close("dqkv", &d, &want_d);
        }
    }
}

/// Returns the sum of the losses of rows with a target, each times its coefficient.
fn loss_f64(x: &[f64], w: &[f64], width: usize, targets: LossTargets<'_>, softcap: Option<f64>) -> f64 {
    let rows = x.chunks(width).zip(targets.ids).enumerate().filter(|(_, (_, target))| **target != IGNORE);
    let loss = |(n, (x, target)): (usize, (&[f64], &u32))| {
        let coefficient = targets.coefficients.map_or(1.0, |all| f64::from(all[n]));
        let logit = |w| softcap.map_or(dot(x, w), |cap: f64| cap * (dot(x, w) / cap).tanh());
        let logits: Vec<f64> = w.chunks(width).map(logit).collect();
        coefficient * (logits.iter().map(|l| l.exp()).sum::<f64>().ln() - logits[*target as usize])
    };
    rows.map(loss).sum()
}

#[test]
fn of_the_loss() {
    let ids = [3, IGNORE, 0, 12, 3, IGNORE, 7];
    let weights = [0.5, 3.0, 1.5, 0.0, -0.25, 1.0, 2.0];
    let unweighted = LossTargets::unweighted(&ids);
    let weighted = LossTargets { coefficients: Some(&weights), ..unweighted };
    for (softcap, targets) in
        [(None, unweighted), (Some(2.0), unweighted), (None, weighted), (Some(2.0), weighted)]
    {
        let (x, w) = (normal("x", (7, 6)), normal("w", (13, 6)));
        let (x64, w64) = (values(&x), values(&w));
        let kind = LossKind { scale: 0.2, softcap };
        let dw = zeros((13, 6));
        let output = Output { weight: &w, delta: None };
        let grads = OutputGrads { weight: Some(&dw), ..OutputGrads::default() };
        let LossAndGrad { loss, dx, .. } = linear_cross_entropy(&x, output, targets, kind, grads).unwrap();
        let want = loss_f64(&x64, &w64, 6, targets, softcap);
        let loss = loss.read().unwrap();
        assert!((loss - want).abs() < 1e-5 * want, "{loss}, by definition {want}");
        close("dx", &dx, &differences(&x64, |x| 0.2 * loss_f64(x, &w64, 6, targets, softcap)));
        close("dw", &dw, &differences(&w64, |w| 0.2 * loss_f64(&x64, w, 6, targets, softcap)));
        let frozen = linear_cross_entropy(&x, output, targets, kind, OutputGrads::default()).unwrap();
        let loss = frozen.loss.read().unwrap();
        assert!((loss - want).abs() < 1e-5 * want, "{loss} under a frozen layer, by definition {want}");
        close("dx under a frozen layer", &frozen.dx, &values(&dx));

        if targets.coefficients.is_some() {
            continue;
        }
        let scores = score_targets(&x, output, &ids, softcap).unwrap();
        let sum: f64 = scores.iter().map(|score: &TokenScore| f64::from(score.loss)).sum();
        assert_eq!(scores.len(), 5);
        assert!((sum - want).abs() < 1e-5 * want, "{sum}, by definition {want}");
    }
}
