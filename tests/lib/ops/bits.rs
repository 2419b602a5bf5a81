//! Two runs of an op agree to the bit, for any number of threads.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use finetune::ops::activation::{PlainActivation, activate, activate_backward};
use finetune::ops::adamw::{AdamWPiece, AdamWStep, adamw};
use finetune::ops::attention::{AttentionKind, ColumnView, Heads, Qkv, Span, attention, attention_backward};
use finetune::ops::attention_sinks::{attention_sinks, attention_sinks_backward};
use finetune::ops::causal_conv::{ConvWeight, causal_conv, causal_conv_backward};
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
use finetune::ops::gated_delta::{
    DeltaHeads, DeltaInputs, DeltaParamGrads, gated_delta, gated_delta_backward,
};
use finetune::ops::gated_norm::{gated_rms_norm, gated_rms_norm_backward};
use finetune::ops::glu::{Activation, glu, glu_backward};
use finetune::ops::layer_norm::{LayerNorm, LayerNormGradients, layer_norm, layer_norm_backward};
use finetune::ops::matmul::{add_bias, sum_rows};
use finetune::ops::rms_norm::{NormKind, rms_norm, rms_norm_backward};
use finetune::ops::rotary::{QkNorm, RotaryTable, rotary, rotary_backward};
use finetune::ops::stochastic_rounding::StochasticRounding;
use finetune::ops::xielu::{xielu, xielu_backward};
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
    for (name, tensor) in gated_delta_net(dtype, &[200, 65, 1]) {
        results.insert(name, bits(&tensor));
    }
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
        (["clamped silu", "clamped silu backward"], Activation::ClampedSilu),
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
    let curve = Tensor::new(&[0.8f32, 1.3, 0.5, -1e-6], &Device::Cpu).unwrap();
    let (dh, dcurve) = (TensorMut::new(cast("dh", (200, 96), dtype)), zeros(2));
    results.insert("xielu backward", bits(&xielu_backward(&x, &dh, &curve, Some(&dcurve)).unwrap()));
    results.insert("xielu", bits(&xielu(&x, &curve).unwrap()));
    assert_eq!(bits(&dh), results["xielu"]);
    results.insert("xielu dcurve", bits(&dcurve));
    let router = Router::softmax(2, false);
    let logits = x.narrow(1, 0, 24).unwrap().contiguous().unwrap();
    let choice = choose_experts(&logits, None, router).unwrap();
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
    let plain = attention(qkv, &spans, kind, Attention::Flash).unwrap();
    let (sinks, dsinks) = (normal("sinks", 4), zeros(4));
    let attended = attention_sinks(plain, &sinks).unwrap();
    attention_sinks_backward(&attended, &dout, &sinks, &dsinks).unwrap();
    results.insert("attention_sinks", bits(&attended.out));
    results.insert("attention_sinks_backward", bits(&dsinks));
}

/// Returns the results of a gated linear attention over packed sequences of these lengths. The rows
/// of its inputs do not depend on the lengths.
fn gated_delta_net(dtype: DType, lengths: &[usize]) -> BTreeMap<&'static str, Tensor> {
    gated_delta_net_from(dtype, 0, lengths)
}

/// Works like [`gated_delta_net`], on the inputs from row `first` on.
fn gated_delta_net_from(dtype: DType, first: usize, lengths: &[usize]) -> BTreeMap<&'static str, Tensor> {
    let heads = DeltaHeads { num_key_heads: 2, num_value_heads: 6, key_dim: 16, value_dim: 32 };
    let (rows, width, values) = (lengths.iter().sum(), heads.conv_width(), heads.value_width());
    let starts = lengths.iter().scan(0, |end, len| {
        *end += len;
        Some(*end - len)
    });
    let spans: Vec<Span> = starts.zip(lengths).map(|(start, len)| Span::sequence(start, *len)).collect();
    let given = |name: &str, width: usize| {
        cast(name, (266, width), dtype).narrow(0, first, rows).unwrap().contiguous().unwrap()
    };
    let new = |width: usize| TensorMut::new(Tensor::zeros((rows, width), dtype, &Device::Cpu).unwrap());
    // Columns of qkv, z, a and b, and their gradients.
    let x = given("delta", width + values + 12);
    let d = new(width + values + 12);
    let column = |start, len| ColumnView { tensor: &x, start, len };
    let to = |start, len| ColumnViewMut { tensor: &d, start, len };
    let (w, dw) = (normal("conv", (width, 4)).to_dtype(dtype).unwrap(), zeros((width, 4)));
    let (a_log, dt_bias, norm) = (normal("a_log", 6), normal("dt_bias", 6), normal("norm", 32));
    let (dlog, dbias, dnorm) = (zeros(6), zeros(6), zeros(32));

    let qkv = causal_conv(column(0, width), ConvWeight::silu(&w), &spans, None).unwrap();
    let (a, b) = (column(width + values, 6), column(width + values + 6, 6));
    let inputs = DeltaInputs { qkv: &qkv, a, b, a_log: &a_log, dt_bias: &dt_bias };
    let output = gated_delta(inputs, heads, &spans, None).unwrap();
    let z = column(width, values);
    let norm = norm.to_dtype(dtype).unwrap();
    let y = gated_rms_norm(&output.out, z, &norm, 1e-6).unwrap();

    let (dy, dz) = (given("dy", values), to(width, values));
    let dout = gated_rms_norm_backward(&output.out, z, &norm, &dy, Some(&dnorm), 1e-6, dz).unwrap();
    let grads = DeltaParamGrads { a_log: Some(&dlog), dt_bias: Some(&dbias) };
    let (da, db) = (to(width + values, 6), to(width + values + 6, 6));
    let dqkv = gated_delta_backward(inputs, &output, &dout, heads, &spans, grads, da, db).unwrap();
    causal_conv_backward(column(0, width), ConvWeight::silu(&w), &dqkv, &spans, Some(&dw), to(0, width))
        .unwrap();
    BTreeMap::from([
        ("causal_conv", qkv),
        ("gated_delta", output.out),
        ("gated_delta states", output.states),
        ("gated_rms_norm", y),
        ("gated_rms_norm_backward", dout),
        ("gated_delta_backward", dqkv),
        ("gradients of a gated linear attention", d.into_tensor()),
        ("causal_conv_backward dweight", dw.into_tensor()),
        ("gated_rms_norm_backward dweight", dnorm.into_tensor()),
        ("gated_delta_backward da_log", dlog.into_tensor()),
        ("gated_delta_backward ddt_bias", dbias.into_tensor()),
    ])
}

/// Convolution and state restart at every sequence: results and gradients of packed sequences are
/// those of each sequence alone, to the bit.
#[test]
fn of_a_linear_attention_do_not_depend_on_packing() {
    for dtype in [DType::F32, DType::BF16] {
        let (lengths, mut row, mut chunk) = ([70, 1, 130, 65], 0, 0);
        let packed = gated_delta_net(dtype, &lengths);
        for len in lengths {
            let alone = gated_delta_net_from(dtype, row, &[len]);
            for (name, alone) in &alone {
                let (start, len) = match *name {
                    "gated_delta states" => (chunk, len.div_ceil(64) - 1),
                    name if name.ends_with("dweight") || name.contains(" d") => continue,
                    _ => (row, len),
                };
                let here = packed[name].narrow(0, start, len).unwrap();
                assert_eq!(bits(&here), bits(alone), "{name} in {dtype:?}, {len} rows from {row} on");
            }
            (row, chunk) = (row + len, chunk + len.div_ceil(64) - 1);
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
