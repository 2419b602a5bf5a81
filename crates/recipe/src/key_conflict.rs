//! A key that has no effect, or misses a required key, given the other keys.

/// A key that conflicts with another.
pub(super) struct KeyConflict {
    pub(super) section: &'static str,
    pub(super) key: &'static str,
    /// The problem, written after the key's name.
    pub(super) text: String,
    /// The fix to write.
    pub(super) hint: String,
    /// Section and name of the single key that leaves this one without effect, if there is one.
    pub(super) overruled_by: Option<(&'static str, &'static str)>,
}

impl KeyConflict {
    /// Creates a conflict of a key that no single other key leaves without effect.
    pub(super) fn new(
        section: &'static str,
        key: &'static str,
        text: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        KeyConflict { section, key, text: text.into(), hint: hint.into(), overruled_by: None }
    }

    pub(super) fn overruled_by(self, section: &'static str, key: &'static str) -> Self {
        KeyConflict { overruled_by: Some((section, key)), ..self }
    }
}
