//! `finetune bench ops` through the binary: it lists every operation, with plausible figures. No
//! test asserts a time.

use std::fmt::Write;

use insta::assert_snapshot;
use serde_json::Value;

use crate::test_dir::TestDir;

/// Runs `bench ops` on the tiny model's shapes for the shortest time; returns stdout if it
/// succeeds, else stderr.
fn bench_ops(dir: &TestDir, more: &[&str]) -> String {
    let args =
        ["bench", "ops", "--model", "model", "--tokens", "48", "--max-seq-len", "20", "--secs", "0.0001"];
    let output = dir.command(&[&args[..], more].concat()).output().unwrap();
    let told = dir.told(if output.status.success() { &output.stdout } else { &output.stderr });
    if output.status.success() { told } else { format!("exit {:?}\n{told}", output.status.code().unwrap()) }
}

fn positive(figures: &Value, key: &str) -> f64 {
    let number = figures[key].as_f64().unwrap_or(f64::NAN);
    assert!(number.is_finite() && number > 0.0, "{key} of {figures}");
    number
}

/// One line an operation: shape, dtype and unit of its rate.
fn listed(figures: &Value) -> String {
    let mut lines = String::new();
    for op in figures["ops"].as_array().unwrap() {
        let keys: Vec<&str> = op.as_object().unwrap().keys().map(String::as_str).collect();
        let unit = keys[4];
        assert_eq!(keys, ["op", "shape", "dtype", "ms", unit, "share"]);
        let rate = if unit == "gbps" { "copy_gbps" } else { "peak_tflops" };
        let share = positive(op, unit) / positive(figures, rate);
        assert!((positive(op, "share") / share - 1.0).abs() < 1e-9, "{op}");
        positive(op, "ms");
        let text = |key: &str| op[key].as_str().unwrap().to_owned();
        writeln!(lines, "{} ({}) {} {unit}", text("op"), text("shape"), text("dtype")).unwrap();
    }
    lines
}

#[test]
fn every_operation_is_measured() {
    let dir = TestDir::new();
    let figures = |dtype: &str| -> Value {
        let figures: Value = serde_json::from_str(&bench_ops(&dir, &["--json", "--dtype", dtype])).unwrap();
        let keys: Vec<&str> = figures.as_object().unwrap().keys().map(String::as_str).collect();
        let rates = ["copy_gbps", "gemm_tflops", "peak_tflops"];
        assert_eq!(
            keys,
            [&["device", "processor", "tokens", "max_seq_len", "dtype"][..], &rates, &["ops"]].concat()
        );
        positive(&figures, "gemm_tflops");
        assert!(!figures["device"].as_str().unwrap().is_empty());
        assert_eq!((&figures["tokens"], &figures["dtype"]), (&48.into(), &dtype.into()));
        figures
    };
    let bf16 = listed(&figures("bf16"));
    assert_snapshot!(bf16, @"
    matmul (48x64 to 64, q_proj) bf16 tflops
    matmul (48x64 to 32, k_proj) bf16 tflops
    matmul (48x64 to 128, gate_proj) bf16 tflops
    matmul (48x128 to 64, down_proj) bf16 tflops
    matmul (48x64 to 128, gate_proj, dx) bf16 tflops
    matmul (48x64 to 128, gate_proj, dw) bf16 tflops
    matmul_weight_plus_low_rank (48x64 to 128, gate_proj and r 16) bf16 tflops
    matmul_weight (48x64 to 128, gate_proj in nf4) bf16 tflops
    matmul_weights (48x64 to 128, q, k, v in nf4) bf16 tflops
    quantize_fp8 (48x64) bf16 gbps
    matmul_fp8 (48x64 to 128, gate_proj) bf16 tflops
    matmul_fp8 (48x64 to 128, gate_proj, dx) bf16 tflops
    linear_cross_entropy (48x64 to 480, frozen) bf16 tflops
    linear_cross_entropy (48x64 to 480, soft-cap) bf16 tflops
    linear_cross_entropy (48x64 to 480, trained) bf16 tflops
    score_targets (48x64 to 480) bf16 tflops
    logits (1x64 to 480) bf16 gbps
    attention (48 in rows of 20, 4/2 heads of 16, causal) bf16 tflops
    attention_backward (48 in rows of 20, 4/2 heads of 16, causal) bf16 tflops
    attention_sinks (48, 4 heads of 16) bf16 gbps
    attention_sinks_backward (48, 4 heads of 16) bf16 gbps
    gated_delta (48 in rows of 20, 16/16 heads of 128) bf16 tflops
    gated_delta_backward (48 in rows of 20, 16/16 heads of 128) bf16 tflops
    causal_conv (48x6144, 4 taps) bf16 gbps
    causal_conv_backward (48x6144, 4 taps, trained) bf16 gbps
    gated_rms_norm (48, 16 heads of 128) bf16 gbps
    gated_rms_norm_backward (48, 16 heads of 128, trained) bf16 gbps
    rms_norm (48x64) bf16 gbps
    rms_norm_backward (48x64, residual) bf16 gbps
    rms_norm_backward (48x64, residual, normed) bf16 gbps
    rms_norm_backward (48x64, residual, weight trained) bf16 gbps
    layer_norm (48x64) bf16 gbps
    layer_norm_backward (48x64, residual, trained) bf16 gbps
    rotary (48, 4+2 heads of 16) bf16 gbps
    rotary (48, 4+2 heads of 16, normed) bf16 gbps
    rotary_backward (48, 4+2 heads of 16) bf16 gbps
    rotary_backward (48, 4+2 heads of 16, normed) bf16 gbps
    glu (48x256, silu) bf16 gbps
    glu_backward (48x256, silu) bf16 gbps
    activate (48x128, gelu) bf16 gbps
    activate_backward (48x128, gelu) bf16 gbps
    xielu (48x128) bf16 gbps
    xielu_backward (48x128, trained) bf16 gbps
    dropout (48x64) bf16 gbps
    add_noise (48x64) bf16 gbps
    add (48x64) bf16 gbps
    scaled (48x64) bf16 gbps
    stack_rows (2 of 16x64) bf16 gbps
    add_bias (48x64) bf16 gbps
    sum_rows (48x64) bf16 gbps
    scale_columns (48x64) bf16 gbps
    magnitude_backward (48x64) bf16 gbps
    choose_experts (48x128, 8 each) bf16 gbps
    choose_experts_backward (48x128, 8 each) bf16 gbps
    balance_experts (48x128) bf16 gbps
    scale_rows (384x768) bf16 gbps
    scale_rows_backward (384x768) bf16 gbps
    combine_rows (384x64) bf16 gbps
    dequantize (128x64, nf4, double quantization) bf16 gbps
    dequantize (128x64, int4 with zeros, groups of 128) bf16 gbps
    dequantize (128x64, fp8, blocks of 128x128) bf16 gbps
    dequantize (128x256, q4_K) bf16 gbps
    weight_norm (128x64, r 16) bf16 gbps
    embed (48 of 480x64) bf16 gbps
    embed_backward (48 of 480x64) bf16 gbps
    columns_of (48 of 16x480) f32 gbps
    columns_of_backward (48 of 16x480) f32 gbps
    rows_of (48 of 2 480x16) f32 gbps
    copy_into (128x64 to bf16) f32 gbps
    zero (128x64) f32 gbps
    add_into (128x64) f32 gbps
    sums_of_squares (128x64) f32 gbps
    adamw (128x64) f32 gbps
    adamw_int8 (128x64) f32 gbps
    ");
    assert_eq!(listed(&figures("f32")), bf16.replace("bf16", "f32"));
}

#[test]
fn a_table_has_the_operations_that_were_asked_for() {
    let text = bench_ops(&TestDir::new(), &["--only", "rms_norm", "--only", "squares"]);
    let lines: Vec<&str> = text.lines().collect();
    let head = lines[0].split_once(" GB/s, bf16 products ").unwrap().1;
    let (product, peak) = head.split_once(" TFLOP/s, in registers alone ").unwrap();
    let peak = peak.strip_suffix("; 48 tokens in rows of 20 at most").unwrap();
    assert!([product, peak].into_iter().all(|rate| rate.parse::<f64>().is_ok()), "{head}");
    assert!(lines[2].starts_with("operation ") && lines[2].ends_with(" share"), "{text}");
    let names: Vec<&str> = lines[3..].iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(
        names,
        [
            "gated_rms_norm",
            "gated_rms_norm_backward",
            "rms_norm",
            "rms_norm_backward",
            "rms_norm_backward",
            "rms_norm_backward",
            "sums_of_squares"
        ]
    );
    // Operands this small may stay in the processor's caches.
    let has_share = |line: &str| line.ends_with(" %") || line.ends_with(" cached");
    assert!(lines[3..].iter().all(|line| line.contains(" GB/s ") && has_share(line)), "{text}");
}

#[test]
fn what_cannot_be_measured() {
    let dir = TestDir::new();
    assert_snapshot!(bench_ops(&dir, &["--only", "norm", "--only", "softmax"]), @"
    exit 1
    error: cannot measure `softmax`
      caused by: no operation has that in its name
      caused by: accepted: a part of matmul, matmul_weight_plus_low_rank, matmul_weight, matmul_weights, quantize_fp8, matmul_fp8, linear_cross_entropy, score_targets, logits, attention, attention_backward, attention_sinks, attention_sinks_backward, gated_delta, gated_delta_backward, causal_conv, causal_conv_backward, gated_rms_norm, gated_rms_norm_backward, rms_norm, rms_norm_backward, layer_norm, layer_norm_backward, rotary, rotary_backward, glu, glu_backward, activate, activate_backward, xielu, xielu_backward, dropout, add_noise, add, scaled, stack_rows, add_bias, sum_rows, scale_columns, magnitude_backward, choose_experts, choose_experts_backward, balance_experts, scale_rows, scale_rows_backward, combine_rows, dequantize, weight_norm, embed, embed_backward, columns_of, columns_of_backward, rows_of, copy_into, zero, add_into, sums_of_squares, adamw, adamw_int8
    hint: leave out `--only` to measure all
    ");
    assert_snapshot!(bench_ops(&dir, &["--gpus", "0,1"]), @"
    exit 2
    error: invalid value '0,1' for '--gpus <N>': accepted: the number of one GPU, such as 0

    For more information, try '--help'.
    ");
    assert_snapshot!(bench_ops(&dir, &["--algorithms", "8"]), @"
    exit 1
    error: cannot measure products by 8 algorithms
      caused by: `--algorithms` is for GPUs; a CPU has one algorithm for each product
    hint: leave out `--algorithms`, or name a GPU with `--gpus`
    ");
    assert_snapshot!(bench_ops(&dir, &["--algorithms", "1"]), @"
    exit 2
    error: invalid value '1' for '--algorithms <N>': 1 is not in 2..=100

    For more information, try '--help'.
    ");
    assert_snapshot!(bench_ops(&dir, &["--dtype", "f16"]), @"
    exit 2
    error: invalid value 'f16' for '--dtype <DTYPE>'
      [possible values: bf16, f32]

      tip: a similar value exists: 'bf16'

    For more information, try '--help'.
    ");
    std::fs::remove_file(dir.path("model/config.json")).unwrap();
    assert_snapshot!(bench_ops(&dir, &[]), @"
    exit 1
    error: folder `[DIR]/model` has no config.json
      caused by: a model is a config.json, a tokenizer and safetensors
    hint: give a folder that holds config.json, or a hub id such as `owner/name`
    ");
}

/// Each collective and size has a rate; bus bandwidth is what a ring sends over each link.
#[test]
fn collectives_are_measured() {
    let dir = TestDir::new();
    let args = ["bench", "collectives", "--ranks", "4", "--sizes", "64,1K,8192", "--json"];
    let output = dir.command(&args).output().unwrap();
    assert!(output.status.success(), "{}", dir.told(&output.stderr));
    let speeds: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&speeds["ranks"], &speeds["backend"]), (&4.into(), &"the memory of one process".into()));
    let timings = speeds["timings"].as_array().unwrap();
    let listed: Vec<(&str, u64)> = timings
        .iter()
        .map(|timing| (timing["op"].as_str().unwrap(), timing["bytes"].as_u64().unwrap()))
        .collect();
    let sizes = |op| [64, 1024, 8192].map(|bytes| (op, bytes));
    assert_eq!(listed, ["all_reduce", "all_gather", "reduce_scatter"].map(sizes).concat());
    for timing in timings {
        let rate = timing["bytes"].as_f64().unwrap() / 1e9 / positive(timing, "secs");
        let bus = if timing["op"] == "all_reduce" { 1.5 } else { 0.75 };
        assert!((positive(timing, "algbw_gbps") / rate - 1.0).abs() < 1e-9, "{timing}");
        assert!((positive(timing, "busbw_gbps") / rate / bus - 1.0).abs() < 1e-9, "{timing}");
    }
}

#[test]
fn communication_that_cannot_be_measured() {
    let dir = TestDir::new();
    let said = |args: &[&str]| {
        let output = dir.command(args).output().unwrap();
        format!("exit {:?}\n{}", output.status.code().unwrap(), dir.told(&output.stderr))
    };
    assert_snapshot!(said(&["bench", "collectives", "--ranks", "1"]), @"
    exit 1
    error: cannot measure collectives of a single rank
      caused by: the world size is 1, from one process
    hint: give `--ranks 2` or more, several `--gpus`, or start several processes with mpirun
    ");
    assert_snapshot!(said(&["doctor", "net", "--sizes", "1K,lots"]), @"
    exit 2
    error: invalid value 'lots' for '--sizes <LIST>': accepted: 4 to 4G bytes, such as 4096, 64K or 16M

    For more information, try '--help'.
    ");
    assert_snapshot!(said(&["doctor", "net", "--ranks", "2", "--world-size", "4", "--rank", "0", "--master-addr", "h"]), @"
    exit 1
    error: cannot measure the network over several processes
      caused by: the world size is 4, from --world-size and --rank
      caused by: this binary was built without MPI, which CPU ranks in several processes need
    hint: on one host, start one process with `--ranks N`; over hosts, start a build with `--features mpi` (`cargo build --release --features mpi`) under `mpirun`; torchrun cannot replace mpirun
    ");
    let too_much = said(&["bench", "collectives", "--ranks", "1024", "--sizes", "4G"]);
    assert!(
        too_much
            .starts_with("exit 1\nerror: cannot measure collectives of 1024 ranks with 4.00 GiB of data\n"),
        "{too_much}"
    );
    assert!(too_much.trim_end().ends_with("hint: give smaller `--sizes` or fewer `--ranks`"), "{too_much}");
}
