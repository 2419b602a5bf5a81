//! Replaces values that JSON cannot hold (see [`super::unusable`]) with null. A row is refused only
//! if the value changes the record that its format makes of the row.

use serde_json::{Map, Value};

use super::RowFault;
use super::format::convert;
use super::parsed_row::ParsedRow;
use super::unusable::{MARK, Unusable};
use crate::recipe::enums::{DataFormat, ObjectiveRows};

/// Maximum number of recorded paths below one key of a row.
const MAX_PATHS: usize = 64;

#[derive(Debug, Clone)]
enum PathStep {
    Key(String),
    Index(usize),
}

/// A marked value and its path.
struct MarkedValue {
    path: Vec<PathStep>,
    kind: Unusable,
}

impl MarkedValue {
    fn shown(&self) -> String {
        let mut text = String::new();
        for step in &self.path {
            match step {
                PathStep::Key(key) if text.is_empty() => text.push_str(key),
                PathStep::Key(key) => text.extend([".", key]),
                PathStep::Index(index) => text.push_str(&format!("[{index}]")),
            }
        }
        text
    }

    fn in_row<'a>(&self, row: &'a mut Map<String, Value>) -> Option<&'a mut Value> {
        let (PathStep::Key(first), rest) = self.path.split_first()? else { return None };
        rest.iter().try_fold(row.get_mut(first)?, |value, step| match step {
            PathStep::Key(key) => value.get_mut(key),
            PathStep::Index(index) => value.get_mut(*index),
        })
    }
}

/// Returns the row with null in place of every marked value.
///
/// # Errors
/// Fails with the reason if the row's format requires one of these values.
pub(super) fn settle(mut row: Map<String, Value>) -> Result<Map<String, Value>, String> {
    let mut problems = Vec::new();
    for (key, value) in &mut row {
        let mut below = Vec::new();
        take_marks(value, &mut vec![PathStep::Key(key.clone())], &mut below);
        problems.append(&mut below);
    }
    let row = without_marked_keys(row);
    if problems.is_empty() {
        return Ok(row);
    }
    let without = records(&row);
    let mut other = row.clone();
    for one in &problems {
        put_text(one, &mut other);
    }
    if records(&other) == without {
        return Ok(row);
    }
    for one in &problems {
        let mut other = row.clone();
        put_text(one, &mut other);
        // Directly in a row or a message null means a missing value; within a call or a schema it
        // is a value.
        let is_missing = one.kind.can_be_missing() && without[0].is_ok() && one.path.len() <= 3;
        if !is_missing && records(&other) != without {
            return Err(format!("`{}` {}", one.shown(), one.kind.words()));
        }
    }
    Ok(row)
}

/// The records that objectives of single rows and of pairs make of a row.
fn records(row: &Map<String, Value>) -> [Result<Option<ParsedRow>, RowFault>; 2] {
    [ObjectiveRows::Single, ObjectiveRows::Pairs].map(|rows| convert(row, DataFormat::Auto, rows))
}

/// Puts a text in place of `marked`: if the record then changes, the row requires the value.
fn put_text(marked: &MarkedValue, row: &mut Map<String, Value>) {
    if let Some(value) = marked.in_row(row) {
        *value = Value::String("\u{FFFD}".to_owned());
    }
}

fn take_marks(value: &mut Value, path: &mut Vec<PathStep>, marked: &mut Vec<MarkedValue>) {
    match value {
        Value::String(text) => {
            if let Some(kind) = Unusable::in_text(text) {
                *value = Value::Null;
                if marked.len() < MAX_PATHS {
                    marked.push(MarkedValue { path: path.clone(), kind });
                }
            }
        }
        Value::Array(list) => {
            for (index, value) in list.iter_mut().enumerate() {
                path.push(PathStep::Index(index));
                take_marks(value, path, marked);
                path.pop();
            }
        }
        Value::Object(map) => {
            for (key, value) in map.iter_mut() {
                path.push(PathStep::Key(key.clone()));
                take_marks(value, path, marked);
                path.pop();
            }
            if map.keys().any(|key| key.contains(MARK)) {
                *map = without_marked_keys(std::mem::take(map));
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Removes members with marked keys; no format has a key with half of a surrogate pair.
fn without_marked_keys(map: Map<String, Value>) -> Map<String, Value> {
    map.into_iter().filter(|(key, _)| !key.contains(MARK)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn settled(row: Value) -> Result<Value, String> {
        settle(row.as_object().unwrap().clone()).map(Value::Object)
    }

    #[test]
    fn only_a_value_that_the_format_needs_is_a_fault() {
        let (nan, half, bytes) = (Unusable::Nan.value(), Unusable::HalfPair.value(), Unusable::Bytes.value());
        let chat = json!([{"role": "user", "content": "a"}]);
        for (row, expected) in [
            (json!({"text": "a", "n": nan}), json!({"text": "a", "n": null})),
            (json!({"text": "a", "n": [1, {"b": bytes}]}), json!({"text": "a", "n": [1, {"b": null}]})),
            (
                json!({"instruction": "a", "output": "b", "input": nan}),
                json!({"instruction": "a", "output": "b", "input": null}),
            ),
            (json!({"messages": chat, "text": half}), json!({"messages": chat, "text": null})),
            (
                json!({"messages": [{"role": "user", "content": "a", "score": nan}]}),
                json!({"messages": [{"role": "user", "content": "a", "score": null}]}),
            ),
        ] {
            assert_eq!(settled(row), Ok(expected));
        }
        for (row, why) in [
            (json!({"prompt": "a", "completion": nan}), "`completion` is NaN"),
            (json!({"prompt": half, "completion": "b"}), "`prompt` holds half of a surrogate pair"),
            (
                json!({"instruction": "a", "output": "b", "input": bytes}),
                "`input` holds bytes that are not UTF-8",
            ),
            (
                json!({"n": nan, "messages": [{"role": "user", "content": nan}]}),
                "`messages[0].content` is NaN",
            ),
            (
                json!({"messages": chat, "tools": [{"name": "f", "parameters": {"maximum": nan}}]}),
                "`tools[0].parameters.maximum` is NaN",
            ),
        ] {
            let message = settled(row).unwrap_err();
            assert!(message.starts_with(why), "{message}");
        }
    }

    #[test]
    fn a_text_that_holds_a_mark_is_taken_as_a_whole() {
        let row = json!({"text": "a", "n": format!("b{}c", Unusable::HalfPair.mark()), (Unusable::HalfPair.mark()): 1});
        assert_eq!(settled(row), Ok(json!({"text": "a", "n": null})));
    }
}
