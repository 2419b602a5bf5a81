//! What a tokenizer gives for a text.

use std::ops::Range;

/// Ids of a text with the bytes each came from.
#[derive(Debug, Clone, Default)]
pub struct Encoded {
    /// Token ids of the text, in order.
    pub ids: Vec<u32>,
    /// The byte range of the text that each token covers; empty for tokens that were added.
    pub offsets: Vec<Range<usize>>,
}
