//! Turns rows of any format into tokens, loss masks and micro-batches.
//!
//! The pipeline: [`source`] reads a row and its position from a file. [`mod@format`] detects its
//! format and turns it into a [`ParsedRow`]. [`template`] renders chats, and [`tokenizer`] makes
//! ids; [`encode`] combines these into an [`Example`] (ids and their training mask). [`dataset`]
//! does so for all rows, in parallel, and reports. [`pack`], [`sampler`] and [`batch`] decide which
//! rows share a step.
//!
//! Result of each format:
//!
//! | format | with a chat template | without one | trained (`train_on = "assistant"`) |
//! |---|---|---|---|
//! | messages, sharegpt | the template's text | refused | assistant turns |
//! | alpaca, instruction, question_answer | user and assistant messages | `### Instruction:` headings | the answer |
//! | prompt_completion of strings | prompt + completion + EOS, no template | the same | the completion |
//! | prompt_completion of messages | the template's text | refused | the completion's assistant turns |
//! | preference_chosen | its chosen side, as the rows above | the same | the chosen answer |
//! | text | text + EOS | the same | everything |
//! | tokens | the tokens unchanged | the same | as its labels and masks mark them |
//! | preference | an example for each answer, as TRL encodes them | plain texts the same, chats refused | each answer |
//!
//! A row that cannot be used is never skipped silently: it is a [`BadRow`] with file, line and
//! reason, and [`OnBadRow`] decides whether it ends the run.

pub mod batch;
pub mod dataset;
pub mod encode;
pub mod format;
pub mod pack;
pub mod prompts;
pub mod sampler;
pub mod sandbox;
pub mod sandboxed;
pub mod source;
pub mod template;
pub mod tokenizer;

mod answer_groups;
mod arrow_rows;
mod arrow_values;
mod child_pool;
mod container;
mod control_tokens;
mod conversation;
mod coverage;
mod csv_delimiters;
mod csv_rows;
mod encode_answers;
mod encoded;
mod example;
mod example_source;
mod expansion;
mod figures;
mod file_formats;
mod jinja;
mod json_cut;
mod json_reader;
mod json_rows;
mod labelled_rows;
mod linear_cost;
mod listed_tokens;
mod long_text;
mod new_tokens;
mod other_files;
mod pair_rows;
mod parquet_rows;
mod parsed_row;
mod parsed_tokenizer;
mod python_json;
mod raw_rows;
mod report;
mod role;
mod row_fields;
mod sandbox_limits;
mod saved_dataset;
mod selected_rows;
mod settle;
mod spans;
mod special_token;
mod step_source;
mod table_rows;
mod table_values;
mod template_child;
mod template_engine;
mod template_files;
mod template_form;
mod text_encoding;
mod token_rows;
mod tokenizer_child;
mod tokenizer_files;
mod tokenizer_outline;
mod unpack;
mod unusable;
mod wire;

use finetune_core::{clock, contained, error, locks, program, tokenizer_names, units};
use finetune_recipe as recipe;
use finetune_runtime::runtime;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

pub use batch::{Batch, Sample, Step};
pub use dataset::Dataset;
pub use encode::Example;
pub use example::EncodedAnswers;
pub use example_source::ExampleSource;
pub use figures::{ExampleFigures, Percentiles, TrainedEnd};
pub use parsed_row::{Answer, AnsweredRow, ParsedRow, Task};
pub use prompts::{Prompt, PromptEncoder};
pub use report::DataReport;
pub use role::Role;
pub use sampler::{Cursor, Sampler, SamplerOptions};
pub use selected_rows::{hold_out, take, weighted};
pub use source::{DataFile, Split};
pub use step_source::StepSource;
pub use template::ChatTemplate;
pub use template_files::stored_templates;
pub use tokenizer::Tokenizer;
pub use tokenizer_files::gguf::{GgufTokenizer, GgufVocabulary, VocabularyKind, WordRules};

use crate::error::{Error, ErrorCategory};
use crate::recipe::TrainOn;
use crate::recipe::enums::{DataFormat, ObjectiveKind, OnBadRow, OnLongRow};
pub use finetune_core::IGNORE;

/// Options for encoding rows: the keys of `[data]` about rows, and two properties of the model.
#[derive(Debug, Clone)]
pub struct DataOptions {
    /// The row format; [`DataFormat::Auto`] detects it from the rows.
    pub format: DataFormat,
    /// The files of a folder to read.
    pub split: Split,
    /// Maximum length of a row, in tokens.
    pub max_seq_len: usize,
    /// Selects the tokens that carry loss.
    pub train_on: TrainOn,
    /// Reaction to a row that cannot be used.
    pub on_bad_row: OnBadRow,
    /// Reaction to a row that is too long.
    pub on_long_row: OnLongRow,
    /// True to encode control tokens in the texts of chats as text.
    pub sanitize_control_tokens: bool,
    /// Number of rows of the model's embedding; token ids from it on are refused.
    pub vocab_size: usize,
    /// The objective, which decides the examples of a row.
    pub objective: ObjectiveKind,
    /// The number of labelled answers in a row among which the mismatched answers of KTO go round:
    /// the size of a micro-batch, as in TRL. `None`: no mismatched answers.
    pub mismatched_block: Option<usize>,
}

impl Default for DataOptions {
    fn default() -> Self {
        DataOptions {
            format: DataFormat::Auto,
            split: Split::Train,
            max_seq_len: 2048,
            train_on: TrainOn::default(),
            on_bad_row: OnBadRow::Stop,
            on_long_row: OnLongRow::Truncate,
            sanitize_control_tokens: false,
            vocab_size: usize::MAX,
            objective: ObjectiveKind::CrossEntropy,
            mismatched_block: None,
        }
    }
}

/// Position of a row in its file, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowOrigin {
    /// The line on which it begins.
    Line(u64),
    /// The number of the row, in files without lines.
    Row(u64),
}

/// File and position of a row; displayed as `file:line`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The file's path as the user named it.
    pub file: Arc<Path>,
    /// The position in the file.
    pub row: RowOrigin,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.row {
            RowOrigin::Line(line) => write!(f, "{}:{line}", self.file.display()),
            RowOrigin::Row(row) => write!(f, "{} row {row}", self.file.display()),
        }
    }
}

/// The kinds of fault a row can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RowFaultKind {
    /// Not readable as a row of its file format.
    Unreadable,
    /// Not a row of the data set's format.
    Format,
    /// The chat template refuses it, or its assistant turns cannot be located.
    Template,
    /// It begins with the BOS token that the tokenizer adds.
    DoubleBos,
    /// It contains a token that the model does not have.
    Vocabulary,
    /// The template prints nothing of a trained turn.
    EmptyTurn,
    /// It has no trained token.
    NothingTrained,
    /// Longer than `max_seq_len`, with `on_long_row = "stop"`.
    TooLong,
}

impl fmt::Display for RowFaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RowFaultKind::Unreadable => "unreadable",
            RowFaultKind::Format => "not a row of this format",
            RowFaultKind::Template => "refused by the chat template",
            RowFaultKind::DoubleBos => "two BOS tokens",
            RowFaultKind::Vocabulary => "token outside the vocabulary",
            RowFaultKind::EmptyTurn => "a trained turn that comes out empty",
            RowFaultKind::NothingTrained => "no trained token",
            RowFaultKind::TooLong => "too long",
        })
    }
}

/// The reason why a row cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowFault {
    /// The kind, by which the report counts.
    pub kind: RowFaultKind,
    /// The reason, with the value found.
    pub why: String,
}

impl RowFault {
    /// A fault of `kind` because of `why`.
    ///
    /// A reason of more than 2000 characters is cut.
    pub fn new(kind: RowFaultKind, why: impl Into<String>) -> Self {
        const LONGEST: usize = 2000;
        let mut why: String = why.into();
        if let Some((cut, _)) = why.char_indices().nth(LONGEST) {
            why.truncate(cut);
            why.push('…');
        }
        RowFault { kind, why }
    }
}

/// Error of encoding a row.
#[derive(Debug, Clone)]
pub enum RowError {
    /// The row cannot be used; [`OnBadRow`] decides whether that ends the run.
    Fault(RowFault),
    /// An error that the row did not cause, such as a process that does not start: it always ends
    /// the run.
    Run(Error),
}

impl RowError {
    /// Converts an error of processing a row: a user error becomes a fault of `kind`; other
    /// categories end the run. All errors of encoding a row pass here.
    pub fn of(kind: RowFaultKind, error: Error) -> Self {
        match error.kind() {
            ErrorCategory::User => RowError::Fault(RowFault::new(kind, error.in_one_line())),
            _ => RowError::Run(error),
        }
    }
}

impl From<RowFault> for RowError {
    fn from(fault: RowFault) -> Self {
        RowError::Fault(fault)
    }
}

/// A row that cannot be used, with its position and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadRow {
    /// File and position of the row.
    pub origin: Origin,
    /// The fault of the row.
    pub fault: RowFault,
}

impl fmt::Display for BadRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.origin, self.fault.why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_of_the_input_become_faults_of_a_row() {
        let of = |kind| RowError::of(RowFaultKind::Template, Error::new(kind, "cannot render"));
        assert!(matches!(of(ErrorCategory::User), RowError::Fault(fault) if fault.why == "cannot render"));
        for kind in [ErrorCategory::Transient, ErrorCategory::Storage, ErrorCategory::Internal] {
            assert!(matches!(of(kind), RowError::Run(error) if error.kind() == kind));
        }
    }
}
