//! Control tokens in the texts of a chat, as text: `data.sanitize_control_tokens`, by the rules of transformers 5.24
//! (`apply_chat_template(..., sanitize_control_tokens=True)`).
//!
//! Each control token in a string of the row is put between two private characters before the template renders it. In the
//! rendered text those that still stand between them are encoded without the tokenizer's added tokens, and all else as
//! always. A lone character is dropped, and still parts the text. Control tokens are the special tokens, and the other added
//! tokens that the template names.

use regex::Regex;
use serde_json::Value;

use super::child_pool::RowBudget;
use super::encoded::Encoded;
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};

/// The characters before and after a control token of a row.
const MARKERS: [char; 2] = ['\u{F8F1}', '\u{F8F2}'];

/// The control tokens of a tokenizer and a chat template.
#[derive(Debug)]
pub(super) struct ControlTokens {
    tokens: Regex,
    marked: Regex,
}

impl ControlTokens {
    /// Finds them; none where there are none.
    ///
    /// # Errors
    /// They are too many for a pattern.
    pub(super) fn new(tokenizer: &Tokenizer, template: &ChatTemplate) -> Result<Option<Self>> {
        let added = tokenizer.added_texts();
        let is_control = |(text, special): &(String, bool)| {
            !text.is_empty() && (*special || (template.mentions(text) && !text.trim().is_empty()))
        };
        let mut texts: Vec<String> = added.filter(is_control).map(|(text, _)| text).collect();
        // A token takes priority over the tokens that it contains.
        texts.sort_by_key(|text| std::cmp::Reverse(text.len()));
        let any = texts.iter().map(|text| regex::escape(text)).collect::<Vec<_>>().join("|");
        let pattern = |text: &str| {
            Regex::new(text).map_err(|error| {
                Error::user("cannot look for the control tokens of the tokenizer")
                    .because(error.to_string())
                    .hint("remove `data.sanitize_control_tokens`")
            })
        };
        let [before, after] = MARKERS;
        if texts.is_empty() {
            return Ok(None);
        }
        Ok(Some(ControlTokens {
            tokens: pattern(&any)?,
            marked: pattern(&format!("{before}({any}){after}|[{before}{after}]"))?,
        }))
    }

    /// A value of a row with its control tokens marked; the keys of objects stay.
    pub(super) fn mark(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.marked_text(text)),
            Value::Array(values) => values.iter().map(|value| self.mark(value)).collect(),
            Value::Object(map) => {
                Value::Object(map.iter().map(|(key, value)| (key.clone(), self.mark(value))).collect())
            }
            other => other.clone(),
        }
    }

    fn marked_text(&self, text: &str) -> String {
        // A row cannot forge a mark.
        let text = text.replace(MARKERS, "");
        let [before, after] = MARKERS;
        self.tokens.replace_all(&text, format!("{before}${{0}}{after}")).into_owned()
    }

    /// Ids of a rendered chat, with the bytes of its text that they cover.
    ///
    /// # Errors
    /// As the tokenizer; a marked token is a token of the vocabulary by itself.
    pub(super) fn encode(&self, tokenizer: &Tokenizer, text: &str, budget: &RowBudget) -> Result<Encoded> {
        let (mut encoded, mut at) = (Encoded::default(), 0);
        let as_always = |piece: &str| tokenizer.encode_within(piece, false, budget);
        let as_text = |piece: &str| tokenizer.encode_as_text(piece);
        for found in self.marked.captures_iter(text) {
            let (Some(whole), token) = (found.get(0), found.get(1)) else { continue };
            append(&mut encoded, &text[at..whole.start()], at, &as_always)?;
            at = whole.end();
            let Some(token) = token else { continue };
            let before = encoded.ids.len();
            append(&mut encoded, token.as_str(), token.start(), &as_text)?;
            let own = tokenizer.token_id(token.as_str());
            if encoded.ids[before..].iter().any(|id| Some(*id) == own) {
                return Err(Error::user(format!("cannot encode {:?} as text", token.as_str()))
                    .because("the tokenizer makes this token of the plain text, too")
                    .hint("change the row, or remove `data.sanitize_control_tokens`"));
            }
        }
        append(&mut encoded, &text[at..], at, &as_always)?;
        Ok(encoded)
    }
}

/// Appends a piece of a text that begins at its byte `at`. Only the first piece may get what a tokenizer puts before a text: the
/// others are encoded after a line end, which is removed again.
fn append(
    encoded: &mut Encoded,
    piece: &str,
    at: usize,
    encode: &dyn Fn(&str) -> Result<Encoded>,
) -> Result<()> {
    if piece.is_empty() {
        return Ok(());
    }
    let (mut own, mut shift) = (None, 0);
    if at > 0 {
        let line_end = encode("\n")?.ids;
        let whole = encode(&format!("\n{piece}"))?;
        if whole.ids.starts_with(&line_end) {
            let kept = line_end.len();
            own = Some(Encoded { ids: whole.ids[kept..].to_vec(), offsets: whole.offsets[kept..].to_vec() });
            shift = 1;
        }
    }
    let own = own.map_or_else(|| encode(piece), Ok)?;
    encoded.ids.extend(own.ids);
    let placed = |range: std::ops::Range<usize>| {
        if range.is_empty() {
            range
        } else {
            (at + range.start).saturating_sub(shift)..at + range.end - shift
        }
    };
    encoded.offsets.extend(own.offsets.into_iter().map(placed));
    Ok(())
}
