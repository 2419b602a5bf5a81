//! Tokenizers that run in child processes: the same ids, and an error where they would not end.

use std::path::Path;
use std::time::{Duration, Instant};

use assert_cmd::cargo::cargo_bin;
use finetune::data::{Tokenizer, sandbox};
use finetune::error::ErrorCategory;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{alone, seeds};

/// The tokenizer of a golden model with parts replaced by `changes`.
fn changed(model: &str, changes: &[(&str, Value)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    let path = seeds::golden("models").join(model).join("tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for (key, part) in changes {
        file[*key] = part.clone();
    }
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    folder
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

/// The crate's own tokens of `text`, computed in this process.
fn reference(folder: &Path, text: &str, add_special: bool) -> tokenizers::Encoding {
    let tokenizer = tokenizers::Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
    tokenizer.encode(text, add_special).unwrap()
}

#[test]
fn processes_give_the_ids_of_the_crate() {
    let _alone = alone();
    sandbox::run_in(cargo_bin!("finetune").to_owned());
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let sequence = json!({"type": "Sequence", "pretokenizers": [split(r"\s+|[^\s]+"), byte_level]});
    for (model, changes) in [
        ("tiny-llama", vec![("pre_tokenizer", sequence)]),
        ("tiny-gemma3", vec![("pre_tokenizer", split("[a-z]+"))]),
        ("tiny-phi3", vec![("pre_tokenizer", split("(?=▁)"))]),
    ] {
        let folder = changed(model, &changes);
        let tokenizer = Tokenizer::load(folder.path()).unwrap();
        for text in ["", "a", "Hello, world! 12345\n\tÄpfel 你好 😀 <s> </s>  end "] {
            for special in [true, false] {
                let expected = reference(folder.path(), text, special);
                assert_eq!(tokenizer.encode(text, special).unwrap(), expected.get_ids(), "{model}: {text:?}");
                let actual = tokenizer.encode_with_offsets(text, special).unwrap();
                assert_eq!(actual.ids, expected.get_ids(), "{model}: {text:?}");
                let offsets = expected.get_offsets().iter().zip(expected.get_special_tokens_mask());
                let offsets: Vec<_> = offsets
                    .map(|((start, end), added)| if *added == 1 { 0..0 } else { *start..*end })
                    .collect();
                assert_eq!(actual.offsets, offsets, "{model}: {text:?}");
            }
            let ids = tokenizer.encode(text, false).unwrap();
            let crates = tokenizers::Tokenizer::from_file(folder.path().join("tokenizer.json")).unwrap();
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), crates.decode(&ids, false).unwrap());
            tokenizer.release();
        }
    }
}

#[test]
fn a_pattern_of_quadratic_time_is_one_error_of_its_text() {
    let _alone = alone();
    sandbox::run_in(cargo_bin!("finetune").to_owned());
    let folder = changed("tiny-llama", &[("pre_tokenizer", split("(?>a+)+$"))]);
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    let long = format!("{}b", "a".repeat(300_000));
    for _ in 0..2 {
        let begun = Instant::now();
        let error = tokenizer.encode_with_offsets(&long, true).unwrap_err();
        assert_eq!(error.kind(), ErrorCategory::User);
        assert!(error.to_string().contains("processor time"), "{error}");
        // The limit is ten seconds of CPU time; only an unlimited tokenizer fails here.
        assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", begun.elapsed());
        assert!(!tokenizer.encode("ab ba", true).unwrap().is_empty(), "the next text is encoded");
    }
}

/// Decoders have patterns, too.
#[test]
fn a_decoder_of_quadratic_time_is_an_error() {
    let _alone = alone();
    sandbox::run_in(cargo_bin!("finetune").to_owned());
    let long = format!("{}b", "a".repeat(300_000));
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"Regex": "(?>a+)+$"}, "content": "x"}
    ]});
    let token = json!([{"id": 1, "content": long, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false}]);
    let model = json!({"type": "WordLevel", "vocab": {"u": 0}, "unk_token": "u"});
    let folder = changed(
        "tiny-llama",
        &[("decoder", decoder), ("added_tokens", token), ("model", model), ("post_processor", Value::Null)],
    );
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    assert_eq!(tokenizer.decode(&[0], false).unwrap(), "u");
    let error = tokenizer.decode(&[1], false).unwrap_err().to_string();
    assert!(error.contains("processor time"), "{error}");
}
