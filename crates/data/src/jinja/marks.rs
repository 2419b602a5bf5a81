//! `{% generation %}`, the tag with which transformers marks the assistant's text.

use super::edits::SourceEdits;
use super::tags::{TagKind, tags};

/// Characters that a rewritten template prints at the begin and end of a generation block. Both are
/// noncharacters, which exchanged text never contains (Unicode 16, section 23.7).
pub(crate) const GENERATION_MARKS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// Rewrites generation tags so that they print the marks and keep their whitespace control; `None`
/// without such tags.
pub(crate) fn mark_generation(source: &str) -> Option<String> {
    let mut edits = SourceEdits::default();
    let [open, close] = GENERATION_MARKS;
    for tag in tags(source).into_iter().filter(|tag| tag.kind == TagKind::Block) {
        let inner = tag.tokens.first().map_or(0..0, |token| token.range.start..tag.close.start);
        // `with` gives the block its own scope, as in Jinja, and pairs the tags.
        match tag.only_name(source) {
            Some("generation") => {
                edits.instead(inner, format!("with generation_ = 0 %}}{open}{{% set generation_ = 0 "))
            }
            Some("endgeneration") => {
                edits.instead(inner, format!("set generation_ = 0 %}}{close}{{% endwith "))
            }
            _ => {}
        }
    }
    (edits.mark() > 0).then(|| edits.apply(source, 0..source.len()))
}
