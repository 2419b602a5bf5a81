//! Prints values like Python's `str` and `repr`.

use std::sync::OnceLock;

use minijinja::Error;
use minijinja::value::{Value, ValueKind};
use regex::Regex;

use super::objects::{DictView, PythonRange, dict_pairs};
use super::values::{MAX_DEPTH, PythonType, check_text, fault, type_of};

/// Python's `str(value)`.
///
/// # Errors
/// Fails if the text is too large or the value nests too deep.
pub(super) fn string(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let mut out = String::new();
    match value.kind() {
        ValueKind::Undefined => {}
        _ => write(value, 0, &mut out)?,
    }
    Ok(out)
}

/// Python's `repr(value)`.
///
/// # Errors
/// Fails like [`string`].
pub(super) fn repr(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write(value, 0, &mut out)?;
    Ok(out)
}

fn write(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(fault(format!("a value to print has more than {MAX_DEPTH} values within values")));
    }
    check_text(Some(out.len()))?;
    match type_of(value) {
        PythonType::Undefined => out.push_str("Undefined"),
        PythonType::None => out.push_str("None"),
        PythonType::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        PythonType::Int => out.push_str(&value.to_string()),
        PythonType::Float => out.push_str(&float(f64::try_from(value.clone())?)),
        PythonType::Str => {
            out.push_str(if value.is_safe() { "Markup(" } else { "" });
            quote(value.as_str().unwrap_or_default(), out);
            out.push_str(if value.is_safe() { ")" } else { "" });
        }
        PythonType::List => sequence(value, ('[', ']'), depth, out)?,
        PythonType::Tuple => {
            let single = value.len() == Some(1);
            sequence(value, ('(', if single { ',' } else { ')' }), depth, out)?;
            out.push_str(if single { ")" } else { "" });
        }
        PythonType::Dict => mapping(value, depth, out)?,
        PythonType::Namespace => {
            out.push_str("<Namespace ");
            mapping(value, depth, out)?;
            out.push('>');
        }
        PythonType::View => {
            out.push_str(value.downcast_object_ref::<DictView>().map_or("", |view| view.name));
            sequence(value, ('(', '['), depth, out)?;
        }
        PythonType::Range => {
            out.push_str(
                &value.downcast_object_ref::<PythonRange>().map(PythonRange::text).unwrap_or_default(),
            );
        }
        PythonType::Generator | PythonType::Other => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// Prints items between brackets; `('(', '[')` means `([` and `])`, the brackets of a view.
fn sequence(value: &Value, (open, close): (char, char), depth: usize, out: &mut String) -> Result<(), Error> {
    let view = (open, close) == ('(', '[');
    out.push_str(if view { "([" } else { "" });
    if !view {
        out.push(open);
    }
    for (index, item) in value.try_iter()?.checked().enumerate() {
        out.push_str(if index > 0 { ", " } else { "" });
        write(&item?, depth + 1, out)?;
    }
    if view {
        out.push_str("])");
    } else {
        out.push(close);
    }
    Ok(())
}

fn mapping(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    out.push('{');
    for (index, (key, value)) in dict_pairs(value).into_iter().enumerate() {
        out.push_str(if index > 0 { ", " } else { "" });
        write(&key, depth + 1, out)?;
        out.push_str(": ");
        write(&value, depth + 1, out)?;
    }
    out.push('}');
    Ok(())
}

/// Python's `repr` of a float: Rust's shortest digits, with Python's form of the exponent.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let text = format!("{value:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{exponent:0>2}")
        }
    }
}

/// Python's `repr` of a text.
fn quote(text: &str, out: &mut String) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == mark => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c if u32::from(c) <= 0xff => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c if u32::from(c) <= 0xffff => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => out.push_str(&format!("\\U{:08x}", u32::from(c))),
        }
    }
    out.push(mark);
}

/// Returns whether Python's `repr` prints `c` without an escape.
pub(super) fn is_printable(c: char) -> bool {
    static HIDDEN: OnceLock<Option<Regex>> = OnceLock::new();
    if c.is_ascii() {
        return (' '..='~').contains(&c);
    }
    let hidden = HIDDEN.get_or_init(|| Regex::new(r"^[\p{C}\p{Z}]$").ok());
    hidden.as_ref().is_none_or(|hidden| !hidden.is_match(c.encode_utf8(&mut [0; 4])))
}
