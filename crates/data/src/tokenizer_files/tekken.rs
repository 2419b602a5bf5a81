//! Mistral's tekken.json: a pattern, special tokens with the first ids, and bytes with ranks.
//!
//! The rules are those of transformers 5.24 (`MistralConverter`). A BOS token comes before each
//! text, as in mistral-common, unless tokenizer_config.json decides otherwise.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::Value;

use super::MAX_TOKENS;
use super::byte_ranks::{ByteRanks, add_special};
use super::converted::{AddedEnds, ConvertedVocabulary};
use super::settings::TokenizerSettings;
use crate::tokenizer_outline::MAX_ADDED_TOKENS;

/// The special tokens of the first files, which do not list them.
const FIRST_SPECIAL: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];
/// The names of special tokens.
const NAMES: [(&str, &str); 4] =
    [("bos_token", "<s>"), ("eos_token", "</s>"), ("pad_token", "<pad>"), ("unk_token", "<unk>")];

#[derive(Deserialize)]
struct TekkenFile {
    config: TekkenConfig,
    vocab: Vec<RankedBytes>,
    special_tokens: Option<Vec<RankedText>>,
}

#[derive(Deserialize)]
struct TekkenConfig {
    pattern: String,
    default_vocab_size: Option<usize>,
    default_num_special_tokens: Option<usize>,
}

#[derive(Deserialize)]
struct RankedBytes {
    rank: usize,
    token_bytes: String,
}

#[derive(Deserialize)]
struct RankedText {
    rank: usize,
    token_str: String,
}

/// Converts the tekken.json in `bytes` of a folder with `settings`.
///
/// # Errors
/// Fails with the reason if it is no tekken.json, or contradicts itself.
pub(super) fn convert(bytes: &[u8], mut settings: TokenizerSettings) -> Result<ConvertedVocabulary, String> {
    let file: TekkenFile =
        serde_json::from_slice(bytes).map_err(|error| format!("it is not a tekken.json: {error}"))?;
    let special = special_tokens(&file)?;
    let count = match file.config.default_vocab_size {
        None => file.vocab.len(),
        Some(all) => {
            all.checked_sub(special.len()).filter(|count| *count <= file.vocab.len()).ok_or_else(|| {
                format!(
                    "its `default_vocab_size` is {all}; accepted: {} special tokens and up to {} others",
                    special.len(),
                    file.vocab.len()
                )
            })?
        }
    };
    if count > MAX_TOKENS {
        return Err(format!("it has {count} tokens; accepted: up to {MAX_TOKENS}"));
    }
    let token = |(rank, token): (u32, &RankedBytes)| {
        if token.rank != rank as usize {
            return Err(format!("token {rank} of its `vocab` has the rank {}; accepted: {rank}", token.rank));
        }
        let bytes = BASE64_STANDARD.decode(&token.token_bytes);
        bytes
            .map(|bytes| (bytes, rank))
            .map_err(|error| format!("token {rank} of its `vocab` is no base64: {error}"))
    };
    let tokens: Result<Vec<(Vec<u8>, u32)>, String> = (0..).zip(&file.vocab[..count]).map(token).collect();
    let ranks = ByteRanks::new(tokens?)?;
    let mut parts = ranks.parts(&special, &file.config.pattern, Value::Null)?;
    add_special(&mut parts, &special, 0);
    for (name, text) in NAMES.iter().filter(|(_, text)| special.iter().any(|token| token == text)) {
        settings.name_token(name, text);
    }
    let ends = Some(AddedEnds::of(&settings, true));
    Ok(ConvertedVocabulary { parts, settings, ends })
}

/// The special tokens by rank, filled up to the number that the file claims.
fn special_tokens(file: &TekkenFile) -> Result<Vec<String>, String> {
    let mut special: Vec<String> = match &file.special_tokens {
        None => FIRST_SPECIAL.map(str::to_owned).to_vec(),
        Some(listed) => {
            let mut listed: Vec<&RankedText> = listed.iter().collect();
            listed.sort_by_key(|token| token.rank);
            if let Some((rank, token)) = listed.iter().enumerate().find(|(rank, token)| *rank != token.rank) {
                return Err(format!(
                    "its special token {:?} has the rank {}; accepted: all ranks from 0 on, each once (expected {rank})",
                    token.token_str, token.rank
                ));
            }
            listed.into_iter().map(|token| token.token_str.clone()).collect()
        }
    };
    let count = file.config.default_num_special_tokens.unwrap_or(special.len());
    if count < special.len() || count > MAX_ADDED_TOKENS {
        return Err(format!(
            "its `default_num_special_tokens` is {count}; accepted: {} to {MAX_ADDED_TOKENS}",
            special.len()
        ));
    }
    special.extend((special.len()..count).map(|id| format!("<SPECIAL_{id}>")));
    let mut seen = std::collections::HashSet::new();
    match special.iter().find(|text| text.is_empty() || !seen.insert(text.as_str())) {
        Some(text) => Err(format!("its special token {text:?} is empty or occurs twice")),
        None => Ok(special),
    }
}
