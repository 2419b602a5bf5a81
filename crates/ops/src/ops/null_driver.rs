//! Operations on tensors without elements must not call the GPU: CUDA refuses a grid without blocks
//! and a matrix without rows. Such tensors occur, for example if a micro-batch has no trained
//! tokens.

use candle_core::{DType, Device, Tensor};

use crate::backends::gpu::{Arg, Driver, Gemm, Kernel, LaunchShape, with_host_driver};
use crate::error::{Error, Result};
use crate::ops::activation::{PlainActivation, activate, activate_backward};
use crate::ops::attention::{AttentionKind, Qkv, attention, attention_backward};
use crate::ops::attention_sinks::{attention_sinks, attention_sinks_backward};
use crate::ops::causal_conv::{ConvWeight, causal_conv, causal_conv_backward};
use crate::ops::cross_entropy::{
    LossKind, LossTargets, Output, OutputGrads, linear_cross_entropy, score_targets,
};
use crate::ops::dropout::{Dropout, dropout};
use crate::ops::embedding::{columns_of, columns_of_backward, embed, embed_backward, rows_of};
use crate::ops::experts::{
    ExpertRows, Router, balance_experts, choose_experts, choose_experts_backward, combine_rows, scale_rows,
    scale_rows_backward,
};
use crate::ops::gated_delta::{DeltaHeads, DeltaInputs, DeltaParamGrads, gated_delta, gated_delta_backward};
use crate::ops::gated_norm::{gated_rms_norm, gated_rms_norm_backward};
use crate::ops::glu::{Activation, glu, glu_backward};
use crate::ops::layer_norm::{LayerNorm, LayerNormGradients, layer_norm, layer_norm_backward};
use crate::ops::noise::{Noise, add_noise};
use crate::ops::rms_norm::{NormKind, rms_norm, rms_norm_backward};
use crate::ops::rotary::{Heads, QkNorm, RotaryTable, rotary, rotary_backward};
use crate::ops::xielu::{xielu, xielu_backward};
use crate::ops::{Addend, ColumnView, ColumnViewMut, Transpose, elementwise, matmul};
use crate::recipe::enums::Attention;
use crate::runtime::TensorMut;
use crate::runtime::rng::RngStream;

/// A driver that refuses every call.
#[derive(Debug)]
struct NullDriver;

impl Driver for NullDriver {
    fn launch(&self, kernel: &Kernel, shape: LaunchShape, _: &[Arg]) -> Result<()> {
        if shape.is_empty() {
            return Ok(());
        }
        Err(Error::internal(format!("{} was launched over {shape:?}", kernel.name)))
    }

    fn gemm(&self, gemm: &Gemm) -> Result<()> {
        Err(Error::internal(format!("a product of {:?} was started", gemm.size())))
    }
}

fn zeros(rows: usize, width: usize, dtype: DType) -> Result<TensorMut> {
    TensorMut::zeros((rows, width), dtype, &Device::Cpu)
}

fn gain(width: usize) -> Result<TensorMut> {
    TensorMut::zeros(width, DType::F32, &Device::Cpu)
}

fn norms_and_rotation(dtype: DType) -> Result<()> {
    let (x, weight, kind) = (zeros(0, 16, dtype)?, gain(16)?, NormKind { eps: 1e-6, unit_offset: false });
    let dweight = gain(16)?;
    rms_norm(&x, &weight, kind)?;
    rms_norm_backward(&x, &weight, &x, Some(&x), Some(&dweight), Some(&zeros(0, 16, dtype)?), kind)?;
    let norm = LayerNorm { weight: &weight, bias: Some(&weight), kind };
    let grads = LayerNormGradients { weight: Some(&dweight), bias: None };
    layer_norm(&x, norm)?;
    layer_norm_backward(&x, norm, &x, Some(&x), grads, Some(&zeros(0, 16, dtype)?))?;
    let heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim: 16 };
    let (qkv, angles) = (zeros(0, heads.qkv_width(), dtype)?, zeros(0, 8, DType::F32)?.into_tensor());
    let table = RotaryTable { cos: angles.clone(), sin: angles, interleaved: false };
    let norm = QkNorm { q: (&weight, Some(&dweight)), k: (&weight, Some(&dweight)), kind };
    rotary(&qkv, heads, Some(norm), &table)?;
    rotary_backward(&qkv, &zeros(0, heads.qkv_width(), dtype)?, heads, Some(norm), &table)
}

fn products(dtype: DType) -> Result<()> {
    let (none, weight, grad) = (zeros(0, 16, dtype)?, zeros(24, 16, dtype)?, zeros(24, 16, DType::F32)?);
    let (wide, dy) = (zeros(0, 24, dtype)?, zeros(0, 24, dtype)?);
    let (all, out) = (ColumnView::all, ColumnViewMut::all);
    matmul(out(&wide), all(&none), all(&weight), Transpose::Nt, 1.0, Addend::Nothing)?;
    matmul(out(&none), all(&dy), all(&weight), Transpose::Nn, 1.0, Addend::Destination)?;
    // The gradient of a weight, to which no row contributes.
    matmul(out(&grad), all(&dy), all(&none), Transpose::Tn, 1.0, Addend::Destination)
}

fn attention_of_nothing() -> Result<()> {
    let heads = Heads { num_heads: 2, num_kv_heads: 1, head_dim: 64 };
    let kind = AttentionKind { heads, scale: 0.125, softcap: None, window: None };
    let [q, k, v, dout] =
        [128, 64, 64, 128].map(|width| zeros(0, width, DType::BF16).map(TensorMut::into_tensor));
    let (q, k, v, dout) = (q?, k?, v?, dout?);
    let [q, k, v] = [&q, &k, &v].map(ColumnView::all);
    let qkv = Qkv { q, k, v };
    let attended = attention(qkv, &[], kind, Attention::Flash)?;
    attention_backward(qkv, &attended, &dout, &[], kind, Attention::Flash)?;
    let sinks = gain(2)?;
    let attended = attention_sinks(attended, &sinks)?;
    attention_sinks_backward(&attended, &dout, &sinks, &gain(2)?)
}

fn tables(dtype: DType) -> Result<()> {
    let (table, grad, dy) = (zeros(9, 16, dtype)?, zeros(9, 16, DType::F32)?, zeros(0, 16, dtype)?);
    embed(&table, &[], 2.0, dtype)?;
    rows_of([&table, &table], &[])?;
    embed_backward(&grad, &[], &dy, 2.0, None)?;
    let (a, a_grad, du) = (zeros(4, 9, DType::F32)?, zeros(4, 9, DType::F32)?, zeros(0, 4, DType::F32)?);
    columns_of(&a, &[])?;
    columns_of_backward(&a_grad, &[], &du, None)
}

fn losses(dtype: DType) -> Result<()> {
    let (x, weight) = (zeros(0, 16, dtype)?, zeros(32, 16, dtype)?);
    let (output, kind) = (Output { weight: &weight, delta: None }, LossKind { scale: 1.0, softcap: None });
    let targets = LossTargets { ids: &[], coefficients: None };
    linear_cross_entropy(&x, output, targets, kind, OutputGrads::default())?;
    score_targets(&x, output, &[], None).map(drop)
}

fn elements(dtype: DType) -> Result<()> {
    let (x, gate_up, h) = (zeros(0, 16, dtype)?, zeros(0, 32, dtype)?, zeros(0, 16, dtype)?);
    glu(&gate_up, Activation::Silu)?;
    glu_backward(&gate_up, &h, Activation::Silu)?;
    activate(&x, PlainActivation::Relu2)?;
    activate_backward(&x, &h, PlainActivation::Relu2)?;
    let (curve, dcurve) = (gain(4)?, gain(2)?);
    xielu(&x, &curve)?;
    xielu_backward(&x, &h, &curve, Some(&dcurve))?;
    dropout(&x, Dropout { p: 0.5, stream: RngStream::new(1), first_token: 0 })?;
    add_noise(&x, Noise { bounds: &[], stream: RngStream::new(1), first_token: 0 })?;
    elementwise::add(&x, &h)?;
    elementwise::scaled(&x, 0.5)?;
    elementwise::add_into(&x, &h)
}

fn experts_of_no_tokens(dtype: DType) -> Result<()> {
    let (logits, router) = (zeros(0, 8, dtype)?, Router::softmax(2, false));
    let choice = choose_experts(&logits, None, router)?;
    let rows = ExpertRows::of(&choice, 8)?;
    let (x, dx) = (zeros(0, 16, dtype)?, zeros(0, 16, dtype)?);
    scale_rows(&x, &choice.weights, &rows)?;
    let dweights = scale_rows_backward(&x, &dx, &choice.weights, &rows)?;
    let dlogits = choose_experts_backward(&logits, &choice, &dweights, router)?;
    balance_experts(&logits, &*zeros(1, 8, DType::F32)?, &TensorMut::new(dlogits))?;
    combine_rows(&x, &rows, None).map(drop)
}

fn linear_attention_of_no_tokens(dtype: DType) -> Result<()> {
    let heads = DeltaHeads { num_key_heads: 1, num_value_heads: 2, key_dim: 16, value_dim: 16 };
    let (x, dx, weight, dweight) =
        (zeros(0, 64, dtype)?, zeros(0, 64, dtype)?, zeros(64, 4, dtype)?, zeros(64, 4, DType::F32)?);
    let (view, to) = (ColumnView::all(&x), ColumnViewMut::all(&dx));
    let qkv = causal_conv(view, ConvWeight::silu(&weight), &[], None)?;
    causal_conv_backward(view, ConvWeight::silu(&weight), &qkv, &[], Some(&dweight), to)?;
    let (a, b, da, db) = (zeros(0, 2, dtype)?, zeros(0, 2, dtype)?, zeros(0, 2, dtype)?, zeros(0, 2, dtype)?);
    let (param, grad) = (gain(2)?, gain(2)?);
    let [a, b] = [&a, &b].map(|gates| ColumnView::all(gates));
    let inputs = DeltaInputs { qkv: &qkv, a, b, a_log: &param, dt_bias: &param };
    let output = gated_delta(inputs, heads, &[], None)?;
    let grads = DeltaParamGrads { a_log: Some(&grad), dt_bias: None };
    let [da, db] = [&da, &db].map(ColumnViewMut::all);
    gated_delta_backward(inputs, &output, &output.out, heads, &[], grads, da, db)?;
    let (z, dz, weight, dweight) = (zeros(0, 32, dtype)?, zeros(0, 32, dtype)?, gain(16)?, gain(16)?);
    let (z, dz) = (ColumnView::all(&z), ColumnViewMut::all(&dz));
    let y = gated_rms_norm(&output.out, z, &weight, 1e-6)?;
    gated_rms_norm_backward(&y, z, &weight, &y, Some(&dweight), 1e-6, dz).map(drop)
}

#[test]
fn nothing_is_launched_for_no_elements() {
    type Case = (&'static str, fn() -> Result<()>);
    let cases: [Case; 15] = [
        ("norms, bf16", || norms_and_rotation(DType::BF16)),
        ("norms, f32", || norms_and_rotation(DType::F32)),
        ("products, bf16", || products(DType::BF16)),
        ("products, f32", || products(DType::F32)),
        ("attention", attention_of_nothing),
        ("tables, bf16", || tables(DType::BF16)),
        ("tables, f32", || tables(DType::F32)),
        ("losses, bf16", || losses(DType::BF16)),
        ("losses, f32", || losses(DType::F32)),
        ("elements, bf16", || elements(DType::BF16)),
        ("elements, f32", || elements(DType::F32)),
        ("experts, bf16", || experts_of_no_tokens(DType::BF16)),
        ("experts, f32", || experts_of_no_tokens(DType::F32)),
        ("linear attention, bf16", || linear_attention_of_no_tokens(DType::BF16)),
        ("linear attention, f32", || linear_attention_of_no_tokens(DType::F32)),
    ];
    let failed = cases.map(|(name, case)| {
        let done = with_host_driver(&NullDriver, case);
        done.err().map(|error| format!("{name}: {}", error.in_one_line()))
    });
    let failed: Vec<String> = failed.into_iter().flatten().collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    // Check that the driver does refuse.
    let x = Tensor::zeros((1, 32), DType::F32, &Device::Cpu).unwrap();
    assert!(with_host_driver(&NullDriver, || glu(&x, Activation::Silu)).is_err());
}
