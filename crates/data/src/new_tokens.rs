//! Writes tokens that are added to a tokenizer into its files, like transformers' `add_tokens`.
//!
//! The files are edited, not made anew: the rest stays as its author wrote it. The tokenizer is
//! then read from the edited text, so that the used and the saved one are equal.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value, json};
use tokenizers::AddedToken;

use super::parsed_tokenizer;

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

    /// Adds `tokens` to a tokenizer. Returns those that are new or have other flags.
    ///
    /// # Errors
    /// Fails with the reason of the crate `tokenizers`.
    pub(super) fn add_all(
        inner: &mut tokenizers::Tokenizer,
        tokens: Vec<AddedToken>,
    ) -> Result<Vec<Self>, String> {
        let added = parsed_tokenizer::add_tokens(inner, tokens)?;
        Ok(added.into_iter().map(|(id, token)| NewToken { id, token }).collect())
    }

    /// Checks that `tokens` have their ids in a tokenizer that was read again.
    ///
    /// # Errors
    /// Fails with the first token that has another id.
    pub(super) fn check_ids(tokens: &[Self], inner: &tokenizers::Tokenizer) -> Result<(), String> {
        match tokens.iter().find(|token| inner.token_to_id(token.text()) != Some(token.id)) {
            None => Ok(()),
            Some(token) => Err(format!(
                "the ids of tokenizer.json have holes: {:?} does not keep the id {}",
                token.text(),
                token.id
            )),
        }
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

/// Returns tokenizer_config.json with all added `tokens` and the names of special ones, which until
/// now came from a vocabulary and its class.
pub(super) fn with_all(
    mut file: Map<String, Value>,
    named: &BTreeMap<String, String>,
    tokens: &[NewToken],
) -> Map<String, Value> {
    for (name, text) in named {
        if !file.contains_key(name) {
            file.insert(name.clone(), text.as_str().into());
        }
    }
    file.insert("added_tokens_decoder".to_owned(), json!({}));
    in_config(file.clone(), tokens).unwrap_or(file)
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
