//! Tokens that tokenizer_config.json, special_tokens_map.json and added_tokens.json add to those of
//! tokenizer.json.
//!
//! transformers adds them when it loads a tokenizer, so they have ids there. The rules are those of
//! transformers 5.24 (`PreTrainedTokenizerBase._from_pretrained`, `TokenizersBackend.__init__`):
//! the list `added_tokens_decoder` of tokenizer_config.json, else the two older files; then named
//! tokens (`pad_token`, ...), then further special tokens. A token without an id gets the next one,
//! not the number in the list. Flags of a list replace those of tokenizer.json.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::tokenizer_outline::MAX_ADDED_TOKENS;

/// The list of tokenizer_config.json that replaces the older files.
const DECODER: &str = "added_tokens_decoder";
/// The list of special tokens without a name, and its name before transformers 5.
pub(super) const EXTRA: &str = "extra_special_tokens";
pub(super) const ADDITIONAL: &str = "additional_special_tokens";
/// Names of special tokens, in the order in which transformers adds them.
const NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The files beside tokenizer.json that list tokens; a missing file is empty.
pub(super) struct TokenLists<'a> {
    /// The contents of tokenizer_config.json.
    pub(super) config: &'a Map<String, Value>,
    /// The contents of special_tokens_map.json.
    pub(super) map: &'a Map<String, Value>,
    /// The contents of added_tokens.json.
    pub(super) list: &'a Map<String, Value>,
    /// True if listed tokens match the text before it is normalized, whatever their flags.
    pub(super) raw: bool,
}

impl TokenLists<'_> {
    /// Returns whether the older files apply.
    pub(super) fn has_older(&self) -> bool {
        !self.config.get(DECODER).is_some_and(Value::is_object)
    }

    /// The value of a key about special tokens.
    fn value(&self, key: &str) -> Option<&Value> {
        let older = self.map.get(key).filter(|_| self.has_older());
        older.or_else(|| self.config.get(key)).filter(|value| !value.is_null())
    }

    /// The text of the token with this name, from tokenizer_config.json or else
    /// special_tokens_map.json.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        let token_value = self.value(name).or_else(|| self.map.get(name));
        token_value.and_then(|value| token(value, true)).map(|token| token.content)
    }

    /// The names of tokens: those of transformers, then those of the model alone, such as
    /// `image_token`.
    pub(super) fn names(&self) -> Vec<&str> {
        let own = self.config.keys().chain(self.map.keys()).map(String::as_str);
        let own = own.filter(|name| name.ends_with("_token") && !NAMES.contains(name));
        let mut seen = HashSet::new();
        NAMES.into_iter().chain(own).filter(|name| seen.insert(*name) && self.text(name).is_some()).collect()
    }

    /// The special tokens without a name.
    pub(super) fn extra(&self) -> Vec<AddedToken> {
        let list = |file: &Map<String, Value>, key| file.get(key).and_then(Value::as_array).cloned();
        let older = |key| list(self.map, key).filter(|_| self.has_older());
        let filled = |list: &Vec<Value>| !list.is_empty();
        let own = list(self.config, EXTRA).filter(filled).or_else(|| list(self.config, ADDITIONAL));
        // A list in special_tokens_map.json continues that of tokenizer_config.json; its older key
        // applies only alone.
        let all = match (own, older(EXTRA)) {
            (Some(own), Some(more)) => [own, more].concat(),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => older(ADDITIONAL).unwrap_or_default(),
        };
        all.iter()
            .filter_map(|value| token(value, value.get("special") != Some(&Value::Bool(false))))
            .collect()
    }

    /// The tokens by id of `added_tokens_decoder`, else of added_tokens.json.
    pub(super) fn listed(&self) -> BTreeMap<i64, AddedToken> {
        if !self.has_older() {
            return decoder(self.config);
        }
        older_list(self.list, &self.special_texts())
    }

    /// The texts that mark tokens of added_tokens.json as special. An object of
    /// tokenizer_config.json does not, since transformers compares before it reads these objects.
    fn special_texts(&self) -> HashSet<String> {
        let list = |file: &Map<String, Value>, key| {
            file.get(key).and_then(Value::as_array).cloned().unwrap_or_default()
        };
        let in_config = NAMES.iter().filter(|name| !self.map.contains_key(**name));
        let in_config = in_config.filter_map(|name| self.config.get(*name).cloned());
        let in_config = in_config.chain(list(self.config, EXTRA)).chain(list(self.config, ADDITIONAL));
        let in_map = NAMES.iter().filter_map(|name| self.map.get(*name).cloned());
        let in_map = in_map.chain(list(self.map, EXTRA)).filter_map(|value| token(&value, true));
        let texts = in_config.filter_map(|value| value.as_str().map(str::to_owned));
        texts.chain(in_map.map(|token| token.content)).filter(|text| !text.is_empty()).collect()
    }

    /// The tokens with a name, in the order in which transformers adds them.
    fn named(&self) -> Vec<AddedToken> {
        let names = self.names();
        let named = names.iter().filter_map(|name| token(self.value(name)?, true));
        named.chain(self.named_extra()).collect()
    }

    /// Named tokens of an object `extra_special_tokens`.
    fn named_extra(&self) -> Vec<AddedToken> {
        let object = self.value(EXTRA).and_then(Value::as_object);
        object.into_iter().flat_map(Map::values).filter_map(|value| token(value, true)).collect()
    }

    /// All tokens in the order in which transformers adds them; `own` are those of tokenizer.json.
    ///
    /// # Errors
    /// Fails if the lists hold more tokens than accepted.
    pub(super) fn tokens(&self, own: &BTreeMap<u32, AddedToken>) -> Result<Vec<AddedToken>, String> {
        let (named, extra, mut listed) = (self.named(), self.extra(), self.listed());
        if self.raw {
            listed.values_mut().for_each(|token| token.normalized = false);
        }
        if self.has_older() {
            listed.extend(own.iter().map(|(id, token)| (i64::from(*id), token.clone())));
        }
        let count = listed.len() + named.len() + extra.len();
        if count > MAX_ADDED_TOKENS {
            return Err(format!("its files list {count} tokens; accepted: up to {MAX_ADDED_TOKENS}"));
        }
        let named_texts: HashSet<&str> = named.iter().map(|token| token.content.as_str()).collect();
        for token in listed.values_mut().filter(|token| named_texts.contains(token.content.as_str())) {
            token.special = true;
        }
        let mut tokens: Vec<AddedToken> = listed.into_values().collect();
        // A text may occur several times: the last flags apply.
        let known: HashSet<String> = own.values().chain(&tokens).map(|token| token.content.clone()).collect();
        let mut seen: HashSet<AddedToken> = tokens.iter().cloned().collect();
        let more = named.into_iter().chain(extra).filter(|token| !known.contains(&token.content));
        tokens.extend(more.filter(|token| seen.insert(token.clone())));
        Ok(tokens)
    }
}

/// Reads added_tokens.json: texts with their ids.
fn older_list(list: &Map<String, Value>, special: &HashSet<String>) -> BTreeMap<i64, AddedToken> {
    let entry = |(text, id): (&String, &Value)| {
        let is_special = special.contains(text.as_str());
        Some((id.as_i64()?, AddedToken::from(text.clone(), is_special)))
    };
    list.iter().filter_map(entry).collect()
}

/// Reads the list of tokenizer_config.json: ids with texts and flags.
fn decoder(config: &Map<String, Value>) -> BTreeMap<i64, AddedToken> {
    let listed = config.get(DECODER).and_then(Value::as_object).into_iter().flatten();
    listed.filter_map(|(id, value)| Some((id.parse().ok()?, token(value, false)?))).collect()
}

/// Reads a token from its text or an object; special if `special` or the object's flag is true.
/// `None` for another value.
fn token(value: &Value, special: bool) -> Option<AddedToken> {
    match value {
        Value::String(text) => Some(AddedToken::from(text.clone(), special)),
        Value::Object(object) => {
            let flag = |key: &str| object.get(key).and_then(Value::as_bool);
            let special = special || flag("special").unwrap_or(false);
            Some(AddedToken {
                content: object.get("content")?.as_str()?.to_owned(),
                single_word: flag("single_word").unwrap_or(false),
                lstrip: flag("lstrip").unwrap_or(false),
                rstrip: flag("rstrip").unwrap_or(false),
                normalized: flag("normalized").unwrap_or(!special),
                special,
            })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn texts(config: &Value, map: &Value, list: &Value) -> Vec<(String, bool, bool)> {
        let object = |value: &Value| value.as_object().cloned().unwrap_or_default();
        let (config, map, list) = (object(config), object(map), object(list));
        let own = BTreeMap::from([(3, AddedToken::from("<own>".to_owned(), true))]);
        let lists = TokenLists { config: &config, map: &map, list: &list, raw: false };
        let tokens = lists.tokens(&own).unwrap_or_default();
        tokens.into_iter().map(|token| (token.content, token.special, token.normalized)).collect()
    }

    /// The order is that of transformers 5.24.
    #[test]
    fn the_newer_list_replaces_the_older_files() {
        let config = json!({
            "added_tokens_decoder": {"9": {"content": "b", "special": false}, "8": {"content": "a", "special": true}},
            "pad_token": "<pad>", "eos_token": {"content": "b"}, "image_token": "<image>",
            "additional_special_tokens": ["x", "a"]
        });
        let older = json!({"unk_token": "<unk>", "additional_special_tokens": ["y"]});
        let actual = texts(&config, &older, &json!({"<z>": 7}));
        let expected = [
            ("a", true, false),
            ("b", true, true),
            ("<pad>", true, false),
            ("<image>", true, false),
            ("x", true, false),
        ];
        let expected: Vec<_> = expected.into_iter().map(|(text, s, n)| (text.to_owned(), s, n)).collect();
        assert_eq!(actual, expected);
    }

    #[test]
    fn the_older_files_count_without_the_newer_list() {
        let map =
            json!({"pad_token": {"content": "<pad>", "lstrip": true}, "additional_special_tokens": ["y"]});
        let actual = texts(&json!({"pad_token": "no"}), &map, &json!({"<z>": 7, "<pad>": 2}));
        let expected =
            [("<pad>", true, false), ("<own>", true, false), ("<z>", false, true), ("y", true, false)];
        let expected: Vec<_> = expected.into_iter().map(|(text, s, n)| (text.to_owned(), s, n)).collect();
        assert_eq!(actual, expected);
    }
}
