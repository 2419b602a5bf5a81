//! The part that an example has in its objective.

use std::fmt;

/// The part of an example in the objective.
///
/// The two answers of a pair are neighbours in one [group](super::ExampleSource::group): first the
/// chosen answer, then the rejected one. A row of KTO is a group of its own answer and, if the loss
/// needs it, the mismatched one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// Trained by itself.
    #[default]
    Plain,
    /// The better answer of a pair.
    Chosen,
    /// The worse answer of a pair.
    Rejected,
    /// An answer that its row marks as good.
    Desirable,
    /// An answer that its row marks as bad.
    Undesirable,
    /// The prompt of a row with the answer of another one, by which KTO estimates how far the model
    /// moved from the reference.
    Mismatched,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Plain => "plain",
            Role::Chosen => "chosen",
            Role::Rejected => "rejected",
            Role::Desirable => "desirable",
            Role::Undesirable => "undesirable",
            Role::Mismatched => "mismatched",
        })
    }
}

impl Role {
    /// True if the example before it in the group has the same prompt.
    pub fn repeats_prompt(self) -> bool {
        matches!(self, Role::Rejected | Role::Mismatched)
    }

    /// Bytes that differ for different roles; none for [`Role::Plain`], whose data keep the digest
    /// that older checkpoints recorded.
    pub(super) fn digest_bytes(self) -> Vec<u8> {
        match self {
            Role::Plain => Vec::new(),
            Role::Chosen => vec![1],
            Role::Rejected => vec![2],
            Role::Desirable => vec![3],
            Role::Undesirable => vec![4],
            Role::Mismatched => vec![5],
        }
    }
}
