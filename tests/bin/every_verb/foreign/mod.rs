//! Tokenizers, weights and adapters of other programs: read like transformers 5.24 and PEFT 0.21
//! read them, or refused with a remedy. The expected losses are those of transformers and PEFT in
//! f32.

mod adapters;
mod tokenizers;
mod vision;
mod weights;

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;

use crate::test_dir::TestDir;

/// The text whose loss was measured with transformers: 39 predicted tokens of tiny-llama3.
const TEXT: &str = r#"{"text": "Once upon a time there was a river and a town. 12 345 <b>"}"#;
/// The loss of tiny-llama3 on [`TEXT`].
const LOSS: f64 = 8.757_254;

/// Dtype, shape and bytes of each tensor.
type Stored = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A folder with a golden model as `model`, and the text as rows.
fn test_dir(model: &str) -> TestDir {
    let dir = TestDir::with_model(model);
    dir.write("rows.jsonl", TEXT);
    dir
}

/// Changes a JSON object in a file, which may be missing.
fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let text = std::fs::read_to_string(path).unwrap_or_else(|_| "{}".to_owned());
    let mut value: Value = serde_json::from_str(&text).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn read(path: &Path) -> Stored {
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, view): (String, TensorView<'_>)| {
        (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    tensors.tensors().into_iter().map(tensor).collect()
}

fn write(path: &Path, tensors: &Stored) {
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        })
        .collect();
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Renames the tensors of a file.
fn rename(path: &Path, name: impl Fn(&str) -> String) {
    let renamed = read(path).into_iter().map(|(old, tensor)| (name(&old), tensor)).collect();
    write(path, &renamed);
}

/// Returns `count` deterministic values up to `scale`; PEFT and transformers computed the cases
/// with the same ones.
fn noise(count: usize, scale: f64, mut state: u64) -> Vec<f64> {
    let mut next = || {
        state = (1_103_515_245 * state + 12_345) % (1 << 31);
        (state as f64 / f64::from(1 << 30) - 1.0) * scale
    };
    (0..count).map(|_| next()).collect()
}

/// Runs a command that must succeed; returns stdout and stderr.
fn succeed(dir: &TestDir, args: &[&str]) -> (String, String) {
    let output = dir.command(args).output().unwrap();
    let said = dir.told(&output.stderr);
    assert!(output.status.success(), "{args:?}\n{said}");
    (String::from_utf8(output.stdout).unwrap(), said)
}

/// Returns the error of a command that must fail because of its input.
fn refused(dir: &TestDir, args: &[&str]) -> String {
    let output = dir.command(args).output().unwrap();
    let said = dir.told(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{args:?}\n{said}");
    said[said.find("error: ").unwrap()..].to_owned()
}

/// Returns the loss of `model`, with an adapter if `more` names one, and the warnings.
fn loss_with(dir: &TestDir, model: &str, more: &[&str]) -> (f64, String) {
    let args = ["eval", "--model", model, "--dataset", "rows.jsonl", "--json"];
    let (printed, said) = succeed(dir, &[&args[..], more].concat());
    let figures: Value = serde_json::from_str(&printed).unwrap();
    let warnings: Vec<&str> = said.lines().filter(|line| line.starts_with("warning: ")).collect();
    (figures["loss"].as_f64().unwrap(), warnings.join("\n"))
}

fn loss(dir: &TestDir, model: &str) -> (f64, String) {
    loss_with(dir, model, &[])
}

fn assert_near(actual: f64, expected: f64) {
    assert!((actual - expected).abs() < 2e-6, "{actual}, expected {expected}");
}
