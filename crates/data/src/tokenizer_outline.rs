//! Checks the sizes in a tokenizer.json before the crate `tokenizers` builds it.
//!
//! The crate accepts any number that parses: an id of 2^32 - 1 with a table of that length, a chain
//! of replacements that each double the text, a pattern that matches empty text everywhere. This
//! module checks sizes; panics of the crate become errors at its calls (see [`super::tokenizer`]).

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

/// Maximum bytes of tokenizer.json: four times those of the largest vocabulary in use.
pub(crate) const MAX_TOKENIZER_BYTES: u64 = 128 << 20;
/// Exclusive limit of ids: sixteen times that of the largest vocabulary in use. It bounds the
/// length of tables.
pub(super) const MAX_ID: u32 = 1 << 24;
/// Maximum number of values in a part beside the vocabulary: thousands of times that of any
/// tokenizer.
const MAX_VALUES: usize = 100_000;
/// Maximum growth of a text by normalizing, and of a token by decoding. Unicode's NFKC, counted as
/// 33 bytes for one, and two replacements of a space by three bytes give 297.
const MAX_GROWTH: f64 = 512.0;
/// Maximum number of values in the whole file: several times those of a vocabulary of a million
/// tokens with its merges.
const MAX_ALL_VALUES: usize = 1 << 23;
/// Maximum number of tokens that a post-processor adds to a text.
const MAX_TOKENS_ADDED_TO_TEXT: usize = 1024;
/// Maximum bytes that a part puts before or after each text or word.
const MAX_ADDED_BYTES: usize = 4096;
/// Maximum bytes that a table puts in place of a character: eight times those of Unicode's NFKC.
const MAX_REPLACEMENT_BYTES: usize = 256;
/// The pattern of a text that begins with a mark for a space: it matches once, three bytes.
pub(super) const FIRST_MARK: &str = r"\A▁";
/// The content that replaces that mark in converted sentencepiece models.
pub(super) const TWO_MARKS: &str = "▁▁";
/// Maximum number of added tokens: ten times that of any tokenizer.
pub(super) const MAX_ADDED_TOKENS: usize = 200_000;

/// The parts of a tokenizer.json that are small in every genuine one.
#[derive(Deserialize)]
struct TokenizerOutline {
    #[serde(default)]
    added_tokens: Vec<IgnoredAny>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
}

/// Checks the parts of a tokenizer.json that process each text.
///
/// # Errors
/// Fails with the size that is too large and the accepted one.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    if commas(bytes) > MAX_ALL_VALUES {
        return Err(format!("it holds more than {MAX_ALL_VALUES} values"));
    }
    let outline: TokenizerOutline =
        serde_json::from_slice(bytes).map_err(|error| format!("it is not a tokenizer.json: {error}"))?;
    let tokens = outline.added_tokens.len();
    if tokens > MAX_ADDED_TOKENS {
        return Err(format!("it has {tokens} added tokens; accepted: up to {MAX_ADDED_TOKENS}"));
    }
    for (name, part) in [
        ("normalizer", &outline.normalizer),
        ("pre_tokenizer", &outline.pre_tokenizer),
        ("post_processor", &outline.post_processor),
        ("decoder", &outline.decoder),
    ] {
        let mut size = PartSizes { values: 0, growth: 1.0 };
        size.look_at(part).map_err(|why| format!("its `{name}` {why}"))?;
        if size.growth > MAX_GROWTH {
            return Err(format!(
                "its `{name}` makes a text up to {:.0} times as long; accepted: up to {MAX_GROWTH} times",
                size.growth
            ));
        }
    }
    Ok(())
}

/// Sizes of one part, summed over its nested parts.
struct PartSizes {
    values: usize,
    growth: f64,
}

impl PartSizes {
    fn look_at(&mut self, value: &Value) -> Result<(), String> {
        self.values += 1;
        if self.values > MAX_VALUES {
            return Err(format!("holds more than {MAX_VALUES} values"));
        }
        match value {
            Value::Array(list) => list.iter().try_for_each(|value| self.look_at(value)),
            Value::Object(map) => {
                self.step(value)?;
                map.values().try_for_each(|value| self.look_at(value))
            }
            _ => Ok(()),
        }
    }

    /// Checks one step of a part by its keys: the crate accepts most steps also without their type,
    /// or with another one.
    fn step(&mut self, step: &Value) -> Result<(), String> {
        let has = |key: &str| step.get(key).is_some();
        if has("pattern") && has("content") {
            self.replacement(step)?;
        }
        if let Some(prepended) = step["prepend"].as_str().filter(|text| text.len() > MAX_ADDED_BYTES) {
            return Err(format!("has a `Prepend` of {} bytes", prepended.len()));
        }
        if let Some(charsmap) = step["precompiled_charsmap"].as_str() {
            let longest =
                longest_replacement(charsmap).map_err(|why| format!("has a `Precompiled` {why}"))?;
            if longest > MAX_REPLACEMENT_BYTES {
                return Err(format!(
                    "has a `Precompiled` that makes {longest} bytes of a character; accepted: up to {MAX_REPLACEMENT_BYTES}"
                ));
            }
            self.growth *= longest.max(1) as f64;
        }
        // Each byte outside of ASCII becomes a character of two bytes.
        if step["type"] == "ByteLevel" {
            self.growth *= 2.0;
        }
        if has("single") || has("pair") {
            refuse_repeated_texts(step)?;
        }
        if step["length"].as_u64() == Some(0) {
            return Err("has a `FixedLength` of 0".to_owned());
        }
        for key in ["start", "stop"] {
            if step[key].as_u64().is_some_and(|cut| cut > MAX_ADDED_BYTES as u64) {
                return Err(format!("has a `Strip` whose `{key}` is {}", step[key]));
            }
        }
        Ok(())
    }

    fn replacement(&mut self, step: &Value) -> Result<(), String> {
        let content = step["content"].as_str().unwrap_or_default();
        let least = match (step["pattern"]["String"].as_str(), step["pattern"]["Regex"].as_str()) {
            (Some(""), _) | (_, Some("")) => return Err("has a `Replace` with an empty pattern".to_owned()),
            (Some(pattern), _) => pattern.len(),
            (_, Some(FIRST_MARK)) if content == TWO_MARKS => return Ok(()),
            // A match of a regular expression may be a single byte.
            _ => 1,
        };
        self.growth *= (content.len() as f64 / least as f64).max(1.0);
        Ok(())
    }
}

/// Refuses templates that repeat a text, or add too many tokens.
fn refuse_repeated_texts(step: &Value) -> Result<(), String> {
    for key in ["single", "pair"] {
        let pieces = step[key].as_array().map_or(&[][..], Vec::as_slice);
        let added = |piece: &Value| {
            let id = piece["SpecialToken"]["id"].as_str().unwrap_or_default();
            step["special_tokens"][id]["ids"].as_array().map_or(0, Vec::len)
        };
        let texts = |id: &str| pieces.iter().filter(|piece| piece["Sequence"]["id"] == id).count();
        let added = pieces.iter().map(added).fold(0, usize::saturating_add);
        if added > MAX_TOKENS_ADDED_TO_TEXT || texts("A") > 1 || texts("B") > 1 {
            return Err(format!(
                "has a `{key}` that repeats a text or adds {added} tokens; accepted: each text once, up to {MAX_TOKENS_ADDED_TO_TEXT} tokens"
            ));
        }
    }
    Ok(())
}

/// Number of commas outside of texts: that of values, except for the first of each list.
fn commas(json: &[u8]) -> usize {
    let (mut count, mut inside, mut escaped) = (0, false, false);
    for byte in json {
        match (inside, byte) {
            _ if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => inside = !inside,
            (false, b',') => count += 1,
            _ => {}
        }
    }
    count
}

/// Bytes of the longest text in a sentencepiece table of replacements (base64 of the length of a
/// trie in four bytes, the trie, and texts that each end in a zero byte).
///
/// # Errors
/// Fails if the table is no base64, or claims a trie longer than itself, for which the crate would
/// allocate memory.
fn longest_replacement(base64: &str) -> Result<usize, String> {
    let bytes = BASE64_STANDARD.decode(base64).map_err(|error| format!("that is no base64: {error}"))?;
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return Ok(0) };
    let claimed = u32::from_le_bytes(*length) as usize;
    let Some(texts) = rest.get(claimed..) else {
        let available = rest.len();
        return Err(format!(
            "that claims a trie of {claimed} bytes; found: {available} bytes after that number"
        ));
    };
    Ok(texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(part: &str) -> String {
        check(format!(r#"{{"model": {{"vocab": {{"a": 0}}}}, {part}}}"#).as_bytes()).unwrap_err()
    }

    #[test]
    fn replacements_are_measured() {
        // 4, a trie of four bytes, then "ab\0abcde\0c".
        assert_eq!(longest_replacement("BAAAAAECAwRhYgBhYmNkZQBj"), Ok(5));
        assert_eq!(longest_replacement(""), Ok(0));
    }

    #[test]
    fn a_length_is_compared_with_the_file() {
        for claim in ["/////w==", "/P///wAAAAA=", "AAAAgAAAAAA=", "/////wAA"] {
            let part = format!(r#"{{"type": "Precompiled", "precompiled_charsmap": "{claim}"}}"#);
            assert!(refusal(&format!(r#""normalizer": {part}"#)).contains("claims a trie of"), "{claim}");
            // The crate accepts it within others, and without its name.
            let bare = format!(r#"{{"precompiled_charsmap": "{claim}"}}"#);
            for part in [&part, &bare] {
                let all = format!(r#""normalizer": {{"type": "Sequence", "normalizers": [{part}]}}"#);
                assert!(refusal(&all).contains("claims a trie of"), "{all}");
            }
        }
        let part = r#""normalizer": {"type": "Precompiled", "precompiled_charsmap": "not base64"}"#;
        assert!(refusal(part).contains("no base64"));
    }

    #[test]
    fn parts_without_their_type_count_too() {
        let bare = r#"{"type": "Other", "pattern": {"String": "a"}, "content": "aa"}"#;
        let all = vec![bare; 40].join(",");
        assert!(
            refusal(&format!(r#""normalizer": {{"type": "Sequence", "normalizers": [{all}]}}"#))
                .contains("1099511627776 times as long")
        );
        assert!(refusal(r#""pre_tokenizer": {"length": 0}"#).contains("FixedLength"));
    }

    #[test]
    fn only_a_second_mark_grows_a_text_by_a_constant() {
        let parts = |content: &str| {
            let part =
                format!(r#"{{"type": "Replace", "pattern": {{"Regex": "\\A▁"}}, "content": "{content}"}}"#);
            format!(r#""normalizer": {{"type": "Sequence", "normalizers": [{}]}}"#, vec![part; 40].join(","))
        };
        assert!(check(format!("{{{}}}", parts(TWO_MARKS)).as_bytes()).is_ok());
        assert!(refusal(&parts("▁▁▁")).contains("times as long"));
    }

    #[test]
    fn parts_that_no_tokenizer_needs_are_refused() {
        let doubling = r#"{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}"#;
        let chain = |n: usize| {
            let all = vec![doubling; n].join(",");
            format!(r#""normalizer": {{"type": "Sequence", "normalizers": [{all}]}}"#)
        };
        assert!(refusal(&chain(40)).contains("1099511627776 times as long"));
        assert!(check(format!("{{{}}}", chain(6)).as_bytes()).is_ok());
        let bytes = vec![r#"{"type": "ByteLevel"}"#; 35].join(",");
        let bytes = format!(r#""normalizer": {{"type": "Sequence", "normalizers": [{bytes}]}}"#);
        assert!(refusal(&bytes).contains("34359738368 times as long"));
        let twice = r#""post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}, {"Sequence": {"id": "A"}}]}"#;
        assert!(refusal(twice).contains("repeats a text"));
        let ids = vec!["0"; 2000].join(",");
        let many = format!(
            r#""post_processor": {{"type": "TemplateProcessing", "single": [{{"SpecialToken": {{"id": "s"}}}}], "special_tokens": {{"s": {{"ids": [{ids}]}}}}}}"#
        );
        assert!(refusal(&many).contains("adds 2000 tokens"));
        assert_eq!(commas(br#"{"a,\",": [1, 2], "b": ","}"#), 2);
        let empty = r#""normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}"#;
        assert!(refusal(empty).contains("empty pattern"));
        assert!(refusal(r#""pre_tokenizer": {"type": "FixedLength", "length": 0}"#).contains("FixedLength"));
        let long = format!(r#""post_processor": [{}]"#, vec!["0"; MAX_VALUES].join(","));
        assert!(refusal(&long).contains("more than 100000 values"));
        assert!(
            refusal(r#""decoder": {"type": "Strip", "content": " ", "start": 0, "stop": 99999}"#)
                .contains("`stop`")
        );
    }
}
