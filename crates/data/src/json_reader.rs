//! Rows of JSON files: objects one after the other, an array of objects, or an object with one
//! array of objects.
//!
//! A scan of strings and brackets cuts the text into values (see [`super::json_cut`]), and each row
//! is parsed by itself. So every row has its line, a bad row does not affect others, and rows parse
//! in parallel.

use std::path::Path;

use rayon::prelude::*;
use serde_json::{Map, Value};

use super::json_cut::{self, JsonPart, line_ends};
use super::json_rows::{elements, json_type, member_starts};
use super::raw_rows::{DataFile, RawRow, TextFile};
use super::settle::settle;
use super::{
    BadRow, Origin, RowFault, RowFaultKind, RowOrigin, expansion, format, python_json, text_encoding,
};
use crate::error::{Error, Result};

/// Keys of a row with arrays as values. An object with one of them, or with the keys of a format,
/// is a row and not a holder of rows.
const ROW_KEYS: [&str; 7] =
    ["messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected"];

/// Reads the rows of a text of JSON.
///
/// # Errors
/// Fails if the text is one broken value, or the rows of a packed file exceed its limits.
pub(super) fn rows(text: &TextFile<'_>, source: &mut DataFile) -> Result<()> {
    let unreadable = |why: String| unreadable(&text.file, &why);
    let bytes = &text.bytes[..];
    let lines = json_cut::lines(bytes);
    within_bounds(text, &lines).map_err(unreadable)?;
    // Nearly every file has one object a line.
    if lines.len() > 1 {
        let parsed: Option<Vec<_>> = lines.par_iter().map(|part| parse_row(text, part).ok()).collect();
        if let Some(parsed) = parsed {
            take(parsed, source);
            return Ok(());
        }
    }
    drop(lines);
    let values = json_cut::cut(bytes).map_err(unreadable)?;
    let parts = match &values[..] {
        [one] if bytes[one.range.start] == b'{' => held_rows(text, one).map_err(unreadable)?,
        [one] => whole_array(bytes, one).unwrap_or_else(|| vec![one.clone()]),
        _ => values.iter().flat_map(|value| rows_of_value(bytes, value)).collect(),
    };
    drop(values);
    within_bounds(text, &parts).map_err(unreadable)?;
    let parsed = parts.par_iter().map(|part| parse_row(text, part).unwrap_or_else(Err)).collect();
    take(parsed, source);
    Ok(())
}

/// Splits one of several values: an array of objects becomes a row for each.
fn rows_of_value(bytes: &[u8], value: &JsonPart) -> Vec<JsonPart> {
    let is_object = |part: &JsonPart| bytes[part.range.clone()].first() == Some(&b'{');
    match whole_array(bytes, value) {
        Some(rows) if rows.first().is_some_and(is_object) => rows,
        _ => vec![value.clone()],
    }
}

/// The elements of `value`, if it is an array without text after it.
fn whole_array(bytes: &[u8], value: &JsonPart) -> Option<Vec<JsonPart>> {
    let (rows, end) = elements(bytes, value)?;
    (end == value.range.end).then_some(rows)
}

/// The rows of a file of one object: the object itself, or those of the one array of objects in it.
fn held_rows(text: &TextFile<'_>, one: &JsonPart) -> Result<Vec<JsonPart>, String> {
    let bytes = &text.bytes[..];
    let Ok(parsed) = python_json::parse(&bytes[one.range.clone()]) else { return Ok(vec![one.clone()]) };
    let Value::Object(object) = parsed.value else { return Ok(vec![one.clone()]) };
    if ROW_KEYS.iter().any(|key| object.contains_key(*key)) {
        return Ok(vec![one.clone()]);
    }
    if format::is_row(&object) {
        return match object.iter().find(|(_, value)| holds_rows_of(&object, value)) {
            None => Ok(vec![one.clone()]),
            Some((key, _)) => Err(format!(
                "its object has the keys of a row, and so have those in its `{key}`: write one row a line"
            )),
        };
    }
    let holds_rows = |value: &Value| matches!(value, Value::Array(list) if list.iter().any(Value::is_object));
    let holders: Vec<usize> =
        object.values().enumerate().filter(|(_, value)| holds_rows(value)).map(|(index, _)| index).collect();
    match holders[..] {
        [] => Ok(vec![one.clone()]),
        [holder] => {
            let starts = member_starts(bytes, one.range.start);
            // A repeated key shifts the members after it.
            let start = starts.get(holder).filter(|_| starts.len() == object.len());
            let start = *start.ok_or("the object that holds its rows repeats a key")?;
            let line = one.line + line_ends(&bytes[one.range.start..start]);
            elements(bytes, &JsonPart { line, range: start..one.range.end })
                .map(|(rows, _)| rows)
                .ok_or_else(|| format!("the array that begins on line {line} does not end"))
        }
        _ => Err(format!("its object holds {} arrays of objects; one is needed", holders.len())),
    }
}

/// Returns whether a value is a list of rows of the same format as `row`.
fn holds_rows_of(row: &Map<String, Value>, value: &Value) -> bool {
    let is_alike = |value: &Value| value.as_object().is_some_and(|held| format::are_alike(row, held));
    value.as_array().is_some_and(|list| !list.is_empty() && list.iter().all(is_alike))
}

/// Refuses rows that exceed the limits of their packed file.
fn within_bounds(text: &TextFile<'_>, parts: &[JsonPart]) -> Result<(), String> {
    let Some(mut bounds) = text.packed.clone() else { return Ok(()) };
    parts
        .iter()
        .try_for_each(|part| bounds.count(expansion::json_text_bytes(&text.bytes[part.range.clone()])))
}

fn take(parsed: Vec<Result<RawRow, BadRow>>, source: &mut DataFile) {
    for row in parsed {
        match row {
            Ok(row) => source.rows.push(row),
            Err(bad) => source.bad.push(bad),
        }
    }
}

/// Parses `part`: a row, or an object that cannot be used. The outer error means that it is no
/// object.
fn parse_row(text: &TextFile<'_>, part: &JsonPart) -> Result<Result<RawRow, BadRow>, BadRow> {
    let origin = Origin { file: text.file.clone(), row: RowOrigin::Line(part.line) };
    let bad =
        |why: String| BadRow { origin: origin.clone(), fault: RowFault::new(RowFaultKind::Unreadable, why) };
    let bytes = &text.bytes[part.range.clone()];
    let parsed = match python_json::parse(bytes) {
        Ok(parsed) => parsed,
        Err(error) => return Err(bad(why_unreadable(bytes, &error, part.line))),
    };
    let Value::Object(value) = parsed.value else {
        return Err(bad(format!("the row is {}; an object is needed", json_type(&parsed.value))));
    };
    let settled: Result<Map<String, Value>, String> =
        if parsed.has_marks { settle(value) } else { Ok(value) };
    Ok(match settled {
        Ok(value) => Ok(RawRow { value, origin, document: false, format: None }),
        Err(why) => Err(bad(why)),
    })
}

fn why_unreadable(bytes: &[u8], error: &serde_json::Error, line: u64) -> String {
    match std::str::from_utf8(bytes) {
        Ok(_) => python_json::placed(error, line),
        Err(error) => {
            let at = error.valid_up_to();
            let (likely, _) = text_encoding::narrow(bytes);
            format!("not UTF-8: its byte {} is 0x{:02X}, perhaps of {likely}", at + 1, bytes[at])
        }
    }
}

fn unreadable(file: &Path, why: &str) -> Error {
    Error::user(format!("cannot read the data file {}", file.display())).because(why)
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::sync::Arc;

    use super::*;

    /// The numbers of rows and of bad rows in `text`.
    fn counts(text: &str) -> (usize, usize) {
        let file = Arc::from(Path::new("rows.jsonl"));
        let file_bytes = text.len() as u64;
        let text = TextFile { file, bytes: Cow::Borrowed(text.as_bytes()), file_bytes, packed: None };
        let mut source = DataFile::default();
        rows(&text, &mut source).unwrap();
        (source.rows.len(), source.bad.len())
    }

    #[test]
    fn what_follows_an_array_on_its_line_is_not_lost() {
        let row = "{\"prompt\": \"a\", \"completion\": \"b\"}";
        assert_eq!(counts(&format!("[{row}, {row}]")), (2, 0));
        assert_eq!(counts(&format!("[{row}]\n[{row}]")), (2, 0));
        for more in [format!(",[{row}]"), " x".to_owned()] {
            assert_eq!(counts(&format!("[{row}]{more}")), (0, 1), "{more}");
        }
    }

    /// Each line begins an array that does not end on it.
    #[test]
    fn open_arrays_are_looked_at_within_their_lines() {
        assert_eq!(counts(&format!("{{\"text\": \"a\"}}\n{}", "[\"\n".repeat(50_000))), (1, 50_000));
    }

    #[test]
    fn broken_rows_hide_no_later_ones_however_many_there_are() {
        let good = "{\n  \"text\": \"a\"\n}\n".repeat(5_000);
        let broken = "{\n  \"text\": \"a\n}\n".repeat(20);
        let (rows, bad) = counts(&format!("{good}{broken}{good}"));
        assert_eq!(rows, 10_000);
        assert!(bad >= 20, "{bad}");
    }
}
