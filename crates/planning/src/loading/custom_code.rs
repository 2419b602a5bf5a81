//! Warns of code that comes with a model. transformers runs the code named by `auto_map` if the
//! user trusts it. finetune never reads or runs it, so a model that needs it may compute
//! differently than its author intended.

use std::path::Path;

use serde_json::Value;

use crate::error::input_file;

/// The files that may name code.
const FILES: [&str; 3] = ["config.json", "tokenizer_config.json", "generation_config.json"];
/// Most names of code in a warning.
const TOLD: usize = 4;

/// Returns a warning about the code that the files of a model in `folder` name; none if they name
/// no code.
pub(super) fn named_in(folder: &Path) -> Option<String> {
    let named = FILES.iter().filter_map(|file| {
        let text = input_file::read("read", &folder.join(file)).ok()?;
        let config: Value = serde_json::from_slice(&text).ok()?;
        let mut names = Vec::new();
        texts(config.get("auto_map")?, &mut names);
        names.dedup();
        let more = names.len().saturating_sub(TOLD);
        names.truncate(TOLD);
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        Some(format!("`auto_map` of {file} names {}{more}", names.join(", ")))
    });
    let named: Vec<String> = named.collect();
    (!named.is_empty()).then(|| {
        format!(
            "{}: finetune never reads or runs code that comes with a model; it uses only `model_type` and the vocabulary of the tokenizer",
            named.join("; ")
        )
    })
}

/// Collects the strings inside a value, each cut to 100 characters.
fn texts(value: &Value, strings: &mut Vec<String>) {
    match value {
        Value::String(text) => strings.push(text.chars().take(100).collect()),
        Value::Array(list) => list.iter().for_each(|value| texts(value, strings)),
        Value::Object(map) => map.values().for_each(|value| texts(value, strings)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_told_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(named_in(folder.path()), None);
        let write = |file: &str, text: &str| std::fs::write(folder.path().join(file), text).unwrap();
        write("config.json", r#"{"model_type": "llama"}"#);
        assert_eq!(named_in(folder.path()), None);
        write(
            "config.json",
            r#"{"auto_map": {"AutoConfig": "configuration_x.X", "AutoModel": "modeling_x.X"}}"#,
        );
        write("tokenizer_config.json", r#"{"auto_map": {"AutoTokenizer": [null, "tokenization_x.T"]}}"#);
        let warning = named_in(folder.path()).unwrap();
        assert!(warning.starts_with(
            "`auto_map` of config.json names configuration_x.X, modeling_x.X; `auto_map` of tokenizer_config.json names tokenization_x.T: "
        ));
    }
}
