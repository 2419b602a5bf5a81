//! Changes of a source, collected in any order and then applied.

/// Classes of changes at one position, in the order of writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EditClass {
    /// Text after an expression that ends here, innermost first.
    After,
    /// Text before an expression that begins here, outermost first.
    Before,
    /// Text that replaces the text here.
    Instead,
}

/// A change of a source.
#[derive(Debug)]
struct SourceEdit {
    at: usize,
    class: EditClass,
    removed: usize,
    text: String,
}

/// Changes of a source, collected in any order.
#[derive(Debug, Default)]
pub(super) struct SourceEdits(Vec<SourceEdit>);

impl SourceEdits {
    /// The number of edits so far, for [`Self::take_from`].
    pub(super) fn mark(&self) -> usize {
        self.0.len()
    }

    /// Removes and returns the changes since `mark`.
    pub(super) fn take_from(&mut self, mark: usize) -> Self {
        SourceEdits(self.0.split_off(mark))
    }

    /// Inserts `text` before `at`, after a space that separates it from a name that ends there.
    pub(super) fn before(&mut self, at: usize, text: &str) {
        self.0.push(SourceEdit { at, class: EditClass::Before, removed: 0, text: format!(" {text}") });
    }

    /// Inserts `text` after the expression that ends at `at`.
    pub(super) fn after(&mut self, at: usize, text: impl Into<String>) {
        self.0.push(SourceEdit { at, class: EditClass::After, removed: 0, text: text.into() });
    }

    /// Replaces the range `range` with `text`.
    pub(super) fn instead(&mut self, range: std::ops::Range<usize>, text: impl Into<String>) {
        self.0.push(SourceEdit {
            at: range.start,
            class: EditClass::Instead,
            removed: range.len(),
            text: text.into(),
        });
    }

    /// Returns the range `range` of `source` with these changes.
    pub(super) fn apply(self, source: &str, range: std::ops::Range<usize>) -> String {
        let mut edits: Vec<(usize, SourceEdit)> = self.0.into_iter().enumerate().collect();
        edits.sort_by(|(a_order, a), (b_order, b)| {
            let order = match a.class {
                EditClass::Before => b_order.cmp(a_order),
                _ => a_order.cmp(b_order),
            };
            (a.at, a.class).cmp(&(b.at, b.class)).then(order)
        });
        let mut out = String::with_capacity(range.len());
        let mut at = range.start;
        for (_, edit) in edits {
            if edit.at > at {
                out.push_str(&source[at..edit.at]);
            }
            out.push_str(&edit.text);
            at = at.max(edit.at + edit.removed);
        }
        out.push_str(&source[at.min(range.end)..range.end]);
        out
    }
}
