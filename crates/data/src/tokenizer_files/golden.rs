//! Tests of converted vocabularies against the ids of other programs.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::linear_cost;
use crate::tokenizer::Tokenizer;
use crate::tokenizer_names::{TOKENIZER_JSON, VOCABULARIES};

fn golden(name: &str) -> PathBuf {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    project.join("tests/golden/vocabularies").join(name)
}

fn copy_of(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(golden(name)).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    folder
}

/// The ids are those of transformers, tiktoken and mistral-common.
#[test]
fn other_vocabularies_give_the_ids_of_their_programs() {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(golden("")).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.is_dir() {
            continue;
        }
        let tokenizer = Tokenizer::load(&folder).unwrap();
        let rows: Value =
            serde_json::from_slice(&std::fs::read(folder.with_extension("json")).unwrap()).unwrap();
        for row in rows.as_array().unwrap() {
            let text = row["text"].as_str().unwrap();
            let ids = |special| tokenizer.encode(text, special).unwrap();
            assert_eq!(json!(ids(true)), row["ids"], "{}: {text:?}", folder.display());
            assert_eq!(json!(ids(false)), row["ids_no_special"], "{}: {text:?}", folder.display());
            let decoded = tokenizer.decode(&ids(false), false).unwrap();
            assert_eq!(decoded, row["decoded"].as_str().unwrap(), "{}: {text:?}", folder.display());
        }
        let parts = tokenizers::Tokenizer::from_bytes(tokenizer.json().unwrap()).unwrap();
        // sentencepiece removes the spaces around a text by a pattern that is not linear.
        assert_eq!(linear_cost::is_linear(&parts), !folder.ends_with("unigram"), "{}", folder.display());
        let silent = ["llama2-no-prefix", "llama2-bare", "llama3"].iter().any(|name| folder.ends_with(name));
        let notes = tokenizer.left_out();
        assert_eq!(notes.iter().any(|note| note.contains("has no `add_bos_token`")), silent, "{notes:?}");
        names.push(folder);
    }
    assert!(!names.is_empty());
}

/// The changed files open without the vocabulary, with the ids of the changed tokenizer.
#[test]
fn new_tokens_make_a_tokenizer_json() {
    for name in ["llama2", "llama2-added", "mistral", "gemma", "unigram", "llama3", "qwen", "tekken"] {
        let mut tokenizer = Tokenizer::load(&golden(name)).unwrap();
        let next = tokenizer.vocab_size() as u32;
        assert_eq!(tokenizer.add_tokens(&["<new>".to_owned()]).unwrap(), [next], "{name}");
        let folder = copy_of(name);
        let vocabulary =
            VOCABULARIES.map(|file| folder.path().join(file)).into_iter().find(|path| path.exists());
        std::fs::remove_file(vocabulary.unwrap()).unwrap();
        for (file, text) in tokenizer.changed_files() {
            std::fs::write(folder.path().join(file), text).unwrap();
        }
        let again = Tokenizer::load(folder.path()).unwrap();
        assert_eq!((again.bos(), again.eos()), (tokenizer.bos(), tokenizer.eos()), "{name}");
        for text in ["a<new> b  c", " <s>x<|im_end|>"] {
            assert_eq!(again.encode(text, true).unwrap(), tokenizer.encode(text, true).unwrap());
        }
    }
}

#[test]
fn the_first_name_describes_the_tokenizer() {
    let folder = copy_of("llama2");
    let put = |from: &str, name: &str| {
        std::fs::copy(golden(from).join(name), folder.path().join(name)).unwrap();
        Tokenizer::load(folder.path()).unwrap().digest()
    };
    let digest = |name: &str| Tokenizer::load(&golden(name)).unwrap().digest();
    assert_eq!(put("qwen", "qwen.tiktoken"), digest("llama2"));
    assert_ne!(put("tekken", "tekken.json"), digest("llama2"));
    let json = std::fs::read(golden("../models/tiny-llama/tokenizer.json")).unwrap();
    std::fs::write(folder.path().join(TOKENIZER_JSON), &json).unwrap();
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    assert!(tokenizer.token_id("<SPECIAL_6>").is_none() && tokenizer.token_id("Ġthe").is_some());
}

#[test]
fn bad_vocabularies_are_refused_with_the_file_and_the_reason() {
    let why = |name: &str, contents: &[u8]| {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(name), contents).unwrap();
        Tokenizer::load(folder.path()).unwrap_err().to_string()
    };
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 493443\n";
    assert!(why("tokenizer.model", pointer).contains("pointer of Git LFS"));
    let text = why("tokenizer.model", b"x");
    assert!(text.contains("tokenizer.model") && text.contains("save_pretrained"), "{text}");
    assert!(why("tokenizer.model", b"").contains("no pieces"));
    assert!(why("tokenizer.model", b"IQ== 0\n").contains("no token for the byte 0x00"));
    assert!(why("qwen.tiktoken", b"x").contains("line 1 is no token"));
    assert!(why("tiktoken.model", b"x").contains("line 1 is no token"));
    assert!(why("tekken.json", b"{}").contains("not a tekken.json: missing field `config`"));
    let tekken = |change: &dyn Fn(&mut Value)| {
        let bytes = std::fs::read(golden("tekken/tekken.json")).unwrap();
        let mut file: Value = serde_json::from_slice(&bytes).unwrap();
        change(&mut file);
        why("tekken.json", file.to_string().as_bytes())
    };
    let text = tekken(&|file| file["config"]["default_num_special_tokens"] = json!(5));
    assert!(text.contains("`default_num_special_tokens` is 5; accepted: 6 to"), "{text}");
    let text = tekken(&|file| file["config"]["default_vocab_size"] = json!(5000));
    assert!(text.contains("`default_vocab_size` is 5000; accepted: 20 special tokens"), "{text}");
    let text = tekken(&|file| file["special_tokens"][2]["rank"] = json!(9));
    // The tokens are in the order of their ranks, so the next one is in its place.
    assert!(
        text.contains(r#"special token "[INST]" has the rank 3"#) && text.contains("expected 2"),
        "{text}"
    );
    let text = tekken(&|file| file["vocab"][7]["rank"] = json!(8));
    assert!(text.contains("token 7 of its `vocab` has the rank 8; accepted: 7"), "{text}");
    let text = tekken(&|file| file["vocab"][7]["token_bytes"] = json!("?"));
    assert!(text.contains("token 7 of its `vocab` is no base64"), "{text}");
    let text = tekken(&|file| file["config"]["pattern"] = json!("("));
    assert!(text.contains("its parts make no tokenizer"), "{text}");
}
