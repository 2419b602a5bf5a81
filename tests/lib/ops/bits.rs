//! Two runs of an op agree to the bit, for any number of threads.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};
use finetune::ops::activation::{PlainActivation, activate, activate_backward};
use finetune::ops::adamw::{AdamWPiece, AdamWStep, adamw};
use finetune::ops::attention::{AttentionKind, ColumnView, Heads, Qkv, Span, attention, attention_backward};
use finetune::ops::cross_entropy::{
    IGNORE, LossKind, LossTargets, Output, OutputGrads, linear_cross_entropy, logits, score_targets,
};
use finetune::ops::dropout::{Dropout, dropout};
use finetune::ops::elementwise::{add, add_into, sums_of_squares};
use finetune::ops::embedding::{embed, embed_backward};
use finetune::ops::experts::{
    ExpertRows, Router, choose_experts, choose_experts_backward, combine_rows, scale_rows,
    scale_rows_backward,
};
use finetune::ops::glu::{Activation, glu, glu_backward};
use finetune::ops::layer_norm::{LayerNorm, LayerNormGradients, layer_norm, layer_norm_backward};
use finetune::ops::matmul::{add_bias, sum_rows};
use finetune::ops::rms_norm::{NormKind, rms_norm, rms_norm_backward};
use finetune::ops::rotary::{QkNorm, RotaryTable, rotary, rotary_backward};
use finetune::ops::stochastic_rounding::StochasticRounding;
use finetune::ops::{Addend, ColumnViewMut, Transpose, matmul};
use finetune::recipe::enums::Attention;
use finetune::runtime::TensorMut;
use finetune::runtime::copy::copy_into;
use finetune::runtime::rng::RngStream;

use super::{normal, zeros};

/// Returns the bits of every result of every op, by name. Inputs are large enough for the ops to
/// split their work.
fn results(dtype: DType) -> BTreeMap<&'static str, Vec<u64>> {
    let mut results = BTreeMap::new();
    linear(dtype, &mut results);
    elementwise(dtype, &mut results);
    attended(dtype, &mut results);
    loss_and_update(dtype, &mut results);
    results
}

type Results = BTreeMap<&'static str, Vec<u64>>;

fn bits(tensor: &Tensor) -> Vec<u64> {
    // Widening to f64 preserves every bit of bf16 and f32.
    super::values(tensor).into_iter().map(f64::to_bits).collect()
}

fn cast(name: &str, shape: (usize, usize), dtype: DType) -> Tensor {
    normal(name, shape).to_dtype(dtype).unwrap()
}

fn linear(dtype: DType, results: &mut Results) {
    for (name, form, a, b) in [
        ("product Nt", Transpose::Nt, (150, 170), (190, 170)),
        ("product Nn", Transpose::Nn, (150, 170), (170, 190)),
        ("product Tn", Transpose::Tn, (170, 150), (170, 190)),
    ] {
        let dst = TensorMut::new(cast("dst", (150, 190), dtype));
        let (a, b) = (cast("a", a, dtype), cast("b", b, dtype));
        matmul(
            ColumnViewMut::all(&dst),
            ColumnView::all(&a),
            ColumnView::all(&b),
            form,
            0.7,
            Addend::Destination,
        )
        .unwrap();
        results.insert(name, bits(&dst));
    }
    let dst = TensorMut::new(cast("dst", (150, 190), dtype));
    let bias = normal("bias", 190).to_dtype(dtype).unwrap();
    add_bias(ColumnViewMut::all(&dst), &bias).unwrap();
    let grad = zeros(190);
    sum_rows(&grad, ColumnView::all(&dst)).unwrap();
    results.insert("add_bias", bits(&dst));
    results.insert("sum_rows", bits(&grad));
}

fn elementwise(dtype: DType, results: &mut Results) {
    let kind = NormKind { eps: 1e-6, unit_offset: true };
    let (x, dy) = (cast("x", (200, 96), dtype), cast("dy", (200, 96), dtype));
    let (w, dw) = (normal("w", 96).to_dtype(dtype).unwrap(), zeros(96));
    let normed = TensorMut::new(cast("dst", (200, 96), dtype));
    let dx = rms_norm_backward(&x, &w, &dy, Some(&x), Some(&dw), Some(&normed), kind).unwrap();
    results.insert("rms_norm", bits(&rms_norm(&x, &w, kind).unwrap()));
    assert_eq!(bits(&normed), results["rms_norm"]);
    results.insert("rms_norm_backward dx", bits(&dx));
    results.insert("rms_norm_backward dweight", bits(&dw));

    let (b, dw) = (normal("b", 96).to_dtype(dtype).unwrap(), zeros(96));
    let norm = LayerNorm { weight: &w, bias: Some(&b), kind };
    let grads = LayerNormGradients { weight: Some(&dw), bias: None };
    let dx = layer_norm_backward(&x, norm, &dy, Some(&x), grads, Some(&normed)).unwrap();
    results.insert("layer_norm", bits(&layer_norm(&x, norm).unwrap()));
    assert_eq!(bits(&normed), results["layer_norm"]);
    results.insert("layer_norm_backward dx", bits(&dx));
    results.insert("layer_norm_backward dweight", bits(&dw));

    let heads = Heads { num_heads: 3, num_kv_heads: 1, head_dim: 16 };
    let (qkv, d) = (cast("qkv", (200, 80), dtype), TensorMut::new(cast("dqkv", (200, 80), dtype)));
    let angles = normal("angles", (200, 8));
    let table = RotaryTable { cos: angles.cos().unwrap(), sin: angles.sin().unwrap(), interleaved: false };
    let (q, k) = (normal("q", 16).to_dtype(dtype).unwrap(), normal("k", 16).to_dtype(dtype).unwrap());
    let (dq, dk) = (zeros(16), zeros(16));
    let norm = Some(QkNorm { q: (&q, Some(&dq)), k: (&k, Some(&dk)), kind });
    results.insert("rotary", bits(&rotary(&qkv, heads, norm, &table).unwrap()));
    rotary_backward(&qkv, &d, heads, norm, &table).unwrap();
    results.insert("rotary_backward dqkv", bits(&d));
    results.insert("rotary_backward dq_norm", bits(&dq));
    results.insert("rotary_backward dk_norm", bits(&dk));

    for (names, activation) in [
        (["silu", "silu backward"], Activation::Silu),
        (["gelu_tanh", "gelu_tanh backward"], Activation::GeluTanh),
        (["sigmoid", "sigmoid backward"], Activation::Sigmoid),
    ] {
        let dh = TensorMut::new(cast("dh", (200, 48), dtype));
        results.insert(names[1], bits(&glu_backward(&x, &dh, activation).unwrap()));
        results.insert(names[0], bits(&glu(&x, activation).unwrap()));
        assert_eq!(bits(&dh), results[names[0]]);
    }
    for (names, activation) in [
        (["relu2", "relu2 backward"], PlainActivation::Relu2),
        (["gelu", "gelu backward"], PlainActivation::Gelu),
    ] {
        let dh = TensorMut::new(cast("dh", (200, 96), dtype));
        results.insert(names[1], bits(&activate_backward(&x, &dh, activation).unwrap()));
        results.insert(names[0], bits(&activate(&x, activation).unwrap()));
        assert_eq!(bits(&dh), results[names[0]]);
    }
    let router = Router { chosen: 2, renormalize: false };
    let logits = x.narrow(1, 0, 24).unwrap().contiguous().unwrap();
    let choice = choose_experts(&logits, router).unwrap();
    let rows = ExpertRows::of(&choice, 24).unwrap();
    let (of_rows, d_rows) = (cast("rows", (400, 96), dtype), TensorMut::new(cast("drows", (400, 96), dtype)));
    results.insert("scale_rows", bits(&scale_rows(&of_rows, &choice.weights, &rows).unwrap()));
    results.insert("combine_rows", bits(&combine_rows(&of_rows, &rows, Some(&x)).unwrap()));
    let product = TensorMut::new(of_rows.copy().unwrap());
    let dweights = scale_rows_backward(&product, &d_rows, &choice.weights, &rows).unwrap();
    assert_eq!(bits(&product), results["scale_rows"]);
    results.insert("scale_rows_backward", bits(&d_rows));
    let dlogits = choose_experts_backward(&logits, &choice, &dweights, router).unwrap();
    results.insert("choose_experts_backward", bits(&dlogits));
    let site = Dropout { p: 0.1, stream: RngStream::new(9), first_token: 3 };
    results.insert("dropout", bits(&dropout(&x, site).unwrap()));
    results.insert("add", bits(&add(&x, &dy).unwrap()));
    let sum = zeros((200, 96));
    copy_into(&sum, &x).unwrap();
    add_into(&sum, &dy).unwrap();
    results.insert("copy_into, add_into", bits(&sum));
    results.insert(
        "sum_of_squares",
        vec![sums_of_squares(&[&sum], sum.device()).unwrap().read().unwrap()[0].to_bits()],
    );
}

fn attended(dtype: DType, results: &mut Results) {
    let heads = Heads { num_heads: 4, num_kv_heads: 2, head_dim: 16 };
    let kind = AttentionKind { heads, scale: 0.25, softcap: None, window: Some(150) };
    let spans = [Span::sequence(0, 200), Span::sequence(200, 65), Span::sequence(265, 1)];
    let x = cast("qkv", (266, heads.qkv_width()), dtype);
    let dout = cast("dout", (266, heads.q_width()), dtype);
    let range = |start, len| ColumnView { tensor: &x, start, len };
    let (q, k) = (range(0, heads.q_width()), range(heads.q_width(), heads.kv_width()));
    let qkv = Qkv { q, k, v: range(heads.qk_width(), heads.kv_width()) };
    for (names, algorithm) in [
        (["flash", "flash lse", "flash backward"], Attention::Flash),
        (["eager", "eager lse", "eager backward"], Attention::Eager),
    ] {
        let attended = attention(qkv, &spans, kind, algorithm).unwrap();
        let d = attention_backward(qkv, &attended, &dout, &spans, kind, algorithm).unwrap();
        for (name, tensor) in names.into_iter().zip([attended.out, attended.lse, d]) {
            results.insert(name, bits(&tensor));
        }
    }
}

fn loss_and_update(dtype: DType, results: &mut Results) {
    let (x, w, dw) = (cast("x", (210, 64), dtype), cast("w", (300, 64), dtype), zeros((300, 64)));
    let targets: Vec<u32> = (0..210).map(|i| if i % 7 == 0 { IGNORE } else { i * 31 % 300 }).collect();
    let kind = LossKind { scale: 0.01, softcap: None };
    let output = Output { weight: &w, delta: None };
    let grads = OutputGrads { weight: Some(&dw), ..OutputGrads::default() };
    let out = linear_cross_entropy(&x, output, LossTargets::unweighted(&targets), kind, grads).unwrap();
    results.insert("linear_cross_entropy", vec![out.loss.read().unwrap().to_bits()]);
    results.insert("linear_cross_entropy dx", bits(&out.dx));
    results.insert("linear_cross_entropy dweight", bits(&dw));
    // More words than one part, and more rows than one task.
    let (wide, spread) = (cast("wide", (4500, 64), dtype), targets.iter().map(|id| id.saturating_mul(15)));
    let (output_of_parts, spread) = (Output { weight: &wide, delta: None }, spread.collect::<Vec<u32>>());
    let targets_of_parts = LossTargets::unweighted(&spread);
    let frozen =
        linear_cross_entropy(&x, output_of_parts, targets_of_parts, kind, OutputGrads::default()).unwrap();
    results.insert("linear_cross_entropy frozen", vec![frozen.loss.read().unwrap().to_bits()]);
    results.insert("linear_cross_entropy frozen dx", bits(&frozen.dx));
    results.insert("logits", bits(&logits(&x, output, Some(3.0)).unwrap()));
    let scores = score_targets(&x, output, &targets, None).unwrap();
    results.insert("score_targets", scores.iter().map(|score| u64::from(score.loss.to_bits())).collect());

    let ids: Vec<u32> = (0..210).map(|i| i % 40).collect();
    results.insert("embed", bits(&embed(&w, &ids, 8.0, dtype).unwrap()));
    embed_backward(&dw, &ids, &out.dx, 8.0, None).unwrap();
    results.insert("embed_backward", bits(&dw));

    let options = AdamWStep {
        learning_rate: 0.01,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.1,
        update: 2,
        grad_scale: 0.5,
    };
    let (param, grad) = (TensorMut::new(normal("param", 70_000)), normal("grad", 70_000));
    let (first, second) = (zeros(70_000), zeros(70_000));
    adamw(&[AdamWPiece {
        param: &param,
        value: None,
        rounding: StochasticRounding::new(RngStream::new(0), 0),
        grad: &grad,
        moments: [&first, &second],
        step: options,
    }])
    .unwrap();
    results.insert("adamw", bits(&param));
    results.insert("adamw moments", [bits(&first), bits(&second)].concat());
}

#[test]
fn do_not_depend_on_the_run_or_on_the_threads() {
    for dtype in [DType::F32, DType::BF16] {
        let in_pool = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| results(dtype))
        };
        let one = in_pool(1);
        assert!(!one.is_empty());
        // The second run uses one thread again.
        for threads in [1, 2, 5, 64] {
            let again = in_pool(threads);
            for (name, bits) in &one {
                assert!(again[name] == *bits, "{name} in {dtype:?} differs on {threads} threads");
            }
        }
    }
}

#[test]
fn of_different_inputs_differ() {
    let (f32, bf16) = (results(DType::F32), results(DType::BF16));
    let same: Vec<&str> =
        f32.iter().filter(|(name, bits)| bf16[*name] == **bits).map(|(name, _)| *name).collect();
    assert_eq!(same, ["adamw", "adamw moments"]);
}
