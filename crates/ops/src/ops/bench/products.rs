//! Ops measured by their multiplications: products of a block's linear layers, dense and quantized,
//! and the output layer with its loss.

use candle_core::DType;

use super::inputs::{BenchInputs, token_ids};
use super::{BenchShapes, Repeat, TimedOp};
use crate::backends::packed_gemm::{self, MicroKernel};
use crate::error::Result;
use crate::instruction_set::InstructionSet;
use crate::ops::case::CaseRunner;
use crate::ops::cross_entropy::{
    LossKind, LossTargets, Output, OutputGrads, linear_cross_entropy, logits, score_targets,
};
use crate::ops::matmul::{Addend, ColumnView, ColumnViewMut, LowRank, Transpose, matmul};
use crate::ops::matmul_fp8::{Fp8Rows, matmul_fp8, quantize_fp8};
use crate::ops::matmul_quantized::cases::quantized;
use crate::ops::matmul_quantized::{
    Quantized, Weight, matmul_weight, matmul_weight_plus_low_rank, matmul_weights,
};
use crate::quant::QuantFormat;
use crate::runtime::TensorMut;

/// Standard deviation of weights, as in initialized models.
const WEIGHTS: f32 = 0.02;

pub(super) fn ops(shapes: &BenchShapes) -> Vec<TimedOp> {
    let mut ops = linear_layers(shapes);
    ops.extend([linear_with_adapter(shapes), quantized_linear(shapes), quantized_group(shapes)]);
    ops.extend([codes(shapes), fp8_linear(shapes, Transpose::Nt), fp8_linear(shapes, Transpose::Nn)]);
    ops.extend(losses(shapes));
    ops.extend([scores(shapes), next_token(shapes)]);
    ops
}

/// Times the forward of the widest linear layer of a block: the multiply rate of a GPU.
pub(super) fn gate_proj(shapes: &BenchShapes) -> TimedOp {
    let widths = shapes.widths;
    LinearProduct::new("gate_proj", Transpose::Nt, widths.hidden_size, widths.intermediate_size).timed(shapes)
}

/// Returns the peak operations per second of the processor, by the multiply instructions for this
/// dtype.
pub(super) fn peak_flops(dtype: DType) -> f64 {
    packed_gemm::peak_flops(MicroKernel::of(InstructionSet::in_use(), dtype == DType::BF16))
}

/// A product of a linear layer with N rows of activations.
#[derive(Debug, Clone, Copy)]
struct LinearProduct {
    name: &'static str,
    form: Transpose,
    /// Width of the layer's input.
    inputs: usize,
    /// Width of its output.
    outputs: usize,
}

impl LinearProduct {
    fn new(name: &'static str, form: Transpose, inputs: usize, outputs: usize) -> Self {
        LinearProduct { name, form, inputs, outputs }
    }

    fn timed(self, shapes: &BenchShapes) -> TimedOp {
        let (n, dtype) = (shapes.tokens, shapes.dtype);
        let gradient = match self.form {
            Transpose::Nt => "",
            Transpose::Nn => ", dx",
            Transpose::Tn => ", dw",
        };
        let shape = format!("{n}x{} to {}, {}{gradient}", self.inputs, self.outputs, self.name);
        let flops = (2 * n * self.inputs * self.outputs) as u64;
        TimedOp::multiplying(flops, ("matmul", shape, dtype), move |inputs| self.repeat(n, inputs))
    }

    fn repeat(self, n: usize, inputs: &BenchInputs<'_>) -> Result<Repeat> {
        let (x, y) = (inputs.normal(1.0, (n, self.inputs))?, inputs.normal(1.0, (n, self.outputs))?);
        let (form, shape) = (self.form, (self.outputs, self.inputs));
        // The gradient of a weight is accumulated in f32.
        let is_gradient = form == Transpose::Tn;
        let w = if is_gradient { inputs.zeros(shape)? } else { inputs.normal(WEIGHTS, shape)? };
        let [dst, a, b] = match form {
            Transpose::Nt => [y, x, w],
            Transpose::Nn => [x, y, w],
            Transpose::Tn => [w, y, x],
        };
        Ok(Box::new(move || {
            let (a, b) = (ColumnView::all(&a), ColumnView::all(&b));
            matmul(ColumnViewMut::all(&dst), a, b, form, 1.0, Addend::destination_if(is_gradient))
        }))
    }
}

fn linear_layers(shapes: &BenchShapes) -> Vec<TimedOp> {
    let widths = shapes.widths;
    let (d, f, heads) = (widths.hidden_size, widths.intermediate_size, widths.heads);
    let products = [
        LinearProduct::new("q_proj", Transpose::Nt, d, heads.q_width()),
        LinearProduct::new("k_proj", Transpose::Nt, d, heads.kv_width()),
        LinearProduct::new("gate_proj", Transpose::Nt, d, f),
        LinearProduct::new("down_proj", Transpose::Nt, f, d),
        LinearProduct::new("gate_proj", Transpose::Nn, d, f),
        LinearProduct::new("gate_proj", Transpose::Tn, d, f),
    ];
    products.map(|product| product.timed(shapes)).into()
}

/// Returns a quantized weight.
pub(super) fn weight_in(
    format: QuantFormat,
    inputs: &BenchInputs<'_>,
    shape: (usize, usize),
) -> Result<Quantized> {
    let runner = CaseRunner { device: inputs.device, dtype: inputs.dtype, first: 0 };
    let [here, _] = quantized(&runner, format, shape)?;
    Ok(here)
}

/// Returns a weight in NF4 with nested scales, as in QLoRA.
fn nf4(inputs: &BenchInputs<'_>, shape: (usize, usize)) -> Result<Quantized> {
    weight_in(QuantFormat::default(), inputs, shape)
}

fn quantized_linear(shapes: &BenchShapes) -> TimedOp {
    let (n, d, f) = (shapes.tokens, shapes.widths.hidden_size, shapes.widths.intermediate_size);
    let shape = format!("{n}x{d} to {f}, gate_proj in nf4");
    TimedOp::multiplying((2 * n * d * f) as u64, ("matmul_weight", shape, shapes.dtype), move |inputs| {
        let (x, y) = (inputs.normal(1.0, (n, d))?, inputs.normal(1.0, (n, f))?);
        let weight = nf4(inputs, (f, d))?;
        Ok(Box::new(move || {
            let (y, x) = (ColumnViewMut::all(&y), ColumnView::all(&x));
            matmul_weight(y, x, Weight::Quantized(&weight), Transpose::Nt, Addend::Nothing)
        }))
    })
}

/// Times a dense weight with an adapter of rank 16.
fn linear_with_adapter(shapes: &BenchShapes) -> TimedOp {
    let (n, d, f) = (shapes.tokens, shapes.widths.hidden_size, shapes.widths.intermediate_size);
    let what = ("matmul_weight_plus_low_rank", format!("{n}x{d} to {f}, gate_proj and r 16"), shapes.dtype);
    TimedOp::multiplying((2 * n * d * f) as u64, what, move |inputs| {
        let (x, y) = (inputs.normal(1.0, (n, d))?, inputs.normal(1.0, (n, f))?);
        let weight = inputs.normal(WEIGHTS, (f, d))?;
        let (u, b) =
            (inputs.normal_as(DType::F32, 1.0, (n, 16))?, inputs.normal_as(DType::F32, WEIGHTS, (f, 16))?);
        Ok(Box::new(move || {
            let low_rank = LowRank { u: ColumnView::all(&u), factor: &b, scale: 2.0 };
            let (y, x, weight) = (ColumnViewMut::all(&y), ColumnView::all(&x), Weight::Dense(&weight));
            matmul_weight_plus_low_rank(y, x, weight, Transpose::Nt, Addend::Nothing, low_rank)
        }))
    })
}

/// Times q, k and v, whose weights form one product on a GPU.
fn quantized_group(shapes: &BenchShapes) -> TimedOp {
    let (n, d, heads) = (shapes.tokens, shapes.widths.hidden_size, shapes.widths.heads);
    let out = [heads.q_width(), heads.kv_width(), heads.kv_width()];
    let all = heads.qkv_width();
    let what = ("matmul_weights", format!("{n}x{d} to {all}, q, k, v in nf4"), shapes.dtype);
    TimedOp::multiplying((2 * n * d * all) as u64, what, move |inputs| {
        let (x, y) = (inputs.normal(1.0, (n, d))?, inputs.normal(1.0, (n, all))?);
        let weights = out.into_iter().map(|out| nf4(inputs, (out, d))).collect::<Result<Vec<_>>>()?;
        Ok(Box::new(move || {
            let weights: Vec<_> = weights.iter().map(Weight::Quantized).collect();
            let (y, x) = (ColumnViewMut::all(&y), ColumnView::all(&x));
            matmul_weights(y, x, &weights, Transpose::Nt, Addend::Nothing)
        }))
    })
}

/// Times the codes of the input of q, k and v.
fn codes(shapes: &BenchShapes) -> TimedOp {
    let (n, d) = (shapes.tokens, shapes.widths.hidden_size);
    let bytes = shapes.bytes(n * d) + Fp8Rows::bytes(n, d);
    TimedOp::moving(bytes, ("quantize_fp8", format!("{n}x{d}"), shapes.dtype), move |inputs| {
        let x = inputs.normal(1.0, (n, d))?;
        Ok(Box::new(move || quantize_fp8(ColumnView::all(&x), None).map(drop)))
    })
}

/// Times a product with a frozen weight in fp8, with the codes of the activations.
fn fp8_linear(shapes: &BenchShapes, form: Transpose) -> TimedOp {
    let (n, d, f) = (shapes.tokens, shapes.widths.hidden_size, shapes.widths.intermediate_size);
    let gradient = if form == Transpose::Nn { ", dx" } else { "" };
    let shape = format!("{n}x{d} to {f}, gate_proj{gradient}");
    TimedOp::multiplying((2 * n * d * f) as u64, ("matmul_fp8", shape, shapes.dtype), move |inputs| {
        let (x, y) = (inputs.normal(1.0, (n, d))?, inputs.normal(1.0, (n, f))?);
        let weight = inputs.normal(WEIGHTS, (f, d))?;
        let weight = Fp8Rows::of(&[Weight::Dense(&weight)])?;
        let [dst, a] = if form == Transpose::Nt { [y, x] } else { [x, y] };
        Ok(Box::new(move || {
            let (dst, a) = (ColumnViewMut::all(&dst), ColumnView::all(&a));
            matmul_fp8(dst, a, &weight, form, Addend::Nothing)
        }))
    })
}

/// The output layer's inputs: the last hidden states and the weight.
struct HeadInputs {
    x: TensorMut,
    weight: TensorMut,
    targets: Vec<u32>,
}

impl HeadInputs {
    fn new(inputs: &BenchInputs<'_>, n: usize, (vocab, width): (usize, usize)) -> Result<Self> {
        Ok(HeadInputs {
            x: inputs.normal(1.0, (n, width))?,
            weight: inputs.normal(WEIGHTS, (vocab, width))?,
            targets: token_ids(n, vocab, 0),
        })
    }

    fn output(&self) -> Output<'_> {
        Output { weight: &self.weight, delta: None }
    }
}

/// Times the loss through three output layers: frozen; under a soft-cap (all logits of a chunk of
/// rows are stored, as for an adapter or single rows that train); and with a trained weight. Counts
/// the products of the logits, of the gradient of `x`, and of the weight's gradient if trained.
fn losses(shapes: &BenchShapes) -> [TimedOp; 3] {
    let (n, d, vocab) = (shapes.tokens, shapes.widths.hidden_size, shapes.widths.vocab_size);
    let paths = [("frozen", 2, None), ("soft-cap", 2, Some(30.0)), ("trained", 3, None)];
    paths.map(|(path, products, softcap)| {
        let what = ("linear_cross_entropy", format!("{n}x{d} to {vocab}, {path}"), shapes.dtype);
        TimedOp::multiplying((2 * products * n * d * vocab) as u64, what, move |inputs| {
            let head = HeadInputs::new(inputs, n, (vocab, d))?;
            let dweight = (products == 3).then(|| inputs.zeros((vocab, d))).transpose()?;
            let kind = LossKind { scale: 1.0 / n as f64, softcap };
            Ok(Box::new(move || {
                let targets = LossTargets::unweighted(&head.targets);
                let grads = OutputGrads { weight: dweight.as_ref(), ..OutputGrads::default() };
                linear_cross_entropy(&head.x, head.output(), targets, kind, grads).map(drop)
            }))
        })
    })
}

fn scores(shapes: &BenchShapes) -> TimedOp {
    let (n, d, vocab) = (shapes.tokens, shapes.widths.hidden_size, shapes.widths.vocab_size);
    let what = ("score_targets", format!("{n}x{d} to {vocab}"), shapes.dtype);
    TimedOp::multiplying((2 * n * d * vocab) as u64, what, move |inputs| {
        let head = HeadInputs::new(inputs, n, (vocab, d))?;
        Ok(Box::new(move || score_targets(&head.x, head.output(), &head.targets, None).map(drop)))
    })
}

/// Times the logits of one token, as in generation, dominated by reading the weight.
fn next_token(shapes: &BenchShapes) -> TimedOp {
    let (d, vocab) = (shapes.widths.hidden_size, shapes.widths.vocab_size);
    let bytes = shapes.bytes((vocab + 1) * d) + DType::F32.size_in_bytes() * vocab;
    TimedOp::moving(bytes, ("logits", format!("1x{d} to {vocab}"), shapes.dtype), move |inputs| {
        let head = HeadInputs::new(inputs, 1, (vocab, d))?;
        Ok(Box::new(move || logits(&head.x, head.output(), None).map(drop)))
    })
}
