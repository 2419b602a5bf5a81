//! The parts of a gated linear attention, at the sizes of Qwen3.5: 16 heads of 128, and a
//! convolution of four tokens. The delta rule is measured by the products of its chunks, the rest
//! by the values that they read and write.

use candle_core::DType;

use super::attention::packed;
use super::inputs::BenchInputs;
use super::{BenchShapes, TimedOp};
use crate::error::Result;
use crate::ops::causal_conv::{ConvWeight, causal_conv, causal_conv_backward};
use crate::ops::gated_delta::{DeltaHeads, DeltaInputs, DeltaParamGrads, gated_delta, gated_delta_backward};
use crate::ops::gated_norm::{gated_rms_norm, gated_rms_norm_backward};
use crate::ops::matmul::{ColumnView, ColumnViewMut};
use crate::runtime::TensorMut;

const HEADS: DeltaHeads = DeltaHeads { num_key_heads: 16, num_value_heads: 16, key_dim: 128, value_dim: 128 };
const TAPS: usize = 4;

pub(super) fn ops(shapes: &BenchShapes) -> Vec<TimedOp> {
    vec![
        delta(shapes),
        delta_gradients(shapes),
        convolved(shapes),
        convolved_gradients(shapes),
        normed(shapes),
        normed_gradients(shapes),
    ]
}

/// The inputs of the delta rule.
struct DeltaTensors {
    qkv: TensorMut,
    /// Columns of a, then of b.
    gates: TensorMut,
    a_log: TensorMut,
    dt_bias: TensorMut,
}

impl DeltaTensors {
    fn new(inputs: &BenchInputs<'_>, n: usize) -> Result<Self> {
        let values = HEADS.num_value_heads;
        Ok(DeltaTensors {
            qkv: inputs.normal(1.0, (n, HEADS.conv_width()))?,
            gates: inputs.normal(1.0, (n, 2 * values))?,
            a_log: inputs.normal_as(DType::F32, 1.0, values)?,
            dt_bias: inputs.normal_as(DType::F32, 1.0, values)?,
        })
    }

    fn inputs(&self) -> DeltaInputs<'_> {
        let columns = |start| ColumnView { tensor: &self.gates, start, len: HEADS.num_value_heads };
        DeltaInputs {
            qkv: &self.qkv,
            a: columns(0),
            b: columns(HEADS.num_value_heads),
            a_log: &self.a_log,
            dt_bias: &self.dt_bias,
        }
    }
}

fn delta_shape(shapes: &BenchShapes) -> String {
    let DeltaHeads { num_key_heads, num_value_heads, key_dim, .. } = HEADS;
    let row = shapes.max_seq_len.min(shapes.tokens);
    format!("{} in rows of {row}, {num_key_heads}/{num_value_heads} heads of {key_dim}", shapes.tokens)
}

fn delta(shapes: &BenchShapes) -> TimedOp {
    let (spans, n) = (packed(shapes), shapes.tokens);
    let what = ("gated_delta", delta_shape(shapes), shapes.dtype);
    TimedOp::multiplying(HEADS.forward_flops(n) as u64, what, move |inputs| {
        let (x, spans) = (DeltaTensors::new(inputs, n)?, spans.clone());
        Ok(Box::new(move || gated_delta(x.inputs(), HEADS, &spans, None).map(drop)))
    })
}

fn delta_gradients(shapes: &BenchShapes) -> TimedOp {
    let (spans, n) = (packed(shapes), shapes.tokens);
    let what = ("gated_delta_backward", delta_shape(shapes), shapes.dtype);
    TimedOp::multiplying(HEADS.backward_flops(n) as u64, what, move |inputs| {
        let (x, spans) = (DeltaTensors::new(inputs, n)?, spans.clone());
        let output = gated_delta(x.inputs(), HEADS, &spans, None)?;
        let dout = inputs.normal(1.0, (n, HEADS.value_width()))?;
        let values = HEADS.num_value_heads;
        let dgates = inputs.normal(1.0, (n, 2 * values))?;
        let grads = [inputs.zeros(values)?, inputs.zeros(values)?];
        Ok(Box::new(move || {
            let to = |start| ColumnViewMut { tensor: &dgates, start, len: values };
            let grads = DeltaParamGrads { a_log: Some(&grads[0]), dt_bias: Some(&grads[1]) };
            let (da, db) = (to(0), to(values));
            gated_delta_backward(x.inputs(), &output, &dout, HEADS, &spans, grads, da, db).map(drop)
        }))
    })
}

fn convolved(shapes: &BenchShapes) -> TimedOp {
    let (spans, n, width) = (packed(shapes), shapes.tokens, HEADS.conv_width());
    let what = ("causal_conv", format!("{n}x{width}, {TAPS} taps"), shapes.dtype);
    TimedOp::moving(shapes.bytes(2 * n * width), what, move |inputs| {
        let (w, spans) = (inputs.normal(0.5, (width, TAPS))?, spans.clone());
        let x = inputs.sets(|_| inputs.normal(1.0, (n, width)))?;
        x.calls(move |x| causal_conv(ColumnView::all(x), ConvWeight::silu(&w), &spans, None).map(drop))
    })
}

fn convolved_gradients(shapes: &BenchShapes) -> TimedOp {
    let (spans, n, width) = (packed(shapes), shapes.tokens, HEADS.conv_width());
    let what = ("causal_conv_backward", format!("{n}x{width}, {TAPS} taps, trained"), shapes.dtype);
    TimedOp::moving(shapes.bytes(3 * n * width), what, move |inputs| {
        let (w, dw) = (inputs.normal(0.5, (width, TAPS))?, inputs.zeros((width, TAPS))?);
        let spans = spans.clone();
        let sets = inputs.sets(|_| {
            let one = || inputs.normal(1.0, (n, width));
            Ok([one()?, one()?, one()?])
        })?;
        sets.calls(move |[x, dy, dx]| {
            let (conv, to) = (ConvWeight::silu(&w), ColumnViewMut::all(dx));
            causal_conv_backward(ColumnView::all(x), conv, dy, &spans, Some(&dw), to)
        })
    })
}

fn norm_shape(shapes: &BenchShapes) -> String {
    format!("{}, {} heads of {}", shapes.tokens, HEADS.num_value_heads, HEADS.value_dim)
}

fn normed(shapes: &BenchShapes) -> TimedOp {
    let (n, width) = (shapes.tokens, HEADS.value_width());
    let what = ("gated_rms_norm", norm_shape(shapes), shapes.dtype);
    TimedOp::moving(shapes.bytes(3 * n * width), what, move |inputs| {
        let w = inputs.normal(1.0, HEADS.value_dim)?;
        let sets = inputs.sets(|_| Ok([inputs.normal(1.0, (n, width))?, inputs.normal(1.0, (n, width))?]))?;
        sets.calls(move |[x, z]| gated_rms_norm(x, ColumnView::all(z), &w, 1e-6).map(drop))
    })
}

fn normed_gradients(shapes: &BenchShapes) -> TimedOp {
    let (n, width) = (shapes.tokens, HEADS.value_width());
    let what = ("gated_rms_norm_backward", format!("{}, trained", norm_shape(shapes)), shapes.dtype);
    TimedOp::moving(shapes.bytes(5 * n * width), what, move |inputs| {
        let (w, dw) = (inputs.normal(1.0, HEADS.value_dim)?, inputs.zeros(HEADS.value_dim)?);
        let sets = inputs.sets(|_| {
            let one = || inputs.normal(1.0, (n, width));
            Ok([one()?, one()?, one()?, one()?])
        })?;
        sets.calls(move |[x, z, dy, dz]| {
            let (z, dz) = (ColumnView::all(z), ColumnViewMut::all(dz));
            gated_rms_norm_backward(x, z, &w, dy, Some(&dw), 1e-6, dz).map(drop)
        })
    })
}
