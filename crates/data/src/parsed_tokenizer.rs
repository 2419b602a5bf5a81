//! Reads a tokenizer.json with the crate `tokenizers`, and wraps calls of the crate, whose panics
//! become errors.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use tokenizers::models::ModelWrapper;
use tokenizers::{
    AddedToken, Model as _, NormalizedString, Normalizer as _, OffsetType, PreTokenizedString,
    PreTokenizer as _,
};

use super::encoded::Encoded;
use super::tokenizer_outline;
use crate::contained::contain;
use crate::error::{Error, Result};

/// The tokenizer that a tokenizer.json describes.
pub(super) struct ParsedTokenizer {
    pub(super) inner: tokenizers::Tokenizer,
    /// The largest id plus one.
    pub(super) vocab_size: usize,
    /// BPE dropout that the file requests, which is disabled.
    pub(super) dropout: Option<f32>,
}

impl ParsedTokenizer {
    /// Reads the tokenizer that `bytes`, the contents of `path`, describe.
    ///
    /// # Errors
    /// Fails with a user error if they describe no tokenizer, or one with too large ids.
    pub(super) fn read(bytes: &[u8], path: &Path) -> Result<Self> {
        Self::parse(bytes, "it is not a tokenizer.json").map_err(|why| {
            Error::user(format!("cannot read the tokenizer {}", path.display()))
                .because(why)
                .hint("copy tokenizer.json from the model this one was made from")
        })
    }

    /// Reads the tokenizer that `bytes` describe; `invalid` begins the reason if they describe
    /// none.
    ///
    /// # Errors
    /// Fails with the reason if they describe no tokenizer, or one with too large ids.
    pub(super) fn parse(bytes: &[u8], invalid: &str) -> Result<Self, String> {
        tokenizer_outline::check(bytes)?;
        let parsed = contained(|| {
            let mut inner = tokenizers::Tokenizer::from_bytes(bytes)?;
            // Files saved after use may hold these; they would silently cut or pad rows.
            inner.with_truncation(None)?;
            inner.with_padding(None);
            let dropout = without_dropout(&mut inner);
            Ok((inner, dropout))
        });
        let (inner, dropout) = parsed.map_err(|why| format!("{invalid}: {why}"))?;
        let largest = inner.get_vocab(true).into_iter().max_by_key(|(_, id)| *id);
        match largest {
            Some((token, id)) if id >= tokenizer_outline::MAX_ID => {
                let most = tokenizer_outline::MAX_ID;
                Err(format!("its token {token:?} has the id {id}; accepted: below {most}"))
            }
            largest => {
                let vocab_size = largest.map_or(0, |(_, id)| id as usize + 1);
                Ok(ParsedTokenizer { inner, vocab_size, dropout })
            }
        }
    }
}

/// The added tokens by id.
pub(super) fn added_tokens(inner: &tokenizers::Tokenizer) -> BTreeMap<u32, AddedToken> {
    inner.get_added_tokens_decoder().into_iter().collect()
}

/// Adds `tokens` by the rules of the crate: a known text keeps its id, a new one gets the next id,
/// and the last token of a text sets its flags. Returns the tokens that are new or have other
/// flags, by id.
///
/// # Errors
/// Fails with the crate's reason.
pub(super) fn add_tokens(
    inner: &mut tokenizers::Tokenizer,
    tokens: Vec<AddedToken>,
) -> Result<BTreeMap<u32, AddedToken>, String> {
    let before = added_tokens(inner);
    let known: HashSet<&AddedToken> = before.values().collect();
    if tokens.iter().all(|token| known.contains(token)) {
        return Ok(BTreeMap::new());
    }
    contained(|| inner.add_tokens(tokens))?;
    let after = added_tokens(inner).into_iter();
    Ok(after.filter(|(id, token)| before.get(id) != Some(token)).collect())
}

/// Encodes `text` with the crate: ids, each with the bytes that it covers.
///
/// # Errors
/// Fails with the crate's reason.
pub(super) fn encode(
    inner: &tokenizers::Tokenizer,
    text: &str,
    add_special: bool,
) -> Result<Encoded, String> {
    let encoding = contained(|| inner.encode(text, add_special))?;
    let tokens = encoding.get_offsets().iter().zip(encoding.get_special_tokens_mask());
    let offsets = tokens.map(|(&(start, end), &added)| if added == 1 { 0..0 } else { start..end }).collect();
    Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets })
}

/// Encodes `text` without the vocabulary's added tokens: ids, each with the bytes that it covers.
///
/// # Errors
/// Fails with the crate's reason.
pub(super) fn encode_as_text(inner: &tokenizers::Tokenizer, text: &str) -> Result<Encoded, String> {
    contained(|| {
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = inner.get_normalizer() {
            normalizer.normalize(&mut normalized)?;
        }
        let mut split = PreTokenizedString::from(normalized);
        if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut split)?;
        }
        split.tokenize(|part| inner.get_model().tokenize(part.get()))?;
        let encoding = split.into_encoding(None, 0, OffsetType::Byte)?;
        let offsets = encoding.get_offsets().iter().map(|&(start, end)| start..end).collect();
        Ok(Encoded { ids: encoding.get_ids().to_vec(), offsets })
    })
}

/// Encodes `text` with the crate to ids alone, which is faster.
///
/// # Errors
/// Fails with the crate's reason.
pub(super) fn encode_ids(
    inner: &tokenizers::Tokenizer,
    text: &str,
    add_special: bool,
) -> Result<Vec<u32>, String> {
    Ok(contained(|| inner.encode_fast(text, add_special))?.get_ids().to_vec())
}

/// Decodes `ids` with the crate.
///
/// # Errors
/// Fails with the crate's reason.
pub(super) fn decode(inner: &tokenizers::Tokenizer, ids: &[u32]) -> Result<String, String> {
    contained(|| inner.decode(ids, false))
}

/// Disables the dropout of a BPE model, whose random numbers have no seed: two runs would see other
/// tokens. Returns its share, if above zero.
fn without_dropout(inner: &mut tokenizers::Tokenizer) -> Option<f32> {
    let ModelWrapper::BPE(bpe) = inner.get_model() else { return None };
    let dropout = bpe.dropout.filter(|share| *share > 0.0)?;
    let mut bpe = bpe.clone();
    bpe.dropout = None;
    inner.with_model(bpe);
    Some(dropout)
}

/// Returns the value of `call`, or the reason of its error or panic.
fn contained<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match contain(call) {
        Ok(returned) => returned.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("it contradicts itself: {panic}")),
    }
}
