//! Weights of other programs: tensor names, blocks and heads that config.json does not expect.

use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::{LOSS, assert_near, edit, json, loss, noise, read, refused, rename, succeed, test_dir, write};
use crate::test_dir::TestDir;

const WEIGHTS: &str = "model/model.safetensors";
const EVAL: [&str; 5] = ["eval", "--model", "model", "--dataset", "rows.jsonl"];

#[test]
fn names_of_wrappers_and_containers_are_left_out() {
    let names: [fn(&str) -> String; 7] = [
        |name| format!("_orig_mod.{name}"),
        |name| name.trim_start_matches("model.").to_owned(),
        |name| format!("module._orig_mod.module.{name}"),
        |name| format!("base_model.model.{name}"),
        |name| format!("language_model.{name}"),
        |name| format!("actor.net.{name}"),
        |name| name.replace("mlp", "_fsdp_wrapped_module._checkpoint_wrapped_module.mlp"),
    ];
    let dir = test_dir("tiny-llama3");
    let original = std::fs::read(dir.path(WEIGHTS)).unwrap();
    for (at, name) in names.into_iter().enumerate() {
        std::fs::write(dir.path(WEIGHTS), &original).unwrap();
        rename(&dir.path(WEIGHTS), name);
        let (actual, warnings) = loss(&dir, "model");
        assert!((actual - LOSS).abs() < 2e-6, "names {at}: {actual}");
        assert!(warnings.contains("tensors have names of another program: `"), "{warnings}");
    }
    // The result has the names of Hugging Face.
    succeed(&dir, &["export", "--model", "model", "--format", "hf", "--output", "plain"]);
    assert_eq!(loss(&dir, "plain"), (loss(&dir, "model").0, String::new()));
}

#[test]
fn two_names_of_one_tensor_are_refused() {
    let dir = test_dir("tiny-llama3");
    let mut tensors = read(&dir.path(WEIGHTS));
    let norm = tensors["model.norm.weight"].clone();
    tensors.insert("_orig_mod.model.norm.weight".to_owned(), norm);
    write(&dir.path(WEIGHTS), &tensors);
    insta::assert_snapshot!(refused(&dir, &EVAL), @r"
    error: cannot read weights in [DIR]/model
      caused by: `_orig_mod.model.norm.weight` and `model.norm.weight` are names of one tensor
    hint: save the model again with transformers, or remove one of the two
    ");
}

#[test]
fn blocks_beyond_those_of_config_json_are_not_used() {
    let dir = test_dir("tiny-llama3");
    let mut tensors = read(&dir.path(WEIGHTS));
    let block = tensors.clone().into_iter().filter(|(name, _)| name.contains(".layers.1."));
    for (name, tensor) in block.collect::<Vec<_>>() {
        tensors.insert(name.replace("layers.1.", "layers.2."), tensor.clone());
        tensors.insert(name.replace("model.layers.1.", "mtp.layers.0."), tensor);
    }
    write(&dir.path(WEIGHTS), &tensors);
    let (actual, warnings) = loss(&dir, "model");
    assert_near(actual, LOSS);
    insta::assert_snapshot!(warnings, @r"
    warning: block 2 of the weights is not used: `num_hidden_layers` of config.json is 2
    warning: 9 tensors that predict further tokens (`mtp`) are not trained; written models keep them
    ");
}

#[test]
fn a_negative_pad_token_is_none() {
    let dir = test_dir("tiny-llama3");
    edit(&dir.path("model/config.json"), |config| config["pad_token_id"] = json!(-1));
    assert_near(loss(&dir, "model").0, LOSS);
}

#[test]
fn an_untied_model_without_a_head_is_told() {
    let dir = test_dir("tiny-llama3");
    edit(&dir.path("model/config.json"), |config| {
        config.as_object_mut().unwrap().remove("tie_word_embeddings");
    });
    insta::assert_snapshot!(refused(&dir, &EVAL), @r#"
    error: cannot use the weights in [DIR]/model
      caused by: they hold `model.embed_tokens.weight` and no `lm_head.weight`
      caused by: config.json does not tie the two: its `tie_word_embeddings` is false, or missing and false for this family
    hint: write `"tie_word_embeddings": true` into config.json if embedding and head are one table
    "#);
}

/// A tied tiny-llama3 whose file holds a different head.
fn tied_but_apart() -> TestDir {
    let dir = test_dir("tiny-llama3");
    let mut tensors = read(&dir.path(WEIGHTS));
    let (_, shape, _) = tensors["model.embed_tokens.weight"].clone();
    let values = noise(shape.iter().product(), 0.1, 12_345);
    // Truncated to bf16.
    let bytes = values.iter().flat_map(|v| (((*v as f32).to_bits() >> 16) as u16).to_le_bytes()).collect();
    tensors.insert("lm_head.weight".to_owned(), (Dtype::BF16, shape, bytes));
    write(&dir.path(WEIGHTS), &tensors);
    dir
}

/// The loss with that head, computed by transformers.
const APART: f64 = 6.663_144;

fn is_tied(dir: &TestDir, folder: &str) -> Value {
    json(&dir.path(&format!("{folder}/config.json")))["tie_word_embeddings"].clone()
}

#[test]
fn a_head_that_differs_from_the_tied_embedding_stays() {
    let dir = tied_but_apart();
    let (actual, warnings) = loss(&dir, "model");
    assert_near(actual, APART);
    insta::assert_snapshot!(warnings, @"warning: config.json ties embedding and head, but the weights hold two tables that differ: the head is `lm_head.weight` as it is stored");
    succeed(&dir, &["export", "--model", "model", "--format", "hf", "--output", "plain"]);
    assert_near(loss(&dir, "plain").0, APART);
    succeed(&dir, &["quantize", "--model", "model", "--kind", "nf4", "--output", "nf4"]);
    assert!((loss(&dir, "nf4").0 - APART).abs() < 0.1);
    succeed(&dir, &["export", "--model", "model", "--format", "gguf", "--output", "model.gguf"]);
    let gguf = std::fs::read(dir.path("model.gguf")).unwrap();
    assert!(gguf.windows(13).any(|bytes| bytes == b"output.weight"));
    for folder in ["plain", "nf4"] {
        assert_eq!(is_tied(&dir, folder), false, "{folder}");
    }
}

#[test]
fn a_head_that_differs_trains_apart() {
    let dir = tied_but_apart();
    let train = |output: &str, more: &[&str]| {
        let args = ["--model", "model", "--dataset", "rows.jsonl", "--output", output];
        let settings = ["train.max_steps=2", "scheduler.warmup_steps=0", "optimizer.learning_rate=1e-3"];
        let set = settings.iter().flat_map(|setting| ["--set", *setting]).collect::<Vec<_>>();
        succeed(&dir, &[&args[..], &set, more].concat());
    };
    train("full", &[]);
    train("sharded", &["--ranks", "2"]);
    for folder in ["full", "sharded"] {
        assert_eq!(is_tied(&dir, folder), false, "{folder}");
        assert!(loss(&dir, folder).0 < APART, "{folder}");
    }
    train("adapter", &["--recipe", "lora"]);
    train("adapter-on-nf4", &["--recipe", "qlora"]);
    let data = ["--verify-on", "rows.jsonl"];
    let merge = ["merge", "--model", "model", "--adapter", "adapter", "--output", "merged"];
    succeed(&dir, &[&merge[..], &data].concat());
    assert_eq!(is_tied(&dir, "merged"), false);
    assert!(loss(&dir, "merged").0 < APART);
    let export =
        ["export", "--model", "model", "--adapter", "adapter", "--format", "gguf", "--output", "a.gguf"];
    succeed(&dir, &export);
}

#[test]
fn equal_tables_stay_tied() {
    let dir = test_dir("tiny-llama3");
    let mut tensors = read(&dir.path(WEIGHTS));
    let table = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".to_owned(), table);
    write(&dir.path(WEIGHTS), &tensors);
    let (actual, warnings) = loss(&dir, "model");
    assert_near(actual, LOSS);
    assert_eq!(warnings, "");
}
