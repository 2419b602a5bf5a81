//! Values that a file can hold but JSON cannot: NaN, half of a surrogate pair, bytes that are no
//! text.
//!
//! A reader puts a marked text in place of such a value; [`super::settle`] removes the marks again.

use serde_json::Value;

/// First character of a mark. It is a noncharacter (U+FDD0), so no text contains it.
pub(super) const MARK: char = '\u{FDD0}';

/// A kind of value without a form in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unusable {
    /// Not a number.
    Nan,
    /// More than the largest float.
    Infinity,
    /// Less than the smallest float.
    MinusInfinity,
    /// An escape such as `\ud83d` without its second half.
    HalfPair,
    /// Bytes that are not UTF-8.
    Bytes,
    /// A column type without a form in a row.
    Type,
}

impl Unusable {
    const ALL: [Unusable; 6] = [
        Unusable::Nan,
        Unusable::Infinity,
        Unusable::MinusInfinity,
        Unusable::HalfPair,
        Unusable::Bytes,
        Unusable::Type,
    ];

    /// The kind of a float that is not finite.
    pub(super) fn of_float(value: f64) -> Self {
        match value {
            value if value.is_nan() => Unusable::Nan,
            value if value > 0.0 => Unusable::Infinity,
            _ => Unusable::MinusInfinity,
        }
    }

    /// The text in place of a value of this kind until the row is settled.
    pub(super) fn mark(self) -> String {
        [MARK, char::from(b'a' + self as u8)].iter().collect()
    }

    /// The JSON value in place of one of this kind until the row is settled.
    pub(super) fn value(self) -> Value {
        Value::String(self.mark())
    }

    /// The kind whose mark `text` contains.
    pub(super) fn in_text(text: &str) -> Option<Self> {
        let (_, after) = text.split_once(MARK)?;
        Self::ALL.into_iter().find(|kind| after.starts_with(char::from(b'a' + *kind as u8)))
    }

    /// Returns whether this may stand for a missing value: pandas writes NaN for a missing text.
    pub(super) fn can_be_missing(self) -> bool {
        matches!(self, Unusable::Nan | Unusable::Infinity | Unusable::MinusInfinity)
    }

    /// Words that continue "the key".
    pub(super) fn words(self) -> &'static str {
        match self {
            Unusable::Nan => "is NaN",
            Unusable::Infinity => "is Infinity",
            Unusable::MinusInfinity => "is -Infinity",
            Unusable::HalfPair => {
                "holds half of a surrogate pair (an escape such as \\ud83d alone), which is no text"
            }
            Unusable::Bytes => "holds bytes that are not UTF-8",
            Unusable::Type => "has a column type that has no form in a row",
        }
    }
}
