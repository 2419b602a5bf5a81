//! Parses JSON like Python's `json`, with values that serde_json refuses: NaN, Infinity, too large
//! floats, and escapes of half a surrogate pair.
//!
//! serde_json reads all text that it accepts. Other text is rewritten first, with marks in place of
//! such values (see [`super::unusable`]).

use serde_json::Value;
use serde_json::error::Result as JsonResult;

use super::unusable::{MARK, Unusable};

/// A parsed value, and true if it contains marks.
pub(super) struct ParsedJson {
    pub(super) value: Value,
    pub(super) has_marks: bool,
}

/// Parses `bytes` as one JSON value.
///
/// # Errors
/// Fails at the first position of `bytes` that Python refuses too.
pub(super) fn parse(bytes: &[u8]) -> JsonResult<ParsedJson> {
    let error = match serde_json::from_slice(bytes) {
        Ok(value) => return Ok(ParsedJson { value, has_marks: false }),
        Err(error) => error,
    };
    let Some(marked) = rewrite(bytes, Rewriting::Marks) else { return Err(error) };
    match serde_json::from_slice(&marked) {
        Ok(value) => Ok(ParsedJson { value, has_marks: true }),
        // The error must have the positions of the original.
        Err(_) => {
            let blank = rewrite(bytes, Rewriting::SameLength);
            Err(blank.and_then(|blank| serde_json::from_slice::<Value>(&blank).err()).unwrap_or(error))
        }
    }
}

/// Describes an error of [`parse`], for a text that begins on the line `first` of its file.
pub(super) fn placed(error: &serde_json::Error, first: u64) -> String {
    let text = error.to_string();
    let reason = text.rsplit_once(" at line ").map_or(&text[..], |(reason, _)| reason);
    match error.line() {
        0 | 1 => format!("not JSON: {reason} at column {}", error.column()),
        line => format!("not JSON: {reason} at line {}, column {}", first + line as u64 - 1, error.column()),
    }
}

/// Returns whether `bytes` is one JSON value.
pub(super) fn is_json(bytes: &[u8]) -> bool {
    let holds = |bytes: &[u8]| serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok();
    holds(bytes) || rewrite(bytes, Rewriting::SameLength).is_some_and(|blank| holds(&blank))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rewriting {
    /// Marks replace values that serde_json refuses.
    Marks,
    /// Text of the same length replaces them.
    SameLength,
}

/// Rewrites `bytes` for serde_json; `None` if nothing changes, or a mark would be ambiguous.
fn rewrite(bytes: &[u8], how: Rewriting) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(bytes.len() + 64);
    let (mut at, mut changed) = (0, false);
    while at < bytes.len() {
        let (length, kind) = token(&bytes[at..]);
        match kind {
            JsonToken::Same => out.extend(&bytes[at..at + length]),
            JsonToken::String => changed |= string(&bytes[at..at + length], how, &mut out)?,
            JsonToken::NotFinite(kind) => {
                changed = true;
                match how {
                    Rewriting::Marks => out.extend(format!("\"{}\"", kind.mark()).bytes()),
                    Rewriting::SameLength => {
                        out.push(b'0');
                        out.resize(out.len() + length - 1, b' ');
                    }
                }
            }
        }
        at += length;
    }
    changed.then_some(out)
}

enum JsonToken {
    Same,
    String,
    NotFinite(Unusable),
}

/// The length of the token at the beginning of `rest`, which is not empty, and its kind.
fn token(rest: &[u8]) -> (usize, JsonToken) {
    const NAMES: [(&[u8], Unusable); 3] =
        [(b"NaN", Unusable::Nan), (b"Infinity", Unusable::Infinity), (b"-Infinity", Unusable::MinusInfinity)];
    if let Some((name, kind)) = NAMES.into_iter().find(|(name, _)| rest.starts_with(name)) {
        return (name.len(), JsonToken::NotFinite(kind));
    }
    match rest[0] {
        b'"' => (string_length(rest), JsonToken::String),
        b'-' | b'0'..=b'9' => {
            let is_part = |byte: &u8| byte.is_ascii_digit() || b"+-.eE".contains(byte);
            let length = rest.iter().position(|byte| !is_part(byte)).unwrap_or(rest.len()).max(1);
            let number = std::str::from_utf8(&rest[..length]).ok().and_then(|text| text.parse::<f64>().ok());
            match number {
                Some(number) if !number.is_finite() => {
                    (length, JsonToken::NotFinite(Unusable::of_float(number)))
                }
                _ => (length, JsonToken::Same),
            }
        }
        _ => (1, JsonToken::Same),
    }
}

/// The length of the string at the beginning of `rest`, with both quotes; that of `rest` if the
/// string does not end.
fn string_length(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Appends a string in quotes. Returns true if it contains half of a surrogate pair, and `None` if
/// it contains a mark of its own.
fn string(text: &[u8], how: Rewriting, out: &mut Vec<u8>) -> Option<bool> {
    let mut mark = [0; 4];
    let mark = MARK.encode_utf8(&mut mark).as_bytes();
    let (mut at, mut changed) = (0, false);
    while at < text.len() {
        if text[at] != b'\\' {
            if text[at..].starts_with(mark) {
                return None;
            }
            out.push(text[at]);
            at += 1;
            continue;
        }
        let length = match (code_unit(&text[at..]), code_unit(text.get(at + 6..).unwrap_or_default())) {
            (Some(0xD800..=0xDBFF), Some(0xDC00..=0xDFFF)) => 12,
            (Some(0xD800..=0xDFFF), _) => {
                changed = true;
                match how {
                    Rewriting::Marks => out.extend(Unusable::HalfPair.mark().bytes()),
                    Rewriting::SameLength => out.extend(br"\ufffd"),
                }
                at += 6;
                continue;
            }
            (Some(unit), _) if u32::from(unit) == u32::from(MARK) => return None,
            (Some(_), _) => 6,
            (None, _) => 2.min(text.len() - at),
        };
        out.extend(&text[at..at + length]);
        at += length;
    }
    Some(changed)
}

/// The number of the escape `\uXXXX` at the beginning of `text`.
fn code_unit(text: &[u8]) -> Option<u16> {
    let digits = text.strip_prefix(br"\u")?.get(..4)?;
    digits.iter().try_fold(0, |number, digit| Some(number * 16 + char::from(*digit).to_digit(16)? as u16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_and_this_read_the_same() {
        let marked = |kind: Unusable| kind.mark();
        for (text, expected) in [
            (r#"{"a": NaN}"#, serde_json::json!({"a": marked(Unusable::Nan)})),
            (
                r#"[Infinity,-Infinity]"#,
                serde_json::json!([marked(Unusable::Infinity), marked(Unusable::MinusInfinity)]),
            ),
            (
                r#"[1e999, -1e999, 5]"#,
                serde_json::json!([marked(Unusable::Infinity), marked(Unusable::MinusInfinity), 5]),
            ),
            (
                r#"{"a": "NaN \" NaN", "b": NaN}"#,
                serde_json::json!({"a": "NaN \" NaN", "b": marked(Unusable::Nan)}),
            ),
            (r#"["x\ud83dy"]"#, serde_json::json!([format!("x{}y", marked(Unusable::HalfPair))])),
            (
                r#"["\ud83d\ud83d\ude00\\ud83d"]"#,
                serde_json::json!([format!("{}😀\\ud83d", marked(Unusable::HalfPair))]),
            ),
            (
                r#"{"a": 1, "a": 2, "b": 123456789012345678901234567890}"#,
                serde_json::json!({"a": 2, "b": 1.2345678901234568e29}),
            ),
        ] {
            assert_eq!(parse(text.as_bytes()).unwrap().value, expected, "{text}");
            assert!(is_json(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn what_python_refuses_is_refused_at_its_place() {
        for (text, column) in [
            (r#"{"a": NaNs}"#, 10),
            (r#"{"a": Infinity, "b" 2}"#, 21),
            (r#"["\ud83d", x]"#, 12),
            ("[NaN, \"\u{FDD0}\"]", 2),
            (r#"[NaN, "\uFDD0"]"#, 2),
            (r#"[--Infinity]"#, 3),
            ("[NaN, \"\\", 8),
        ] {
            let error = parse(text.as_bytes()).err().unwrap();
            assert_eq!(error.column(), column, "{text}: {error}");
            assert!(!is_json(text.as_bytes()), "{text}");
        }
    }
}
