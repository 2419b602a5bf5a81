//! Writes tokens that are added to a tokenizer into its files, like transformers' `add_tokens`.
//!
//! The files are edited, not made anew: the rest stays as its author wrote it. The tokenizer is
//! then read from the edited text, so that the used and the saved one are equal.

use std::collections::HashSet;

use serde_json::{Map, Value, json};
use tokenizers::AddedToken;

/// Files beside tokenizer.json that name tokens: the settings, and the list of older tokenizers.
pub(super) const CONFIG: &str = "tokenizer_config.json";
pub(super) const LIST: &str = "added_tokens.json";

/// A token with its future id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NewToken {
    pub(super) id: u32,
    pub(super) token: AddedToken,
}

impl NewToken {
    /// A token of plain text, which matches anywhere after normalization.
    pub(super) fn plain(id: u32, text: &str) -> Self {
        NewToken { id, token: AddedToken::from(text, false) }
    }

    /// The token's text.
    pub(super) fn text(&self) -> &str {
        &self.token.content
    }

    /// The token's fields in transformers' files.
    fn properties(&self) -> Map<String, Value> {
        let token = &self.token;
        let mut map = Map::new();
        map.insert("content".into(), self.text().into());
        for (key, value) in [
            ("single_word", token.single_word),
            ("lstrip", token.lstrip),
            ("rstrip", token.rstrip),
            ("normalized", token.normalized),
            ("special", token.special),
        ] {
            map.insert(key.into(), value.into());
        }
        map
    }
}

/// Returns tokenizer.json with `tokens`, which replace those of the same ids.
pub(super) fn in_tokenizer(mut file: Map<String, Value>, tokens: &[NewToken]) -> Map<String, Value> {
    let entry = |token: &NewToken| {
        let mut entry = Map::new();
        entry.insert("id".into(), token.id.into());
        entry.extend(token.properties());
        Value::Object(entry)
    };
    let ids: HashSet<u64> = tokens.iter().map(|token| u64::from(token.id)).collect();
    let list = file.entry("added_tokens").or_insert_with(|| json!([]));
    if list.is_null() {
        *list = json!([]);
    }
    if let Some(list) = list.as_array_mut() {
        list.retain(|entry| !entry["id"].as_u64().is_some_and(|id| ids.contains(&id)));
        list.extend(tokens.iter().map(entry));
        list.sort_by_key(|entry| entry["id"].as_u64());
    }
    file
}

/// Returns tokenizer_config.json with `tokens`, if it lists added tokens.
pub(super) fn in_config(mut file: Map<String, Value>, tokens: &[NewToken]) -> Option<Map<String, Value>> {
    let listed = file.get_mut("added_tokens_decoder")?.as_object_mut()?;
    listed.extend(tokens.iter().map(|token| (token.id.to_string(), Value::Object(token.properties()))));
    Some(file)
}

/// Returns added_tokens.json with `tokens`, if it is not empty.
pub(super) fn in_list(mut file: Map<String, Value>, tokens: &[NewToken]) -> Option<Map<String, Value>> {
    if file.is_empty() {
        return None;
    }
    file.extend(tokens.iter().map(|token| (token.text().to_owned(), token.id.into())));
    Some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().cloned().unwrap_or_default()
    }

    #[test]
    fn entries_are_those_of_transformers() {
        let token = NewToken::plain(5, "<tool>");
        let file =
            object(json!({"version": "1.0", "added_tokens": [{"id": 7, "content": "z"}], "model": {}}));
        let written = Value::Object(in_tokenizer(file, std::slice::from_ref(&token)));
        let entry = json!({"id": 5, "content": "<tool>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": true, "special": false});
        assert_eq!(written["added_tokens"], json!([entry, {"id": 7, "content": "z"}]));
        let keys: Vec<String> = object(written).keys().cloned().collect();
        assert_eq!(keys, ["version", "added_tokens", "model"]);

        let config = object(json!({"added_tokens_decoder": {"4": {"content": "y"}}}));
        let written = in_config(config, std::slice::from_ref(&token)).map(Value::Object);
        let content = written.map(|config| config["added_tokens_decoder"]["5"]["content"].clone());
        assert_eq!(content, Some("<tool>".into()));
        assert_eq!(in_config(object(json!({"bos_token": "a"})), std::slice::from_ref(&token)), None);
        assert_eq!(in_list(Map::new(), std::slice::from_ref(&token)), None);
        let list = in_list(object(json!({"y": 4})), std::slice::from_ref(&token));
        assert_eq!(list, Some(object(json!({"y": 4, "<tool>": 5}))));
    }
}
