//! A vocabulary in the format of tiktoken: a line for each token, with its bytes in base64 and its
//! rank.
//!
//! The file has no special tokens and no pattern. They are those of transformers 5.24
//! (`TikTokenConverter`). If no file lists special tokens, Llama 3 has those of
//! convert_llama_weights_to_hf.py. The first Qwen models have those of their tokenization_qwen.py.

use std::collections::HashSet;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Map, Value, json};

use super::MAX_TOKENS;
use super::byte_ranks::{ByteRanks, add_special};
use super::class::refuse_code;
use super::converted::{AddedEnds, ConvertedVocabulary};
use super::settings::TokenizerSettings;
use crate::tokenizer_outline::MAX_ADDED_TOKENS;

/// The pattern of GPT-4 and Llama 3.
const GPT4: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The pattern of Qwen.
const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Returns whether the first line of a file is a token and its rank.
pub(super) fn is_tiktoken(bytes: &[u8]) -> bool {
    let first = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    first.len() < 1 << 16 && line(first).is_some()
}

/// Converts the vocabulary in `bytes` of a folder with `settings` and the config.json `model`.
///
/// # Errors
/// Fails with the line that is no token, or the reason for which the tokens make no tokenizer.
pub(super) fn convert(
    bytes: &[u8],
    mut settings: TokenizerSettings,
    model: &Map<String, Value>,
) -> Result<ConvertedVocabulary, String> {
    refuse_code(&settings.config)?;
    let ranks = read(bytes)?;
    let mut special = listed_special(&settings, ranks.len())?;
    let is_llama = special.is_empty() && model.get("model_type").is_some_and(|kind| kind == "llama");
    if is_llama {
        special = llama3_special(model);
        settings.name_token("bos_token", "<|begin_of_text|>");
        settings.name_token("eos_token", &special[llama3_eos(model, ranks.len())]);
    }
    let mut parts = ranks.parts(&[], GPT4, Value::Null)?;
    add_special(&mut parts, &special, ranks.len());
    let requested = ["add_bos_token", "add_eos_token"].iter().any(|key| settings.flag(key).is_some());
    let ends = (requested || is_llama).then(|| AddedEnds::of(&settings, is_llama));
    Ok(ConvertedVocabulary { parts, settings, ends })
}

/// Converts the vocabulary of the first Qwen models in `bytes` of a folder with `settings`.
///
/// # Errors
/// Fails like [`convert`].
pub(super) fn convert_qwen(
    bytes: &[u8],
    mut settings: TokenizerSettings,
) -> Result<ConvertedVocabulary, String> {
    let ranks = read(bytes)?;
    let extra = (0..205).map(|number| format!("<|extra_{number}|>"));
    let special: Vec<String> =
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(str::to_owned).into_iter().chain(extra).collect();
    settings.name_token("eos_token", &special[0]);
    let mut parts = ranks.parts(&[], QWEN, json!({"type": "NFC"}))?;
    add_special(&mut parts, &special, ranks.len());
    let requested = ["add_bos_token", "add_eos_token"].iter().any(|key| settings.flag(key).is_some());
    let ends = requested.then(|| AddedEnds::of(&settings, false));
    Ok(ConvertedVocabulary { parts, settings, ends })
}

fn read(bytes: &[u8]) -> Result<ByteRanks, String> {
    let mut tokens = Vec::new();
    for (number, text) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let text = text.trim_ascii();
        if text.is_empty() {
            continue;
        }
        let token = line(text).ok_or_else(|| {
            format!("line {} is no token; accepted: its bytes in base64, a space and its rank", number + 1)
        })?;
        tokens.push(token);
        if tokens.len() > MAX_TOKENS {
            return Err(format!("it has more than {MAX_TOKENS} tokens"));
        }
    }
    ByteRanks::new(tokens)
}

/// Reads the token and the rank of a line.
fn line(text: &[u8]) -> Option<(Vec<u8>, u32)> {
    let text = std::str::from_utf8(text).ok()?;
    let (token, rank) = text.trim().split_once(' ')?;
    Some((BASE64_STANDARD.decode(token).ok()?, rank.trim().parse().ok()?))
}

/// The special tokens after `ranks` ranks: those of `added_tokens_decoder`, whose holes are filled,
/// then those without an id.
fn listed_special(settings: &TokenizerSettings, ranks: u32) -> Result<Vec<String>, String> {
    let lists = settings.lists();
    let (listed, first) = (lists.listed(), i64::from(ranks));
    let mut special = Vec::new();
    if let Some((&last, token)) = listed.last_key_value().filter(|(last, _)| **last >= first) {
        if last - first >= MAX_ADDED_TOKENS as i64 {
            return Err(format!(
                "its token {:?} has the id {last}, {} after the last of the vocabulary; accepted: up to {MAX_ADDED_TOKENS}",
                token.content,
                last - first + 1
            ));
        }
        let text = |id| {
            listed.get(&id).map_or_else(|| format!("<|reserved_token_{id}|>"), |token| token.content.clone())
        };
        special.extend((first..=last).map(text));
    }
    let known: HashSet<String> = special.iter().cloned().collect();
    special.extend(lists.extra().into_iter().map(|token| token.content).filter(|text| !known.contains(text)));
    let mut seen = HashSet::new();
    special.retain(|text| seen.insert(text.clone()));
    Ok(special)
}

/// The special tokens of Llama 3, or of 3.1 and later, whose config.json scales positions.
fn llama3_special(model: &Map<String, Value>) -> Vec<String> {
    let scales = ["rope_scaling", "rope_parameters"].iter().filter_map(|key| model.get(*key));
    let is_newer = scales.into_iter().any(|scaling| scaling["factor"].is_number());
    let named: &[(usize, &str)] = if is_newer {
        &[(4, "<|finetune_right_pad_id|>"), (8, "<|eom_id|>"), (10, "<|python_tag|>")]
    } else {
        &[]
    };
    let shared = [
        (0, "<|begin_of_text|>"),
        (1, "<|end_of_text|>"),
        (6, "<|start_header_id|>"),
        (7, "<|end_header_id|>"),
        (9, "<|eot_id|>"),
    ];
    let mut reserved = 0..;
    let text = |id: usize| {
        let name = shared.iter().chain(named).find(|(known, _)| *known == id);
        name.map_or_else(
            || format!("<|reserved_special_token_{}|>", reserved.next().unwrap_or_default()),
            |(_, name)| (*name).to_owned(),
        )
    };
    (0..256).map(text).collect()
}

/// The place of Llama 3's EOS token: the end of a turn if config.json names it too.
fn llama3_eos(model: &Map<String, Value>, ranks: u32) -> usize {
    let turn = u64::from(ranks) + 9;
    let ids = model.get("eos_token_id");
    let ends = |value: &Value| value.as_u64() == Some(turn);
    if ids.is_some_and(|ids| ends(ids) || ids.as_array().is_some_and(|list| list.iter().any(ends))) {
        9
    } else {
        1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_tokens_with_ranks() {
        assert!(is_tiktoken(b"IQ== 0\nIg== 1\n"));
        for other in [&b"\x0a\x0d\x0a\x05<unk>"[..], b"", b"IQ==\n", b"IQ== x\n", b"! 0\n", b"{\"a\": 1}"] {
            assert!(!is_tiktoken(other), "{other:?}");
        }
        assert!(read(b"IQ== 0\n\nIg== one\n").err().unwrap().contains("line 3 is no token"));
    }

    #[test]
    fn special_tokens_of_llama_3() {
        let of = |config: &Value| llama3_special(config.as_object().unwrap());
        let first = of(&json!({}));
        assert_eq!(
            (first.len(), first[2].as_str(), first[8].as_str()),
            (256, "<|reserved_special_token_0|>", "<|reserved_special_token_4|>")
        );
        assert_eq!(
            (first[10].as_str(), first[255].as_str()),
            ("<|reserved_special_token_5|>", "<|reserved_special_token_250|>")
        );
        let newer = of(&json!({"rope_scaling": {"factor": 8.0}}));
        assert_eq!(
            (newer[4].as_str(), newer[5].as_str(), newer[8].as_str()),
            ("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|eom_id|>")
        );
        assert_eq!(
            (newer[10].as_str(), newer[11].as_str(), newer[255].as_str()),
            ("<|python_tag|>", "<|reserved_special_token_3|>", "<|reserved_special_token_247|>")
        );
        let eos = |ids: Value| llama3_eos(json!({"eos_token_id": ids}).as_object().unwrap(), 128_000);
        assert_eq!([eos(json!(128_001)), eos(json!([128_001, 128_009]))], [1, 9]);
    }
}
