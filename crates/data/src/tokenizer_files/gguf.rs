//! The vocabulary in the metadata of a GGUF file as a tokenizer.json.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value, json};

use super::converted::{AddedEnds, ConvertedVocabulary, FinishedTokenizer, parts};
use super::sentencepiece;
use super::settings::TokenizerSettings;
use super::spm_model::{Piece, PieceKind, SpmModel};
use super::{MAX_MERGES, MAX_TOKENS};

/// The rules of a byte-level BPE before its merges.
#[derive(Debug, Clone, PartialEq)]
pub struct WordRules {
    /// The split into words, as in a tokenizer.json.
    pub pre_tokenizer: Value,
    /// The normalizer, as in a tokenizer.json.
    pub normalizer: Value,
    /// True if a word that is a token skips the merges.
    pub ignores_merges: bool,
    /// True if the BOS token precedes a text unless a key says otherwise.
    pub adds_bos: bool,
}

/// The kind of a vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub enum VocabularyKind {
    /// Byte-level BPE ("gpt2").
    Bytes {
        /// The split into words.
        words: WordRules,
        /// The merges in order, with a space between both sides.
        merges: Vec<String>,
    },
    /// BPE of Gemma's pieces ("gemma4").
    Merged {
        /// The merges in order, with a space between both sides.
        merges: Vec<String>,
    },
    /// BPE of sentencepiece ("llama").
    Pieces {
        /// The score of each token.
        scores: Vec<f32>,
        /// True if a space precedes a text.
        prefix: bool,
        /// True if runs of spaces become one.
        removes_spaces: bool,
    },
}

/// The vocabulary in the metadata of a GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufVocabulary {
    /// The kind of its tokens.
    pub kind: VocabularyKind,
    /// The tokens by id.
    pub tokens: Vec<String>,
    /// The type of each token, as llama.cpp numbers them.
    pub types: Vec<f32>,
    /// The ids of special tokens by their keys in tokenizer_config.json.
    pub special: BTreeMap<&'static str, u32>,
    /// True if the BOS token precedes a text.
    pub adds_bos: bool,
    /// True if the EOS token follows a text.
    pub adds_eos: bool,
    /// True if special tokens, except for the begin, the end of a text and the unknown one, strip
    /// the white space after them.
    pub strips_right: bool,
    /// The chat template, or a list of several, as in tokenizer_config.json.
    pub template: Option<Value>,
}

/// The files of a tokenizer.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufTokenizer {
    /// The text of tokenizer.json.
    pub json: String,
    /// The object in tokenizer_config.json.
    pub config: Map<String, Value>,
}

/// `llama_token_type` in llama.h, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenType {
    Normal,
    Control,
    UserDefined,
    Unused,
    Other,
}

impl GgufVocabulary {
    /// Converts it to the files of a tokenizer; `model` is the config.json of the model.
    ///
    /// # Errors
    /// Fails with the reason if it is malformed, or of a kind that finetune does not support.
    pub fn files(&self, model: &Map<String, Value>) -> Result<GgufTokenizer, String> {
        self.check()?;
        let config = self.config();
        let settings = TokenizerSettings { config: config.clone(), ..TokenizerSettings::default() };
        let converted = match &self.kind {
            VocabularyKind::Bytes { words, merges } => self.bytes(words, merges, settings)?,
            VocabularyKind::Merged { merges } => {
                let pieces = self.pieces(&vec![0.0; self.tokens.len()], false, false);
                sentencepiece::gemma(&pieces, settings, &pairs(merges)?)
            }
            VocabularyKind::Pieces { scores, prefix, removes_spaces } => {
                let model_of_pieces = self.pieces(scores, *prefix, *removes_spaces);
                sentencepiece::convert_model(&model_of_pieces, settings, model)?
            }
        };
        let ends = AddedEnds { bos: self.adds_bos, eos: self.adds_eos };
        let ends = (ends.bos || ends.eos).then_some(ends);
        let FinishedTokenizer { text, .. } = ConvertedVocabulary { ends, ..converted }.finish()?;
        let mut config = config;
        // transformers reads tokenizer.json as it is by this class.
        config.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
        config.extend(self.template.clone().map(|template| ("chat_template".to_owned(), template)));
        Ok(GgufTokenizer { json: text, config })
    }

    fn check(&self) -> Result<(), String> {
        let (count, types) = (self.tokens.len(), self.types.len());
        if count == 0 || count > MAX_TOKENS || count != types {
            return Err(format!(
                "it has {count} tokens and {types} types of tokens; accepted: as many of both, 1 to {MAX_TOKENS}"
            ));
        }
        let mut seen = HashSet::new();
        if let Some(twice) = self.tokens.iter().find(|token| !seen.insert(token.as_str())) {
            return Err(format!("two tokens are {twice:?}"));
        }
        match &self.kind {
            VocabularyKind::Bytes { merges, .. } | VocabularyKind::Merged { merges }
                if merges.len() > MAX_MERGES =>
            {
                Err(format!("it has {} merges; accepted: up to {MAX_MERGES}", merges.len()))
            }
            VocabularyKind::Pieces { scores, .. }
                if scores.len() != count || scores.iter().any(|score| !score.is_finite()) =>
            {
                Err(format!("it has {} scores; accepted: {count} finite numbers", scores.len()))
            }
            _ => Ok(()),
        }
    }

    fn kind(&self, id: usize) -> TokenType {
        match self.types.get(id).map(|kind| *kind as i32) {
            Some(1) => TokenType::Normal,
            Some(3) => TokenType::Control,
            Some(4) => TokenType::UserDefined,
            // Rows of the embedding without a token get such names.
            Some(5) if self.tokens[id] == format!("[PAD{id}]") => TokenType::Unused,
            _ => TokenType::Other,
        }
    }

    /// Returns the tokens that are no rows without a token, with their ids and types.
    fn used(&self) -> impl Iterator<Item = (usize, &str, TokenType)> {
        let all = self.tokens.iter().enumerate().map(|(id, text)| (id, text.as_str(), self.kind(id)));
        all.filter(|(.., kind)| *kind != TokenType::Unused)
    }

    /// The settings beside tokenizer.json, without the chat template.
    fn config(&self) -> Map<String, Value> {
        let mut config = Map::new();
        for (name, id) in &self.special {
            config
                .extend(self.tokens.get(*id as usize).map(|text| ((*name).to_owned(), text.as_str().into())));
        }
        config.insert("add_bos_token".to_owned(), self.adds_bos.into());
        config.insert("add_eos_token".to_owned(), self.adds_eos.into());
        config.insert("clean_up_tokenization_spaces".to_owned(), false.into());
        let added =
            self.used().filter(|(.., kind)| matches!(kind, TokenType::Control | TokenType::UserDefined));
        let is_pieces = !matches!(self.kind, VocabularyKind::Bytes { .. });
        let entry = |(id, text, kind): (usize, &str, TokenType)| {
            let content = if is_pieces { piece_text(text, kind) } else { text.to_owned() };
            let special = kind == TokenType::Control;
            let keeps = ["<unk>", "<s>", "<|endoftext|>"].contains(&content.as_str());
            let token = json!({
                "content": content, "lstrip": false, "normalized": false,
                "rstrip": self.strips_right && special && !keeps, "single_word": false, "special": special
            });
            (id.to_string(), token)
        };
        let added: Map<String, Value> = added.map(entry).collect();
        config.insert("added_tokens_decoder".to_owned(), added.into());
        config
    }

    fn bytes(
        &self,
        words: &WordRules,
        merges: &[String],
        settings: TokenizerSettings,
    ) -> Result<ConvertedVocabulary, String> {
        let merges = pairs(merges)?;
        let vocabulary: Map<String, Value> =
            self.used().map(|(id, text, _)| (text.to_owned(), id.into())).collect();
        let level = |trim: bool| json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": trim, "use_regex": true});
        let unk = self.special.get("unk_token").map(|id| self.tokens[*id as usize].clone());
        let model = json!({
            "type": "BPE", "dropout": null, "unk_token": unk, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": words.ignores_merges, "vocab": vocabulary, "merges": merges,
        });
        let mut parts = parts(words.normalizer.clone(), words.pre_tokenizer.clone(), level(true), model);
        parts.insert("post_processor".to_owned(), level(false));
        Ok(ConvertedVocabulary { parts, settings, ends: None })
    }

    /// The vocabulary as a model of sentencepiece.
    fn pieces(&self, scores: &[f32], prefix: bool, removes_spaces: bool) -> SpmModel {
        let piece = |(id, text): (usize, &String)| {
            let kind = self.kind(id);
            Piece {
                text: piece_text(text, kind),
                score: scores[id],
                kind: match kind {
                    TokenType::Normal => PieceKind::Normal,
                    TokenType::Control => PieceKind::Control,
                    TokenType::UserDefined => PieceKind::UserDefined,
                    TokenType::Unused | TokenType::Other => PieceKind::Other,
                },
            }
        };
        let used = self.tokens.len() - self.tokens.len().min(self.unused_at_the_end());
        let pieces: Vec<Piece> = self.tokens.iter().enumerate().take(used).map(piece).collect();
        let byte_fallback = self.tokens.iter().any(|text| text == "<0x0A>");
        let special = |name: &str| {
            self.special.get(name).map(|id| (i64::from(*id), self.tokens[*id as usize].as_str()))
        };
        SpmModel::of_bpe(pieces, byte_fallback, prefix, removes_spaces, special)
    }

    /// The number of rows without a token after the last one.
    fn unused_at_the_end(&self) -> usize {
        (0..self.tokens.len()).rev().take_while(|id| self.kind(*id) == TokenType::Unused).count()
    }
}

/// Splits merges at their spaces.
fn pairs(merges: &[String]) -> Result<Vec<(String, String)>, String> {
    let pair = |merge: &String| {
        // A side may begin with a space-like letter, but is never empty.
        let cut = merge.char_indices().skip(1).find(|(_, letter)| *letter == ' ');
        let (left, right) = cut.map(|(at, _)| (&merge[..at], &merge[at + 1..]))?;
        (!right.is_empty()).then(|| (left.to_owned(), right.to_owned()))
    };
    let pairs: Option<Vec<(String, String)>> = merges.iter().map(pair).collect();
    pairs.ok_or_else(|| "a merge is no pair of texts with a space between them".to_owned())
}

/// Returns a token as sentencepiece has it: llama.cpp's converter writes spaces in user-defined
/// tokens.
fn piece_text(text: &str, kind: TokenType) -> String {
    if kind == TokenType::UserDefined { text.replace(' ', "▁") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabulary(merges: &[&str]) -> GgufVocabulary {
        let words = WordRules {
            pre_tokenizer: json!({
                "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
            }),
            normalizer: Value::Null,
            ignores_merges: false,
            adds_bos: false,
        };
        let tokens = ["<s>", "a", "b", "ab", "Ġ", "[PAD5]"];
        GgufVocabulary {
            kind: VocabularyKind::Bytes {
                words,
                merges: merges.iter().map(|merge| (*merge).to_owned()).collect(),
            },
            tokens: tokens.map(str::to_owned).into(),
            types: vec![3.0, 1.0, 1.0, 1.0, 1.0, 5.0],
            special: BTreeMap::from([("bos_token", 0)]),
            adds_bos: true,
            adds_eos: false,
            strips_right: false,
            template: Some("{{ messages }}".into()),
        }
    }

    #[test]
    fn tokens_keep_their_ids() {
        let files = vocabulary(&["a b"]).files(&Map::new()).unwrap();
        let tokenizer = tokenizers::Tokenizer::from_bytes(files.json).unwrap();
        assert_eq!(tokenizer.encode("ab<s>ba", true).unwrap().get_ids(), [0, 3, 0, 2, 1]);
        assert_eq!(tokenizer.get_vocab_size(true), 5);
        assert_eq!(files.config["chat_template"], "{{ messages }}");
        assert_eq!(files.config["bos_token"], "<s>");
    }

    /// Gemma 4: spaces as `▁`, merges in their order, bytes for unknown letters.
    #[test]
    fn pieces_with_merges_keep_their_order() {
        let tokens = ["<bos>", "a", "b", "ab", "▁", "▁a", "<0x0A>", "<unk>"];
        let merges = ["▁ a", "a b"].map(str::to_owned).into();
        let merged = GgufVocabulary {
            kind: VocabularyKind::Merged { merges },
            tokens: tokens.map(str::to_owned).into(),
            types: vec![3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 6.0, 3.0],
            special: BTreeMap::from([("bos_token", 0), ("unk_token", 7)]),
            ..vocabulary(&[])
        };
        let files = merged.files(&Map::new()).unwrap();
        let tokenizer = tokenizers::Tokenizer::from_bytes(files.json).unwrap();
        assert_eq!(tokenizer.encode("ab ab\n", true).unwrap().get_ids(), [0, 3, 5, 2, 6]);
        let kind = VocabularyKind::Merged { merges: vec!["ab".to_owned()] };
        assert!(GgufVocabulary { kind, ..merged }.files(&Map::new()).unwrap_err().contains("no pair"));
    }

    #[test]
    fn malformed_vocabularies_are_refused() {
        let why = |vocabulary: GgufVocabulary| vocabulary.files(&Map::new()).unwrap_err();
        assert!(why(vocabulary(&["ab"])).contains("no pair"));
        assert!(why(vocabulary(&["a "])).contains("no pair"));
        assert!(why(GgufVocabulary { types: vec![1.0], ..vocabulary(&[]) }).contains("1 types"));
        let tokens = vec!["a".to_owned(); 6];
        assert!(why(GgufVocabulary { tokens, ..vocabulary(&[]) }).contains("two tokens are \"a\""));
        let kind = VocabularyKind::Pieces { scores: vec![0.0; 5], prefix: true, removes_spaces: false };
        assert!(why(GgufVocabulary { kind, ..vocabulary(&[]) }).contains("5 scores"));
    }
}
