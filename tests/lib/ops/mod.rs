//! The operations from outside: the self-test on the CPU, finite differences of definitions in f64,
//! and the same bits from every run. Oracles that need the references are in
//! `crates/ops/src/ops/selftest`.

mod bits;
mod finite_differences;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Shape, Tensor};
use finetune::ops::bench::{BenchShapes, ModelWidths};
use finetune::ops::selftest;
use finetune::runtime::TensorMut;
use finetune::runtime::rng::RngStream;
use regex::Regex;

/// Returns standard normal values, seeded by `name`.
fn normal(name: &str, shape: impl Into<Shape>) -> Tensor {
    let (shape, stream) = (shape.into(), RngStream::new(2).named(name));
    let values: Vec<f32> = (0..shape.elem_count() as u64).map(|i| stream.normal(i)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn zeros(shape: impl Into<Shape>) -> TensorMut {
    TensorMut::zeros(shape, DType::F32, &Device::Cpu).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Public functions in `ops` that compute nothing on tensors.
const NO_OPS: [&str; 15] = [
    "requested_work",
    "record",
    "count_process",
    "emulate",
    "empty",
    "has_kernels",
    "chunked_loss_bytes",
    "frozen_loss_bytes",
    "logits_bytes",
    "preload",
    "run",
    // Conversions and copies by candle, which need no kernel.
    "converted",
    "stacked",
    "to_device",
    "to_host_vec",
];

#[test]
fn every_op_passes_the_self_test_in_every_dtype_it_knows() {
    let (mut ops, mut failed) = (BTreeSet::new(), Vec::new());
    let mut bf16 = BTreeSet::new();
    for outcome in selftest::run(&Device::Cpu) {
        assert_eq!(outcome.passed, outcome.error <= outcome.tolerance);
        assert!(outcome.tolerance < 0.02, "{}: {:e}", outcome.op, outcome.tolerance);
        ops.insert(outcome.op.to_owned());
        if outcome.dtype == DType::BF16 {
            bf16.insert(outcome.op);
        }
        if !outcome.passed {
            failed.push(format!("{outcome:?}"));
        }
    }
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
    assert_eq!(ops, public_ops(), "the self-test and the public functions of `ops`");
    let f32_alone: Vec<&str> = ops.iter().map(String::as_str).filter(|op| !bf16.contains(op)).collect();
    assert_eq!(f32_alone, ["columns_of", "columns_of_backward", "rows_of"]);
}

#[test]
fn every_op_is_measured() {
    let (widths, dtype) = (ModelWidths::QWEN3_8B, DType::BF16);
    let shapes = BenchShapes { widths, tokens: 64, max_seq_len: 64, dtype, secs: 0.1, memory: u64::MAX };
    let measured: BTreeSet<String> = shapes.op_names().into_iter().map(str::to_owned).collect();
    assert_eq!(measured, public_ops(), "what `bench ops` measures and the public functions of `ops`");
}

/// Each backward, or its reference, is compared with candle's autograd or with central differences.
#[test]
fn every_backward_has_an_oracle() {
    let ops = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/ops/src/ops");
    let read = |path: &Path| fs::read_to_string(path).unwrap();
    let oracles = read(&ops.join("selftest/oracle.rs")) + include_str!("finite_differences.rs");
    let head = Regex::new(r"(?m)^pub fn (\w+_backward)\(").unwrap();
    let mut count = 0;
    for path in sources(&ops) {
        let module = path.file_stem().unwrap().to_string_lossy();
        for name in head.captures_iter(&read(&path)).map(|name| name[1].to_owned()) {
            let calls =
                [format!("{name}("), format!("{name}_reference("), format!("{module}::reference_backward(")];
            assert!(calls.iter().any(|call| oracles.contains(call)), "no oracle computes {name}");
            count += 1;
        }
    }
    assert!(count > 5, "{count}");
}

/// Returns the names of the free public functions below `crates/ops/src/ops` and of the copies of
/// `runtime`, except those that are no ops.
fn public_ops() -> BTreeSet<String> {
    let head = Regex::new(r"(?m)^pub fn (\w+)").unwrap();
    let mut names = BTreeSet::new();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates");
    let copies = crates.join("runtime/src/runtime/copy.rs");
    for path in sources(&crates.join("ops/src/ops")).into_iter().chain([copies]) {
        let text = fs::read_to_string(path).unwrap();
        names.extend(head.captures_iter(&text).map(|name| name[1].to_owned()));
    }
    names.retain(|name| !NO_OPS.contains(&name.as_str()));
    names
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}
