//! The examples of a row, and the results of encoding it.

use super::Origin;
use super::coverage::RowNotes;
use super::role::Role;

/// A row as the model sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    /// Token ids, at most `max_seq_len`.
    pub ids: Vec<u32>,
    /// True for each token whose prediction is trained. The first token is never predicted.
    pub trained: Vec<bool>,
    /// File and position of the row.
    pub origin: Origin,
    /// The [group](super::ExampleSource::group) that it belongs to.
    pub group: Option<u32>,
    /// Its part in the objective.
    pub role: Role,
}

impl Example {
    /// Number of tokens that are predicted and trained.
    pub fn num_trained(&self) -> usize {
        self.trained.iter().skip(1).filter(|trained| **trained).count()
    }
}

/// Result of encoding a row.
#[derive(Debug, Clone, PartialEq)]
pub enum Encoding {
    /// Its examples: one, or the chunks of a document.
    Examples(Vec<Example>),
    /// One example, cut to `max_seq_len` from `was` tokens.
    Truncated {
        /// The shortened example.
        example: Example,
        /// Number of tokens before.
        was: usize,
        /// True if trained tokens were cut off: the end of an answer.
        lost_answer: bool,
    },
    /// Skipped for its length.
    Dropped {
        /// The number of tokens that it had.
        was: usize,
    },
    /// Skipped because its answer begins after `max_seq_len` tokens.
    CutAway {
        /// The number of tokens that it had.
        was: usize,
    },
    /// Skipped because its label marks a bad answer.
    LeftOut,
    /// The examples of its answers, for a preference objective.
    Answers(EncodedAnswers),
}

impl Encoding {
    /// Returns the examples of the row.
    pub(super) fn into_examples(self) -> Vec<Example> {
        match self {
            Encoding::Examples(examples) => examples,
            Encoding::Truncated { example, .. } => vec![example],
            Encoding::Answers(answers) => answers.examples,
            Encoding::Dropped { .. } | Encoding::CutAway { .. } | Encoding::LeftOut => Vec::new(),
        }
    }

    /// The examples of the row, in place.
    pub(super) fn examples(&self) -> &[Example] {
        match self {
            Encoding::Examples(examples) => examples,
            Encoding::Truncated { example, .. } => std::slice::from_ref(example),
            Encoding::Answers(answers) => &answers.examples,
            Encoding::Dropped { .. } | Encoding::CutAway { .. } | Encoding::LeftOut => &[],
        }
    }
}

/// A row's examples, and notes on it for the user.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodedRow {
    /// The examples, or the reason for none.
    pub encoding: Encoding,
    /// Notes on the row, for the user.
    pub notes: RowNotes,
}

/// The examples of a row with answers.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodedAnswers {
    /// One example for each answer, in order.
    pub examples: Vec<Example>,
    /// All tokens of each answer, before any cut; empty unless the objective mixes answers.
    pub completions: Vec<Vec<u32>>,
    /// Number of tokens of the longest example before any cut.
    pub was: usize,
    /// Number of answers that were cut.
    pub cut: usize,
}
