//! Rows of any format to tokens, loss masks and micro-batches.
//!
//! The way of a row: [`source`] reads it from a file and remembers where it stood; [`mod@format`] says what kind of row
//! it is and turns it into a [`ParsedRow`]; [`template`] renders chats; [`tokenizer`] makes ids; [`encode`] puts these
//! together into an [`Example`] (ids and which of them are trained); [`dataset`] does so for all rows, in parallel,
//! and reports; [`pack`], [`sampler`] and [`batch`] decide which rows share a step.
//!
//! What a row becomes:
//!
//! | format | with a chat template | without one | trained (`train_on = "assistant"`) |
//! |---|---|---|---|
//! | messages, sharegpt | the template's text | refused | assistant turns |
//! | alpaca, instruction, question_answer | user and assistant messages | `### Instruction:` headings | the answer |
//! | prompt_completion of strings | prompt + completion + EOS, no template | the same | the completion |
//! | prompt_completion of messages | the template's text | refused | the completion's assistant turns |
//! | preference | its chosen side, as the rows above | the same | the chosen answer |
//! | text | text + EOS | the same | everything |
//! | tokens | the tokens as they are | the same | what its labels and masks say |
//!
//! A row that cannot be used is never dropped in silence: it is a [`BadRow`] with file, line and reason, and
//! [`OnBadRow`] decides whether it ends the run.

pub mod batch;
pub mod coverage;
pub mod dataset;
pub mod encode;
pub mod example_source;
pub mod format;
pub mod pack;
pub mod prompts;
pub mod sampler;
pub mod sandbox;
pub mod sandboxed;
pub mod source;
pub mod step_source;
pub mod template;
pub mod tokenizer;

mod arrow_rows;
mod arrow_values;
mod child_pool;
mod container;
mod control_tokens;
mod conversation;
mod csv_delimiters;
mod csv_rows;
mod encoded;
mod expansion;
mod figures;
mod file_formats;
mod found_tokenizer;
mod jinja;
mod json_cut;
mod json_reader;
mod json_rows;
mod linear_cost;
mod listed_tokens;
mod long_text;
mod new_tokens;
mod other_files;
mod parquet_rows;
mod parsed_row;
mod python_json;
mod raw_rows;
mod report;
mod sandbox_limits;
mod saved_dataset;
mod settle;
mod spans;
mod table_rows;
mod table_values;
mod taken_rows;
mod template_child;
mod template_engine;
mod template_files;
mod template_form;
mod text_encoding;
mod token_rows;
mod tokenizer_child;
mod tokenizer_outline;
mod unpack;
mod unusable;
mod wire;

use finetune_core::{clock, contained, error, program, units};
use finetune_recipe as recipe;
use finetune_runtime::runtime;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

pub use batch::{Batch, Sample, Step};
pub use dataset::Dataset;
pub use encode::Example;
pub use example_source::ExampleSource;
pub use figures::{ExampleFigures, Percentiles, TrainedEnd};
pub use parsed_row::ParsedRow;
pub use prompts::{Prompt, PromptEncoder};
pub use report::DataReport;
pub use sampler::{Cursor, Sampler, SamplerOptions};
pub use source::{DataFile, Split};
pub use step_source::StepSource;
pub use taken_rows::{hold_out, take, weighted};
pub use template::ChatTemplate;
pub use template_files::stored_templates;
pub use tokenizer::Tokenizer;

use crate::error::{Error, ErrorCategory};
use crate::recipe::TrainOn;
use crate::recipe::enums::{DataFormat, OnBadRow, OnLongRow};
pub use finetune_core::IGNORE;

/// How rows become examples; the keys of `[data]` that concern rows, and two facts about the model.
#[derive(Debug, Clone)]
pub struct DataOptions {
    /// The row format; [`DataFormat::Auto`] looks at the rows.
    pub format: DataFormat,
    /// The files of a folder to take.
    pub split: Split,
    /// The longest row, in tokens.
    pub max_seq_len: usize,
    /// Which tokens carry loss.
    pub train_on: TrainOn,
    /// What a row that cannot be used does.
    pub on_bad_row: OnBadRow,
    /// What a row that is too long does.
    pub on_long_row: OnLongRow,
    /// Encode control tokens in the texts of chats as text.
    pub sanitize_control_tokens: bool,
    /// Rows of the model's embedding: a larger token id is refused.
    pub vocab_size: usize,
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
        }
    }
}

/// Where in its file a row stood, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowOrigin {
    /// The line on which it begins.
    Line(u64),
    /// Its number, in files without lines.
    Row(u64),
}

/// Where a row came from; shown as `file:line`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The file as it was named.
    pub file: Arc<Path>,
    /// The place in it.
    pub place: RowOrigin,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
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
    /// The chat template refuses it, or its assistant turns cannot be told apart.
    Template,
    /// It would begin with two BOS tokens.
    DoubleBos,
    /// It holds a token the model does not have.
    Vocabulary,
    /// A turn that is trained comes out empty.
    EmptyTurn,
    /// Nothing in it is trained.
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

/// Why a row cannot be used.
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
    /// A reason that quotes megabytes of a row is cut: nobody reads them.
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

/// The error of a row that was not encoded.
#[derive(Debug, Clone)]
pub enum RowError {
    /// The row cannot be used; [`OnBadRow`] decides whether that ends the run.
    Fault(RowFault),
    /// Nothing that the row is to blame for, such as a process that does not start: it ends the run in any case.
    Run(Error),
}

impl RowError {
    /// An error while something was done to a row, which is a fault of `kind` where it comes from what the user gave. An
    /// error of any other category keeps it. All errors on the way of a row pass here.
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

/// A row that cannot be used, where it is and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadRow {
    /// Where it stands.
    pub origin: Origin,
    /// What is wrong with it.
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
