//! The files beside a vocabulary, and the tokens that a class of transformers adds to their lists.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::read_object;
use crate::error::Result;
use crate::listed_tokens::{ADDITIONAL, EXTRA, TokenLists};
use crate::new_tokens;

/// The contents of the files beside a vocabulary; a missing file is empty.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenizerSettings {
    /// The object in tokenizer_config.json.
    pub(crate) config: Map<String, Value>,
    /// The object in special_tokens_map.json.
    pub(super) map: Map<String, Value>,
    /// The object in added_tokens.json.
    pub(super) list: Map<String, Value>,
    /// True if listed tokens match the text before it is normalized.
    pub(super) listed_are_raw: bool,
}

impl TokenizerSettings {
    /// Reads the files in `folder`.
    ///
    /// # Errors
    /// Fails with a user error if one of them is no JSON object.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        Ok(TokenizerSettings {
            config: read_object(&folder.join(new_tokens::CONFIG))?,
            map: read_object(&folder.join("special_tokens_map.json"))?,
            list: read_object(&folder.join(new_tokens::LIST))?,
            listed_are_raw: false,
        })
    }

    /// The lists of tokens.
    pub(crate) fn lists(&self) -> TokenLists<'_> {
        TokenLists { config: &self.config, map: &self.map, list: &self.list, raw: self.listed_are_raw }
    }

    /// The value of a key of tokenizer_config.json, if Python counts it as true or false.
    pub(super) fn flag(&self, key: &str) -> Option<bool> {
        self.config.get(key).map(is_true)
    }

    /// Names a token, unless a file names it or has null there.
    pub(super) fn name_token(&mut self, name: &str, text: &str) {
        let in_map = self.lists().has_older() && self.map.contains_key(name);
        if !in_map && !self.config.contains_key(name) {
            // An object, so that the name marks no token of added_tokens.json as special.
            self.config.insert(name.to_owned(), json!({"content": text}));
        }
    }

    /// Adds the tokens of a vocabulary to those without a name, unless the files have such a list.
    pub(super) fn list_tokens(&mut self, tokens: Vec<Value>) {
        let extra = self.config.get(EXTRA);
        let is_list = |value: Option<&Value>| value.is_some_and(|value| !value.is_object());
        let has_list = is_list(extra)
            || self.config.contains_key(ADDITIONAL) && !extra.is_some_and(is_true)
            || self.lists().has_older() && is_list(self.map.get(EXTRA));
        self.map.shift_remove(ADDITIONAL);
        if !has_list {
            self.config.insert(ADDITIONAL.to_owned(), tokens.into());
        }
    }
}

/// Returns whether Python counts `value` as true.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(config: &Value, map: &Value) -> TokenizerSettings {
        let object = |value: &Value| value.as_object().cloned().unwrap_or_default();
        TokenizerSettings { config: object(config), map: object(map), ..Default::default() }
    }

    #[test]
    fn a_named_token_keeps_its_name() {
        let mut parsed = settings(&json!({"bos_token": null, "eos_token": "e"}), &json!({"unk_token": "u"}));
        for name in ["bos_token", "eos_token", "unk_token", "pad_token"] {
            parsed.name_token(name, "x");
        }
        let text = |name: &str| parsed.lists().text(name);
        let named = ["bos_token", "eos_token", "unk_token", "pad_token"].map(text);
        assert_eq!(named, [None, Some("e".into()), Some("u".into()), Some("x".into())]);
        // The newer list replaces the older file.
        let mut newer = settings(&json!({"added_tokens_decoder": {}}), &json!({"unk_token": "u"}));
        newer.name_token("unk_token", "x");
        assert_eq!(newer.lists().text("unk_token"), Some("x".into()));
    }

    #[test]
    fn a_list_of_the_files_replaces_that_of_the_vocabulary() {
        let listed = |config: Value, map: Value| {
            let mut parsed = settings(&config, &map);
            parsed.list_tokens(vec![json!({"content": "v", "special": false})]);
            let tokens = parsed.lists().tokens(&Default::default()).unwrap();
            tokens.into_iter().map(|token| (token.content, token.special)).collect::<Vec<_>>()
        };
        let of = |text: &str, special| vec![(text.to_owned(), special)];
        assert_eq!(listed(json!({}), json!({})), of("v", false));
        assert_eq!(listed(json!({}), json!({"additional_special_tokens": ["x"]})), of("v", false));
        assert_eq!(listed(json!({"additional_special_tokens": ["x"]}), json!({})), of("x", true));
        assert_eq!(listed(json!({"additional_special_tokens": []}), json!({})), []);
        assert_eq!(listed(json!({"extra_special_tokens": ["x"]}), json!({})), of("x", true));
        assert_eq!(listed(json!({}), json!({"extra_special_tokens": ["x"]})), of("x", true));
    }
}
