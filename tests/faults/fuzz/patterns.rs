//! Adapter patterns, and the replacement tables in a tokenizer.json: small languages that changes
//! of the surrounding file seldom reach.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use finetune::adapter::{AdapterConfig, SavedAdapter, resolve, resolve_saved};
use finetune::data::Tokenizer;
use finetune::model::{ModelConfig, modules};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Target, seeds};

#[test]
fn patterns_of_adapters() {
    let folder = TempDir::new().unwrap();
    let golden = |name: &str| std::fs::read(seeds::golden("train/lora/adapter_final").join(name)).unwrap();
    std::fs::write(folder.path().join("adapter_model.safetensors"), golden("adapter_model.safetensors"))
        .unwrap();
    let config: Value = serde_json::from_slice(&golden("adapter_config.json")).unwrap();
    let model = std::fs::read_to_string(seeds::golden("models/tiny-llama/config.json")).unwrap();
    let modules = modules(&ModelConfig::from_json(&model, "config.json").unwrap());
    let parse = |bytes: &[u8]| {
        let pattern = String::from_utf8_lossy(bytes).into_owned();
        let mut config = config.clone();
        // The text decides which keys are patterns, so each is also tried alone.
        let keys = bytes.first().copied().unwrap_or(0);
        if keys & 1 == 0 {
            config["target_modules"] = json!(pattern);
        }
        if keys & 2 == 0 {
            config["exclude_modules"] = json!(pattern);
        }
        if keys & 4 == 0 {
            config["rank_pattern"] = json!({ &pattern: 4 });
        }
        if keys & 8 == 0 {
            config["alpha_pattern"] = json!({ &pattern: 2.5 });
        }
        std::fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
        if let Ok(read) = AdapterConfig::read(folder.path()) {
            let _ = resolve(&read.spec, &modules);
            let _ = resolve_saved(&read.spec, &modules);
        }
        drop(SavedAdapter::read(folder.path()));
    };
    let patterns = [
        "q_proj",
        r"model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj",
        r"(?i:.*\.mlp\.(?:up|gate|down)_proj)$",
        r"^(.*_proj){1,9}|\p{L}+[^\W\d_]{2,}(?P<n>a|b)*?",
        r"((a{0,40}){0,40}){0,40}",
    ];
    let seeds = patterns.iter().map(|pattern| pattern.as_bytes().to_vec()).collect();
    Target { name: "adapter-patterns", seeds, tries: 300, parse: &parse }.run();
}

#[test]
fn tables_of_replacements() {
    let folder = TempDir::new().unwrap();
    let path = seeds::golden("models/tiny-phi3/tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let parse = |bytes: &[u8], tokenizer: &mut Value| {
        let table = json!({"type": "Precompiled", "precompiled_charsmap": BASE64_STANDARD.encode(bytes)});
        tokenizer["normalizer"] = if bytes.len().is_multiple_of(2) {
            table
        } else {
            json!({"type": "Sequence", "normalizers": [table]})
        };
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        if let Ok(tokenizer) = Tokenizer::load(folder.path()) {
            let _ = tokenizer.encode("Hello ﬁ ｱ \u{301}\0ab 😀", true);
        }
    };
    let tokenizer = std::cell::RefCell::new(&mut tokenizer);
    // The length of a trie, its units (a root, and a leaf for `a`), and texts that end in a zero
    // byte.
    let units: [u32; 4] = [1 << 10, 0x161, 1 << 31, 0];
    let trie: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
    let table = [&(trie.len() as u32).to_le_bytes()[..], &trie, b"b\0cd\0\0"].concat();
    let claim = |length: u32| [&length.to_le_bytes()[..], &trie, b"b\0"].concat();
    let seeds = vec![table, claim(16), claim(u32::MAX), claim(1 << 31), claim(0)];
    let parse = |bytes: &[u8]| parse(bytes, &mut tokenizer.borrow_mut());
    Target { name: "precompiled-charsmap", seeds, tries: 300, parse: &parse }.run();
}
