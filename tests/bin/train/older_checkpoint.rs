//! Checkpoints older than a recipe key.

use std::path::Path;

use finetune::weights::{ModelFiles, TensorInfo};
use serde_json::{Value, json};

use crate::test_dir::{TestDir, copy_folder, golden, lora};

/// Keys as a later version of the program may have added them.
const KEYS: [&str; 4] =
    ["train.max_grad_norm", "data.train_on", "adapter.use_rslora", "optimizer.lora_plus_ratio"];

/// Removes the keys from a checkpoint, as if they had not existed, and updates its manifest.
fn forget(checkpoint: &Path, keys: &[&str]) {
    let read = |name: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(checkpoint.join(name)).unwrap()).unwrap()
    };
    let (mut state, mut manifest) = (read("trainer_state.json"), read("manifest.json"));
    let said = state["fingerprint"].as_object_mut().unwrap();
    for key in keys {
        assert!(said.remove(*key).is_some(), "no {key} in {said:?}");
    }
    let text = serde_json::to_string_pretty(&state).unwrap();
    manifest["files"]["trainer_state.json"] =
        json!({ "bytes": text.len(), "blake3": blake3::hash(text.as_bytes()).to_hex().to_string() });
    std::fs::write(checkpoint.join("trainer_state.json"), text).unwrap();
    std::fs::write(checkpoint.join("manifest.json"), manifest.to_string()).unwrap();
}

#[test]
fn a_key_that_a_checkpoint_does_not_know_counts_as_its_default() {
    let dir = TestDir::new();
    let run = |output: &str, more: &[&str]| {
        let args = lora(&[&["--set", "checkpoint.save_steps=2"], more].concat());
        let args: Vec<_> = args.into_iter().map(|arg| if arg == "out" { output } else { arg }).collect();
        let done = dir.command(&args).output().unwrap();
        (done.status.success(), dir.told(&done.stderr))
    };
    let (whole, said) = run("out", &[]);
    assert!(whole, "{said}");
    for output in ["older", "changed"] {
        let checkpoint = dir.path(&format!("{output}/checkpoint-2"));
        std::fs::create_dir(dir.path(output)).unwrap();
        copy_folder(&dir.path("out/checkpoint-2"), &checkpoint);
        forget(&checkpoint, &KEYS);
    }
    let (resumed, said) = run("older", &["--resume"]);
    assert!(resumed, "{said}");
    let adapter = |output: &str| std::fs::read(dir.path(output).join("adapter_model.safetensors")).unwrap();
    assert!(adapter("older") == adapter("out"), "resumed from an older checkpoint: other bytes");
    // A value other than the default is another run.
    let (resumed, said) = run("changed", &["--resume", "--set", "train.max_grad_norm=0.5"]);
    assert!(!resumed && said.contains("train.max_grad_norm: 1.0 in the checkpoint, 0.5 now"), "{said}");
}

/// Resumes a checkpoint of an earlier version like an unbroken run. Its base is identified by a
/// digest of a sample only (tests/golden/checkpoints/schema-1, made on tiny-llama with the flags
/// below).
#[test]
fn a_kept_checkpoint_of_the_first_schema_goes_on() {
    let dir = TestDir::new();
    let run = |model: &str, output: &str, more: &[&str]| {
        let keys = ["--set", "adapter.r=2", "--set", r#"adapter.target_modules=["q_proj"]"#, "--ranks", "1"];
        let args = lora(&[&keys[..], more].concat());
        let args: Vec<_> = args
            .into_iter()
            .map(|arg| match arg {
                "out" => output,
                "model" => model,
                arg => arg,
            })
            .collect();
        let done = dir.command(&args).output().unwrap();
        (done.status.code(), dir.told(&done.stderr))
    };
    for output in ["older", "other-base"] {
        std::fs::create_dir(dir.path(output)).unwrap();
        copy_folder(
            &golden("checkpoints/schema-1/checkpoint-2"),
            &dir.path(&format!("{output}/checkpoint-2")),
        );
    }
    assert_eq!(run("model", "unbroken", &[]).0, Some(0));
    // Its `warmup_ratio` was rounded up to the one step given here.
    let warm_up = ["--allow-change", "scheduler.warmup_steps", "--allow-change", "scheduler.warmup_ratio"];
    let (code, said) = run("model", "older", &[&["--resume"], &warm_up[..]].concat());
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("resuming from older/checkpoint-2") && !said.contains("cannot verify"), "{said}");
    let values = |output: &str| {
        let files = ModelFiles::open_file(&dir.path(output).join("adapter_model.safetensors")).unwrap();
        let read = |(name, info): (&str, &TensorInfo)| {
            let mut values = vec![0f32; info.elements()];
            files.read_f32(name, &mut values).unwrap();
            values
        };
        files.tensors().flat_map(read).collect::<Vec<f32>>()
    };
    // Another processor rounds differently than the one that made the checkpoint.
    let pairs = values("older").into_iter().zip(values("unbroken"));
    let largest = pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max);
    assert!(largest < 1e-5, "{largest}");

    // The sampled digest differs for another base.
    let path = dir.path("model/model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let end = bytes.len() - 1;
    bytes[end] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let (code, said) = run("model", "other-base", &["--resume"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("cannot use checkpoint other-base/checkpoint-2 with this model"), "{said}");
}
