//! A special token of a tokenizer.

/// A special token by text and id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialToken {
    /// The text, as in templates.
    pub text: String,
    /// Id of the token.
    pub id: u32,
}
