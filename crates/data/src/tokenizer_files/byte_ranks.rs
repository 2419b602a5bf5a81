//! A vocabulary of bytes with ranks as byte-level BPE: the form of tiktoken and tekken.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

use super::converted::parts;
use super::{check_splits, collect_merges};
use crate::tokenizer_outline::MAX_ID;

/// Tokens with their ranks. A merge has the rank of the token that it makes.
pub(super) struct ByteRanks(HashMap<Vec<u8>, u32>);

impl ByteRanks {
    /// Checks `tokens` with their ranks.
    ///
    /// # Errors
    /// Fails if a token or rank occurs twice, a rank is too large, or one of the 256 bytes is
    /// missing.
    pub(super) fn new(tokens: Vec<(Vec<u8>, u32)>) -> Result<Self, String> {
        check_splits(tokens.iter().map(|(token, _)| token.len()))?;
        let (mut ranks, mut used) = (HashMap::with_capacity(tokens.len()), HashSet::new());
        for (token, rank) in tokens {
            let shown = || token.escape_ascii().to_string();
            if token.is_empty() || rank >= MAX_ID {
                return Err(format!(
                    "its token \"{}\" has rank {rank}; accepted: at least one byte, ranks below {MAX_ID}",
                    shown()
                ));
            }
            if !used.insert(rank) {
                return Err(format!("its token \"{}\" has rank {rank}, as an earlier token", shown()));
            }
            if ranks.contains_key(&token) {
                return Err(format!("its token \"{}\" occurs twice", shown()));
            }
            ranks.insert(token, rank);
        }
        if ranks.len() != ranks.values().max().map_or(0, |rank| *rank as usize + 1) {
            return Err(format!("its ranks have holes: {} tokens; accepted: ranks from 0 on", ranks.len()));
        }
        match (0..=255).find(|byte| !ranks.contains_key(&vec![*byte])) {
            Some(byte) => Err(format!("it has no token for the byte 0x{byte:02X}; accepted: all 256 bytes")),
            None => Ok(ByteRanks(ranks)),
        }
    }

    /// The number of tokens, which is the largest rank plus one.
    pub(super) fn len(&self) -> u32 {
        self.0.len() as u32
    }

    /// Returns the parts of a tokenizer.json. `first` are tokens with the first ids; the other ids
    /// are the ranks after them. `pattern` splits a text into words.
    ///
    /// # Errors
    /// Fails if the tokens have too many merges.
    pub(super) fn parts(
        &self,
        first: &[String],
        pattern: &str,
        normalizer: Value,
    ) -> Result<Map<String, Value>, String> {
        let mut tokens: Vec<(&[u8], u32)> = self.0.iter().map(|(token, rank)| (&token[..], *rank)).collect();
        tokens.sort_unstable_by_key(|(_, rank)| *rank);
        let merges = collect_merges(tokens.iter().flat_map(|(token, _)| self.merges_of(token)))?;
        let mut vocabulary = Map::new();
        for (token, rank) in tokens {
            vocabulary.insert(byte_text(token), (rank as usize + first.len()).into());
        }
        vocabulary.extend(first.iter().cloned().zip((0_u32..).map(Value::from)));
        let model = json!({
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
            "vocab": vocabulary, "merges": merges,
        });
        let split =
            json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let byte_level = |prefix: bool, trim: bool, regex: bool| {
            json!({
                "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": trim, "use_regex": regex
            })
        };
        let pre_tokenizer =
            json!({"type": "Sequence", "pretokenizers": [split, byte_level(false, true, false)]});
        let mut all = parts(normalizer, pre_tokenizer, byte_level(true, true, true), model);
        all.insert("post_processor".to_owned(), byte_level(true, false, true));
        Ok(all)
    }

    /// The merges that make `token`, by the ranks of their sides.
    fn merges_of(&self, token: &[u8]) -> Vec<Value> {
        let cut = |at: usize| {
            let (left, right) = token.split_at(at);
            let ranks = (self.0.get(left)?, self.0.get(right)?);
            Some((ranks, json!([byte_text(left), byte_text(right)])))
        };
        let mut merges: Vec<_> = (1..token.len()).filter_map(cut).collect();
        merges.sort_by_key(|(ranks, _)| *ranks);
        merges.into_iter().map(|(_, merge)| merge).collect()
    }
}

/// Adds special `tokens` to the parts of a tokenizer.json. A token of the vocabulary keeps its id;
/// the others get ids from `next` on.
pub(super) fn add_special(parts: &mut Map<String, Value>, tokens: &[String], mut next: u32) {
    let mut all: Vec<Value> = Vec::with_capacity(tokens.len());
    for token in tokens {
        let known = parts["model"]["vocab"].get(token).and_then(Value::as_u64);
        let id = known.unwrap_or_else(|| {
            next += 1;
            u64::from(next - 1)
        });
        all.push(json!({
            "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }));
    }
    parts.insert("added_tokens".to_owned(), all.into());
}

/// The text of a token of bytes, by the table of GPT-2: one character for each byte.
fn byte_text(token: &[u8]) -> String {
    token.iter().copied().map(byte_character).collect()
}

fn byte_character(byte: u8) -> char {
    let number = u32::from(byte);
    let moved = match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => number,
        // The others follow one another from 256 on.
        0..=0x20 => 0x100 + number,
        0x7f..=0xa0 => 0x121 + number - 0x7f,
        0xad => 0x143,
    };
    char::from_u32(moved).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes() -> Vec<(Vec<u8>, u32)> {
        (0..=255).map(|byte| (vec![byte], u32::from(byte))).collect()
    }

    #[test]
    fn bytes_have_the_characters_of_gpt2() {
        assert_eq!(byte_text(b"A \n\xe2\x96\x81\x7f\xa0\xad\x00"), "AĠĊâĸģġłŃĀ");
        let all: HashSet<char> = (0..=255).map(byte_character).collect();
        assert_eq!(all.len(), 256);
    }

    #[test]
    fn merges_are_in_the_order_of_ranks() {
        let mut tokens = bytes();
        tokens.extend([(b"abc".to_vec(), 258), (b"ab".to_vec(), 257), (b"bc".to_vec(), 256)]);
        let parts = ByteRanks::new(tokens).unwrap().parts(&["<s>".to_owned()], "x", Value::Null).unwrap();
        let model = &parts["model"];
        assert_eq!(model["merges"], json!([["b", "c"], ["a", "b"], ["a", "bc"], ["ab", "c"]]));
        assert_eq!((&model["vocab"]["abc"], &model["vocab"]["<s>"]), (&json!(259), &json!(0)));
    }

    #[test]
    fn contradictions_are_refused() {
        let why = |more: (&[u8], u32)| {
            let tokens = bytes().into_iter().chain([(more.0.to_vec(), more.1)]).collect();
            ByteRanks::new(tokens).err().unwrap()
        };
        assert!(why((b"ab", 7)).contains("\"ab\" has rank 7, as an earlier"));
        assert!(why((b"a", 300)).contains("\"a\" occurs twice"));
        assert!(why((b"", 300)).contains("at least one byte"));
        assert!(why((b"ab", MAX_ID)).contains("ranks below"));
        assert!(why((b"ab", 300)).contains("holes"));
        let mut missing = bytes();
        missing[0] = (b"ab".to_vec(), 0);
        assert!(ByteRanks::new(missing).err().unwrap().contains("0x00"));
    }
}
