//! Ops measured by the activations that they read and write: norms, rotation, the gated product,
//! dropout, sums.

use candle_core::DType;

use super::{BenchShapes, TimedOp};
use crate::error::Result;
use crate::ops::activation::{PlainActivation, activate, activate_backward};
use crate::ops::dora::{magnitude_backward, scale_columns};
use crate::ops::dropout::{Dropout, dropout};
use crate::ops::elementwise::{add, scaled, stack_rows};
use crate::ops::glu::{Activation, glu, glu_backward};
use crate::ops::layer_norm::{LayerNorm, LayerNormGradients, layer_norm, layer_norm_backward};
use crate::ops::matmul::{ColumnView, ColumnViewMut, add_bias, empty, sum_rows};
use crate::ops::noise::{Noise, add_noise};
use crate::ops::rms_norm::{NormKind, rms_norm, rms_norm_backward};
use crate::ops::rotary::{QkNorm, rotary, rotary_backward};
use crate::ops::xielu::{xielu, xielu_backward};
use crate::runtime::TensorMut;
use crate::runtime::rng::RngStream;

const NORM: NormKind = NormKind { eps: 1e-6, unit_offset: false };
const F32_BYTES: usize = 4;
/// The rank of adapters.
const RANK: usize = 16;

pub(super) fn ops(shapes: &BenchShapes) -> Vec<TimedOp> {
    vec![
        norm(shapes),
        norm_backward(shapes, NormOutput::Gradient),
        norm_backward(shapes, NormOutput::NormToo),
        norm_backward(shapes, NormOutput::WeightToo),
        centered_norm(shapes),
        centered_norm_backward(shapes),
        rotation(shapes, false),
        rotation(shapes, true),
        rotation_backward(shapes, false),
        rotation_backward(shapes, true),
        gated(shapes),
        gated_backward(shapes),
        activated(shapes),
        activated_backward(shapes),
        curved(shapes),
        curved_backward(shapes),
        dropped(shapes),
        noisy(shapes),
        residual_sum(shapes),
        scaled_copy(shapes),
        stacked_rows(shapes),
        bias(shapes),
        bias_gradient(shapes),
        magnitudes(shapes),
        magnitude_gradient(shapes),
    ]
}

/// Returns the shape of the activations between blocks as text, and the bytes of `times` of them.
fn hidden(shapes: &BenchShapes, times: usize) -> (String, usize) {
    let (n, d) = (shapes.tokens, shapes.widths.hidden_size);
    (format!("{n}x{d}"), times * shapes.bytes(n * d))
}

fn norm(shapes: &BenchShapes) -> TimedOp {
    let (n, d, (shape, bytes)) = (shapes.tokens, shapes.widths.hidden_size, hidden(shapes, 2));
    TimedOp::moving(bytes + shapes.bytes(d), ("rms_norm", shape, shapes.dtype), move |inputs| {
        let weight = inputs.normal(1.0, d)?;
        inputs.sets(|_| inputs.normal(1.0, (n, d)))?.calls(move |x| rms_norm(x, &weight, NORM).map(drop))
    })
}

/// The results of a norm's backward.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NormOutput {
    /// The gradient of its input, with that around the norm.
    Gradient,
    /// Also the norm itself.
    NormToo,
    /// Also the gradient of its weight.
    WeightToo,
}

fn norm_backward(shapes: &BenchShapes, output: NormOutput) -> TimedOp {
    let (n, d) = (shapes.tokens, shapes.widths.hidden_size);
    let (extra, extra_bytes) = match output {
        NormOutput::Gradient => ("", 0),
        NormOutput::NormToo => (", normed", shapes.bytes(n * d)),
        NormOutput::WeightToo => (", weight trained", 2 * F32_BYTES * d),
    };
    let ((shape, bytes), dtype) = (hidden(shapes, 4), shapes.dtype);
    let what = ("rms_norm_backward", format!("{shape}, residual{extra}"), dtype);
    TimedOp::moving(bytes + shapes.bytes(d) + extra_bytes, what, move |inputs| {
        let (weight, dweight) = (inputs.normal(1.0, d)?, inputs.zeros(d)?);
        let sets = inputs.sets(|_| {
            let one = || inputs.normal(1.0, (n, d));
            Ok([one()?, one()?, one()?])
        })?;
        sets.calls(move |[x, dy, residual]| {
            let dweight = (output == NormOutput::WeightToo).then_some(&dweight);
            let normed =
                (output == NormOutput::NormToo).then(|| empty(n, d, dtype, x.device())).transpose()?;
            rms_norm_backward(x, &weight, dy, Some(residual), dweight, normed.as_ref(), NORM).map(drop)
        })
    })
}

fn centered_norm(shapes: &BenchShapes) -> TimedOp {
    let (n, d, (shape, bytes)) = (shapes.tokens, shapes.widths.hidden_size, hidden(shapes, 2));
    TimedOp::moving(bytes + shapes.bytes(2 * d), ("layer_norm", shape, shapes.dtype), move |inputs| {
        let (weight, bias) = (inputs.normal(1.0, d)?, inputs.normal(1.0, d)?);
        let sets = inputs.sets(|_| inputs.normal(1.0, (n, d)))?;
        sets.calls(move |x| {
            layer_norm(x, LayerNorm { weight: &weight, bias: Some(&bias), kind: NORM }).map(drop)
        })
    })
}

/// Times the backward with the gradient around the norm and those of its parameters.
fn centered_norm_backward(shapes: &BenchShapes) -> TimedOp {
    let (n, d, (shape, bytes)) = (shapes.tokens, shapes.widths.hidden_size, hidden(shapes, 5));
    let what = ("layer_norm_backward", format!("{shape}, residual, trained"), shapes.dtype);
    TimedOp::moving(bytes + shapes.bytes(2 * d) + 4 * F32_BYTES * d, what, move |inputs| {
        let (weight, bias) = (inputs.normal(1.0, d)?, inputs.normal(1.0, d)?);
        let (dweight, dbias) = (inputs.zeros(d)?, inputs.zeros(d)?);
        let sets = inputs.sets(|_| {
            let one = || inputs.normal(1.0, (n, d));
            Ok([one()?, one()?, one()?])
        })?;
        sets.calls(move |[x, dy, residual]| {
            let norm = LayerNorm { weight: &weight, bias: Some(&bias), kind: NORM };
            let grads = LayerNormGradients { weight: Some(&dweight), bias: Some(&dbias) };
            layer_norm_backward(x, norm, dy, Some(residual), grads, None).map(drop)
        })
    })
}

/// Returns the bytes of the q and k columns, `times` times, of the angles, and of both norms'
/// weights if `normed`.
fn rotary_bytes(shapes: &BenchShapes, times: usize, normed: bool) -> usize {
    let (n, heads) = (shapes.tokens, shapes.widths.heads);
    let weights = if normed { shapes.bytes(2 * heads.head_dim) } else { 0 };
    // cos and sin for half as many pairs as a head has values.
    times * shapes.bytes(n * heads.qk_width()) + F32_BYTES * n * heads.head_dim + weights
}

fn rotary_shape(shapes: &BenchShapes, normed: bool) -> String {
    let (n, heads) = (shapes.tokens, shapes.widths.heads);
    let (q, k) = (heads.num_heads, heads.num_kv_heads);
    format!("{n}, {q}+{k} heads of {}{}", heads.head_dim, if normed { ", normed" } else { "" })
}

/// Returns the frozen weights of the norms of q and of k.
fn norms_of(weights: &Option<[TensorMut; 2]>) -> Option<QkNorm<'_>> {
    weights.as_ref().map(|[q, k]| QkNorm { q: (&**q, None), k: (&**k, None), kind: NORM })
}

fn rotation(shapes: &BenchShapes, normed: bool) -> TimedOp {
    let (n, heads) = (shapes.tokens, shapes.widths.heads);
    let what = ("rotary", rotary_shape(shapes, normed), shapes.dtype);
    TimedOp::moving(rotary_bytes(shapes, 2, normed), what, move |inputs| {
        let table = inputs.rotary_table(n, heads.head_dim / 2)?;
        let weight = || inputs.normal(1.0, heads.head_dim);
        let weights = if normed { Some([weight()?, weight()?]) } else { None };
        let x = inputs.sets(|_| inputs.normal(1.0, (n, heads.qkv_width())))?;
        x.calls(move |x| rotary(x, heads, norms_of(&weights), &table).map(drop))
    })
}

/// Times the backward in place: a gradient is the result of the previous run. A rotation, and a
/// norm's backward with unit values, keep its magnitude.
fn rotation_backward(shapes: &BenchShapes, normed: bool) -> TimedOp {
    let (n, heads) = (shapes.tokens, shapes.widths.heads);
    let what = ("rotary_backward", rotary_shape(shapes, normed), shapes.dtype);
    // Only the norms read the raw projection.
    let times = if normed { 3 } else { 2 };
    TimedOp::moving(rotary_bytes(shapes, times, normed), what, move |inputs| {
        let table = inputs.rotary_table(n, heads.head_dim / 2)?;
        let weight = || -> Result<TensorMut> {
            Ok(TensorMut::new(inputs.zeros(heads.head_dim)?.ones_like()?.to_dtype(inputs.dtype)?))
        };
        let weights = if normed { Some([weight()?, weight()?]) } else { None };
        let sets = inputs.sets(|_| {
            let width = heads.qkv_width();
            Ok((inputs.signs((n, width))?, inputs.normal(1.0, (n, width))?))
        })?;
        sets.calls(move |(raw, d)| rotary_backward(raw, d, heads, norms_of(&weights), &table))
    })
}

fn gated(shapes: &BenchShapes) -> TimedOp {
    let (n, f) = (shapes.tokens, shapes.widths.intermediate_size);
    let what = ("glu", format!("{n}x{}, silu", 2 * f), shapes.dtype);
    TimedOp::moving(shapes.bytes(3 * n * f), what, move |inputs| {
        inputs.sets(|_| inputs.normal(1.0, (n, 2 * f)))?.calls(move |x| glu(x, Activation::Silu).map(drop))
    })
}

/// Times the backward in place: from the second run on, the gradient is the gated product.
fn gated_backward(shapes: &BenchShapes) -> TimedOp {
    let (n, f) = (shapes.tokens, shapes.widths.intermediate_size);
    let what = ("glu_backward", format!("{n}x{}, silu", 2 * f), shapes.dtype);
    TimedOp::moving(shapes.bytes(6 * n * f), what, move |inputs| {
        let sets = inputs.sets(|_| Ok((inputs.normal(1.0, (n, 2 * f))?, inputs.normal(1.0, (n, f))?)))?;
        sets.calls(move |(x, dh)| glu_backward(x, dh, Activation::Silu).map(drop))
    })
}

fn activated(shapes: &BenchShapes) -> TimedOp {
    let (n, f) = (shapes.tokens, shapes.widths.intermediate_size);
    TimedOp::moving(
        shapes.bytes(2 * n * f),
        ("activate", format!("{n}x{f}, gelu"), shapes.dtype),
        move |inputs| {
            let sets = inputs.sets(|_| inputs.normal(1.0, (n, f)))?;
            sets.calls(move |x| activate(x, PlainActivation::Gelu).map(drop))
        },
    )
}

/// Times the backward in place: from the second run on, the gradient is the activated value.
fn activated_backward(shapes: &BenchShapes) -> TimedOp {
    let (n, f) = (shapes.tokens, shapes.widths.intermediate_size);
    let what = ("activate_backward", format!("{n}x{f}, gelu"), shapes.dtype);
    TimedOp::moving(shapes.bytes(4 * n * f), what, move |inputs| {
        let sets = inputs.sets(|_| Ok((inputs.normal(1.0, (n, f))?, inputs.normal(1.0, (n, f))?)))?;
        sets.calls(move |(x, dh)| activate_backward(x, dh, PlainActivation::Gelu).map(drop))
    })
}

fn curved(shapes: &BenchShapes) -> TimedOp {
    let (n, f) = (shapes.tokens, shapes.widths.intermediate_size);
    TimedOp::moving(shapes.bytes(2 * n * f), ("xielu", format!("{n}x{f}"), shapes.dtype), move |inputs| {
        let (sets, curve) =
            (inputs.sets(|_| inputs.normal(1.0, (n, f)))?, inputs.normal_as(DType::F32, 0.5, 4)?);
        sets.calls(move |x| xielu(x, &curve).map(drop))
    })
}

/// Like [`activated_backward`], with the gradients of the curvatures.
fn curved_backward(shapes: &BenchShapes) -> TimedOp {
    let (n, f) = (shapes.tokens, shapes.widths.intermediate_size);
    let what = ("xielu_backward", format!("{n}x{f}, trained"), shapes.dtype);
    TimedOp::moving(shapes.bytes(4 * n * f), what, move |inputs| {
        let sets = inputs.sets(|_| Ok((inputs.normal(1.0, (n, f))?, inputs.normal(1.0, (n, f))?)))?;
        let (curve, dcurve) = (inputs.normal_as(DType::F32, 0.5, 4)?, inputs.zeros(2)?);
        sets.calls(move |(x, dh)| xielu_backward(x, dh, &curve, Some(&dcurve)).map(drop))
    })
}

fn dropped(shapes: &BenchShapes) -> TimedOp {
    let (n, d, (shape, bytes)) = (shapes.tokens, shapes.widths.hidden_size, hidden(shapes, 2));
    let site = Dropout { p: 0.05, stream: RngStream::new(0), first_token: 0 };
    TimedOp::moving(bytes, ("dropout", shape, shapes.dtype), move |inputs| {
        inputs.sets(|_| inputs.normal(1.0, (n, d)))?.calls(move |x| dropout(x, site).map(drop))
    })
}

fn noisy(shapes: &BenchShapes) -> TimedOp {
    let (n, d, (shape, bytes)) = (shapes.tokens, shapes.widths.hidden_size, hidden(shapes, 2));
    TimedOp::moving(bytes, ("add_noise", shape, shapes.dtype), move |inputs| {
        let bounds = vec![0.1; n];
        inputs.sets(|_| inputs.normal(1.0, (n, d)))?.calls(move |x| {
            let noise = Noise { bounds: &bounds, stream: RngStream::new(0), first_token: 0 };
            add_noise(x, noise).map(drop)
        })
    })
}

fn residual_sum(shapes: &BenchShapes) -> TimedOp {
    let (n, d, (shape, bytes)) = (shapes.tokens, shapes.widths.hidden_size, hidden(shapes, 3));
    TimedOp::moving(bytes, ("add", shape, shapes.dtype), move |inputs| {
        let sets = inputs.sets(|_| Ok((inputs.normal(1.0, (n, d))?, inputs.normal(1.0, (n, d))?)))?;
        sets.calls(move |(a, b)| add(a, b).map(drop))
    })
}

fn scaled_copy(shapes: &BenchShapes) -> TimedOp {
    let (n, d, (shape, bytes)) = (shapes.tokens, shapes.widths.hidden_size, hidden(shapes, 2));
    TimedOp::moving(bytes, ("scaled", shape, shapes.dtype), move |inputs| {
        inputs.sets(|_| inputs.normal(1.0, (n, d)))?.calls(move |x| scaled(x, 0.22).map(drop))
    })
}

/// Times the copy of the A of two adapters with one input into one matrix.
fn stacked_rows(shapes: &BenchShapes) -> TimedOp {
    let d = shapes.widths.hidden_size;
    let what = ("stack_rows", format!("2 of {RANK}x{d}"), shapes.dtype);
    TimedOp::moving(shapes.bytes(4 * RANK * d), what, move |inputs| {
        let sets = inputs.sets(|_| Ok([inputs.normal(1.0, (RANK, d))?, inputs.normal(1.0, (RANK, d))?]))?;
        sets.calls(|[a, b]| stack_rows(&[&**a, &**b]).map(drop))
    })
}

/// Adds zeros, since the op is in place.
fn bias(shapes: &BenchShapes) -> TimedOp {
    let (n, d, (shape, bytes)) = (shapes.tokens, shapes.widths.hidden_size, hidden(shapes, 2));
    TimedOp::moving(bytes + shapes.bytes(d), ("add_bias", shape, shapes.dtype), move |inputs| {
        let bias = inputs.normal(0.0, d)?;
        inputs.sets(|_| inputs.normal(1.0, (n, d)))?.calls(move |y| add_bias(ColumnViewMut::all(y), &bias))
    })
}

fn bias_gradient(shapes: &BenchShapes) -> TimedOp {
    let (n, d, (shape, bytes)) = (shapes.tokens, shapes.widths.hidden_size, hidden(shapes, 1));
    TimedOp::moving(bytes + 2 * F32_BYTES * d, ("sum_rows", shape, shapes.dtype), move |inputs| {
        let grad = inputs.zeros(d)?;
        inputs.sets(|_| inputs.normal(1.0, (n, d)))?.calls(move |dy| sum_rows(&grad, ColumnView::all(dy)))
    })
}

/// Times DoRA's magnitudes on the columns of a layer's output.
fn magnitudes(shapes: &BenchShapes) -> TimedOp {
    let (n, d, (shape, bytes)) = (shapes.tokens, shapes.widths.hidden_size, hidden(shapes, 2));
    TimedOp::moving(bytes + F32_BYTES * d, ("scale_columns", shape, shapes.dtype), move |inputs| {
        let factors = inputs.normal_as(DType::F32, 1.0, d)?;
        let sets = inputs.sets(|_| Ok((inputs.normal(1.0, (n, d))?, inputs.normal(1.0, (n, d))?)))?;
        sets.calls(move |(y, x)| scale_columns(ColumnViewMut::all(y), ColumnView::all(x), &factors, false))
    })
}

fn magnitude_gradient(shapes: &BenchShapes) -> TimedOp {
    let (n, d, (shape, bytes)) = (shapes.tokens, shapes.widths.hidden_size, hidden(shapes, 2));
    TimedOp::moving(bytes + 3 * F32_BYTES * d, ("magnitude_backward", shape, shapes.dtype), move |inputs| {
        let (grad, norm) = (inputs.zeros(d)?, inputs.zeros(d)?.ones_like()?);
        let sets = inputs.sets(|_| Ok((inputs.normal(1.0, (n, d))?, inputs.normal(1.0, (n, d))?)))?;
        sets.calls(move |(dy, x)| magnitude_backward(&grad, ColumnView::all(dy), x, &norm))
    })
}
