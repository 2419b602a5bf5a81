//! `{% generation %}`, the tag with which transformers marks what the assistant wrote.

use super::edits::SourceEdits;
use super::tags::{TagKind, tags};

/// The characters that a template prints where a generation block begins and where it ends. Both are noncharacters: never
/// part of text that is exchanged (Unicode 16, section 23.7).
pub(crate) const GENERATION_MARKS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// The template with its generation tags rewritten so that they print the marks and keep their whitespace control;
/// `None` if it has none.
pub(crate) fn mark_generation(source: &str) -> Option<String> {
    let mut edits = SourceEdits::default();
    let [open, close] = GENERATION_MARKS;
    for tag in tags(source).into_iter().filter(|tag| tag.kind == TagKind::Block) {
        let inner = tag.tokens.first().map_or(0..0, |token| token.place.start..tag.close.start);
        // `with` gives the block its own scope, as Jinja's has, and pairs the tags.
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
