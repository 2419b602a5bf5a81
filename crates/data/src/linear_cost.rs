//! Detects tokenizers that take time in proportion to their text, by their parts.
//!
//! The lists hold known linear parts. A tokenizer with another part or pattern may be linear too;
//! it works in a child process all the same (see [`super::tokenizer_child`]). The check reads the
//! tokenizer that the crate built, because the crate accepts more than one form of the file.

use serde_json::Value;
use tokenizers::models::ModelWrapper;

use super::tokenizer_outline::FIRST_MARK;

/// Maximum bytes of a token of a unigram model, which reads that many bytes from each position of a
/// text.
const LONGEST_PIECE: usize = 256;
/// Maximum bytes of a pattern that matches some texts, which may be compared with the text at each
/// position: those of 300 tokens, and of all runs of up to 31 spaces as sentencepiece writes them.
const LONGEST_CHOICE: usize = 8192;
/// Maximum bytes of one of these texts.
const LONGEST_CHOSEN: usize = 256;

/// Parts that read each byte of a text a bounded number of times.
const LINEAR: &[&str] = &[
    // Normalizers.
    "BertNormalizer",
    "Strip",
    "StripAccents",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "Nmt",
    "Precompiled",
    "Prepend",
    // Pre-tokenizers.
    "BertPreTokenizer",
    "ByteLevel",
    "CharDelimiterSplit",
    "Metaspace",
    "Whitespace",
    "WhitespaceSplit",
    "Punctuation",
    "Digits",
    "UnicodeScripts",
    "FixedLength",
    // Decoders.
    "ByteFallback",
    "Fuse",
];

/// Several spaces, of which sentencepiece keeps one.
pub(super) const RUNS_OF_SPACES: &str = " {2,}";

/// Regular expressions of known families, in which no alternative reads far beyond its match.
const PATTERNS: &[&str] = &[
    // Converted sentencepiece models.
    RUNS_OF_SPACES,
    FIRST_MARK,
    // GPT-2.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    // GPT-4 (cl100k), as of Phi-4 and OLMo 2.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    // Qwen2.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // GPT-4o (o200k), as of Llama 4.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Mistral's tekken.
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // DeepSeek V3.
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    r"[!\x22#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Returns whether `tokenizer` takes time in proportion to its text.
pub(super) fn is_linear(tokenizer: &tokenizers::Tokenizer) -> bool {
    let parts = [
        serde_json::to_value(tokenizer.get_normalizer()),
        serde_json::to_value(tokenizer.get_pre_tokenizer()),
        serde_json::to_value(tokenizer.get_decoder()),
    ];
    parts.iter().all(|part| part.as_ref().is_ok_and(is_linear_part)) && is_linear_model(tokenizer)
}

fn is_linear_model(tokenizer: &tokenizers::Tokenizer) -> bool {
    match tokenizer.get_model() {
        ModelWrapper::BPE(_) | ModelWrapper::WordLevel(_) => true,
        ModelWrapper::Unigram(_) => {
            tokenizer.get_vocab(false).keys().all(|piece| piece.len() <= LONGEST_PIECE)
        }
        // It tries all parts of a word, whose maximum length is in the file.
        ModelWrapper::WordPiece(_) => false,
    }
}

fn is_linear_part(part: &Value) -> bool {
    if part.is_null() {
        return true;
    }
    let pattern = &part["pattern"];
    match part["type"].as_str() {
        Some("Sequence") => {
            let lists = ["normalizers", "pretokenizers", "decoders"].map(|key| part[key].as_array());
            lists.iter().flatten().all(|list| list.iter().all(is_linear_part))
        }
        Some("Split" | "Replace") => match (pattern["String"].as_str(), pattern["Regex"].as_str()) {
            (Some(_), _) => true,
            (_, Some(pattern)) => PATTERNS.contains(&pattern) || is_choice_of_texts(pattern),
            _ => false,
        },
        Some(name) => LINEAR.contains(&name),
        None => false,
    }
}

/// Returns whether a pattern matches some texts and nothing else, such as `<a>|\[b\]`, and is
/// short.
fn is_choice_of_texts(pattern: &str) -> bool {
    let mut characters = pattern.chars();
    let mut length = 0;
    while let Some(character) = characters.next() {
        length = if character == '|' { 0 } else { length + character.len_utf8() };
        let is_text = match character {
            '\\' => characters.next().is_some_and(|escaped| escaped.is_ascii_punctuation()),
            _ => !"()[]{}?*+^$.#&~-".contains(character),
        };
        if !is_text || length > LONGEST_CHOSEN {
            return false;
        }
    }
    (1..=LONGEST_CHOICE).contains(&pattern.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer(parts: &str) -> tokenizers::Tokenizer {
        let text = format!(
            r#"{{"version": "1.0", "added_tokens": [], {parts}, "model": {{"type": "BPE", "vocab": {{"a": 0}}, "merges": []}}}}"#
        );
        tokenizers::Tokenizer::from_bytes(text).unwrap()
    }

    #[test]
    fn tokenizers_of_known_families_are_linear() {
        let models = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .nth(2)
            .unwrap()
            .join("tests/golden/models");
        let mut found = 0;
        for model in std::fs::read_dir(models).unwrap() {
            let Ok(bytes) = std::fs::read(model.unwrap().path().join("tokenizer.json")) else { continue };
            assert!(is_linear(&tokenizers::Tokenizer::from_bytes(&bytes).unwrap()));
            found += 1;
        }
        assert!(found > 0);
        for pattern in PATTERNS {
            let split = serde_json::json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
            assert!(is_linear(&tokenizer(&format!(r#""pre_tokenizer": {split}"#))), "{pattern}");
        }
    }

    #[test]
    fn parts_that_are_not_known_are_not_linear() {
        for parts in [
            r#""pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?>a+)+$"}, "behavior": "Isolated", "invert": false}"#,
            r#""pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "a+$"}, "behavior": "Isolated", "invert": false}]}"#,
            r#""normalizer": {"type": "Replace", "pattern": {"Regex": "a+$"}, "content": ""}"#,
            // The crate also accepts a part without its name.
            r#""normalizer": {"pattern": {"Regex": "a+$"}, "content": ""}"#,
            r#""decoder": {"type": "Replace", "pattern": {"Regex": "a+$"}, "content": ""}"#,
            // Each space of a run reads to the end of the run.
            r#""normalizer": {"type": "Replace", "pattern": {"Regex": "\\A +| +\\z"}, "content": ""}"#,
        ] {
            assert!(!is_linear(&tokenizer(parts)), "{parts}");
        }
        assert!(is_linear(&tokenizer(r#""normalizer": null"#)));
        assert!(is_choice_of_texts(&["<a>", "[b]", "▁▁", "|"].map(regex::escape).join("|")));
        for pattern in ["", "a.", "a+", r"a\d", r"a\", "(a)", "a|b*"] {
            assert!(!is_choice_of_texts(pattern), "{pattern}");
        }
        let longest = "a".repeat(LONGEST_CHOSEN);
        let full = vec![longest.as_str(); LONGEST_CHOICE / (LONGEST_CHOSEN + 1)].join("|");
        assert!(is_choice_of_texts(&full) && !is_choice_of_texts(&format!("{full}|{longest}")));
        assert!(!is_choice_of_texts(&format!("{longest}a|b")));
    }
}
