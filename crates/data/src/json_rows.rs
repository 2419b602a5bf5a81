//! Finds the elements of an array and the members of an object in JSON text, and names JSON's
//! types.

use std::ops::Range;

use serde_json::Value;

use super::json_cut::{JsonPart, line_ends, trimmed};

/// Names the type of a value, for messages.
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

/// Visits every byte of JSON text outside of strings, with its index and depth, until `visit`
/// returns true.
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

/// The byte ranges of the elements of the array at `start`, and the end of the array; `None`
/// without an end.
fn element_ranges(bytes: &[u8], start: usize) -> Option<(Vec<Range<usize>>, usize)> {
    let mut ranges = Vec::new();
    let mut from = start + 1;
    let mut ended = false;
    walk(bytes, start, |at, byte, depth| {
        let closes = byte == b']' && depth == 1;
        if depth == 1 && (byte == b',' || closes) {
            let range = trimmed(bytes, from..at);
            // `[]` and a comma before the end add no element.
            let is_end = range.is_empty() && closes;
            if !is_end {
                ranges.push(range);
            }
            from = at + 1;
        }
        ended = closes;
        closes
    });
    ended.then_some((ranges, from))
}

/// The byte at which the value of each member of the object at `start` begins.
pub(super) fn member_starts(bytes: &[u8], start: usize) -> Vec<usize> {
    let mut starts = Vec::new();
    walk(bytes, start, |at, byte, depth| {
        if byte == b':' && depth == 1 {
            let value = bytes[at + 1..].iter().position(|byte| !byte.is_ascii_whitespace());
            starts.push(at + 1 + value.unwrap_or(0));
        }
        byte == b'}' && depth == 1
    });
    starts
}

/// The elements of the array that begins `part`, and the end of the array. `None` if `part` begins
/// with no array, or the array does not end in it.
pub(super) fn elements(bytes: &[u8], part: &JsonPart) -> Option<(Vec<JsonPart>, usize)> {
    if bytes[part.range.start] != b'[' {
        return None;
    }
    let (mut line, mut counted) = (part.line, part.range.start);
    let part_at = |range: Range<usize>| {
        line += line_ends(&bytes[counted..range.start]);
        counted = range.start;
        JsonPart { line, range }
    };
    let (ranges, end) = element_ranges(&bytes[..part.range.end], part.range.start)?;
    Some((ranges.into_iter().map(part_at).collect(), end))
}
