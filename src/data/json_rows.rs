//! Rows of JSON files: one object a line, an array of objects, or an object that holds one array of objects.
//!
//! An array is cut into its elements by a scan that knows strings and brackets only, and each element is parsed by
//! itself: that gives every row its line, lets one bad element stand alone, and parses in parallel.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;
use serde_json::Value;

use super::raw_rows::{DataFile, RawRow};
use super::{BadRow, Origin, RowFault, RowFaultKind, RowOrigin};
use crate::error::{Error, Result};

/// Keys that hold arrays inside a row: an object with one of them is a row, not a holder of rows.
const ROW_KEYS: [&str; 7] =
    ["messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected"];

/// One object a line; empty lines are passed over. The first line of `bytes` is line `first` of the file.
pub(super) fn lines(file: &Arc<Path>, bytes: &[u8], first: u64, source: &mut DataFile) {
    let parts: Vec<(u64, &[u8])> = bytes
        .split(|byte| *byte == b'\n')
        .enumerate()
        .map(|(index, line)| (first + index as u64, line))
        .filter(|(_, line)| !line.iter().all(u8::is_ascii_whitespace))
        .collect();
    parse(file, &parts, source);
}

/// A `.json` file in any of the three shapes.
pub(super) fn json(file: &Arc<Path>, bytes: &[u8], source: &mut DataFile) -> Result<()> {
    let start = bytes.iter().position(|byte| !byte.is_ascii_whitespace());
    match start.map(|start| (start, bytes[start])) {
        None => Ok(()),
        Some((start, b'[')) => {
            let end = array(file, bytes, start, source)?;
            match bytes[end..].iter().position(|byte| !byte.is_ascii_whitespace()) {
                None => Ok(()),
                Some(more) => {
                    let line = line_of(bytes, end + more);
                    Err(unreadable(file, &format!("something follows its array, on line {line}")))
                }
            }
        }
        Some((start, b'{')) => object(file, bytes, start, source),
        Some((_, found)) => Err(unreadable(
            file,
            &format!("it begins with {:?}; a JSON array or object is needed", char::from(found)),
        )),
    }
}

fn object(file: &Arc<Path>, bytes: &[u8], start: usize, source: &mut DataFile) -> Result<()> {
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<Value>();
    let first = match values.next() {
        Some(Ok(Value::Object(first))) => first,
        Some(Err(e)) if !e.is_eof() && bytes[start..].contains(&b'\n') => {
            // Not one object; perhaps lines, of which the first is broken.
            return match e.line() {
                1 => {
                    lines(file, bytes, 1, source);
                    Ok(())
                }
                _ => Err(unreadable(file, &e.to_string())),
            };
        }
        Some(Err(e)) => return Err(unreadable(file, &e.to_string())),
        _ => return Ok(()),
    };
    if !bytes[values.byte_offset()..].iter().all(u8::is_ascii_whitespace) {
        lines(file, bytes, 1, source);
        return Ok(());
    }
    let is_row = ROW_KEYS.iter().any(|key| first.contains_key(*key));
    let holds_rows = |value: &Value| matches!(value, Value::Array(list) if list.iter().any(Value::is_object));
    let holders: Vec<usize> =
        first.values().enumerate().filter(|(_, value)| holds_rows(value)).map(|(index, _)| index).collect();
    match holders[..] {
        [holder] if !is_row => match member_starts(bytes, start).get(holder) {
            Some(&at) => array(file, bytes, at, source).map(|_| ()),
            None => Err(unreadable(file, "a key stands twice in its object")),
        },
        [] | [_] => {
            let origin = Origin { file: file.clone(), place: RowOrigin::Line(line_of(bytes, start)) };
            source.rows.push(RawRow { value: first, origin, document: false });
            Ok(())
        }
        _ if is_row => {
            let origin = Origin { file: file.clone(), place: RowOrigin::Line(line_of(bytes, start)) };
            source.rows.push(RawRow { value: first, origin, document: false });
            Ok(())
        }
        _ => Err(unreadable(
            file,
            &format!("its object holds {} arrays of objects; one is needed", holders.len()),
        )),
    }
}

/// Reads the array that begins at `start`; returns where it ends.
fn array(file: &Arc<Path>, bytes: &[u8], start: usize, source: &mut DataFile) -> Result<usize> {
    let (elements, end) = elements(bytes, start).ok_or_else(|| {
        unreadable(file, &format!("the array that begins on line {} does not end", line_of(bytes, start)))
    })?;
    let mut line = 1;
    let mut counted = 0;
    let parts: Vec<(u64, &[u8])> = elements
        .into_iter()
        .map(|range| {
            line += newlines(&bytes[counted..range.start]);
            counted = range.start;
            (line, &bytes[range])
        })
        .collect();
    parse(file, &parts, source);
    Ok(end)
}

fn parse(file: &Arc<Path>, parts: &[(u64, &[u8])], source: &mut DataFile) {
    let parsed: Vec<Result<RawRow, BadRow>> =
        parts.par_iter().map(|(line, bytes)| parse_row(file, *line, bytes)).collect();
    for row in parsed {
        match row {
            Ok(row) => source.rows.push(row),
            Err(bad) => source.bad.push(bad),
        }
    }
}

fn parse_row(file: &Arc<Path>, line: u64, bytes: &[u8]) -> Result<RawRow, BadRow> {
    let origin = Origin { file: file.clone(), place: RowOrigin::Line(line) };
    let why = match serde_json::from_slice(bytes) {
        Ok(Value::Object(value)) => return Ok(RawRow { value, origin, document: false }),
        Ok(other) => format!("the row is {}; an object is needed", json_type(&other)),
        Err(e) => {
            // The line it names is counted from the row's own beginning.
            let text = e.to_string();
            match text.rsplit_once(" at line ") {
                Some((reason, _)) if e.line() <= 1 => format!("not JSON: {reason} at column {}", e.column()),
                _ => format!("not JSON: {text}, counted from the row's first line"),
            }
        }
    };
    Err(BadRow { origin, fault: RowFault::new(RowFaultKind::Unreadable, why) })
}

/// What a value is, for messages.
pub(super) fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Walks over JSON text and reports every byte outside of strings with the depth it stands at.
fn walk(bytes: &[u8], start: usize, mut visit: impl FnMut(usize, u8, usize) -> bool) {
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for (at, &byte) in bytes.iter().enumerate().skip(start) {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => depth += 1,
            _ => {}
        }
        if visit(at, byte, depth) {
            return;
        }
        if matches!(byte, b']' | b'}') {
            depth = depth.saturating_sub(1);
        }
    }
}

/// The byte ranges of the elements of the array that begins at `start`, and where it ends; `None` when it does not.
fn elements(bytes: &[u8], start: usize) -> Option<(Vec<Range<usize>>, usize)> {
    let mut found = Vec::new();
    let mut from = start + 1;
    let mut ended = false;
    walk(bytes, start, |at, byte, depth| {
        let closes = byte == b']' && depth == 1;
        if depth == 1 && (byte == b',' || closes) {
            let range = trimmed(bytes, from..at);
            // `[]` and a comma before the end leave nothing between them.
            let is_end = range.is_empty() && closes;
            if !is_end {
                found.push(range);
            }
            from = at + 1;
        }
        ended = closes;
        closes
    });
    ended.then_some((found, from))
}

/// Where the value of each member of the object at `start` begins.
fn member_starts(bytes: &[u8], start: usize) -> Vec<usize> {
    let mut found = Vec::new();
    walk(bytes, start, |at, byte, depth| {
        if byte == b':' && depth == 1 {
            let value = bytes[at + 1..].iter().position(|byte| !byte.is_ascii_whitespace());
            found.push(at + 1 + value.unwrap_or(0));
        }
        byte == b'}' && depth == 1
    });
    found
}

fn trimmed(bytes: &[u8], range: Range<usize>) -> Range<usize> {
    let part = &bytes[range.clone()];
    let front = part.len() - part.trim_ascii_start().len();
    let len = part.trim_ascii().len();
    range.start + front..range.start + front + len
}

fn newlines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u64
}

fn line_of(bytes: &[u8], at: usize) -> u64 {
    1 + newlines(&bytes[..at])
}

fn unreadable(file: &Path, why: &str) -> Error {
    Error::user(format!("cannot read the data file {}", file.display())).because(why)
}
