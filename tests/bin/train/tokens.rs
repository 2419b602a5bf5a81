//! New tokens through the binary: the extended tokenizer and tables, the trained rows, and every
//! verb on an adapter or model that has them.

use std::path::{Path, PathBuf};
use std::process::Output;

use finetune::weights::{ModelFiles, WriteEntry, write_file};
use serde_json::{Value, json};
use tempfile::TempDir;

const NEW: &str = r#"model.new_tokens=["<tool>", "</tool>"]"#;
const EMBED: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
const ROWS: &str = "token_adapter.trainable_tokens_delta";
/// Columns of every tiny model's tables.
const WIDTH: usize = 64;

fn finetune(args: &[&str]) -> Output {
    let mut command = assert_cmd::Command::cargo_bin("finetune").unwrap();
    command.env("HF_HUB_OFFLINE", "1").args(args).output().unwrap()
}

fn succeed(args: &[&str]) -> Output {
    let output = finetune(args);
    assert!(output.status.success(), "{args:?}\n{}", String::from_utf8_lossy(&output.stderr));
    output
}

fn fault(args: &[&str]) -> String {
    let output = finetune(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A folder with a data set whose rows all contain the new tokens.
struct TestDir(TempDir);

impl TestDir {
    fn new() -> Self {
        let dir = TestDir(tempfile::tempdir().unwrap());
        let row =
            |i: usize| json!({"text": format!("ask <tool>amber {i}</tool> then <tool>river</tool> end")});
        let rows: Vec<String> = (0..16).map(|i| row(i).to_string()).collect();
        std::fs::write(dir.path("rows.jsonl"), rows.join("\n")).unwrap();
        dir
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn flags(&self, model: &str, output: &str, recipe: &str, more: &[&str]) -> Vec<String> {
        let (model, data, output) = (golden(model), self.path("rows.jsonl"), self.path(output));
        let mut flags = vec!["--model", &model, "--dataset", &data, "--output", &output, "--recipe", recipe];
        let common = [
            "data.max_seq_len=96",
            "data.packing=false",
            "train.micro_batch_size=2",
            "checkpoint.output_dtype=f32",
        ];
        for pair in common.iter().chain(more) {
            flags.extend(["--set", pair]);
        }
        flags.into_iter().map(str::to_owned).collect()
    }

    fn train(&self, model: &str, output: &str, recipe: &str, more: &[&str]) -> PathBuf {
        succeed(&self.flags(model, output, recipe, more).iter().map(String::as_str).collect::<Vec<_>>());
        self.0.path().join(output)
    }

    fn refuse(&self, model: &str, more: &[&str]) -> String {
        fault(&self.flags(model, "refused", "lora", more).iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Returns the loss on the data set.
    fn loss(&self, args: &[&str]) -> f64 {
        let data = self.path("rows.jsonl");
        let mut all = vec!["eval", "--dataset", &data, "--set", "data.max_seq_len=96", "--json"];
        all.extend(args);
        let figures: Value = serde_json::from_slice(&succeed(&all).stdout).unwrap();
        figures["loss"].as_f64().unwrap()
    }

    /// Merges in f32 and checks that the merged model equals the adapter's.
    fn merge(&self, model: &str, adapter: &str) -> ModelFiles {
        let (model, adapter) = (golden(model), self.path(adapter));
        let merged = format!("{adapter}-merged");
        succeed(&["merge", "--model", &model, "--adapter", &adapter, "--output", &merged, "--dtype", "f32"]);
        let (ours, theirs) =
            (self.loss(&["--model", &model, "--adapter", &adapter]), self.loss(&["--model", &merged]));
        assert!((ours - theirs).abs() < 1e-5, "{ours}, merged {theirs}");
        ModelFiles::open(Path::new(&merged)).unwrap()
    }
}

fn golden(model: &str) -> String {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models");
    models.join(model).display().to_string()
}

fn object(folder: &Path, file: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join(file)).unwrap()).unwrap()
}

fn floats(files: &ModelFiles, name: &str) -> Vec<f32> {
    let mut values = vec![0f32; files.require(name).unwrap().elements()];
    files.read_f32(name, &mut values).unwrap();
    values
}

fn adapter_rows(folder: &Path, module: &str) -> Vec<f32> {
    let files = ModelFiles::open_file(&folder.join("adapter_model.safetensors")).unwrap();
    floats(&files, &format!("base_model.model.{module}.{ROWS}"))
}

/// Returns the ids of the added tokens, checked in both files.
fn ids(folder: &Path) -> Vec<u64> {
    let tokenizer = object(folder, "tokenizer.json");
    let listed = &object(folder, "tokenizer_config.json")["added_tokens_decoder"];
    let added = tokenizer["added_tokens"].as_array().unwrap();
    let of = |text: &str| {
        let entry = added.iter().find(|entry| entry["content"] == text).unwrap();
        let id = entry["id"].as_u64().unwrap();
        assert_eq!(listed[id.to_string()]["content"], text);
        assert_eq!((&entry["special"], &entry["normalized"]), (&false.into(), &true.into()));
        id
    };
    ["<tool>", "</tool>"].map(of).to_vec()
}

#[test]
fn a_tied_model_with_unused_rows_trains_them() {
    let dir = TestDir::new();
    let more = [NEW, "train.max_steps=4", "optimizer.learning_rate=1e-2"];
    let adapter = dir.train("tiny-qwen2", "adapter", "lora", &more);
    let config = object(&adapter, "adapter_config.json");
    assert_eq!(config["trainable_token_indices"], json!([500, 501]));
    assert_eq!(ids(&adapter), [500, 501]);

    let base = ModelFiles::open(Path::new(&golden("tiny-qwen2"))).unwrap();
    let (before, after) = (floats(&base, EMBED), floats(&dir.merge("tiny-qwen2", "adapter"), EMBED));
    assert_eq!((before.len(), after.len()), (512 * WIDTH, 512 * WIDTH));
    let moved = before.chunks(WIDTH).zip(after.chunks(WIDTH)).enumerate();
    let moved: Vec<usize> = moved.filter(|(_, (a, b))| a != b).map(|(row, _)| row).collect();
    assert_eq!(moved, [500, 501]);
    assert_eq!(adapter_rows(&adapter, "model.embed_tokens"), after[500 * WIDTH..502 * WIDTH]);
    assert_eq!(ids(&dir.0.path().join("adapter-merged")), [500, 501]);

    let (model, adapter) = (golden("tiny-qwen2"), adapter.display().to_string());
    let prompt = ["--prompt", "ask <tool>", "--max-new-tokens", "4", "--temperature", "0"];
    let generate = |more: &[&str]| succeed(&[&["generate"], more, &prompt[..]].concat()).stdout;
    let text = generate(&["--model", &model, "--adapter", &adapter]);
    assert!(String::from_utf8_lossy(&text).starts_with("ask <tool>"));
    assert_eq!(text, generate(&["--model", &dir.path("adapter-merged")]));
    let rows = ["data", "--tokens", "--model", &model, "--dataset", &dir.path("rows.jsonl"), "--set", NEW];
    let shown = String::from_utf8(succeed(&rows).stdout).unwrap();
    assert!(shown.contains("500  train  <tool>"), "{shown}");
}

/// Missing rows are initialized with the mean of the others, in embedding and head.
#[test]
fn an_untied_model_grows_by_mean_rows() {
    let dir = TestDir::new();
    // So small a learning rate changes nothing.
    let still = dir.train(
        "tiny-llama",
        "still",
        "lora",
        &[NEW, "train.max_steps=1", "optimizer.learning_rate=1e-30"],
    );
    let base = ModelFiles::open(Path::new(&golden("tiny-llama"))).unwrap();
    for (module, name) in [("model.embed_tokens", EMBED), ("lm_head", HEAD)] {
        let table = floats(&base, name);
        assert_eq!(table.len(), 480 * WIDTH);
        let mean = |column: usize| table.chunks(WIDTH).map(|row| f64::from(row[column])).sum::<f64>() / 480.0;
        let rows = adapter_rows(&still, module);
        assert_eq!(rows.len(), 2 * WIDTH);
        for (i, value) in rows.iter().enumerate() {
            assert!((f64::from(*value) - mean(i % WIDTH)).abs() < 1e-7, "{module} {i}");
        }
    }
    let more = [NEW, "train.max_steps=4", "optimizer.learning_rate=1e-2"];
    let adapter = dir.train("tiny-llama", "adapter", "lora", &more);
    let config = object(&adapter, "adapter_config.json");
    let tokens = json!([480, 481]);
    assert_eq!(config["trainable_token_indices"], json!({"embed_tokens": tokens, "lm_head": tokens}));
    assert_eq!(ids(&adapter), [480, 481]);
    let merged = dir.merge("tiny-llama", "adapter");
    assert_eq!(object(merged.folder(), "config.json")["vocab_size"], 482);
    for (module, name) in [("model.embed_tokens", EMBED), ("lm_head", HEAD)] {
        let (before, after) = (floats(&base, name), floats(&merged, name));
        assert!(after[..before.len()] == before[..], "{name}");
        assert_eq!(after[before.len()..], adapter_rows(&adapter, module), "{name}");
    }

    // Continues from there without naming the tokens again.
    let path = format!("adapter.path={:?}", adapter.display().to_string());
    let on =
        dir.train("tiny-llama", "on", "lora", &[&path, "train.max_steps=2", "optimizer.learning_rate=1e-2"]);
    assert_eq!(
        object(&on, "adapter_config.json")["trainable_token_indices"],
        config["trainable_token_indices"]
    );
    assert_eq!(ids(&on), [480, 481]);
    assert!(adapter_rows(&on, "lm_head") != adapter_rows(&adapter, "lm_head"));
    let error = dir.refuse("tiny-llama", &[&path, r#"model.new_tokens=["<other>"]"#]);
    assert!(
        error.contains("`<other>` is token ") && error.contains("for which the saved adapter has no row"),
        "{error}"
    );
}

#[test]
fn tables_that_train_whole_have_no_rows_of_their_own() {
    let dir = TestDir::new();
    let whole = r#"adapter.modules_to_save=["embed_tokens", "lm_head"]"#;
    let more = [NEW, whole, "train.max_steps=2", "optimizer.learning_rate=1e-2"];
    let adapter = dir.train("tiny-llama", "adapter", "lora", &more);
    assert!(object(&adapter, "adapter_config.json")["trainable_token_indices"].is_null());
    let merged = dir.merge("tiny-llama", "adapter");
    assert_eq!(merged.info(EMBED).unwrap().shape, [482, WIDTH]);
    assert_eq!(ids(merged.folder()), [480, 481]);
}

/// A whole run, and one killed after a checkpoint and resumed, leave the same bytes.
#[test]
fn a_resumed_run_equals_the_unbroken_one() {
    for (recipe, file) in [("lora", "adapter_model.safetensors"), ("full", "model.safetensors")] {
        let dir = TestDir::new();
        let more = [NEW, "train.max_steps=5", "optimizer.learning_rate=1e-3", "checkpoint.save_steps=3"];
        let whole = dir.train("tiny-llama", "whole", recipe, &more);
        let broken = dir.train("tiny-llama", "broken", recipe, &more);
        assert_eq!(ids(&broken.join("checkpoint-3")), [480, 481]);
        for name in ["adapter_config.json", "config.json", file] {
            let _ = std::fs::remove_file(broken.join(name));
        }
        let _ = std::fs::remove_dir_all(broken.join("checkpoint-5"));
        let mut flags = dir.flags("tiny-llama", "broken", recipe, &more);
        flags.push("--resume".into());
        succeed(&flags.iter().map(String::as_str).collect::<Vec<_>>());
        let bytes = |folder: &Path| std::fs::read(folder.join(file)).unwrap();
        assert!(bytes(&whole) == bytes(&broken), "{recipe}");
        assert_eq!(ids(&whole), [480, 481]);
        if recipe == "full" {
            assert_eq!(object(&whole, "config.json")["vocab_size"], 482);
            let files = ModelFiles::open(&whole).unwrap();
            assert_eq!(files.info(HEAD).unwrap().shape, [482, WIDTH]);
            assert!(dir.loss(&["--model", &whole.display().to_string()]).is_finite());
        }
    }
}

/// Adds copies of tensors to an adapter, as PEFT writes them for resized or tied models.
fn add_copies(adapter: &Path, copies: &[(&str, &str)]) {
    let path = adapter.join("adapter_model.safetensors");
    let files = ModelFiles::open_file(&path).unwrap();
    let prefixed = |name: &str| format!("base_model.model.{name}");
    let own = files.names().map(|name| (name.to_owned(), name.to_owned()));
    let copied = copies.iter().map(|(name, of)| (prefixed(name), prefixed(of)));
    let sources: std::collections::BTreeMap<String, String> = own.chain(copied).collect();
    let entry = |(name, of): (&String, &String)| {
        let info = files.require(of).unwrap();
        WriteEntry { name: name.clone(), dtype: info.dtype, shape: info.shape.clone(), stack: None }
    };
    let entries: Vec<WriteEntry> = sources.iter().map(entry).collect();
    let copy = adapter.join("copy.safetensors");
    write_file(&copy, &entries, |entry, sink| sink.write_values(&floats(&files, &sources[&entry.name])))
        .unwrap();
    std::fs::rename(copy, path).unwrap();
}

#[test]
fn what_peft_saves_twice_counts_once() {
    let dir = TestDir::new();
    let (rows, head_rows) = (format!("model.embed_tokens.{ROWS}"), format!("lm_head.{ROWS}"));
    let whole = r#"adapter.modules_to_save=["embed_tokens", "lm_head"]"#;
    for (model, extra, copies) in [
        ("tiny-qwen2", "train.seed=1", vec![(head_rows.as_str(), rows.as_str())]),
        (
            "tiny-llama",
            whole,
            vec![("lm_head.modules_to_save.weight", HEAD), ("lm_head.original_module.weight", EMBED)],
        ),
    ] {
        let more = [NEW, extra, "train.max_steps=2", "optimizer.learning_rate=1e-2"];
        let adapter = dir.train(model, model, "lora", &more);
        let (base, folder) = (golden(model), adapter.display().to_string());
        let before = dir.loss(&["--model", &base, "--adapter", &folder]);
        add_copies(&adapter, &copies);
        assert_eq!(dir.loss(&["--model", &base, "--adapter", &folder]), before, "{model}");
        dir.merge(model, model);
    }
}

/// Training rows of a tied head unties embedding and head.
#[test]
fn rows_of_a_tied_head_untie_it() {
    let dir = TestDir::new();
    let apart = r#"adapter.modules_to_save=["embed_tokens"]"#;
    let more = [NEW, apart, "train.max_steps=3", "optimizer.learning_rate=1e-2"];
    let adapter = dir.train("tiny-qwen2", "adapter", "lora", &more);
    let config = object(&adapter, "adapter_config.json");
    assert_eq!(config["trainable_token_indices"], json!({"lm_head": [500, 501]}));
    let merged = dir.merge("tiny-qwen2", "adapter");
    assert_eq!(floats(&merged, HEAD)[500 * WIDTH..502 * WIDTH], adapter_rows(&adapter, "lm_head"));
}

#[test]
fn a_token_that_is_there_keeps_its_id() {
    let dir = TestDir::new();
    let more = [r#"model.new_tokens=["<|im_start|>"]"#, "train.max_steps=1", "optimizer.learning_rate=1e-2"];
    let adapter = dir.train("tiny-qwen2", "adapter", "lora", &more);
    let config = object(&adapter, "adapter_config.json");
    assert_eq!(config["trainable_token_indices"], json!([498]));
    let tokenizer = |folder: PathBuf| std::fs::read(folder.join("tokenizer.json")).unwrap();
    assert!(tokenizer(adapter) == tokenizer(PathBuf::from(golden("tiny-qwen2"))), "it is the model's own");
}

#[test]
fn wrong_tokens_are_named() {
    let dir = TestDir::new();
    for (tokens, extra, wanted) in [
        (r#"["<a>", ""]"#, "train.seed=1", "one of its entries is empty"),
        (r#"["<a>", "<b>", "<a>"]"#, "train.seed=1", r#"has "<a>" twice"#),
        (r#"["<a>"]"#, r#"adapter.target_modules=["q_proj", "embed_tokens"]"#, "`embed_tokens` has LoRA"),
    ] {
        let error = dir.refuse("tiny-llama", &[&format!("model.new_tokens={tokens}"), extra]);
        assert!(error.contains(wanted), "{error}");
    }
}
