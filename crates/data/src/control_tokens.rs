//! Encodes control tokens in the texts of a chat as plain text: `data.sanitize_control_tokens`, by
//! the rules of transformers 5.24 (`apply_chat_template(..., sanitize_control_tokens=True)`).
//!
//! Before the template renders a row, each control token in a string is wrapped in two private-use
//! characters. In the rendered text, wrapped tokens are encoded without the tokenizer's added
//! tokens, and the rest as usual. A lone private-use character is removed, but still splits the
//! text. Control tokens are the special tokens, and the other added tokens that the template names.

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
    /// Finds the control tokens; `None` if the tokenizer and template have none.
    ///
    /// # Errors
    /// Fails if they are too many for a regular expression.
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
                Error::user("cannot look for the special tokens of the tokenizer")
                    .because(error.to_string())
                    .hint(
                        "remove `data.sanitize_control_tokens`; special tokens in messages then keep their meaning",
                    )
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

    /// Returns a row's value with its control tokens marked; object keys stay unchanged.
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

    /// Encodes a rendered chat: token ids, each with the bytes of the text that it covers.
    ///
    /// # Errors
    /// Fails like the tokenizer, or if a marked token still encodes to its own id.
    pub(super) fn encode(&self, tokenizer: &Tokenizer, text: &str, budget: &RowBudget) -> Result<Encoded> {
        let (mut encoded, mut at) = (Encoded::default(), 0);
        let as_always = |piece: &str| tokenizer.encode_within(piece, false, budget);
        let as_text = |piece: &str| tokenizer.encode_as_text(piece);
        for captures in self.marked.captures_iter(text) {
            let (Some(whole), token) = (captures.get(0), captures.get(1)) else { continue };
            append(&mut encoded, &text[at..whole.start()], at, &as_always)?;
            at = whole.end();
            let Some(token) = token else { continue };
            let before = encoded.ids.len();
            append(&mut encoded, token.as_str(), token.start(), &as_text)?;
            let own = tokenizer.token_id(token.as_str());
            if encoded.ids[before..].iter().any(|id| Some(*id) == own) {
                return Err(Error::user(format!("cannot encode {:?} as text", token.as_str()))
                    .because("the tokenizer encodes the plain text as this token, too")
                    .hint("change the row, or remove `data.sanitize_control_tokens`"));
            }
        }
        append(&mut encoded, &text[at..], at, &as_always)?;
        Ok(encoded)
    }
}

/// Appends the encoding of `piece`, which begins at byte `at` of a text. A tokenizer may put a
/// prefix before a text, but only before the first piece: others are encoded after a line end,
/// which is then removed.
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
            let start = line_end.len();
            own =
                Some(Encoded { ids: whole.ids[start..].to_vec(), offsets: whole.offsets[start..].to_vec() });
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
