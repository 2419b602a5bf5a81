//! llama.cpp's name for a tokenizer's processing of text before BPE.
//!
//! llama.cpp has the regular expressions in its own code (src/llama-vocab.cpp), by name. Names are
//! matched by the contents of tokenizer.json, not by ids, so a fine-tuned model with an added token
//! matches like its base.

use serde_json::{Value as Json, json};

use crate::data::WordRules;

/// Tuples of a regular expression that splits a text into words, whether a word that is a token
/// skips the merges, and llama.cpp's name.
const WORDS: [(&str, bool, &str); 7] = [
    (LLAMA3, true, "llama-bpe"),
    (LLAMA3, false, "dbrx"),
    (QWEN2, false, "qwen2"),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        false,
        "gpt-4o",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        true,
        "tekken",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        false,
        "seed-coder",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        false,
        "qwen35",
    ),
];
/// DeepSeek-V3's three splits in a row.
const DEEPSEEK3: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Returns `tokenizer.ggml.pre` of a byte-level BPE.
///
/// # Errors
/// The part that is not supported, and the accepted ones.
pub(super) fn byte_level(
    normalizer: &Json,
    pre_tokenizer: &Json,
    ignore_merges: bool,
) -> Result<&'static str, String> {
    // llama.cpp does not normalize text. NFC changes only decomposed text, which is rare.
    if !normalizer.is_null() && *normalizer != json!({ "type": "NFC" }) {
        return Err(format!("its normalizer is {}; accepted: none, NFC", shown(normalizer)));
    }
    let unknown =
        || format!("its pre-tokenizer is {}, for which llama.cpp has no name", shown(pre_tokenizer));
    let steps = steps(pre_tokenizer, "pretokenizers");
    if is_falcon(&steps) {
        return Ok("falcon");
    }
    let (last, first) = steps.split_last().ok_or_else(unknown)?;
    let flag =
        |step: &Json, key: &str, default: bool| step.get(key).and_then(Json::as_bool).unwrap_or(default);
    if last["type"] != "ByteLevel" || flag(last, "add_prefix_space", true) {
        return Err(unknown());
    }
    match (first, flag(last, "use_regex", true)) {
        ([], true) => Ok("gpt-2"),
        ([digits], true) if digits["type"] == "Digits" && flag(digits, "individual_digits", false) => {
            Ok("smollm")
        }
        (splits, false) if splits.len() == DEEPSEEK3.len() => {
            let expressions: Option<Vec<String>> = splits.iter().map(|split| isolated(split)).collect();
            expressions
                .filter(|expressions| *expressions == DEEPSEEK3)
                .map(|_| "deepseek-v3")
                .ok_or_else(unknown)
        }
        ([split], false) => {
            let regex = isolated(split).ok_or_else(unknown)?;
            let of_regex = || WORDS.iter().filter(|(known, ..)| *known == regex);
            let exact = of_regex().find(|(_, ignores, _)| *ignores == ignore_merges);
            exact.or_else(|| of_regex().next()).map(|(.., name)| *name).ok_or_else(unknown)
        }
        _ => Err(unknown()),
    }
}

/// Returns the regular expression of a step whose matches are words of their own, with line ends as
/// escapes: files have either.
fn isolated(split: &Json) -> Option<String> {
    let keeps = split.get("invert").and_then(Json::as_bool) != Some(true);
    let is_split = split["type"] == "Split" && split["behavior"] == "Isolated" && keeps;
    let regex = split["pattern"]["Regex"].as_str().filter(|_| is_split)?;
    Some(regex.replace('\r', "\\r").replace('\n', "\\n"))
}

/// Returns whether the steps are Falcon's: punctuation, words, digits in threes.
fn is_falcon(steps: &[&Json]) -> bool {
    match steps {
        [marks, bytes, digits, threes] => {
            marks["type"] == "Punctuation"
                && marks["behavior"] == "Contiguous"
                && bytes["type"] == "ByteLevel"
                && bytes["add_prefix_space"] == false
                && bytes["use_regex"] != false
                && digits["type"] == "Digits"
                && digits["individual_digits"] == false
                && isolated(threes).as_deref() == Some("[0-9][0-9][0-9]")
        }
        _ => false,
    }
}

/// Other names of llama.cpp with the same split into words, after the name that the export writes.
/// Their tokenizers in Hugging Face folders have the rules of that name too; those of falcon-h1,
/// lfm2 and glm5 have not been compared.
const ALIASES: [(&str, &[&str]); 7] = [
    ("llama-bpe", &["llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "glm4", "glm5"]),
    ("dbrx", &["smaug-bpe", "chatglm-bpe"]),
    ("qwen2", &["deepseek-r1-qwen", "stablelm2", "hunyuan"]),
    ("gpt-4o", &["llama4", "minimax-m2"]),
    ("deepseek-v3", &["hunyuan-dense", "joyai-llm"]),
    ("gpt-2", &["olmo", "exaone4", "granite-docling", "phi-2"]),
    ("smollm", &["refact", "starcoder", "command-r", "exaone"]),
];

/// Returns the rules of a byte-level BPE by its `tokenizer.ggml.pre`; `None` for an unknown name.
pub(super) fn of_name(name: &str) -> Option<WordRules> {
    let alias = ALIASES.iter().find(|(_, others)| others.contains(&name));
    let known = alias.map_or(name, |(known, _)| known);
    let bytes = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": use_regex });
    let split = |regex: &str| json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false });
    let sequence = |first: Json, last: Json| json!({ "type": "Sequence", "pretokenizers": [first, last] });
    let plain = |pre_tokenizer| {
        let normalizer = Json::Null;
        WordRules { pre_tokenizer, normalizer, ignores_merges: false, adds_bos: false }
    };
    match known {
        "gpt-2" => return Some(plain(bytes(true))),
        "smollm" => {
            let digits = json!({ "type": "Digits", "individual_digits": true });
            return Some(plain(sequence(digits, bytes(true))));
        }
        "deepseek-v3" => {
            let steps = DEEPSEEK3.into_iter().map(split).chain([bytes(false)]);
            let steps: Vec<Json> = steps.collect();
            return Some(plain(json!({ "type": "Sequence", "pretokenizers": steps })));
        }
        "falcon" => {
            let marks = json!({ "type": "Punctuation", "behavior": "Contiguous" });
            let digits = json!({ "type": "Digits", "individual_digits": false });
            let steps = [marks, bytes(true), digits, split("[0-9][0-9][0-9]")];
            return Some(plain(json!({ "type": "Sequence", "pretokenizers": steps })));
        }
        _ => {}
    }
    let (regex, ignores_merges, _) = WORDS.iter().find(|(.., word)| *word == known)?;
    Some(WordRules {
        // The tokenizers of Qwen normalize, which llama.cpp leaves out.
        normalizer: if matches!(name, "qwen2" | "qwen35") { json!({ "type": "NFC" }) } else { Json::Null },
        ignores_merges: *ignores_merges,
        adds_bos: matches!(known, "llama-bpe" | "tekken") && !name.starts_with("glm"),
        ..plain(sequence(split(regex), bytes(false)))
    })
}

/// Returns the names that [`of_name`] knows.
pub(super) fn names() -> Vec<&'static str> {
    let others = ALIASES.iter().flat_map(|(_, others)| others.iter().copied());
    ["gpt-2", "smollm", "deepseek-v3", "falcon"]
        .into_iter()
        .chain(WORDS.iter().map(|(.., name)| *name))
        .chain(others)
        .collect()
}

/// Returns whether a sentencepiece-like BPE adds a space before a text.
///
/// # Errors
/// The part that is not supported, and the accepted ones.
pub(super) fn sentencepiece(normalizer: &Json, pre_tokenizer: &Json) -> Result<bool, String> {
    let (mut prefix, mut escapes) = (false, false);
    for step in steps(normalizer, "normalizers") {
        let replaces = step["type"] == "Replace" && step["pattern"] == json!({ "String": " " });
        match () {
            () if step["type"] == "Prepend" && step["prepend"] == "▁" => prefix = true,
            () if replaces && step["content"] == "▁" => escapes = true,
            // A text that begins with a space gets another one, as in llama.cpp.
            () if step["pattern"] == json!({ "Regex": "\\A▁" }) && step["content"] == "▁▁" => {}
            () => {
                return Err(format!(
                    "its normalizer has {}; accepted: `▁` before the text and for each space",
                    shown(step)
                ));
            }
        }
    }
    for step in steps(pre_tokenizer, "pretokenizers") {
        match step["type"].as_str() {
            Some("Metaspace") => {
                escapes = true;
                let scheme = step["prepend_scheme"].as_str();
                // Older files have a flag instead.
                prefix |= scheme.map_or(step["add_prefix_space"] != false, |scheme| scheme != "never");
            }
            // Once spaces are replaced, this step has none to split at.
            Some("Split") if escapes && step["pattern"] == json!({ "String": " " }) => {}
            _ => return Err(format!("its pre-tokenizer has {}; accepted: Metaspace, none", shown(step))),
        }
    }
    if escapes { Ok(prefix) } else { Err("it does not write spaces as `▁`".into()) }
}

/// Returns the steps of a sequence; a single step counts as a sequence of one, null as an empty
/// one.
fn steps<'a>(value: &'a Json, key: &str) -> Vec<&'a Json> {
    match value {
        Json::Null => Vec::new(),
        _ if value["type"] == "Sequence" => value[key].as_array().into_iter().flatten().collect(),
        one => vec![one],
    }
}

fn shown(value: &Json) -> String {
    let text = value.to_string();
    match text.char_indices().nth(200) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(regex: &str) -> Json {
        let split = json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false });
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
        json!({ "type": "Sequence", "pretokenizers": [split, bytes] })
    }

    #[test]
    fn names_by_what_is_done() {
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": true });
        let digits = json!({ "type": "Digits", "individual_digits": true });
        let smollm = json!({ "type": "Sequence", "pretokenizers": [digits, bytes] });
        let none = Json::Null;
        assert_eq!(byte_level(&none, &bytes, false), Ok("gpt-2"));
        assert_eq!(byte_level(&none, &smollm, false), Ok("smollm"));
        assert_eq!(byte_level(&none, &cut(LLAMA3), true), Ok("llama-bpe"));
        assert_eq!(byte_level(&none, &cut(LLAMA3), false), Ok("dbrx"));
        assert_eq!(byte_level(&json!({ "type": "NFC" }), &cut(QWEN2), false), Ok("qwen2"));
        assert!(byte_level(&json!({ "type": "Lowercase" }), &bytes, false).is_err());
        assert!(byte_level(&none, &cut(r"\w+"), false).is_err());
        assert!(byte_level(&none, &json!({ "type": "ByteLevel", "add_prefix_space": true }), false).is_err());
        assert!(byte_level(&none, &none, false).is_err());
    }

    /// The export finds its own name in the rules of each, or that of which it is an alias.
    #[test]
    fn rules_by_their_name() {
        for name in names() {
            let rules = of_name(name).expect("a known name");
            let actual = byte_level(&rules.normalizer, &rules.pre_tokenizer, rules.ignores_merges);
            let known =
                ALIASES.iter().find(|(_, others)| others.contains(&name)).map_or(name, |(known, _)| known);
            assert_eq!(actual, Ok(known));
        }
        assert!(of_name("kimi-k2").is_none() && of_name("default").is_none());
        // GLM-4's first files merge always; none of its files begin a text with BOS on their own.
        let flags = ["glm4", "chatglm-bpe", "lfm2"].map(|name| {
            let rules = of_name(name).expect("a known name");
            (rules.ignores_merges, rules.adds_bos)
        });
        assert_eq!(flags, [(true, false), (false, false), (true, true)]);
    }

    #[test]
    fn spaces_of_sentencepiece() {
        let prepend = json!({ "type": "Prepend", "prepend": "▁" });
        let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
        let both = json!({ "type": "Sequence", "normalizers": [prepend, replace] });
        let split =
            json!({ "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious" });
        let none = Json::Null;
        assert_eq!(sentencepiece(&both, &none), Ok(true));
        let first = json!({ "type": "Replace", "pattern": { "Regex": "\\A▁" }, "content": "▁▁" });
        let converted = json!({ "type": "Sequence", "normalizers": [replace, first] });
        assert_eq!(sentencepiece(&replace, &split), Ok(false));
        let metaspace =
            |scheme: &str| json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme });
        assert_eq!(sentencepiece(&none, &metaspace("first")), Ok(true));
        assert_eq!(sentencepiece(&converted, &metaspace("always")), Ok(true));
        assert_eq!(sentencepiece(&none, &metaspace("never")), Ok(false));
        assert!(sentencepiece(&none, &none).is_err());
        assert!(sentencepiece(&json!({ "type": "NFKC" }), &none).is_err());
    }
}
