//! Detects the format of a row and converts the row to a [`ParsedRow`].
//!
//! Only keys decide the format of a row. The format of a data set is that of most of its rows; the
//! other rows are faults. Literal `{{name}}` placeholders stay unchanged: nothing in a row is a
//! template.

use serde_json::{Map, Value};

use super::conversation::{Conversation, OPTIONS_KEY, SYSTEM_KEYS, TOOLS_KEYS, messages_of, tools_of, truth};
use super::json_rows::json_type;
use super::parsed_row::ParsedRow;
use super::raw_rows::RawRow;
use super::{RowFault, RowFaultKind, token_rows};
use crate::error::{Error, Result};
use crate::recipe::enums::DataFormat;

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
pub fn detect(rows: &[RawRow]) -> Result<(DataFormat, String)> {
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
    let mut why = format!("{format}: {share} {}", keys_found(format, rows));
    if format == DataFormat::Messages && rows.iter().any(|row| row.value.contains_key("label")) {
        why.push_str("; of the labelled rows those with a true label are trained");
    }
    Ok((format, why))
}

/// The keys that the first row of the format has, for messages.
fn keys_found(format: DataFormat, rows: &[RawRow]) -> String {
    let wanted: Vec<&str> = match format {
        DataFormat::Sharegpt => vec!["conversations", "conversation", "tools"],
        DataFormat::PromptCompletion => vec!["prompt", "completion", "canonical_solution"],
        DataFormat::Alpaca => vec!["instruction", "input", "output"],
        DataFormat::Instruction => vec!["instruction", "context", "response"],
        DataFormat::Messages => vec!["messages", "tools", "label"],
        DataFormat::Preference | DataFormat::PreferenceChosen => {
            vec!["prompt", "messages", "conversations", "chosen", "rejected"]
        }
        DataFormat::Tokens => token_rows::KEYS.to_vec(),
        _ => format.keys().split(", ").collect(),
    };
    let row = rows.iter().find(|row| format.fits(&row.value));
    let values: Vec<String> = wanted
        .into_iter()
        .filter(|key| row.is_some_and(|row| row.value.contains_key(*key)))
        .map(|key| format!("`{key}`"))
        .collect();
    values.join(", ")
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
            Some(vec!["prompt", "chosen", "rejected"])
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
pub(super) fn unused_keys(row: &Map<String, Value>, format: DataFormat) -> Vec<String> {
    let format = match format {
        DataFormat::Auto => FORMATS.into_iter().find(|format| format.fits(row)).unwrap_or(format),
        format => format,
    };
    let used = used_keys(row, format);
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

/// Converts a row of `format`; `None` if its label marks a bad answer, which is skipped.
///
/// # Errors
/// Fails if the row is not of the format.
pub fn convert(row: &Map<String, Value>, format: DataFormat) -> Result<Option<ParsedRow>, RowFault> {
    let record = match format {
        DataFormat::Auto => match FORMATS.iter().find(|format| format.fits(row)) {
            Some(format) => return convert(row, *format),
            None => return Err(no_format(row)),
        },
        DataFormat::Messages => {
            if let Some(label) = row.get("label") {
                match truth(label) {
                    Some(true) => {}
                    Some(false) => return Ok(None),
                    None => return Err(fault(format!("`label` is {label}; true or false is needed"))),
                }
            }
            Conversation::read(row, "messages")?.with_system(row)?.into_record(tools_of(row)?)
        }
        DataFormat::Sharegpt => {
            let key = if row.contains_key("conversations") { "conversations" } else { "conversation" };
            Conversation::read(row, key)?.with_system(row)?.into_record(tools_of(row)?)
        }
        DataFormat::Preference | DataFormat::PreferenceChosen => preference(row)?,
        DataFormat::Alpaca => alpaca(row)?,
        DataFormat::Instruction => task(row, "instruction", "context", "response")?,
        DataFormat::QuestionAnswer => task(row, "question", "context", "answer")?,
        DataFormat::PromptCompletion => prompt_completion(row)?,
        DataFormat::Text => ParsedRow::Text(text(row, "text")?),
        DataFormat::Tokens => token_rows::read(row)?,
    };
    Ok(Some(record))
}

fn fault(why: impl Into<String>) -> RowFault {
    RowFault::new(RowFaultKind::Format, why)
}

fn no_format(row: &Map<String, Value>) -> RowFault {
    fault(format!("its keys are those of no format: {}", keys_of(row)))
}

/// The first keys of a row, for messages.
fn keys_of(row: &Map<String, Value>) -> String {
    const SHOWN: usize = 30;
    let clipped = |key: &String| key.chars().take(100).collect::<String>();
    let keys: Vec<String> = row.keys().take(SHOWN).map(clipped).collect();
    match row.len().saturating_sub(SHOWN) {
        0 => keys.join(", "),
        more => format!("{} and {more} more", keys.join(", ")),
    }
}

fn text(row: &Map<String, Value>, key: &str) -> Result<String, RowFault> {
    match row.get(key) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(fault(format!("`{key}` is {}; a string is needed", json_type(other)))),
        None => Err(fault(format!("it has no `{key}`; its keys are {}", keys_of(row)))),
    }
}

fn optional_text(row: &Map<String, Value>, key: &str) -> Result<String, RowFault> {
    match row.get(key) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(_) => text(row, key),
    }
}

fn task(row: &Map<String, Value>, ask: &str, about: &str, answer: &str) -> Result<ParsedRow, RowFault> {
    let systems = SYSTEM_KEYS.into_iter().map(|key| optional_text(row, key));
    let systems = systems.collect::<Result<Vec<_>, _>>()?;
    Ok(ParsedRow::Task {
        system: systems.into_iter().find(|system| !system.is_empty()),
        instruction: text(row, ask)?,
        input: optional_text(row, about)?,
        output: text(row, answer)?,
    })
}

fn alpaca(row: &Map<String, Value>) -> Result<ParsedRow, RowFault> {
    let record = task(row, "instruction", "input", "output")?;
    let history = match row.get("history") {
        None | Some(Value::Null) => return Ok(record),
        Some(Value::Array(turns)) if turns.is_empty() => return Ok(record),
        Some(Value::Array(turns)) => turns,
        Some(other) => {
            return Err(fault(format!("`history` is {}; a list of pairs is needed", json_type(other))));
        }
    };
    let ParsedRow::Task { system, instruction, input, output } = record else { return Ok(record) };
    let mut chat = Conversation::default();
    if let Some(system) = system {
        chat.push("system", system);
    }
    for turn in history {
        match turn.as_array().map(Vec::as_slice) {
            Some([Value::String(user), Value::String(assistant)]) => {
                chat.push("user", user.clone());
                chat.push("assistant", assistant.clone());
            }
            _ => return Err(fault("`history` holds something that is not a pair of strings")),
        }
    }
    chat.push("user", question(&instruction, &input));
    chat.push("assistant", output);
    Ok(chat.into_record(None))
}

/// The user's turn of a task.
pub(super) fn question(instruction: &str, input: &str) -> String {
    match (instruction.is_empty(), input.is_empty()) {
        (_, true) => instruction.to_owned(),
        (true, false) => input.to_owned(),
        (false, false) => format!("{instruction}\n\n{input}"),
    }
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

fn preference(row: &Map<String, Value>) -> Result<ParsedRow, RowFault> {
    let before = ["prompt", "messages", "conversations"].into_iter().find(|key| row.contains_key(*key));
    match (before, row.get("chosen")) {
        (Some("prompt"), Some(Value::String(chosen))) if row["prompt"].is_string() => {
            Ok(ParsedRow::Pair { prompt: text(row, "prompt")?, completion: chosen.clone() })
        }
        (None, Some(Value::String(chosen))) => {
            let rejected = text(row, "rejected")?;
            let at = transcript_answer(chosen).unwrap_or_else(|| common_prefix(chosen, &rejected));
            Ok(ParsedRow::Pair { prompt: chosen[..at].to_owned(), completion: chosen[at..].to_owned() })
        }
        (Some(key), Some(Value::Array(_) | Value::Object(_))) => {
            let chat = match &row[key] {
                Value::String(prompt) => {
                    let mut chat = Conversation::default();
                    chat.push("user", prompt.clone());
                    chat
                }
                _ => Conversation::read(row, key)?,
            };
            let answer = Conversation::read(row, "chosen")?;
            // UltraFeedback's form: the chosen side begins with the prompt itself.
            let chat = match answer.len_with(&chat) {
                Some(asked) => answer.trained_from(asked).with_system(row)?,
                None => chat.with_system(row)?.answered_by(answer),
            };
            Ok(chat.into_record(tools_of(row)?))
        }
        (None, Some(Value::Array(_))) => {
            let (chosen, rejected) = (messages_of(row, "chosen")?, messages_of(row, "rejected")?);
            let shared = chosen.iter().zip(&rejected).take_while(|(a, b)| a == b).count();
            let chat = Conversation::read(row, "chosen")?;
            Ok(chat.trained_from(shared).with_system(row)?.into_record(tools_of(row)?))
        }
        (_, chosen) => Err(fault(format!(
            "`chosen` is {}; a string or messages, as `{}` is, are needed",
            chosen.map_or("missing", json_type),
            before.unwrap_or("rejected")
        ))),
    }
}

/// The byte at which the last answer of a `\n\nHuman: ... \n\nAssistant: ...` transcript begins.
fn transcript_answer(text: &str) -> Option<usize> {
    const MARK: &str = "\n\nAssistant:";
    (text.contains("\n\nHuman:")).then(|| text.rfind(MARK))?.map(|at| at + MARK.len())
}

fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices().zip(b.chars()).find(|((_, x), y)| x != y).map_or(a.len().min(b.len()), |((at, _), _)| at)
}
