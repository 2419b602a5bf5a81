//! The tokenizer of a model folder: ids, offsets, special tokens, decoding.
//!
//! `tokenizer.json` decides how text becomes ids, and its post-processor adds BOS or EOS:
//! `add_bos_token` and similar keys of `tokenizer_config.json` only record how that file was made.
//! The other files name the special tokens and the ids that end a generation, and may list tokens
//! missing in `tokenizer.json` (`listed_tokens`). `clean_up_tokenization_spaces` is not
//! applied: decoding returns the encoded text.
//!
//! A folder without `tokenizer.json` may have another vocabulary, which `tokenizer_files` converts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::child_pool::RowBudget;
pub use super::encoded::Encoded;
use super::new_tokens::{self, NewToken};
use super::parsed_tokenizer::{self, ParsedTokenizer};
use super::sandbox::ChildEnd;
pub use super::special_token::SpecialToken;
use super::tokenizer_child::TokenizingChildren;
use super::tokenizer_files::{self, file_text, parse_object, read_object};
use super::{linear_cost, long_text, sandbox, tokenizer_outline};
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::tokenizer_names::TOKENIZER_JSON;

/// The tokenizer of one model folder.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Child processes for tokenizers that may take more than linear time; `None`: this process
    /// encodes.
    children: Option<Arc<TokenizingChildren>>,
    folder: PathBuf,
    config: Map<String, Value>,
    named: BTreeMap<String, String>,
    bos: Option<SpecialToken>,
    eos: Option<SpecialToken>,
    pad: Option<SpecialToken>,
    eos_ids: Vec<u32>,
    special: BTreeMap<u32, String>,
    adds_bos: bool,
    vocab_size: usize,
    digest: blake3::Hash,
    /// The text of a tokenizer.json that was converted, or got tokens that only other files list;
    /// `None` if the file has them all.
    completed: Option<Vec<u8>>,
    /// True if the folder has another vocabulary than a tokenizer.json.
    converted: bool,
    /// BPE dropout of tokenizer.json, which is disabled.
    dropout: Option<f32>,
    /// Files that differ from those in `folder`: name and text.
    changed: Vec<(String, String)>,
}

impl Tokenizer {
    /// Reads the tokenizer of `folder`, and the special tokens from tokenizer_config.json,
    /// special_tokens_map.json, generation_config.json and config.json if they exist.
    ///
    /// # Errors
    /// Fails without a tokenizer, or if one of the files is invalid.
    pub fn load(folder: &Path) -> Result<Self> {
        Self::load_for(folder, folder)
    }

    /// Loads the tokenizer in `folder`; the files in `model` name the ids that end a generation.
    /// config.json there describes the model of a vocabulary in a folder without it.
    ///
    /// # Errors
    /// Fails like [`Self::load`].
    pub fn load_for(folder: &Path, model: &Path) -> Result<Self> {
        let source = tokenizer_files::read(folder, model)?;
        let ParsedTokenizer { inner, vocab_size, dropout } = source.parsed;
        let lists = source.settings.lists();
        // A name without a token, such as an empty text, is ignored.
        let token = |name: &str| {
            let text = lists.text(name)?;
            let id = inner.token_to_id(&text)?;
            Some(SpecialToken { text, id })
        };
        let (bos, eos, pad) = (token("bos_token"), token("eos_token"), token("pad_token"));
        let named = lists.names().into_iter();
        let named = named.filter_map(|name| Some((name.to_owned(), lists.text(name)?))).collect();
        let special = inner
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, added)| added.special)
            .map(|(id, added)| (id, added.content))
            .collect();
        let eos_ids = eos_ids(model, eos.as_ref())?;
        let mut tokenizer = Tokenizer {
            vocab_size,
            children: children(&inner, &source.text),
            inner,
            folder: folder.to_owned(),
            named,
            config: source.config,
            converted: source.converted,
            bos,
            eos,
            pad,
            eos_ids,
            special,
            adds_bos: false,
            digest: blake3::hash(&source.text),
            completed: (!source.in_file).then_some(source.text),
            dropout,
            changed: Vec::new(),
        };
        tokenizer.adds_bos = tokenizer.finds_bos_added()?;
        Ok(tokenizer)
    }

    /// Adds `texts` as tokens that are not special, with the ids after the last. A text that is an
    /// added token already, or in the vocabulary, keeps its id. Returns the id of each.
    ///
    /// # Errors
    /// Fails if the ids of tokenizer.json have holes, so that a new token gets another id.
    pub fn add_tokens(&mut self, texts: &[String]) -> Result<Vec<u32>> {
        let known: BTreeMap<String, u32> = self
            .inner
            .get_added_tokens_decoder()
            .into_iter()
            .map(|(id, token)| (token.content, id))
            .collect();
        let (mut ids, mut new) = (Vec::with_capacity(texts.len()), Vec::new());
        let mut next = self.vocab_size as u32;
        for text in texts {
            let id = known.get(text).copied().or_else(|| {
                let id = self.inner.token_to_id(text).unwrap_or(next);
                next = next.max(id + 1);
                new.push(NewToken::plain(id, text));
                Some(id)
            });
            ids.extend(id);
        }
        if !new.is_empty() {
            self.rewrite(&new)?;
        }
        Ok(ids)
    }

    /// Replaces the tokenizer with the one that the changed files describe.
    fn rewrite(&mut self, new: &[NewToken]) -> Result<()> {
        let path = self.folder.join(TOKENIZER_JSON);
        let own = parse_object(&path, &self.json()?)?;
        let tokenizer = file_text(new_tokens::in_tokenizer(own, new));
        let ParsedTokenizer { inner, vocab_size, .. } = ParsedTokenizer::read(tokenizer.as_bytes(), &path)?;
        if let Some(token) = new.iter().find(|token| inner.token_to_id(token.text()) != Some(token.id)) {
            return Err(Error::user(format!(
                "cannot add the token {:?} to the tokenizer in {}",
                token.text(),
                self.folder.display()
            ))
            .because(format!(
                "its largest id is {}, but a new token gets id {}: its ids have holes; accepted: ids without holes",
                self.vocab_size.saturating_sub(1),
                inner.token_to_id(token.text()).map_or_else(|| "none".into(), |id| id.to_string())
            ))
            .hint("use reserved tokens of the tokenizer instead; tokenizer_config.json lists them"));
        }
        (self.vocab_size, self.digest) = (vocab_size, blake3::hash(tokenizer.as_bytes()));
        (self.children, self.inner) = (children(&inner, tokenizer.as_bytes()), inner);
        let list = read_object(&self.folder.join(new_tokens::LIST))?;
        self.changed = vec![(TOKENIZER_JSON.into(), tokenizer)];
        let config = if self.converted {
            let all = parsed_tokenizer::added_tokens(&self.inner).into_iter();
            let all: Vec<NewToken> = all.map(|(id, token)| NewToken { id, token }).collect();
            Some(new_tokens::with_all(self.config.clone(), &self.named, &all))
        } else {
            new_tokens::in_config(self.config.clone(), new)
        };
        for (name, file) in [(new_tokens::CONFIG, config), (new_tokens::LIST, new_tokens::in_list(list, new))]
        {
            self.changed.extend(file.map(|file| (name.to_owned(), file_text(file))));
        }
        Ok(())
    }

    /// The text of tokenizer.json with the tokens that other files list; of another vocabulary, the
    /// text into which it was converted.
    ///
    /// # Errors
    /// Fails with a user error if the file is too long or cannot be read.
    pub fn json(&self) -> Result<Vec<u8>> {
        let path = self.folder.join(TOKENIZER_JSON);
        match &self.completed {
            Some(text) => Ok(text.clone()),
            None => input_file::read_up_to("read", &path, tokenizer_outline::MAX_TOKENIZER_BYTES),
        }
    }

    /// Names and texts of the files that added tokens change, compared to its folder.
    pub fn changed_files(&self) -> &[(String, String)] {
        &self.changed
    }

    /// Encodes `text` to ids; with `add_special`, with the tokens of the post-processor.
    ///
    /// # Errors
    /// Fails with a user error if the model has no token for a part of the text and no unknown
    /// token, or takes too long. Fails with a transient error if the system starts no process to
    /// encode it, or something outside ends it.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        if self.children.is_some() || long_text::is_long(text) {
            return Ok(self.encode_with_last_offsets(text, add_special, &RowBudget::default())?.ids);
        }
        let ids = parsed_tokenizer::encode_ids(&self.inner, text, add_special);
        ids.map_err(|why| self.cannot(ENCODE, ChildEnd::ByInput(why)))
    }

    /// Encodes `text` within the remaining processor time of its row. Returns all ids, and the byte
    /// ranges of the last ones: some ten thousand for a long text, else all.
    ///
    /// # Errors
    /// Fails like [`Self::encode`].
    pub(super) fn encode_with_last_offsets(
        &self,
        text: &str,
        add_special: bool,
        budget: &RowBudget,
    ) -> Result<Encoded> {
        if !long_text::is_long(text) {
            return self.encode_within(text, add_special, budget);
        }
        let (before, after) = if add_special { self.special_around()? } else { Default::default() };
        let mut encoded = Encoded { ids: before, offsets: Vec::new() };
        let encode = |part: &str| self.encode_within(part, false, budget);
        long_text::for_each_piece(text, encode, |ids, offsets| {
            encoded.ids.extend(ids);
            encoded.offsets = offsets.to_vec();
        })?;
        encoded.offsets.extend(after.iter().map(|_| 0..0));
        encoded.ids.extend(after);
        Ok(encoded)
    }

    /// Encodes `text` to ids with the bytes that they cover.
    ///
    /// # Errors
    /// Fails like [`Self::encode`].
    pub fn encode_with_offsets(&self, text: &str, add_special: bool) -> Result<Encoded> {
        self.encode_within(text, add_special, &RowBudget::default())
    }

    /// Like [`Self::encode_with_offsets`], within the remaining processor time of its row.
    ///
    /// # Errors
    /// Fails like [`Self::encode`].
    pub(super) fn encode_within(&self, text: &str, add_special: bool, budget: &RowBudget) -> Result<Encoded> {
        if long_text::is_long(text) {
            let whole = long_text::encode_in_pieces(text, |part| self.encode_within(part, false, budget))?;
            return if add_special { self.with_special(whole) } else { Ok(whole) };
        }
        let encoded = match &self.children {
            Some(children) => children.encode(text, add_special, budget),
            None => parsed_tokenizer::encode(&self.inner, text, add_special).map_err(ChildEnd::ByInput),
        };
        encoded.map_err(|end| self.cannot(ENCODE, end))
    }

    /// Encodes a short text without added tokens: by normalizer, pre-tokenizer and model only.
    ///
    /// # Errors
    /// Fails like [`Self::encode`].
    pub(super) fn encode_as_text(&self, text: &str) -> Result<Encoded> {
        let encoded = parsed_tokenizer::encode_as_text(&self.inner, text).map_err(ChildEnd::ByInput);
        encoded.map_err(|end| self.cannot(ENCODE, end))
    }

    /// Returns true if so many rows ended the tokenizer's process that no more are encoded.
    pub(crate) fn has_given_up(&self) -> bool {
        self.children.as_ref().is_some_and(|children| children.has_given_up())
    }

    /// Ends idle child processes; the next encoding starts them again.
    pub fn release(&self) {
        self.children.iter().for_each(|children| children.end());
    }

    /// Tokens that the post-processor puts before and after a text.
    fn special_around(&self) -> Result<(Vec<u32>, Vec<u32>)> {
        let (with, without) = (self.encode("a", true)?, self.encode("a", false)?);
        let own = with.windows(without.len().max(1)).position(|part| part == without).ok_or_else(|| {
            Error::user(format!("cannot encode a long text with the tokenizer in {}", self.folder.display()))
                .because("its post-processor does more than to put tokens before and after a text")
        })?;
        Ok((with[..own].to_vec(), with[own + without.len()..].to_vec()))
    }

    /// Adds the tokens that the post-processor puts before and after a text.
    fn with_special(&self, text: Encoded) -> Result<Encoded> {
        let (before, after) = self.special_around()?;
        let none = |tokens: &[u32]| vec![0..0; tokens.len()];
        Ok(Encoded {
            ids: [&before[..], &text.ids, &after].concat(),
            offsets: [none(&before), text.offsets, none(&after)].concat(),
        })
    }

    /// Decodes `ids`; `skip_special` skips the special tokens.
    ///
    /// # Errors
    /// Fails if the decoder of tokenizer.json fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let shown: Vec<u32>;
        let ids = if skip_special {
            shown = ids.iter().copied().filter(|id| !self.is_special(*id)).collect();
            &shown
        } else {
            ids
        };
        let text = match &self.children {
            Some(children) => children.decode(ids),
            None => parsed_tokenizer::decode(&self.inner, ids).map_err(ChildEnd::ByInput),
        };
        text.map_err(|end| self.cannot("decode tokens with", end))
    }

    /// Returns a decoder for ids that arrive one by one.
    pub fn stream(&self, skip_special: bool) -> TextStream<'_> {
        TextStream { tokenizer: self, skip_special, ids: Vec::new(), shown: String::new() }
    }

    /// The token's own text (`Ġthe`, `▁the`, `<0x0A>`), for display.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token by its own text.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The begin-of-sequence token, if any.
    pub fn bos(&self) -> Option<&SpecialToken> {
        self.bos.as_ref()
    }

    /// The end-of-sequence token, if any, which ends a row.
    pub fn eos(&self) -> Option<&SpecialToken> {
        self.eos.as_ref()
    }

    /// The padding token, if any.
    pub fn pad(&self) -> Option<&SpecialToken> {
        self.pad.as_ref()
    }

    /// Every id that ends a generation: the EOS token and those of generation_config.json (else
    /// config.json).
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// Returns true if `id` is a special token.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains_key(&id)
    }

    /// The added tokens, each with true if it is special.
    pub(super) fn added_texts(&self) -> impl Iterator<Item = (String, bool)> {
        self.inner.get_added_tokens_decoder().into_values().map(|token| (token.content, token.special))
    }

    /// Texts of all special tokens.
    pub(crate) fn special_texts(&self) -> impl Iterator<Item = &str> {
        self.special.values().map(String::as_str)
    }

    /// The special tokens by their names in templates: `bos_token`, `eos_token`, `unk_token`, ...
    pub(crate) fn named_tokens(&self) -> impl Iterator<Item = (String, String)> {
        self.named.iter().map(|(name, token)| (name.clone(), token.clone()))
    }

    /// Returns true if encoding with special tokens puts BOS first.
    pub(crate) fn adds_bos(&self) -> bool {
        self.adds_bos
    }

    /// The largest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The folder of the tokenizer's files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The fields of tokenizer_config.json; empty without that file.
    pub fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// Notes if the BPE dropout of tokenizer.json is disabled, or a converted vocabulary adds no
    /// BOS because its files do not decide about it.
    pub fn left_out(&self) -> Vec<String> {
        let folder = self.folder.display();
        let dropout = self.dropout.map(|share| format!(
            "tokenizer.json of {folder} has a BPE dropout of {share} (`model.dropout`): it is disabled, so that a text always has the same tokens"
        ));
        let silent = self.converted && !self.adds_bos && !self.config.contains_key("add_bos_token");
        let bos = self.bos.as_ref().filter(|_| silent).map(|bos| format!(
            "the tokenizer in {folder} has the BOS token {:?}, but tokenizer_config.json has no `add_bos_token`: texts get no BOS, as in transformers 5; other programs may add it, as finetune does with `\"add_bos_token\": true`",
            bos.text
        ));
        dropout.into_iter().chain(bos).collect()
    }

    /// BLAKE3 of tokenizer.json.
    pub fn digest(&self) -> blake3::Hash {
        self.digest
    }

    fn finds_bos_added(&self) -> Result<bool> {
        let Some(bos) = self.bos.as_ref().map(|bos| bos.id) else { return Ok(false) };
        let (with, without) = (self.encode("a", true)?, self.encode("a", false)?);
        Ok(with.first() == Some(&bos) && without.first() != Some(&bos))
    }

    fn cannot(&self, doing: &str, end: ChildEnd) -> Error {
        end.into_error(format!("cannot {doing} the tokenizer in {}", self.folder.display()))
    }
}

/// Decodes ids one by one, and holds back bytes of an incomplete character.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    ids: Vec<u32>,
    shown: String,
}

impl TextStream<'_> {
    /// Returns the text that `id` adds; empty while a character is incomplete.
    ///
    /// # Errors
    /// Fails like [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids, self.skip_special)?;
        if text.ends_with('\u{FFFD}') {
            return Ok(String::new());
        }
        let new = self.unseen(&text).to_owned();
        self.forget_old(&text)?;
        Ok(new)
    }

    /// Returns the part of `text` not shown yet, and marks it as shown. A decoder may rewrite
    /// earlier text (bytes that are no character after all): text after the common beginning is
    /// new.
    fn unseen<'t>(&mut self, text: &'t str) -> &'t str {
        let same = |((_, a), b): &((usize, char), char)| a == b;
        let common = text.char_indices().zip(self.shown.chars()).take_while(same).last();
        let from = common.map_or(0, |((at, character), _)| at + character.len_utf8());
        text.clone_into(&mut self.shown);
        &text[from..]
    }

    /// Returns the text still held back at the end of a generation.
    ///
    /// # Errors
    /// Fails like [`Tokenizer::decode`].
    pub fn finish(mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.ids, self.skip_special)?;
        Ok(self.unseen(&text).to_owned())
    }

    /// Drops old ids, so that the cost of a long generation is linear. It does so only if the last
    /// ids decode to the end of the whole text, so that no decoder rule breaks.
    fn forget_old(&mut self, text: &str) -> Result<()> {
        const WINDOW: usize = 32;
        if self.ids.len() < 2 * WINDOW {
            return Ok(());
        }
        let tail = self.ids.split_off(self.ids.len() - WINDOW);
        let decoded = self.tokenizer.decode(&tail, self.skip_special)?;
        if text.ends_with(&decoded) && !decoded.starts_with('\u{FFFD}') {
            self.shown = decoded;
            self.ids = tail;
        } else {
            // The decoder depends on earlier ids: keep them all.
            self.ids.extend(tail);
        }
        Ok(())
    }
}

/// The action that an error of encoding names.
const ENCODE: &str = "encode a text with";

/// Makes child processes for the tokenizer.json in `bytes`, from which `inner` was built. `None` if
/// it takes linear time, or this program cannot start them.
fn children(inner: &tokenizers::Tokenizer, bytes: &[u8]) -> Option<Arc<TokenizingChildren>> {
    let apart = sandbox::is_available() && !linear_cost::is_linear(inner);
    apart.then(|| Arc::new(TokenizingChildren::new(bytes)))
}

fn eos_ids(folder: &Path, eos: Option<&SpecialToken>) -> Result<Vec<u32>> {
    let mut ids: Vec<u32> = eos.iter().map(|eos| eos.id).collect();
    let mut add = |map: &Map<String, Value>| {
        // A model for images has the ids in its text part.
        let text = map.get("text_config").and_then(|text| text.get("eos_token_id"));
        let configured = match map.get("eos_token_id").filter(|id| !id.is_null()).or(text) {
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_u64).collect(),
            Some(value) => value.as_u64().into_iter().collect(),
            None => Vec::new(),
        };
        for id in configured.iter().filter_map(|id| u32::try_from(*id).ok()) {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        !configured.is_empty()
    };
    if !add(&read_object(&folder.join("generation_config.json"))?) {
        add(&read_object(&folder.join("config.json"))?);
    }
    Ok(ids)
}
