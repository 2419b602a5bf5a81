//! The tokenizer as `tokenizer.ggml.*` keys.
//!
//! llama.cpp has two tokenizers for these families. "gpt2" is byte-level BPE with merges;
//! `tokenizer.ggml.pre` names its built-in split into words. "llama" is sentencepiece-like BPE,
//! which joins the neighbours whose token has the highest score; merges become scores by rank.
//! finetune refuses any other tokenizer.json, whose ids would be silently wrong. Token types,
//! padding of the vocabulary and the choice of special ids follow conversion/base.py and
//! gguf-py/gguf/vocab.py.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use serde::Deserialize;
use serde_json::Value as Json;

use super::pretokenizer;
use super::writer::{GgufMetadata, MetadataValue};
use crate::data::{Tokenizer, stored_templates};
use crate::error::{Error, Result};

/// `llama_token_type` in llama.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenType {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

/// The parts of tokenizer.json that define a tokenizer's behaviour.
#[derive(Deserialize)]
struct TokenizerJson {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Json,
    #[serde(default)]
    pre_tokenizer: Json,
    model: Bpe,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    rstrip: bool,
}

#[derive(Deserialize)]
struct Bpe {
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Text(String),
}

impl Merge {
    fn pair(&self) -> Option<(&str, &str)> {
        match self {
            Self::Pair(left, right) => Some((left, right)),
            Self::Text(text) => text.split_once(' '),
        }
    }
}

/// The tokenizer of a model.
#[derive(Debug)]
pub(super) struct Vocabulary {
    pub(super) metadata: GgufMetadata,
    pub(super) notes: Vec<String>,
    /// True if a special token strips the white space after it.
    pub(super) strips_right: bool,
}

impl Vocabulary {
    /// Reads the tokenizer in `folder` of a model with `vocab_size` embeddings.
    ///
    /// # Errors
    /// User: a file is missing or malformed, or llama.cpp does not have the tokenizer.
    pub(super) fn read(folder: &Path, vocab_size: usize) -> Result<Self> {
        let tokenizer = Tokenizer::load(folder)?;
        let json = read_json(folder, &tokenizer.json()?)?;
        let mut notes = Vec::new();
        let list = TokenList::new(&json, vocab_size, &mut notes)?;
        let mut metadata = GgufMetadata::default();
        if json.model.byte_fallback {
            let prefix =
                pretokenizer::sentencepiece(&json.normalizer, &json.pre_tokenizer).map_err(refused)?;
            let merges = Merges::new(&json.model)?;
            notes.extend(merges.missing(&json.model.vocab));
            notes.extend(list.missing_bytes());
            metadata.text("tokenizer.ggml.model", "llama");
            metadata.text("tokenizer.ggml.pre", "default");
            metadata.set("tokenizer.ggml.scores", MetadataValue::F32s(list.scores(&merges)));
            metadata.set("tokenizer.ggml.add_space_prefix", MetadataValue::Bool(prefix));
        } else {
            let pretokenizer_name =
                pretokenizer::byte_level(&json.normalizer, &json.pre_tokenizer, json.model.ignore_merges);
            metadata.text("tokenizer.ggml.model", "gpt2");
            metadata.text("tokenizer.ggml.pre", pretokenizer_name.map_err(refused)?);
            metadata.set("tokenizer.ggml.merges", MetadataValue::Texts(merge_texts(&json.model)?));
        }
        metadata.set("tokenizer.ggml.token_type", MetadataValue::I32s(list.types()));
        metadata.set("tokenizer.ggml.tokens", MetadataValue::Texts(list.texts()));
        specials(&tokenizer, &json, vocab_size, &mut metadata, &mut notes)?;
        templates(&tokenizer, &mut metadata)?;
        let strips_right = json.added_tokens.iter().any(|token| token.rstrip);
        Ok(Self { metadata, notes, strips_right })
    }
}

/// Returns the error for a tokenizer that GGUF cannot express, with a hint.
fn refused(cause: String) -> Error {
    Error::user("cannot express this model's tokenizer in GGUF")
        .because(cause)
        .hint("write `--format hf` for programs that read Hugging Face folders")
}

/// Reads the parts of `text`, the tokenizer.json of `folder`.
fn read_json(folder: &Path, text: &[u8]) -> Result<TokenizerJson> {
    #[derive(Deserialize)]
    struct Head {
        model: PretokenizerKind,
    }
    #[derive(Deserialize)]
    struct PretokenizerKind {
        r#type: Option<String>,
    }
    let path = folder.join("tokenizer.json");
    let unreadable = |error: serde_json::Error| {
        Error::user(format!("cannot read the tokenizer {}", path.display())).because(error.to_string())
    };
    let head: Head = serde_json::from_slice(text).map_err(unreadable)?;
    if let Some(kind) = head.model.r#type.filter(|kind| kind != "BPE") {
        return Err(refused(format!("its model is {kind}; accepted: BPE")));
    }
    let json: TokenizerJson = serde_json::from_slice(text).map_err(unreadable)?;
    for affix in [&json.model.continuing_subword_prefix, &json.model.end_of_word_suffix] {
        if let Some(affix) = affix.as_deref().filter(|affix| !affix.is_empty()) {
            return Err(refused(format!("its tokens carry the affix {affix:?}; accepted: none")));
        }
    }
    Ok(json)
}

/// Every token by id.
struct TokenList(Vec<(String, TokenType)>);

impl TokenList {
    fn new(json: &TokenizerJson, vocab_size: usize, notes: &mut Vec<String>) -> Result<Self> {
        let mut tokens: Vec<Option<(String, TokenType)>> = vec![None; vocab_size];
        for (text, id) in &json.model.vocab {
            let kind = match text {
                _ if json.model.byte_fallback && is_byte(text) => TokenType::Byte,
                _ if json.model.byte_fallback && json.model.unk_token.as_ref() == Some(text) => {
                    TokenType::Unknown
                }
                _ => TokenType::Normal,
            };
            let Some(entry) = tokens.get_mut(*id as usize) else {
                let added = json.added_tokens.iter().any(|token| token.id == *id);
                if added {
                    continue;
                }
                return Err(refused(format!(
                    "token {id} ({text:?}) is beyond the {vocab_size} embeddings of the model"
                ))
                .hint("give tokenizer files and weights of one and the same model"));
            };
            *entry = Some((text.clone(), kind));
        }
        for token in &json.added_tokens {
            let Some(entry) = tokens.get_mut(token.id as usize) else {
                notes.push(format!(
                    "left out token {} ({:?}), which has no embedding",
                    token.id, token.content
                ));
                continue;
            };
            let known = matches!(entry, Some((_, TokenType::Unknown)));
            *entry = Some(if known {
                (token.content.clone(), TokenType::Unknown)
            } else if token.special || looks_special(&token.content) {
                (token.content.clone(), TokenType::Control)
            } else {
                (token.content.replace('▁', " "), TokenType::UserDefined)
            });
        }
        let tokens: Vec<(String, TokenType)> = (0..)
            .zip(tokens)
            .map(|(id, token): (usize, _)| token.unwrap_or((format!("[PAD{id}]"), TokenType::Unused)))
            .collect();
        let mut seen = HashMap::new();
        for (id, (text, _)) in tokens.iter().enumerate() {
            // llama.cpp aborts at the second one.
            if let Some(first) = seen.insert(text.as_str(), id) {
                return Err(refused(format!("tokens {first} and {id} are both {text:?}")));
            }
        }
        Ok(Self(tokens))
    }

    fn texts(&self) -> Vec<String> {
        self.0.iter().map(|(text, _)| text.clone()).collect()
    }

    fn types(&self) -> Vec<i32> {
        self.0.iter().map(|(_, kind)| *kind as i32).collect()
    }

    /// Returns the note on missing byte tokens. HF's tokenizers use an unknown token for a
    /// character without one; llama.cpp needs its bytes.
    fn missing_bytes(&self) -> Option<String> {
        let bytes = self.0.iter().filter(|(_, kind)| *kind == TokenType::Byte).count();
        (bytes < 256).then(|| {
            format!("the tokenizer has {bytes} of 256 byte tokens: llama.cpp aborts at a character that has no token")
        })
    }

    /// Returns minus the rank of the merge that makes each token. A token without a merge comes
    /// after all others.
    fn scores(&self, merges: &Merges<'_>) -> Vec<f32> {
        let last = merges.pairs.len() as f32;
        let score = |(text, kind): &(String, TokenType)| match kind {
            TokenType::Normal => -merges.ranks.get(text).map_or(last, |rank| *rank as f32),
            TokenType::Byte | TokenType::Unknown => 0.0,
            TokenType::Control | TokenType::UserDefined => -1000.0,
            TokenType::Unused => -10000.0,
        };
        self.0.iter().map(score).collect()
    }
}

/// Returns whether the token is a byte, such as `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

/// Returns whether a token looks like a control token although it is not marked
/// (`does_token_look_special`).
fn looks_special(text: &str) -> bool {
    let between = |open: &str, close: &str| text.starts_with(open) && text.ends_with(close);
    matches!(text, "<pad>" | "<mask>" | "<2mass>" | "[@BOS@]")
        || between("<|", "|>")
        || between("<｜", "｜>")
        || between("<unused", ">")
}

/// The merges of a sentencepiece-like BPE, by pair and by result.
struct Merges<'a> {
    pairs: HashSet<(&'a str, &'a str)>,
    ranks: HashMap<String, usize>,
}

impl<'a> Merges<'a> {
    fn new(model: &'a Bpe) -> Result<Self> {
        let (mut pairs, mut ranks) = (HashSet::new(), HashMap::new());
        for (rank, merge) in model.merges.iter().enumerate() {
            let (left, right) = merge.pair().ok_or_else(|| refused(format!("merge {rank} is no pair")))?;
            pairs.insert((left, right));
            ranks.entry(format!("{left}{right}")).or_insert(rank);
        }
        Ok(Self { pairs, ranks })
    }

    /// Returns the note on unlisted merges. llama.cpp joins any two neighbours whose text is a
    /// token, tokenizer.json only listed pairs. Files converted from sentencepiece list all.
    fn missing(&self, vocab: &HashMap<String, u32>) -> Option<String> {
        let made = |part: &str| part.chars().nth(1).is_none() || self.ranks.contains_key(part);
        let joins = |text: &String| {
            let cuts = text.char_indices().skip(1).map(|(at, _)| text.split_at(at)).collect::<Vec<_>>();
            cuts.into_iter().any(|pair| {
                let known = [pair.0, pair.1].iter().all(|part| vocab.contains_key(*part) && made(part));
                known && !self.pairs.contains(&pair)
            })
        };
        let count = vocab.keys().filter(|text| !is_byte(text)).filter(|text| joins(text)).count();
        (count > 0).then(|| {
            format!(
                "llama.cpp can merge {count} tokens in ways that tokenizer.json does not list: it may tokenize some texts differently"
            )
        })
    }
}

/// Returns merges as `a b` lines, with a space inside a token as `Ġ`, like byte-level tokenizers.
fn merge_texts(model: &Bpe) -> Result<Vec<String>> {
    let text = |(rank, merge): (usize, &Merge)| match merge {
        Merge::Text(text) => Ok(text.clone()),
        Merge::Pair(left, right) if left.is_empty() || right.is_empty() => {
            Err(refused(format!("merge {rank} has an empty side")))
        }
        Merge::Pair(left, right) => Ok(format!("{} {}", left.replace(' ', "Ġ"), right.replace(' ', "Ġ"))),
    };
    model.merges.iter().enumerate().map(text).collect()
}

/// Sets the ids of special tokens, and which of them surround a text.
fn specials(
    tokenizer: &Tokenizer,
    json: &TokenizerJson,
    vocab_size: usize,
    metadata: &mut GgufMetadata,
    notes: &mut Vec<String>,
) -> Result<()> {
    let (with, without) = (tokenizer.encode("a", true)?, tokenizer.encode("a", false)?);
    let around = with.windows(without.len().max(1)).position(|window| window == without);
    let Some((before, after)) = around.map(|at| (&with[..at], &with[at + without.len()..])) else {
        return Err(refused(
            "the tokens that it adds to a text cannot be separated from the text's own".into(),
        ));
    };
    if before.len() > 1 || after.len() > 1 {
        return Err(refused(format!(
            "it puts {} tokens before a text and {} after it; accepted: at most one each",
            before.len(),
            after.len()
        )));
    }
    let mut set = |key: &str, id: Option<u32>| {
        if let Some(id) = id.filter(|id| (*id as usize) < vocab_size) {
            metadata.set(format!("tokenizer.ggml.{key}_token_id"), MetadataValue::U32(id));
        }
    };
    let eos = after.first().copied().or(tokenizer.eos().map(|eos| eos.id));
    set("bos", before.first().copied().or(tokenizer.bos().map(|bos| bos.id)));
    set("eos", eos);
    set("unknown", json.model.unk_token.as_ref().and_then(|text| tokenizer.token_id(text)));
    set("padding", tokenizer.pad().map(|pad| pad.id));
    // Further ids that end a generation, as far as GGUF has keys.
    let mut ends = tokenizer.eos_ids().iter().copied().filter(|id| Some(*id) != eos);
    set("eot", ends.next());
    set("eom", ends.next());
    if let Some(id) = ends.next() {
        notes.push(format!("token {id}, which ends a generation, has no key of its own in GGUF"));
    }
    metadata.set("tokenizer.ggml.add_bos_token", MetadataValue::Bool(!before.is_empty()));
    metadata.set("tokenizer.ggml.add_eos_token", MetadataValue::Bool(!after.is_empty()));
    Ok(())
}

/// Sets the chat template, and others by their names.
fn templates(tokenizer: &Tokenizer, metadata: &mut GgufMetadata) -> Result<()> {
    let templates: BTreeMap<String, String> = stored_templates(tokenizer)?.into_iter().collect();
    let names: Vec<String> = templates.keys().filter(|name| *name != "default").cloned().collect();
    for (name, text) in templates {
        let key = match name.as_str() {
            "default" => "tokenizer.chat_template".to_owned(),
            name => format!("tokenizer.chat_template.{name}"),
        };
        metadata.text(key, text);
    }
    if !names.is_empty() {
        metadata.set("tokenizer.chat_templates", MetadataValue::Texts(names));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(added: &str, vocab: &str, merges: &str) -> TokenizerJson {
        serde_json::from_str(&format!(
            r#"{{"added_tokens":[{added}],"model":{{"vocab":{vocab},"merges":{merges},"unk_token":"<unk>","byte_fallback":true}}}}"#
        ))
        .expect("valid")
    }

    #[test]
    fn types_of_tokens() {
        let json = json(
            r#"{"id":0,"content":"<unk>","special":true},{"id":4,"content":"<s>","special":true},{"id":5,"content":"<think>"},{"id":6,"content":"<|x|>"}"#,
            r#"{"<unk>":0,"<0x0A>":1,"a":2,"▁a":3}"#,
            r#"["▁ a"]"#,
        );
        let mut notes = Vec::new();
        let list = TokenList::new(&json, 8, &mut notes).expect("no token twice");
        assert_eq!(list.types(), [2, 6, 1, 1, 3, 4, 3, 5]);
        assert_eq!(list.texts()[5..], ["<think>", "<|x|>", "[PAD7]"]);
        let merges = Merges::new(&json.model).expect("pairs");
        assert_eq!(list.scores(&merges)[1..4], [0.0, -1.0, 0.0]);
        assert_eq!(notes, [""; 0]);
        assert!(list.missing_bytes().expect("1 of 256").contains("1 of 256"));
    }

    #[test]
    fn tokens_without_a_place() {
        let json = json(
            r#"{"id":3,"content":"<image>","special":true}"#,
            r#"{"a":0,"b":1,"ab":2}"#,
            r#"[["a","b"]]"#,
        );
        let mut notes = Vec::new();
        assert_eq!(TokenList::new(&json, 3, &mut notes).expect("an added one is left out").0.len(), 3);
        assert_eq!(notes, ["left out token 3 (\"<image>\"), which has no embedding"]);
        assert!(TokenList::new(&json, 2, &mut notes).is_err(), "`ab` is no added token");
    }

    #[test]
    fn a_token_twice_is_refused() {
        let json = json(r#"{"id":2,"content":"a","special":true}"#, r#"{"a":0,"b":1}"#, "[]");
        assert!(TokenList::new(&json, 3, &mut Vec::new()).is_err());
    }

    /// `abc` from `ab` and `c` is listed; from `a` and `bc` it is not, though merges make both
    /// tokens.
    #[test]
    fn merges_that_are_not_listed() {
        let vocab = r#"{"a":0,"b":1,"c":2,"ab":3,"bc":4,"abc":5}"#;
        let missing = |merges: &str| {
            let json = json("", vocab, merges);
            let merges = Merges::new(&json.model).expect("pairs");
            merges.missing(&json.model.vocab)
        };
        assert_eq!(missing(r#"["a b","b c","ab c","a bc"]"#), None);
        assert!(missing(r#"["a b","b c","ab c"]"#).expect("a + bc").contains("merge 1 tokens"));
    }
}
