//! A tokenizer.json that is made from another vocabulary.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::settings::TokenizerSettings;
use crate::error::{Error, Result};
use crate::new_tokens::{self, NewToken};
use crate::parsed_tokenizer::{self, ParsedTokenizer};
use crate::special_token::SpecialToken;
use crate::tokenizer_outline::MAX_TOKENIZER_BYTES;

/// The tokens that a tokenizer adds to a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AddedEnds {
    /// True for the BOS token before it.
    pub(super) bos: bool,
    /// True for the EOS token after it.
    pub(super) eos: bool,
}

impl AddedEnds {
    /// The tokens that tokenizer_config.json requests; `bos` applies if it is silent about BOS.
    pub(super) fn of(settings: &TokenizerSettings, bos: bool) -> Self {
        AddedEnds {
            bos: settings.flag("add_bos_token").unwrap_or(bos),
            eos: settings.flag("add_eos_token").unwrap_or(false),
        }
    }
}

/// A vocabulary as the parts of a tokenizer.json, without the tokens that other files list.
pub(super) struct ConvertedVocabulary {
    /// The parts of a tokenizer.json.
    pub(super) parts: Map<String, Value>,
    /// The files beside it, with the tokens that its class adds.
    pub(super) settings: TokenizerSettings,
    /// The tokens around a text; `None` keeps the post-processor of `parts`.
    pub(super) ends: Option<AddedEnds>,
}

/// A tokenizer with all its tokens.
pub(super) struct FinishedTokenizer {
    pub(super) parsed: ParsedTokenizer,
    /// The text of its tokenizer.json.
    pub(super) text: String,
    pub(super) settings: TokenizerSettings,
}

impl ConvertedVocabulary {
    /// Builds the tokenizer with the tokens that the settings list.
    ///
    /// # Errors
    /// Fails with the reason if the parts make no tokenizer.
    pub(super) fn finish(self) -> Result<FinishedTokenizer, String> {
        let ConvertedVocabulary { parts, settings, ends } = self;
        let text_of =
            |parts: &Map<String, Value>| serde_json::to_string(parts).map_err(|why| why.to_string());
        let text = text_of(&parts)?;
        if text.len() as u64 > MAX_TOKENIZER_BYTES {
            return Err(format!(
                "as a tokenizer.json it has {} bytes; accepted: up to {MAX_TOKENIZER_BYTES}",
                text.len()
            ));
        }
        let invalid = "its parts make no tokenizer";
        let mut tokenizer = ParsedTokenizer::parse(text.as_bytes(), invalid)?;
        let lists = settings.lists();
        let tokens = lists.tokens(&parsed_tokenizer::added_tokens(&tokenizer.inner))?;
        let new = NewToken::add_all(&mut tokenizer.inner, tokens)?;
        let mut parts = new_tokens::in_tokenizer(parts, &new);
        if let Some(ends) = ends {
            let token = |is_added: bool, name| {
                let text = lists.text(name).filter(|_| is_added)?;
                tokenizer.inner.token_to_id(&text).map(|id| SpecialToken { text, id })
            };
            let (bos, eos) = (token(ends.bos, "bos_token"), token(ends.eos, "eos_token"));
            parts.insert("post_processor".to_owned(), template(bos.as_ref(), eos.as_ref()));
        }
        let text = text_of(&parts)?;
        let with_tokens = ParsedTokenizer::parse(text.as_bytes(), invalid)?;
        NewToken::check_ids(&new, &with_tokens.inner)?;
        Ok(FinishedTokenizer { parsed: with_tokens, text, settings })
    }
}

/// The parts of a tokenizer.json without added tokens.
pub(super) fn parts(
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    model: Value,
) -> Map<String, Value> {
    let all = [
        ("version", "1.0".into()),
        ("truncation", Value::Null),
        ("padding", Value::Null),
        ("added_tokens", json!([])),
        ("normalizer", normalizer),
        ("pre_tokenizer", pre_tokenizer),
        ("post_processor", Value::Null),
        ("decoder", decoder),
        ("model", model),
    ];
    all.into_iter().map(|(name, part)| (name.to_owned(), part)).collect()
}

/// The post-processor that puts tokens around a text.
fn template(bos: Option<&SpecialToken>, eos: Option<&SpecialToken>) -> Value {
    let special = |token: Option<&SpecialToken>, text: u8| {
        token.map(|token| json!({"SpecialToken": {"id": token.text, "type_id": text}}))
    };
    let piece = |name: &str, text: u8| {
        let own = json!({"Sequence": {"id": name, "type_id": text}});
        [special(bos, text), Some(own), special(eos, text)].into_iter().flatten().collect::<Vec<Value>>()
    };
    let entry = |token: &SpecialToken| {
        (token.text.clone(), json!({"id": token.text, "ids": [token.id], "tokens": [token.text]}))
    };
    let specials: Map<String, Value> = bos.into_iter().chain(eos).map(entry).collect();
    let (single, pair) = (piece("A", 0), [piece("A", 0), piece("B", 1)].concat());
    json!({
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": specials,
    })
}

/// The error of a vocabulary in `path` that finetune cannot convert.
pub(super) fn unreadable(path: &Path, why: String) -> Error {
    let folder = path.parent().unwrap_or(path).display().to_string();
    Error::user(format!("cannot read the tokenizer {}", path.display())).because(why).hint(format!(
        "write tokenizer.json with Python: AutoTokenizer.from_pretrained({folder:?}).save_pretrained({folder:?})"
    ))
}
