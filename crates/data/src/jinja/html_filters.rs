//! Jinja's filters of markup and addresses.

use std::fmt::Write;

use minijinja::Error;
use minijinja::value::Value;

use super::Builtin;
use super::characters::is_space;
use super::objects::dict_pairs;
use super::print::string;
use super::tojson;
use super::values::{PythonType, bind, check_text, fault, is_iterable, items, type_of};

/// Filters by name.
pub(super) const FILTERS: [(&str, Builtin); 8] = [
    ("e", |_, args| escape_once(args)),
    ("escape", |_, args| escape_once(args)),
    ("forceescape", |_, args| escaped(args.first().unwrap_or_default_ref()).map(Value::from_safe_string)),
    ("safe", |_, args| string(args.first().unwrap_or_default_ref()).map(Value::from_safe_string)),
    ("striptags", |_, args| striptags(args)),
    ("urlencode", |_, args| urlencode(args)),
    ("xmlattr", |_, args| xmlattr(args)),
    ("tojson", |_, args| tojson::tojson(args)),
];

/// Returns an argument, or an undefined value if it is missing.
trait OrUndefined<'a> {
    fn unwrap_or_default_ref(self) -> &'a Value;
}

impl<'a> OrUndefined<'a> for Option<&'a Value> {
    fn unwrap_or_default_ref(self) -> &'a Value {
        self.unwrap_or(&Value::UNDEFINED)
    }
}

/// The text of `value` with HTML's characters escaped.
pub(super) fn escaped(value: &Value) -> Result<String, Error> {
    let out = html_text(&string(value)?);
    check_text(Some(out.len()))?;
    Ok(out)
}

/// A text with HTML's characters escaped as Python's markupsafe does.
pub(crate) fn html_text(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

fn escape_once(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("escape", ["s"], 1, args)?;
    let value = value.unwrap_or_default();
    if value.is_safe() { Ok(value) } else { escaped(&value).map(Value::from_safe_string) }
}

fn striptags(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("striptags", ["value"], 1, args)?;
    let mut text = string(&value.unwrap_or_default())?;
    for (open, close) in [("<!--", "-->"), ("<", ">")] {
        while let Some(start) = text.find(open)
            && let Some(length) = text[start..].find(close)
        {
            text.replace_range(start..start + length + close.len(), "");
        }
    }
    let words: Vec<&str> = text.split(is_space).filter(|word| !word.is_empty()).collect();
    Ok(Value::from(unescape(&words.join(" "))))
}

/// Resolves numbered entities and the common named ones.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = rest.find(';').filter(|end| *end <= 10);
        match end.and_then(|end| entity(&rest[1..end]).map(|c| (c, end))) {
            Some((c, end)) => {
                out.push(c);
                rest = &rest[end + 1..];
            }
            None => {
                out.push('&');
                rest = &rest[1..];
            }
        }
    }
    out.push_str(rest);
    out
}

fn entity(name: &str) -> Option<char> {
    if let Some(number) = name.strip_prefix('#') {
        let code = match number.strip_prefix(['x', 'X']) {
            Some(digits) => u32::from_str_radix(digits, 16),
            None => number.parse(),
        };
        return char::from_u32(code.ok()?);
    }
    match name {
        "amp" => Some('&'),
        "lt" => Some('<'),
        "gt" => Some('>'),
        "quot" => Some('"'),
        "apos" => Some('\''),
        "nbsp" => Some('\u{a0}'),
        _ => None,
    }
}

/// Percent-encodes a text for an address; in a query, spaces become `+`.
fn quoted(value: &Value, query: bool) -> Result<String, Error> {
    let mut out = String::new();
    for byte in string(value)?.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => out.push(char::from(byte)),
            b'/' if !query => out.push('/'),
            b' ' if query => out.push('+'),
            byte => write!(out, "%{byte:02X}").unwrap_or_default(),
        }
    }
    check_text(Some(out.len()))?;
    Ok(out)
}

fn urlencode(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("urlencode", ["value"], 1, args)?;
    let value = value.unwrap_or_default();
    if value.as_str().is_some() || !is_iterable(&value) {
        return quoted(&value, false).map(Value::from);
    }
    let pairs = match type_of(&value) {
        PythonType::Dict => dict_pairs(&value),
        _ => {
            let mut pairs = Vec::new();
            for item in items(&value)? {
                match &items(&item)?[..] {
                    [key, value] => pairs.push((key.clone(), value.clone())),
                    _ => return Err(fault("urlencode takes pairs")),
                }
            }
            pairs
        }
    };
    let mut parts = Vec::new();
    for (key, value) in pairs {
        parts.push(format!("{}={}", quoted(&key, true)?, quoted(&value, true)?));
    }
    Ok(Value::from(parts.join("&")))
}

fn xmlattr(args: &[Value]) -> Result<Value, Error> {
    let [dict, space] = bind("xmlattr", ["d", "autospace"], 1, args)?;
    let dict = dict.unwrap_or_default();
    if type_of(&dict) != PythonType::Dict {
        return Err(fault("xmlattr takes a dict"));
    }
    let mut out = String::new();
    for (key, value) in dict_pairs(&dict) {
        if value.is_none() || value.is_undefined() {
            continue;
        }
        let name = super::values::text(&key)?;
        if name.contains(|c: char| c.is_ascii_whitespace() || matches!(c, '\u{b}' | '/' | '>' | '=')) {
            return Err(fault(format!("Invalid character in attribute name: '{name}'")));
        }
        out.push_str(if out.is_empty() { "" } else { " " });
        write!(out, "{}=\"{}\"", escaped(&key)?, escaped(&value)?).unwrap_or_default();
    }
    let lead = if space.is_none_or(|space| space.is_true()) && !out.is_empty() { " " } else { "" };
    Ok(Value::from(format!("{lead}{out}")))
}
