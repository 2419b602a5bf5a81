//! Text of a row with its trained parts marked.

use std::ops::Range;

use crate::data::{Example, Role, Tokenizer};
use crate::error::Result;
use crate::report::html::MaskedRow;

/// Returns the tokens `shown` of `example` as text with their mask.
///
/// # Errors
/// The tokenizer has no text for an id.
pub(crate) fn masked_row(example: &Example, tokenizer: &Tokenizer, shown: Range<usize>) -> Result<MaskedRow> {
    let mut pieces: Vec<(String, bool)> = Vec::new();
    let mut add = |text: String, trained: bool| match pieces.last_mut() {
        _ if text.is_empty() => {}
        Some((piece, same)) if *same == trained => *piece += &text,
        _ => pieces.push((text, trained)),
    };
    let mut stream = tokenizer.stream(false);
    let (from, to) = (shown.start, shown.end.min(example.ids.len()));
    for (at, id) in example.ids.iter().enumerate().take(to).skip(from) {
        // The first token of a row is never predicted.
        add(stream.push(*id)?, at > 0 && example.trained[at]);
    }
    add(stream.finish()?, to > 1 && example.trained[to - 1]);
    Ok(MaskedRow {
        origin: match example.role {
            Role::Plain => example.origin.to_string(),
            role => format!("{role}, {}", example.origin),
        },
        pieces,
        tokens: example.ids.len(),
        trained_tokens: example.num_trained(),
        omitted_before: from,
        omitted_after: example.ids.len() - to,
    })
}
