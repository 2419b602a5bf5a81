//! Detects the format of a row and converts the row to a [`ParsedRow`].
//!
//! Only keys decide the format of a row. The format of a data set is that of most of its rows; the
//! other rows are faults. Literal `{{name}}` placeholders stay unchanged: nothing in a row is a
//! template.

use serde_json::{Map, Value};

use super::conversation::{Conversation, OPTIONS_KEY, SYSTEM_KEYS, TOOLS_KEYS, tools_of, truth};
use super::json_rows::json_type;
use super::labelled_rows::{self, LABEL_KEYS};
use super::pair_rows::PairRow;
use super::parsed_row::ParsedRow;
use super::raw_rows::RawRow;
use super::role::Role;
use super::row_fields::{alpaca, fault, keys_of, task, text};
use super::{RowFault, token_rows};
use crate::error::{Error, Result};
use crate::recipe::enums::{DataFormat, ObjectiveRows};

/// All formats of rows, in the order of detection.
const FORMATS: [DataFormat; 9] = [
    DataFormat::Preference,
    DataFormat::Messages,
    DataFormat::Sharegpt,
    DataFormat::Alpaca,
    DataFormat::Instruction,
    DataFormat::PromptCompletion,
    DataFormat::QuestionAnswer,
    DataFormat::Text,
    DataFormat::Tokens,
];

/// Keys that identify a format.
pub(super) trait RowFormat {
    /// Returns the keys of this format, for messages.
    fn keys(self) -> &'static str;
    /// Returns true if a row has the keys of this format.
    fn fits(self, row: &Map<String, Value>) -> bool;
}

impl RowFormat for DataFormat {
    fn keys(self) -> &'static str {
        match self {
            DataFormat::Auto => "any",
            DataFormat::Messages => "messages",
            DataFormat::Sharegpt => "conversations",
            DataFormat::Preference | DataFormat::PreferenceChosen => "chosen, rejected",
            DataFormat::Alpaca => "instruction, output",
            DataFormat::Instruction => "instruction, response",
            DataFormat::PromptCompletion => "prompt, completion",
            DataFormat::QuestionAnswer => "question, answer",
            DataFormat::Text => "text",
            DataFormat::Tokens => token_rows::IDS,
        }
    }

    fn fits(self, row: &Map<String, Value>) -> bool {
        let has = |key: &str| row.get(key).is_some_and(|value| !value.is_null());
        match self {
            DataFormat::Auto => true,
            DataFormat::Messages => has("messages"),
            DataFormat::Sharegpt => has("conversations") || has("conversation"),
            DataFormat::Preference | DataFormat::PreferenceChosen => has("chosen") && has("rejected"),
            DataFormat::Alpaca => has("instruction") && has("output"),
            DataFormat::Instruction => has("instruction") && has("response"),
            DataFormat::PromptCompletion => has("prompt") && (has("completion") || has("canonical_solution")),
            DataFormat::QuestionAnswer => has("question") && has("answer"),
            DataFormat::Text => has("text"),
            DataFormat::Tokens => has(token_rows::IDS),
        }
    }
}

/// Returns the format of most rows, and a sentence with the reason.
///
/// # Errors
/// Fails unless more than half of the rows have the same known format.
pub fn detect(rows: &[RawRow], wanted: ObjectiveRows) -> Result<(DataFormat, String)> {
    let mut counts = [0usize; FORMATS.len()];
    let mut unknown = None;
    for row in rows {
        match FORMATS.iter().position(|format| format.fits(&row.value)) {
            Some(index) => counts[index] += 1,
            None => unknown = unknown.or(Some(row)),
        }
    }
    let (best, &count) = counts
        .iter()
        .enumerate()
        .rev()
        .max_by_key(|(_, count)| **count)
        .ok_or_else(|| Error::internal("the list of data formats is empty"))?;
    let hint = "write `data.format`, one of ";
    if count * 2 <= rows.len() {
        let mut error = Error::user("cannot detect the format of the data set");
        for (format, count) in FORMATS.iter().zip(counts).filter(|(_, count)| *count > 0) {
            error = error.because(format!("{count} of {} rows have the keys of {format}", rows.len()));
        }
        if let Some(row) = unknown {
            error = error.because(format!("{} has the keys {}", row.origin, keys_of(&row.value)));
        }
        let known: Vec<String> = FORMATS.iter().map(|f| format!("{f} ({})", f.keys())).collect();
        return Err(error
            .because(format!("known: {}", known.join("; ")))
            .hint(format!(
                "rename the keys of the rows, or name them in a `[[data.train]]` table, such as `columns = {{ prompt = \"KEY\", \
                 completion = \"KEY\" }}`, or {hint}{}",
                DataFormat::NAMES.join(", ")
            )));
    }
    let format = FORMATS[best];
    let share = if count == rows.len() {
        "every row has".to_owned()
    } else {
        format!("{count} of {} rows have", rows.len())
    };
    let mut why = format!("{format}: {share} {}", keys_found(format, rows, wanted));
    let has_label = || rows.iter().any(|row| row.value.contains_key("label"));
    if format == DataFormat::Messages && wanted == ObjectiveRows::Single && has_label() {
        why.push_str("; of the labelled rows those with a true label are trained");
    }
    Ok((format, why))
}

/// The keys that the first row of the format has, for messages.
fn keys_found(format: DataFormat, rows: &[RawRow], wanted: ObjectiveRows) -> String {
    let mut keys: Vec<&str> = match format {
        DataFormat::Sharegpt => vec!["conversations", "conversation", "tools"],
        DataFormat::PromptCompletion => vec!["prompt", "completion", "canonical_solution"],
        DataFormat::Alpaca => vec!["instruction", "input", "output"],
        DataFormat::Instruction => vec!["instruction", "context", "response"],
        DataFormat::Messages => vec!["messages", "tools", "label"],
        DataFormat::Preference | DataFormat::PreferenceChosen => {
            vec!["instruction", "prompt", "messages", "conversations", "chosen", "rejected"]
        }
        DataFormat::Tokens => token_rows::KEYS.to_vec(),
        _ => format.keys().split(", ").collect(),
    };
    let more = keys_of_objective(wanted).iter().filter(|key| !keys.contains(key)).copied();
    keys.extend(more.collect::<Vec<_>>());
    let row = rows.iter().find(|row| format.fits(&row.value));
    let values: Vec<String> = keys
        .into_iter()
        .filter(|key| row.is_some_and(|row| row.value.contains_key(*key)))
        .map(|key| format!("`{key}`"))
        .collect();
    values.join(", ")
}

/// Keys of a row that an objective reads beside those of the format.
fn keys_of_objective(rows: ObjectiveRows) -> &'static [&'static str] {
    match rows {
        ObjectiveRows::Single | ObjectiveRows::Pairs => &[],
        ObjectiveRows::Labelled => &LABEL_KEYS,
    }
}

/// Returns whether the keys of a row are those of some format.
pub(super) fn is_row(row: &Map<String, Value>) -> bool {
    FORMATS.iter().any(|format| format.fits(row))
}

/// Returns whether the keys of two rows are those of the same format.
pub(super) fn are_alike(a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
    let of = |row: &Map<String, Value>| FORMATS.iter().position(|format| format.fits(row));
    of(a).is_some() && of(a) == of(b)
}

/// Keys read of a row of plain texts, which uses no system message or tools; `None` for other rows.
fn used_keys_of_texts(row: &Map<String, Value>, format: DataFormat) -> Option<Vec<&'static str>> {
    let is_text = |key: &str| row.get(key).is_some_and(Value::is_string);
    match format {
        DataFormat::PromptCompletion if is_text("prompt") => {
            Some(vec!["prompt", "completion", "canonical_solution"])
        }
        DataFormat::Preference | DataFormat::PreferenceChosen if is_text("chosen") => {
            let task: &[&str] = if row.contains_key("instruction") {
                &["instruction", "input", "history", SYSTEM_KEYS[0], SYSTEM_KEYS[1]]
            } else {
                &["prompt"]
            };
            Some([task, &["chosen", "rejected"]].concat())
        }
        _ => None,
    }
}

/// Keys of a row of `format` that this module reads.
fn used_keys(row: &Map<String, Value>, format: DataFormat) -> Vec<&'static str> {
    if let Some(keys) = used_keys_of_texts(row, format) {
        return keys;
    }
    let (chat, task) = (
        [&SYSTEM_KEYS[..], &TOOLS_KEYS, &[OPTIONS_KEY]].concat(),
        [&SYSTEM_KEYS[..], &["instruction"]].concat(),
    );
    match format {
        DataFormat::Auto => Vec::new(),
        DataFormat::Messages => [&["messages", "label"], &chat[..]].concat(),
        DataFormat::Sharegpt => [&["conversations", "conversation"], &chat[..]].concat(),
        DataFormat::Preference | DataFormat::PreferenceChosen => {
            [&["prompt", "messages", "conversations", "chosen", "rejected"], &chat[..]].concat()
        }
        DataFormat::Alpaca => [&["input", "output", "history"], &task[..]].concat(),
        DataFormat::Instruction => [&["context", "response"], &task[..]].concat(),
        DataFormat::QuestionAnswer => [&["question", "context", "answer"], &SYSTEM_KEYS[..]].concat(),
        DataFormat::PromptCompletion => [&["prompt", "completion", "canonical_solution"], &chat[..]].concat(),
        DataFormat::Text => vec!["text"],
        DataFormat::Tokens => token_rows::KEYS.to_vec(),
    }
}

/// Keys of a row that nothing reads, though their values are not empty.
pub(super) fn unused_keys(row: &Map<String, Value>, format: DataFormat, rows: ObjectiveRows) -> Vec<String> {
    let format = match format {
        DataFormat::Auto => FORMATS.into_iter().find(|format| format.fits(row)).unwrap_or(format),
        format => format,
    };
    let used = [&used_keys(row, format)[..], keys_of_objective(rows)].concat();
    let holds = |value: &Value| match value {
        Value::Null => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => true,
    };
    let unused = row.iter().filter(|(key, value)| holds(value) && !used.contains(&key.as_str()));
    unused.map(|(key, _)| key.chars().take(100).collect()).collect()
}

/// Converts a row of `format` for an objective that reads `rows`; `None` if its label marks a bad
/// answer, which an objective of single rows skips.
///
/// # Errors
/// Fails if the row is not of the format, or no row of the objective.
pub fn convert(
    row: &Map<String, Value>,
    format: DataFormat,
    rows: ObjectiveRows,
) -> Result<Option<ParsedRow>, RowFault> {
    let format = match format {
        DataFormat::Auto => *FORMATS.iter().find(|format| format.fits(row)).ok_or_else(|| no_format(row))?,
        format => format,
    };
    match (rows, format) {
        (ObjectiveRows::Single, DataFormat::Messages) => {
            match row.get("label").map(|label| (label, truth(label))) {
                Some((_, Some(false))) => Ok(None),
                Some((label, None)) => Err(fault(format!("`label` is {label}; true or false is needed"))),
                _ => convert_single(row, format).map(Some),
            }
        }
        (ObjectiveRows::Single, _) => convert_single(row, format).map(Some),
        (ObjectiveRows::Pairs, _) => PairRow::read(row)?.answered([Role::Chosen, Role::Rejected]).map(Some),
        (ObjectiveRows::Labelled, DataFormat::Preference) => {
            labelled_rows::of_pair(PairRow::read(row)?).map(Some)
        }
        (ObjectiveRows::Labelled, _) => labelled_rows::of_single(row, convert_single(row, format)?).map(Some),
    }
}

/// Converts a row of `format` to one text or chat; of a pair, its chosen side.
fn convert_single(row: &Map<String, Value>, format: DataFormat) -> Result<ParsedRow, RowFault> {
    Ok(match format {
        DataFormat::Auto => return Err(no_format(row)),
        DataFormat::Messages => {
            Conversation::read(row, "messages")?.with_system(row)?.into_record(tools_of(row)?)
        }
        DataFormat::Sharegpt => {
            let key = if row.contains_key("conversations") { "conversations" } else { "conversation" };
            Conversation::read(row, key)?.with_system(row)?.into_record(tools_of(row)?)
        }
        DataFormat::Preference | DataFormat::PreferenceChosen => PairRow::read(row)?.chosen(),
        DataFormat::Alpaca => alpaca(row, "output")?,
        DataFormat::Instruction => task(row, "instruction", "context", "response")?,
        DataFormat::QuestionAnswer => task(row, "question", "context", "answer")?,
        DataFormat::PromptCompletion => prompt_completion(row)?,
        DataFormat::Text => ParsedRow::Text(text(row, "text")?),
        DataFormat::Tokens => token_rows::read(row)?,
    })
}

fn no_format(row: &Map<String, Value>) -> RowFault {
    fault(format!("its keys are those of no format: {}", keys_of(row)))
}

fn prompt_completion(row: &Map<String, Value>) -> Result<ParsedRow, RowFault> {
    let key = if row.contains_key("completion") { "completion" } else { "canonical_solution" };
    match (row.get("prompt"), row.get(key)) {
        (Some(Value::Array(_)), Some(Value::Array(_))) => {
            let prompt = Conversation::read(row, "prompt")?;
            let chat = prompt.answered_by(Conversation::read(row, key)?);
            Ok(chat.with_system(row)?.into_record(tools_of(row)?))
        }
        (Some(Value::String(prompt)), Some(Value::String(completion))) => {
            Ok(ParsedRow::Pair { prompt: prompt.clone(), completion: completion.clone() })
        }
        (Some(prompt), Some(completion)) => Err(fault(format!(
            "`prompt` is {} and `{key}` is {}; two strings or two lists of messages are needed",
            json_type(prompt),
            json_type(completion)
        ))),
        (prompt, _) => {
            let missing = if prompt.is_none() { "prompt" } else { "completion" };
            Err(fault(format!("it has no `{missing}`; its keys are {}", keys_of(row))))
        }
    }
}
