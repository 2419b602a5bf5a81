//! Finds and reads the files of a tokenizer. A folder without a tokenizer.json opens with the
//! vocabulary of another format, which becomes the text of a tokenizer.json.
//!
//! The converted text is read like any tokenizer.json, so the same checks and limits apply to it.

mod byte_ranks;
mod class;
mod converted;
pub(crate) mod gguf;
#[cfg(test)]
mod golden;
mod protobuf;
mod sentencepiece;
mod settings;
mod spm_model;
mod tekken;
mod tiktoken;

use std::path::Path;

use serde_json::{Map, Value};

use self::converted::{ConvertedVocabulary, FinishedTokenizer, unreadable};
pub(super) use self::settings::TokenizerSettings;
use super::listed_tokens::TokenLists;
use super::new_tokens::{self, NewToken};
use super::parsed_tokenizer::{self, ParsedTokenizer};
use super::tokenizer_outline::MAX_TOKENIZER_BYTES;
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::tokenizer_names::{self, QWEN, TEKKEN, TIKTOKEN, TOKENIZER_JSON, VOCABULARIES};

/// The description of a model.
const CONFIG: &str = "config.json";
/// Maximum bytes of a vocabulary: three times those of the largest in use.
const MAX_VOCABULARY_BYTES: u64 = 64 << 20;
/// Maximum number of tokens: four times that of the largest vocabulary in use.
const MAX_TOKENS: usize = 1 << 20;
/// Maximum sum of squared lengths of tokens, which bounds the work to find their merges: ten times
/// that of Gemma.
const MAX_SPLIT_WORK: u64 = 1 << 28;

/// Maximum number of merges: four times that of the largest vocabulary in use.
const MAX_MERGES: usize = 1 << 21;

/// The tokenizer of a folder.
pub(super) struct TokenizerSource {
    pub(super) parsed: ParsedTokenizer,
    /// The text of tokenizer.json with all tokens.
    pub(super) text: Vec<u8>,
    /// True if `text` is the contents of that file.
    pub(super) in_file: bool,
    /// True if another vocabulary was converted.
    pub(super) converted: bool,
    /// The contents of tokenizer_config.json.
    pub(super) config: Map<String, Value>,
    /// The files beside the vocabulary, with the tokens of the tokenizer's class.
    pub(super) settings: TokenizerSettings,
}

/// Reads the tokenizer in `folder`. The config.json there, or else in the folder `model`, decides
/// how a vocabulary is converted.
///
/// # Errors
/// Fails with a user error if the folder has no vocabulary, or a file is invalid.
pub(super) fn read(folder: &Path, model: &Path) -> Result<TokenizerSource> {
    let name = tokenizer_names::vocabulary(|name| folder.join(name).is_file());
    let name = name.ok_or_else(|| missing(folder))?;
    let (path, settings) = (folder.join(name), TokenizerSettings::read(folder)?);
    let config = settings.config.clone();
    if name != TOKENIZER_JSON {
        let bytes = input_file::read_up_to("read", &path, MAX_VOCABULARY_BYTES)?;
        let own = folder.join(CONFIG);
        let model = read_object(&if own.is_file() { own } else { model.join(CONFIG) })?;
        let made = convert(name, &bytes, settings, &model).and_then(ConvertedVocabulary::finish);
        let FinishedTokenizer { parsed, text, settings } = made.map_err(|why| unreadable(&path, why))?;
        let text = text.into_bytes();
        return Ok(TokenizerSource { parsed, text, in_file: false, converted: true, config, settings });
    }
    let text = input_file::read_up_to("read", &path, MAX_TOKENIZER_BYTES)?;
    let mut tokenizer = ParsedTokenizer::read(&text, &path)?;
    let completed = complete(&mut tokenizer, &text, &path, &settings.lists())?;
    let in_file = completed.is_none();
    let text = completed.map_or(text, String::into_bytes);
    Ok(TokenizerSource { parsed: tokenizer, text, in_file, converted: false, config, settings })
}

/// Converts the vocabulary `bytes` of the file `name`, beside the config.json `model`.
fn convert(
    name: &str,
    bytes: &[u8],
    settings: TokenizerSettings,
    model: &Map<String, Value>,
) -> Result<ConvertedVocabulary, String> {
    if bytes.starts_with(b"version https://git-lfs") {
        return Err("it is a pointer of Git LFS and not the file, which `git lfs pull` downloads".to_owned());
    }
    match name {
        TEKKEN => tekken::convert(bytes, settings),
        QWEN => tiktoken::convert_qwen(bytes, settings),
        _ if name == TIKTOKEN || tiktoken::is_tiktoken(bytes) => tiktoken::convert(bytes, settings, model),
        _ => sentencepiece::convert(bytes, settings, model),
    }
}

/// Adds the tokens that the other files list to `parsed`, read from `own`, the contents of `path`.
/// Returns the text of tokenizer.json with them; `None` if it has them all.
///
/// # Errors
/// Fails with a user error if the lists are too long, or the tokens get other ids in that text.
fn complete(
    parsed: &mut ParsedTokenizer,
    own: &[u8],
    path: &Path,
    lists: &TokenLists<'_>,
) -> Result<Option<String>> {
    let failed = |why: String| {
        Error::user(format!("cannot add the tokens that files beside {} list", path.display())).because(why)
    };
    let tokens = lists.tokens(&parsed_tokenizer::added_tokens(&parsed.inner)).map_err(failed)?;
    let new = NewToken::add_all(&mut parsed.inner, tokens).map_err(failed)?;
    if new.is_empty() {
        return Ok(None);
    }
    let text = file_text(new_tokens::in_tokenizer(parse_object(path, own)?, &new));
    *parsed = ParsedTokenizer::read(text.as_bytes(), path)?;
    NewToken::check_ids(&new, &parsed.inner).map_err(|why| {
        failed(why).hint(
            "write the files again with Python: `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`",
        )
    })?;
    Ok(Some(text))
}

fn missing(folder: &Path) -> Error {
    let error = Error::user(format!("cannot read the tokenizer of {}", folder.display()));
    let has = |name: &str| folder.join(name).is_file();
    let accepted = format!("accepted: {}", VOCABULARIES.join(", "));
    if has("vocab.json") && has("merges.txt") {
        let folder = folder.display().to_string();
        error.because("it holds vocab.json and merges.txt, but no tokenizer.json").because(accepted).hint(format!(
            "write tokenizer.json with Python: AutoTokenizer.from_pretrained({folder:?}).save_pretrained({folder:?})"
        ))
    } else {
        error
            .because("it holds no tokenizer.json")
            .because(accepted)
            .hint("copy the tokenizer and tokenizer_config.json from the model this one was made from")
    }
}

/// The text of a JSON file.
pub(super) fn file_text(file: Map<String, Value>) -> String {
    format!("{:#}\n", Value::Object(file))
}

/// Reads the object in a JSON file; empty if the file does not exist.
///
/// # Errors
/// Fails with a user error if the file is no JSON object.
pub(super) fn read_object(path: &Path) -> Result<Map<String, Value>> {
    if !path.exists() {
        return Ok(Map::new());
    }
    parse_object(path, input_file::read_text("read", path)?.as_bytes())
}

/// Reads the object in `text`, the contents of `path`.
///
/// # Errors
/// Fails with a user error if it is no JSON object.
pub(super) fn parse_object(path: &Path, text: &[u8]) -> Result<Map<String, Value>> {
    match serde_json::from_slice(text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => {
            Err(Error::user(format!("cannot read {}", path.display())).because("it is not a JSON object"))
        }
        Err(e) => Err(Error::user(format!("cannot read {}", path.display())).because(e.to_string())),
    }
}

/// Checks the work to find the merges of tokens with these lengths in bytes.
///
/// # Errors
/// Fails with the work and the accepted one.
fn check_splits(lengths: impl Iterator<Item = usize>) -> Result<(), String> {
    let work = lengths.map(|length| (length as u64).saturating_pow(2)).fold(0, u64::saturating_add);
    if work > MAX_SPLIT_WORK {
        return Err(format!(
            "the squared lengths of its tokens add up to {work}; accepted: up to {MAX_SPLIT_WORK}"
        ));
    }
    Ok(())
}

/// Collects the merges of a vocabulary.
///
/// # Errors
/// Fails if it has more than accepted.
fn collect_merges<T>(merges: impl Iterator<Item = T>) -> Result<Vec<T>, String> {
    let merges: Vec<T> = merges.take(MAX_MERGES + 1).collect();
    if merges.len() > MAX_MERGES {
        return Err(format!("its tokens have more than {MAX_MERGES} merges"));
    }
    Ok(merges)
}

/// The ways to cut a token into two parts, the shortest left part first.
fn splits(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.char_indices().skip(1).map(|(at, _)| text.split_at(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_for_merges_is_bounded() {
        assert!(check_splits(std::iter::repeat_n(64, 1 << 16)).is_ok());
        assert!(check_splits(std::iter::repeat_n(64, (1 << 16) + 1)).unwrap_err().contains("268439552"));
        assert!(check_splits([usize::MAX; 2].into_iter()).is_err());
        assert_eq!(collect_merges(0..MAX_MERGES).map(|merges| merges.len()), Ok(MAX_MERGES));
        assert!(collect_merges(0..=MAX_MERGES).unwrap_err().contains("more than 2097152 merges"));
    }

    #[test]
    fn tokens_are_cut_between_characters() {
        assert_eq!(splits("a▁b").collect::<Vec<_>>(), [("a", "▁b"), ("a▁", "b")]);
        assert_eq!(splits("▁").count(), 0);
    }
}
