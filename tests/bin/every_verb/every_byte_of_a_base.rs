//! A base changed in bytes that the sampled digest leaves out, or in its config.json alone.
//! finetune notices when a run is resumed, or an adapter is trained further, merged, evaluated or
//! used to generate.

use std::path::Path;

use serde_json::Value;

use crate::test_dir::{TestDir, copy_folder, lora};

/// A tensor of which the sample omits most bytes.
const TENSOR: &str = "model.layers.1.mlp.down_proj.weight";

/// Changes the bytes of [`TENSOR`].
fn change_bytes(model: &Path, change: impl Fn(&mut [u8])) {
    let path = model.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..end]).unwrap();
    let offset = |at: usize| end + header[TENSOR]["data_offsets"][at].as_u64().unwrap() as usize;
    let (start, stop) = (offset(0), offset(1));
    assert!(stop - start > 8192, "{}", stop - start);
    change(&mut bytes[start..stop]);
    std::fs::write(path, bytes).unwrap();
}

fn change_config(model: &Path, key: &str, value: Value) {
    let path = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config[key] = value;
    std::fs::write(path, config.to_string()).unwrap();
}

/// Returns a command's exit code and stderr.
fn told(dir: &TestDir, args: &[&str]) -> (Option<i32>, String) {
    let output = dir.command(args).output().unwrap();
    (output.status.code(), dir.told(&output.stderr))
}

fn train<'a>(output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let args = lora(&[&["--set", "checkpoint.save_steps=2"], more].concat());
    args.into_iter().map(|arg| if arg == "out" { output } else { arg }).collect()
}

/// Every use of the adapter in `out`, and of its checkpoint.
fn uses() -> [Vec<&'static str>; 5] {
    let merge = ["merge", "--model", "model", "--adapter", "out", "--output", "merged"];
    let eval = ["eval", "--model", "model", "--adapter", "out", "--dataset", "rows.jsonl", "--set"];
    let generate =
        ["generate", "--model", "model", "--adapter", "out", "--prompt", "a", "--max-new-tokens", "1"];
    [
        train("resumed", &["--resume", "out/checkpoint-2"]),
        train("further", &["--set", "adapter.path=out"]),
        merge.to_vec(),
        [&eval[..], &["data.max_seq_len=96"]].concat(),
        generate.to_vec(),
    ]
}

/// A model, and a run on it in `out`.
fn trained() -> TestDir {
    let dir = TestDir::new();
    let (code, said) = told(&dir, &train("out", &[]));
    assert_eq!(code, Some(0), "{said}");
    copy_folder(&dir.path("model"), &dir.path("kept"));
    dir
}

fn all_refused(dir: &TestDir, uses: &[Vec<&str>], what: &str, why: &str) {
    for args in uses {
        let (code, said) = told(dir, args);
        assert_eq!(code, Some(1), "{what}: {args:?}\n{said}");
        assert!(said.contains("with this model") && said.contains(why), "{what}: {args:?}\n{said}");
        for left in ["resumed", "further", "merged"] {
            assert!(!dir.path(left).exists(), "{what}: {left} is there");
        }
    }
    copy_folder(&dir.path("kept"), &dir.path("model"));
}

#[test]
fn a_bit_that_no_sample_shows() {
    let dir = trained();
    change_bytes(&dir.path("model"), |tensor| tensor[1001] ^= 4);
    all_refused(&dir, &uses(), "a bit", "it was trained on `model` (digest");
    change_bytes(&dir.path("model"), |tensor| tensor[300..2300].fill(0));
    all_refused(&dir, &uses()[..1], "zeroes", "it was trained on `model` (digest");
    // The restored model is the base again. Another base is used with `--force-base`, with one
    // warning.
    for args in uses() {
        let (code, said) = told(&dir, &args);
        assert_eq!((code, said.contains("trained on")), (Some(0), false), "{args:?}\n{said}");
    }
    change_bytes(&dir.path("model"), |tensor| tensor[1001] ^= 4);
    let forced = [&uses()[3][..], &["--force-base"]].concat();
    let (code, said) = told(&dir, &forced);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(said.matches("; `--force-base` uses it on").count(), 1, "{said}");
}

#[test]
fn a_config_that_says_otherwise() {
    let dir = trained();
    for (key, value, why) in [
        ("rope_theta", Value::from(500_000.0), "rope_theta and rope_scaling was theta 10000.0 on"),
        ("rms_norm_eps", Value::from(1e-3), "rms_norm_eps was 1e-5 in training, and is 0.001"),
        ("hidden_act", Value::from("gelu_pytorch_tanh"), "hidden_act was silu in training, and is gelutanh"),
    ] {
        change_config(&dir.path("model"), key, value);
        all_refused(&dir, &uses()[..if key == "rope_theta" { 5 } else { 1 }], key, why);
    }
    // A key that does not affect computation.
    change_config(&dir.path("model"), "transformers_version", Value::from("9.9.9"));
    let (code, said) = told(&dir, &uses()[3]);
    assert_eq!((code, said.contains("trained on")), (Some(0), false), "{said}");
}
