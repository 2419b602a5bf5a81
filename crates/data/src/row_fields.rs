//! The values of a row by their keys: texts, and tasks with their answer.

use serde_json::{Map, Value};

use super::conversation::{Conversation, SYSTEM_KEYS};
use super::json_rows::json_type;
use super::parsed_row::{ParsedRow, Task};
use super::{RowFault, RowFaultKind};

pub(super) fn fault(why: impl Into<String>) -> RowFault {
    RowFault::new(RowFaultKind::Format, why)
}

/// The first keys of a row, for messages.
pub(super) fn keys_of(row: &Map<String, Value>) -> String {
    const SHOWN: usize = 30;
    let clipped = |key: &String| key.chars().take(100).collect::<String>();
    let keys: Vec<String> = row.keys().take(SHOWN).map(clipped).collect();
    match row.len().saturating_sub(SHOWN) {
        0 => keys.join(", "),
        more => format!("{} and {more} more", keys.join(", ")),
    }
}

pub(super) fn text(row: &Map<String, Value>, key: &str) -> Result<String, RowFault> {
    match row.get(key) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(fault(format!("`{key}` is {}; a string is needed", json_type(other)))),
        None => Err(fault(format!("it has no `{key}`; its keys are {}", keys_of(row)))),
    }
}

pub(super) fn optional_text(row: &Map<String, Value>, key: &str) -> Result<String, RowFault> {
    match row.get(key) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(_) => text(row, key),
    }
}

/// Reads a task: its text under `ask`, what it is about under `about`, the answer under `answer`.
pub(super) fn task(
    row: &Map<String, Value>,
    ask: &str,
    about: &str,
    answer: &str,
) -> Result<ParsedRow, RowFault> {
    let systems = SYSTEM_KEYS.into_iter().map(|key| optional_text(row, key));
    let systems = systems.collect::<Result<Vec<_>, _>>()?;
    let task = Task {
        system: systems.into_iter().find(|system| !system.is_empty()),
        instruction: text(row, ask)?,
        input: optional_text(row, about)?,
    };
    Ok(ParsedRow::Task { task, output: text(row, answer)? })
}

/// Reads a task whose answer is under `answer`, perhaps after earlier turns.
pub(super) fn alpaca(row: &Map<String, Value>, answer: &str) -> Result<ParsedRow, RowFault> {
    let record = task(row, "instruction", "input", answer)?;
    let history = match row.get("history") {
        None | Some(Value::Null) => return Ok(record),
        Some(Value::Array(turns)) if turns.is_empty() => return Ok(record),
        Some(Value::Array(turns)) => turns,
        Some(other) => {
            return Err(fault(format!("`history` is {}; a list of pairs is needed", json_type(other))));
        }
    };
    let ParsedRow::Task { task: Task { system, instruction, input }, output } = record else {
        return Ok(record);
    };
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
