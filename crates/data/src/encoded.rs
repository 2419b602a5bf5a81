//! The result of tokenizing a text.

use std::ops::Range;

/// Token ids of a text, each with the bytes that it covers.
#[derive(Debug, Clone, Default)]
pub struct Encoded {
    /// Token ids of the text, in order.
    pub ids: Vec<u32>,
    /// The byte range of the text that each token covers; empty for tokens that were added.
    pub offsets: Vec<Range<usize>>,
}
