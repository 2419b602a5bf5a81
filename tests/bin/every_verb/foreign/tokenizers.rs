//! Tokens listed in files beside tokenizer.json get the ids that `AutoTokenizer` gives them, and so
//! does the text of a folder that has another vocabulary.

use insta::assert_snapshot;
use serde_json::{Value, json};

use super::{edit, json, refused, succeed, test_dir};
use crate::test_dir::{TestDir, golden};

/// Returns the ids that `finetune data` shows for the row `text`.
fn ids(dir: &TestDir, text: &str) -> Vec<u32> {
    dir.write("rows.jsonl", &json!({ "text": text }).to_string());
    let (printed, _) = succeed(dir, &["data", "--tokens", "--model", "model", "--dataset", "rows.jsonl"]);
    let id = |line: &str| {
        let mut words = line.split_whitespace();
        words.next()?.parse::<usize>().ok()?;
        words.next()?.parse().ok()
    };
    printed.lines().filter_map(id).collect()
}

fn special(text: &str) -> Value {
    json!({"content": text, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false,
        "special": true})
}

#[test]
fn a_pad_token_without_an_id_is_no_fault() {
    let dir = test_dir("tiny-mistral");
    edit(&dir.path("model/tokenizer_config.json"), |config| config["pad_token"] = json!("<pad>"));
    edit(&dir.path("model/added_tokens.json"), |list| list["<pad>"] = json!(520));
    assert_eq!(ids(&dir, "The river"), [1, 334, 493, 2]);
    for name in ["unk_token", "mask_token", "image_token"] {
        edit(&dir.path("model/tokenizer_config.json"), |config| config[name] = json!(format!("<{name}>")));
    }
    assert_eq!(ids(&dir, "The river"), [1, 334, 493, 2]);
}

#[test]
fn tokens_of_the_newer_list_have_ids() {
    let dir = test_dir("tiny-qwen2");
    edit(&dir.path("model/tokenizer_config.json"), |config| {
        config["added_tokens_decoder"]["500"] = special("<x>");
    });
    assert_eq!(ids(&dir, "The <x> river"), [260, 220, 500, 407, 499]);
    // The next free id, not the number in the list.
    edit(&dir.path("model/tokenizer_config.json"), |config| {
        config["added_tokens_decoder"]["900"] = special("<y>");
        config["additional_special_tokens"] = json!(["<z>"]);
    });
    assert_eq!(ids(&dir, "<z><y><x>"), [502, 501, 500, 499]);
}

#[test]
fn tokens_of_the_older_files_have_ids() {
    let dir = test_dir("tiny-qwen2");
    edit(&dir.path("model/tokenizer_config.json"), |config| {
        config.as_object_mut().unwrap().remove("added_tokens_decoder");
    });
    edit(&dir.path("model/added_tokens.json"), |list| *list = json!({"<x>": 600, "<y>": 510}));
    edit(&dir.path("model/special_tokens_map.json"), |map| {
        map["mask_token"] =
            json!({"content": "<mask>", "lstrip": false, "rstrip": false, "normalized": false});
        map["additional_special_tokens"] = json!(["<z>", "<x>"]);
    });
    assert_eq!(ids(&dir, "<x><y><z><mask>"), [501, 500, 503, 502, 499]);
}

#[test]
fn an_end_of_text_beyond_the_model_is_an_error_of_rows() {
    let dir = test_dir("tiny-qwen3");
    edit(&dir.path("model/tokenizer_config.json"), |config| config["eos_token"] = json!("<end>"));
    let said = refused(&dir, &["eval", "--model", "model", "--dataset", "rows.jsonl"]);
    assert!(said.contains(r#"("<end>"); the model has the ids below"#), "{said}");
}

/// A run's result gives the same ids as training did, including new tokens.
#[test]
fn what_is_saved_is_what_was_used() {
    let dir = test_dir("tiny-qwen2");
    edit(&dir.path("model/tokenizer_config.json"), |config| {
        config["added_tokens_decoder"]["500"] = special("<x>");
    });
    let used = ids(&dir, "The <x> river");
    let train = |output: &str, more: &[&str]| {
        let args = ["--model", "model", "--dataset", "rows.jsonl", "--output", output];
        let set = ["--set", "train.max_steps=1", "--set", "optimizer.learning_rate=1e-3"];
        succeed(&dir, &[&args[..], &set, more].concat());
    };
    train("full", &[]);
    train("with-tokens", &["--recipe", "lora", "--set", "model.new_tokens=[\"<tool>\"]"]);
    let written = json(&dir.path("with-tokens/tokenizer.json"));
    let added: Vec<&Value> =
        written["added_tokens"].as_array().unwrap().iter().map(|t| &t["content"]).collect();
    assert_eq!(added[added.len() - 2..], ["<x>", "<tool>"]);
    std::fs::rename(dir.path("model"), dir.path("first")).unwrap();
    std::fs::rename(dir.path("full"), dir.path("model")).unwrap();
    assert_eq!(ids(&dir, "The <x> river"), used);
}

/// Replaces the tokenizer of the model with a golden one that has no tokenizer.json.
fn with_vocabulary(dir: &TestDir, name: &str) {
    for entry in std::fs::read_dir(dir.path("model")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.starts_with("tokenizer") || name.contains("tokens") || name.contains("template") {
            std::fs::remove_file(path).unwrap();
        }
    }
    for entry in std::fs::read_dir(golden("vocabularies").join(name)).unwrap() {
        let path = entry.unwrap().path();
        if !path.ends_with("config.json") {
            std::fs::copy(&path, dir.path("model").join(path.file_name().unwrap())).unwrap();
        }
    }
}

/// Runs, merges and exports of a model with a sentencepiece model alone keep its ids.
#[test]
fn a_sentencepiece_model_is_enough() {
    let dir = test_dir("tiny-mistral");
    with_vocabulary(&dir, "mistral");
    let text = " The  river<s>x [INST]";
    let used = ids(&dir, text);
    let train = |output: &str, more: &[&str]| {
        let args = ["--recipe", "lora", "--model", "model", "--dataset", "rows.jsonl", "--output", output];
        let set = ["--set", "train.max_steps=2", "--set", "optimizer.learning_rate=1e-3"];
        succeed(&dir, &[&args[..], &set, more].concat())
    };
    train("lora", &[]);
    let held = |name: &str| dir.path(name).exists();
    let bytes = |name: &str| std::fs::read(dir.path(name)).unwrap();
    assert_eq!(bytes("lora/tokenizer.model"), bytes("model/tokenizer.model"));
    assert!(!held("lora/tokenizer.json"));
    // The adapter's folder has no config.json, which decides how its vocabulary is converted.
    succeed(&dir, &["eval", "--model", "model", "--adapter", "lora", "--dataset", "rows.jsonl"]);
    let merge = |adapter: &str, output: &str| {
        succeed(&dir, &["merge", "--model", "model", "--adapter", adapter, "--output", output]);
    };
    merge("lora", "merged");
    assert_eq!(bytes("merged/tokenizer.model"), bytes("model/tokenizer.model"));

    // New tokens are in a tokenizer.json, and no file without them is left beside it.
    train("more", &["--set", "model.new_tokens=[\"<tool>\"]"]);
    assert!(held("more/tokenizer.json") && !held("more/tokenizer.model"));
    merge("more", "merged-more");
    assert!(held("merged-more/tokenizer.json") && !held("merged-more/tokenizer.model"));

    std::fs::rename(dir.path("model"), dir.path("first")).unwrap();
    for folder in ["merged", "merged-more"] {
        std::fs::rename(dir.path(folder), dir.path("model")).unwrap();
        assert_eq!(ids(&dir, text), used, "{folder}");
        std::fs::rename(dir.path("model"), dir.path(folder)).unwrap();
    }
}

/// The pattern that removes spaces makes a process of its own encode; the ids are the same.
#[test]
fn a_model_that_removes_spaces_gives_the_ids_of_transformers() {
    let dir = test_dir("tiny-mistral");
    with_vocabulary(&dir, "unigram");
    let rows = json(&golden("vocabularies/unigram.json"));
    for text in ["  two leading", "trailing space ", "two  spaces   three    four"] {
        let row = rows.as_array().unwrap().iter().find(|row| row["text"] == text).unwrap();
        let mut expected: Vec<u32> = serde_json::from_value(row["ids"].clone()).unwrap();
        expected.push(2);
        assert_eq!(ids(&dir, text), expected, "{text:?}");
    }
}

/// GGUF files have the tokens of a converted vocabulary.
#[test]
fn a_vocabulary_is_exported_to_gguf() {
    for (model, name) in [("tiny-llama", "llama2"), ("tiny-llama3", "llama3")] {
        let dir = test_dir(model);
        with_vocabulary(&dir, name);
        succeed(&dir, &["export", "--model", "model", "--format", "gguf", "--output", "m.gguf"]);
        let file = std::fs::read(dir.path("m.gguf")).unwrap();
        let has = |text: &str| file.windows(text.len()).any(|part| part == text.as_bytes());
        assert!(has("tokenizer.ggml.tokens") && has(if name == "llama2" { "▁th" } else { "llama-bpe" }));
    }
    let dir = test_dir("tiny-mistral");
    with_vocabulary(&dir, "mistral");
    let said = refused(&dir, &["export", "--model", "model", "--format", "gguf", "--output", "m.gguf"]);
    assert!(said.contains("cannot express this model's tokenizer in GGUF"), "{said}");
    assert!(said.contains("its pre-tokenizer has") && said.contains("Split"), "{said}");
}

#[test]
fn a_vocabulary_that_cannot_be_converted_is_refused() {
    let dir = test_dir("tiny-llama");
    with_vocabulary(&dir, "llama2");
    let said = || refused(&dir, &["data", "--model", "model", "--dataset", "rows.jsonl"]);
    let config = |key: &str, value: Value| {
        edit(&dir.path("model/tokenizer_config.json"), |config| config[key] = value);
    };
    config("tokenizer_class", json!("T5Tokenizer"));
    assert_snapshot!(said(), @r#"
    error: cannot read the tokenizer [DIR]/model/tokenizer.model
      caused by: its class is T5Tokenizer; accepted for a sentencepiece model: LlamaTokenizer, GemmaTokenizer, PreTrainedTokenizerFast
    hint: write tokenizer.json with Python: AutoTokenizer.from_pretrained("[DIR]/model").save_pretrained("[DIR]/model")
    "#);
    config("auto_map", json!({"AutoTokenizer": ["tokenization_x.XTokenizer", null]}));
    assert_snapshot!(said(), @r#"
    error: cannot read the tokenizer [DIR]/model/tokenizer.model
      caused by: `auto_map` of tokenizer_config.json names Python code for it (["tokenization_x.XTokenizer",null]), which finetune never runs
    hint: write tokenizer.json with Python: AutoTokenizer.from_pretrained("[DIR]/model").save_pretrained("[DIR]/model")
    "#);
    std::fs::write(dir.path("model/tokenizer.model"), b"\x0a\x7fabc").unwrap();
    config("auto_map", Value::Null);
    config("tokenizer_class", json!("LlamaTokenizer"));
    assert_snapshot!(said(), @r#"
    error: cannot read the tokenizer [DIR]/model/tokenizer.model
      caused by: it is neither a sentencepiece model nor a vocabulary of tiktoken: a field claims 127 bytes; found: 3
    hint: write tokenizer.json with Python: AutoTokenizer.from_pretrained("[DIR]/model").save_pretrained("[DIR]/model")
    "#);
    dir.write("model/tokenizer.model", "IQ== 0\nIg== 1\nIw== two\n");
    assert_snapshot!(said(), @r#"
    error: cannot read the tokenizer [DIR]/model/tokenizer.model
      caused by: line 3 is no token; accepted: its bytes in base64, a space and its rank
    hint: write tokenizer.json with Python: AutoTokenizer.from_pretrained("[DIR]/model").save_pretrained("[DIR]/model")
    "#);
    dir.write("model/tekken.json", r#"{"config": {"pattern": "x"}, "vocab": []}"#);
    assert_snapshot!(said(), @r#"
    error: cannot read the tokenizer [DIR]/model/tekken.json
      caused by: it has no token for the byte 0x00; accepted: all 256 bytes
    hint: write tokenizer.json with Python: AutoTokenizer.from_pretrained("[DIR]/model").save_pretrained("[DIR]/model")
    "#);
}
