//! A GGUF file as the base of a run, through the verbs: each works as with the same model in a
//! Hugging Face folder. The golden run on one is in the module `train`, the files themselves in
//! tests/lib/gguf_base.rs.

use std::path::Path;

use crate::logits::floats;
use crate::test_dir::{TestDir, copy_folder, golden, lora};
use finetune::weights::ModelFiles;
use insta::assert_snapshot;
use serde_json::Value;

/// A folder with the GGUF file `model.gguf`, and without any other model.
fn test_dir(model: &str) -> TestDir {
    let dir = TestDir::new();
    std::fs::remove_dir_all(dir.path("model")).unwrap();
    let file = golden("qbases/models").join(model).join("model.gguf");
    std::fs::copy(file, dir.path("model.gguf")).unwrap();
    dir
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The arguments of a run on `model`, with the recipe `recipe`, to `output`.
fn run<'a>(model: &'a str, recipe: &'a str, output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = lora(more);
    for (flag, value) in [("--model", model), ("--recipe", recipe), ("--output", output)] {
        let at = args.iter().position(|arg| *arg == flag).unwrap();
        args[at + 1] = value;
    }
    args
}

fn losses(dir: &TestDir, output: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(dir.path(output).join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| line.get("loss").and_then(Value::as_f64)).collect()
}

#[test]
fn inspect_describes_the_model_in_the_file() {
    assert_snapshot!(test_dir("tiny-gguf-q4_0").said(&["inspect", "model.gguf"]), @"
    architecture  LlamaForCausalLM
    model_type    llama
    parameters    103K in 21 tensors, 96.2 KiB
      F16         20.5K in 1 tensor, 40.0 KiB
      F32         320 in 5 tensors, 1.25 KiB
      q4_0        61.4K in 14 tensors, 33.8 KiB
      q8_0        20.5K in 1 tensor, 21.2 KiB
    tensors by group
      embedding   20.5K in 1 tensor, 21.2 KiB
      attention   24.6K in 8 tensors, 13.5 KiB
      mlp         36.9K in 6 tensors, 20.2 KiB
      norm        320 in 5 tensors, 1.25 KiB
      head        20.5K in 1 tensor, 40.0 KiB
    files
      model.gguf  96.2 KiB
    ");
}

/// The plain folder that export writes has the same losses: with LoRA, over NF4, on ranks with
/// shards, of all weights. The folder opens again, and a merged model too.
#[test]
fn runs_equal_those_on_the_plain_folder() {
    let dir = test_dir("tiny-gguf-q4_0");
    dir.said(&["export", "--model", "model.gguf", "--format", "hf", "--type", "f32", "--output", "plain"]);
    let config = json_of(&dir.path("plain/config.json"));
    assert_eq!((&config["model_type"], &config["torch_dtype"]), (&"llama".into(), &"float32".into()));
    let cases: [(&str, &str, &[&str]); 4] = [
        ("lora", "lora", &[]),
        ("nf4", "qlora", &["--set", "quantization.kind=nf4"]),
        ("fsdp", "lora", &["--ranks", "2", "--set", "parallel.strategy=fsdp"]),
        ("full", "full", &["--set", "optimizer.learning_rate=1e-4"]),
    ];
    for (name, recipe, more) in cases {
        for model in ["model.gguf", "plain"] {
            dir.said(&run(model, recipe, &format!("{name}-{model}"), more));
        }
        let ours = losses(&dir, &format!("{name}-model.gguf"));
        assert_eq!(ours, losses(&dir, &format!("{name}-plain")), "{name}");
        assert_eq!(ours.len(), 4);
    }
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
        assert!(dir.path("full-model.gguf").join(file).exists(), "{file}");
    }
    let base = json_of(&dir.path("lora-model.gguf/adapter_config.json"));
    let base = base["base_model_name_or_path"].as_str().unwrap();
    assert!(base.ends_with("model.gguf") && !base.contains("cache"), "{base}");
    // The adapter names its base.
    let adapter = ["--adapter", "lora-model.gguf"];
    dir.said(&[&["eval"][..], &adapter, &["--dataset", "rows.jsonl"]].concat());
    let merge = ["merge", "--model", "model.gguf", "--adapter", "lora-model.gguf", "--output", "merged"];
    dir.said(&[&merge[..], &["--dtype", "f32"]].concat());
    let wanted = ["merge", "--model", "plain", "--adapter", "lora-plain", "--output", "wanted"];
    dir.said(&wanted);
    let [merged, wanted] = ["merged", "wanted"].map(|folder| ModelFiles::open(&dir.path(folder)).unwrap());
    assert!(merged.names().eq(wanted.names()));
    assert!(merged.names().all(|name| floats(&merged, name) == floats(&wanted, name)));
    dir.said(&["export", "--model", "merged", "--format", "gguf", "--output", "again.gguf"]);
    dir.said(&["generate", "--model", "again.gguf", "--prompt", "Hello", "--max-new-tokens", "2"]);
}

/// llama.cpp's converter writes the tensors of longrope without a key for the kind.
#[test]
fn longrope_needs_no_key() {
    let dir = TestDir::new();
    let model = golden("families/models/tiny-phi4-mini");
    let model = model.to_str().unwrap();
    dir.said(&["export", "--model", model, "--format", "gguf", "--output", "named.gguf"]);
    let key = b"phi3.rope.scaling.type";
    let mut bytes = std::fs::read(dir.path("named.gguf")).unwrap();
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
    bytes[at..at + key.len()].copy_from_slice(b"general.source.license");
    std::fs::write(dir.path("unnamed.gguf"), bytes).unwrap();
    let [named, unnamed] = ["named.gguf", "unnamed.gguf"]
        .map(|model| dir.said(&["generate", "--model", model, "--prompt", "Hello", "--max-new-tokens", "8"]));
    assert_eq!(named, unnamed);
}

/// A folder with one GGUF file is that file; a run on it resumes.
#[test]
fn a_folder_with_one_file_is_a_model() {
    let dir = TestDir::new();
    std::fs::remove_dir_all(dir.path("model")).unwrap();
    copy_folder(&golden("qbases/models/tiny-gguf-q8_0"), &dir.path("model"));
    dir.said(&run("model", "lora", "out", &["--set", "checkpoint.save_steps=2"]));
    dir.said(&[
        "verify-resume",
        "--model",
        "model",
        "--dataset",
        "rows.jsonl",
        "--recipe",
        "lora",
        "--set",
        "train.max_steps=4",
        "--set",
        "data.max_seq_len=96",
    ]);
    let said = dir.said(&lora(&["--dry-run"]));
    assert!(said.contains("memory of a step: "), "{said}");
    std::fs::copy(dir.path("model/model.gguf"), dir.path("model/other.gguf")).unwrap();
    assert_snapshot!(dir.refused(&run("model", "lora", "other", &[])), @"
    error: [DIR]/model holds several GGUF models
      caused by: found model.gguf, other.gguf
    hint: give one of them: `--model [DIR]/model/model.gguf`
    ");
}

/// More experts or layers than the file has are refused before a model of them is composed.
#[test]
fn counts_are_those_of_the_tensors() {
    let dir = TestDir::new();
    let model = golden("families/models/tiny-olmoe");
    let export = ["export", "--model", model.to_str().unwrap(), "--format", "gguf", "--output", "model.gguf"];
    dir.said(&export);
    let whole = std::fs::read(dir.path("model.gguf")).unwrap();
    let refused = |key: &str| {
        let mut bytes = whole.clone();
        let at = bytes.windows(key.len()).position(|window| window == key.as_bytes()).unwrap();
        // The type of the value, then the value.
        let value = at + key.len() + 4;
        bytes[value..value + 4].copy_from_slice(&100_000_000u32.to_le_bytes());
        std::fs::write(dir.path("model.gguf"), bytes).unwrap();
        dir.refused(&["plan", "--model", "model.gguf", "--recipe", "lora"])
    };
    assert_snapshot!(["olmoe.expert_count", "olmoe.block_count"].map(refused).join(""), @"
    error: cannot use the model of [DIR]/model.gguf
      caused by: its key `olmoe.expert_count` is 100000000, and its tensor `blk.0.ffn_down_exps.weight` has 8
    hint: give the Hugging Face model that the GGUF file was made from
    error: cannot use the model of [DIR]/model.gguf
      caused by: its key `olmoe.block_count` is 100000000; accepted: up to 65536
    hint: give the Hugging Face model that the GGUF file was made from
    ");
}

/// llama.cpp's converter writes that blocks of StableLM are parallel if config.json does not say
/// it; llama.cpp looks for the norm before the MLP.
#[test]
fn blocks_of_stablelm_are_what_their_norms_say() {
    let dir = TestDir::new();
    let model = golden("families/models/tiny-stablelm");
    dir.said(&["export", "--model", model.to_str().unwrap(), "--format", "gguf", "--output", "model.gguf"]);
    let planned = || {
        let done = dir.command(&["plan", "--model", "model.gguf", "--recipe", "lora", "--json"]).output();
        let plan: Value = serde_json::from_slice(&done.unwrap().stdout).unwrap();
        plan["parameters"].as_u64().unwrap()
    };
    // Parallel blocks have one norm less.
    let wanted = planned();
    let mut bytes = std::fs::read(dir.path("model.gguf")).unwrap();
    let key = b"stablelm.use_parallel_residual";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
    assert_eq!(bytes[at], 0);
    bytes[at] = 1;
    std::fs::write(dir.path("model.gguf"), bytes).unwrap();
    assert_eq!(planned(), wanted);
}

/// Each gets one error, and nothing is written.
#[test]
fn files_that_are_no_models() {
    let dir = test_dir("tiny-gguf-q4_0");
    let whole = std::fs::read(dir.path("model.gguf")).unwrap();
    let refused = |bytes: &[u8]| {
        std::fs::write(dir.path("model.gguf"), bytes).unwrap();
        let said = dir.refused(&run("model.gguf", "lora", "out", &[]));
        assert!(!dir.path("out").exists(), "{said}");
        said
    };
    let replaced = |from: &str, to: &str| {
        let at = whole.windows(from.len()).position(|bytes| bytes == from.as_bytes()).unwrap();
        let mut bytes = whole.clone();
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        bytes
    };
    assert_snapshot!(refused(&whole[..whole.len() - 100]), @"
    error: cannot read weights [DIR]/model.gguf
      caused by: it is truncated: tensor `output.weight` has 40960 bytes from byte 57600 of the data on; the file has 106876 in all
    hint: download or save the file again
    ");
    let changes = [
        ("blk.1.ffn_up.weight", "blk.1.ffn_xx.weight"),
        ("llama.context_length", "llama.context_lengtx"),
        ("llama.vocab_size", "llama.vocab_sixe"),
        ("gpt-2", "gpt-9"),
    ];
    let all: Vec<String> = changes.iter().map(|(from, to)| refused(&replaced(from, to))).collect();
    let (first, rest) = all.split_at(3);
    assert_snapshot!(first.join(""), @"
    error: cannot use the model of [DIR]/model.gguf
      caused by: its tensor `blk.1.ffn_up.weight` is missing
    hint: give the Hugging Face model that the GGUF file was made from
    error: cannot use the model of [DIR]/model.gguf
      caused by: its key `llama.context_length` is missing
    hint: give the Hugging Face model that the GGUF file was made from
    error: cannot use the model of [DIR]/model.gguf
      caused by: finetune does not know its key `llama.vocab_sixe`, which is 320
    hint: give the Hugging Face model that the GGUF file was made from
    ");
    assert!(rest[0].contains("`tokenizer.ggml.pre` is \"gpt-9\"; accepted: gpt-2, smollm, "), "{}", rest[0]);
}
