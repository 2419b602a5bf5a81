//! What chat templates expect of Python: JSON as `json.dumps` writes it, dates as `strftime` does.
//!
//! transformers replaces Jinja's `tojson` by a plain `json.dumps(ensure_ascii=False)`: no HTML escapes, `", "` and
//! `": "` between items, keys in their order. minijinja's own escapes HTML.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// More spaces than anybody indents by.
const MAX_INDENT: usize = 256;
/// Values within values that `tojson` prints: more than a row of a data file can hold. A template can build a value that
/// holds itself.
const MAX_DEPTH: usize = 150;
/// Bytes that `tojson` prints at most.
const MAX_JSON_BYTES: usize = 64 << 20;

/// A JSON value for a template; objects keep the order of their keys.
pub(super) fn to_template(value: &serde_json::Value) -> Value {
    match value {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(value) => Value::from(*value),
        serde_json::Value::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(n), _) => Value::from(n),
            (None, Some(n)) => Value::from(n),
            (None, None) => Value::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(list) => list.iter().map(to_template).collect(),
        serde_json::Value::Object(map) => {
            Value::from_pairs(map.iter().map(|(key, value)| (key.as_str(), to_template(value))))
        }
    }
}

/// The `tojson` filter of transformers.
pub(super) fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    kwargs.assert_all_used()?;
    if let Some(indent) = indent.filter(|indent| *indent > MAX_INDENT) {
        let why = format!("`indent` is {indent}; accepted: up to {MAX_INDENT}");
        return Err(Error::new(ErrorKind::InvalidOperation, why));
    }
    let (item, key) = match separators.as_deref() {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "`separators` must be two strings")),
    };
    let dump = Dump {
        indent,
        item,
        key,
        ensure_ascii: ensure_ascii.unwrap_or(false),
        sort_keys: sort_keys.unwrap_or(false),
    };
    let mut out = String::new();
    dump.write(value, 0, &mut out)?;
    Ok(Value::from(out))
}

/// A JSON value as Python's `json.dumps(value, ensure_ascii=False)` writes it.
pub(super) fn json_text(value: &serde_json::Value) -> String {
    let dumped = tojson(&to_template(value), Kwargs::from_iter(std::iter::empty::<(String, Value)>()));
    // Only a value that is too large or too deep is left to Rust's own way of writing it.
    dumped.ok().and_then(|text| text.as_str().map(str::to_owned)).unwrap_or_else(|| value.to_string())
}

struct Dump {
    indent: Option<usize>,
    item: String,
    key: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Dump {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > MAX_DEPTH || out.len() > MAX_JSON_BYTES {
            let why =
                format!("tojson prints up to {MAX_JSON_BYTES} bytes and {MAX_DEPTH} values within values");
            return Err(Error::new(ErrorKind::InvalidOperation, why));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.items(('{', '}'), keys.len(), depth, out, |index, out| {
                    self.string(&keys[index].to_string(), out);
                    out.push_str(&self.key);
                    self.write(&value.get_item(&keys[index])?, depth + 1, out)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.items(('[', ']'), items.len(), depth, out, |index, out| {
                    self.write(&items[index], depth + 1, out)
                })?;
            }
            kind => {
                let why = format!("Object of type {kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, why));
            }
        }
        Ok(())
    }

    fn items(
        &self,
        (open, close): (char, char),
        count: usize,
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(usize, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |depth: usize, out: &mut String| {
            if let Some(indent) = self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent * depth));
            }
        };
        out.push(open);
        for index in 0..count {
            if index > 0 {
                out.push_str(&self.item);
            }
            line(depth + 1, out);
            write(index, out)?;
        }
        if count > 0 {
            line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// Python's `repr` of a float: Rust's shortest digits, with the exponent as Python writes it.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn dump(json: &str, args: &str) -> String {
        let mut env = minijinja::Environment::new();
        env.add_filter("tojson", tojson);
        let value = to_template(&serde_json::from_str(json).unwrap());
        env.render_str(&format!("{{{{ x|tojson{args} }}}}"), minijinja::context!(x => value)).unwrap()
    }

    // Expected texts: Python 3.11, json.dumps(x, ensure_ascii=False, ...).
    #[test]
    fn json_as_python_writes_it() {
        let json = r#"{"b": [1, 2.5, true, null, "<é & 'q' \"\u0001>"], "a": {}}"#;
        assert_eq!(dump(json, ""), r#"{"b": [1, 2.5, true, null, "<é & 'q' \"\u0001>"], "a": {}}"#);
        assert_eq!(
            dump(json, "(indent=2)"),
            "{\n  \"b\": [\n    1,\n    2.5,\n    true,\n    null,\n    \"<é & 'q' \\\"\\u0001>\"\n  ],\n  \"a\": {}\n}"
        );
        assert_eq!(
            dump(r#"{"b": 1, "a": "😀"}"#, "(sort_keys=true, ensure_ascii=true)"),
            r#"{"a": "\ud83d\ude00", "b": 1}"#
        );
        assert_eq!(dump("[1, 2]", "(separators=[',', ':'])"), "[1,2]");
    }

    #[test]
    fn floats_as_python_writes_them() {
        for (value, text) in [
            (1.0, "1.0"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (1e-5, "1e-05"),
            (-2.5e-7, "-2.5e-07"),
            (1e-4, "0.0001"),
            (1e300, "1e+300"),
        ] {
            assert_eq!(float(value), text);
        }
    }
}
