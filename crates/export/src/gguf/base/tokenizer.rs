//! The tokenizer from the `tokenizer.*` keys: the reverse of `vocabulary`.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::super::pretokenizer;
use super::keys::shown;
use crate::data::{GgufTokenizer, GgufVocabulary, VocabularyKind};
use crate::error::Result;
use crate::model::Architecture;
use crate::weights::{GgufFile, GgufValue};

/// The files of a tokenizer.
pub(super) struct TokenizerParts {
    pub(super) files: GgufTokenizer,
    pub(super) generation: Map<String, Value>,
}

/// Reads the tokenizer of a model of `family`; `config` is its config.json.
///
/// # Errors
/// User: a key is missing, or the tokenizer is of a kind that finetune does not have.
pub(super) fn read(
    file: &GgufFile,
    config: &Map<String, Value>,
    family: &Architecture,
) -> Result<TokenizerParts> {
    let keys = TokenizerKeys(file);
    let kind = match keys.text("model") {
        Some("gpt2") => {
            let name = keys.text("pre").unwrap_or("default");
            let words = pretokenizer::of_name(name).ok_or_else(|| {
                let accepted = pretokenizer::names().join(", ");
                keys.refused("pre", &format!("\"{name}\""), &accepted)
            })?;
            VocabularyKind::Bytes { words, merges: keys.texts("merges")? }
        }
        Some("gemma4") => VocabularyKind::Merged { merges: keys.texts("merges")? },
        Some("llama") => VocabularyKind::Pieces {
            scores: keys.numbers("scores")?,
            prefix: keys.flag("add_space_prefix").unwrap_or(true),
            removes_spaces: keys.flag("remove_extra_whitespaces").unwrap_or(false),
        },
        other => return Err(keys.refused("model", &format!("{other:?}"), "gpt2, llama, gemma4")),
    };
    let is_pieces = matches!(kind, VocabularyKind::Pieces { .. });
    let always_begins = match &kind {
        VocabularyKind::Bytes { words, .. } => words.adds_bos,
        VocabularyKind::Pieces { .. } | VocabularyKind::Merged { .. } => true,
    };
    // llama.cpp always begins texts of this kind so.
    let is_merged = matches!(kind, VocabularyKind::Merged { .. });
    let tokens = keys.texts("tokens")?;
    let types = keys.numbers("token_type")?;
    // The ids that llama.cpp takes without a key.
    let default = |id: u32| is_pieces.then_some(id);
    let id = |name: &str, default: Option<u32>| keys.id(name).or(default);
    let special: BTreeMap<&'static str, u32> = [
        ("bos_token", id("bos", default(1))),
        ("eos_token", id("eos", default(2))),
        ("unk_token", id("unknown", default(0))),
        ("pad_token", id("padding", None)),
    ]
    .into_iter()
    .filter_map(|(name, id)| Some((name, id.filter(|id| (*id as usize) < tokens.len())?)))
    .collect();
    let generation = generation(&keys, &special);
    let vocabulary = GgufVocabulary {
        kind,
        tokens,
        types,
        special,
        adds_bos: is_merged || keys.flag("add_bos_token").unwrap_or(always_begins),
        adds_eos: keys.flag("add_eos_token").unwrap_or(false),
        strips_right: strips_right(file, family),
        template: template(file),
    };
    let files = vocabulary
        .files(config)
        .map_err(|cause| file.refused(format!("its tokenizer cannot be a tokenizer.json: {cause}")))?;
    Ok(TokenizerParts { files, generation })
}

/// Returns whether special tokens strip the white space after them: by the model's name, as in
/// llama.cpp.
fn strips_right(file: &GgufFile, family: &Architecture) -> bool {
    let Some(GgufValue::Text(name)) = file.key("general.name") else { return false };
    let name = name.to_lowercase();
    family.gguf.stripping_names.iter().any(|part| name.contains(part))
}

/// The settings of generation: the ids that end one.
fn generation(keys: &TokenizerKeys<'_>, special: &BTreeMap<&'static str, u32>) -> Map<String, Value> {
    let mut ends: Vec<u32> = special.get("eos_token").copied().into_iter().collect();
    ends.extend(["eot", "eom"].into_iter().filter_map(|name| keys.id(name)));
    let mut seen = Vec::new();
    ends.retain(|id| {
        !seen.contains(id) && {
            seen.push(*id);
            true
        }
    });
    let mut json = Map::new();
    for (key, name) in [("bos_token_id", "bos_token"), ("pad_token_id", "pad_token")] {
        json.extend(special.get(name).map(|id| (key.to_owned(), (*id).into())));
    }
    json.insert("eos_token_id".to_owned(), ends.into());
    json
}

/// The chat template; with others, a list of all by their names.
fn template(file: &GgufFile) -> Option<Value> {
    let text = |key: &str| match file.key(key) {
        Some(GgufValue::Text(text)) => Some(text.clone()),
        _ => None,
    };
    let named = file
        .keys()
        .filter_map(|key| Some((key.strip_prefix("tokenizer.chat_template.")?.to_owned(), text(key)?)));
    let mut all: Vec<(String, String)> = named.collect();
    let default = text("tokenizer.chat_template");
    if all.is_empty() {
        return default.map(Value::String);
    }
    all.extend(default.map(|text| ("default".to_owned(), text)));
    Some(all.into_iter().map(|(name, template)| json!({"name": name, "template": template})).collect())
}

/// The keys `tokenizer.ggml.*`.
struct TokenizerKeys<'a>(&'a GgufFile);

impl TokenizerKeys<'_> {
    fn get(&self, key: &str) -> Option<&GgufValue> {
        self.0.key(&format!("tokenizer.ggml.{key}"))
    }

    fn refused(&self, key: &str, value: &str, accepted: &str) -> crate::error::Error {
        let error =
            self.0.refused(format!("its key `tokenizer.ggml.{key}` is {value}; accepted: {accepted}"));
        error.hint("give the Hugging Face model that the GGUF file was made from")
    }

    fn text(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            GgufValue::Text(text) => Some(text),
            _ => None,
        }
    }

    fn flag(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            GgufValue::Bool(flag) => Some(*flag),
            _ => None,
        }
    }

    fn id(&self, name: &str) -> Option<u32> {
        match self.get(&format!("{name}_token_id"))? {
            GgufValue::Integer(id) => u32::try_from(*id).ok(),
            _ => None,
        }
    }

    fn list<T>(&self, key: &str, read: impl Fn(&GgufValue) -> Option<T>) -> Result<Vec<T>> {
        let value = self.get(key);
        let list = match value {
            Some(GgufValue::List(list)) => list.iter().map(read).collect(),
            _ => None,
        };
        list.ok_or_else(|| {
            let actual = value.map_or_else(|| "missing".to_owned(), shown);
            self.refused(key, &actual, "a list, as llama.cpp writes it")
        })
    }

    fn texts(&self, key: &str) -> Result<Vec<String>> {
        self.list(key, |value| match value {
            GgufValue::Text(text) => Some(text.clone()),
            _ => None,
        })
    }

    fn numbers(&self, key: &str) -> Result<Vec<f32>> {
        self.list(key, |value| match value {
            GgufValue::Float(number) => Some(*number),
            GgufValue::Integer(number) => Some(*number as f32),
            _ => None,
        })
    }
}
