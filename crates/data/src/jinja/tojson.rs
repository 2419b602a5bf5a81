//! JSON for templates, and transformers' filter `tojson`.
//!
//! transformers replaces Jinja's `tojson` by a plain `json.dumps(ensure_ascii=False)`: no HTML
//! escapes, `", "` and `": "` between items, keys in their order. minijinja's own escapes HTML.

use minijinja::Error;
use minijinja::value::Value;

use super::objects::dict_pairs;
use super::print;
use super::sorting::sorted_pairs;
use super::values::{
    MAX_DEPTH, MAX_TEXT_BYTES, PythonType, bind, check_text, fault, flag, given, integer, items, text,
    type_name, type_of, whole,
};

/// Maximum length of an indentation.
const MAX_INDENT: usize = 256;

/// Converts a JSON value for a template; objects keep the order of their keys.
pub(crate) fn to_template(value: &serde_json::Value) -> Value {
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
///
/// # Errors
/// Fails if JSON has no such value, or the text grows too large or too deep.
pub(super) fn tojson(args: &[Value]) -> Result<Value, Error> {
    let parameters = ["value", "ensure_ascii", "indent", "separators", "sort_keys"];
    let [value, ensure_ascii, indent, separators, sort_keys] = bind("tojson", parameters, 1, args)?;
    let indent = match given(indent.as_ref()) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(indent) => indent.to_owned(),
            None => " ".repeat(usize::try_from(integer(indent)?).unwrap_or(0).min(MAX_INDENT + 1)),
        }),
    };
    if let Some(indent) = indent.as_ref().filter(|indent| indent.len() > MAX_INDENT) {
        return Err(fault(format!(
            "`indent` is too large; accepted: up to {MAX_INDENT}, not {}",
            indent.len()
        )));
    }
    let (item, key) = match given(separators.as_ref()) {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some(separators) => match &items(separators)?[..] {
            [item, key] => (text(item)?.to_owned(), text(key)?.to_owned()),
            _ => return Err(fault("`separators` must be two strings")),
        },
    };
    let dump = Dump {
        indent,
        item,
        key,
        ensure_ascii: flag(ensure_ascii.as_ref()),
        sort_keys: flag(sort_keys.as_ref()),
    };
    let mut out = String::new();
    dump.write(&value.unwrap_or_default(), 0, &mut out)?;
    check_text(Some(out.len()))?;
    Ok(Value::from(out))
}

/// Writes a JSON value like Python's `json.dumps(value, ensure_ascii=False)`.
pub(crate) fn json_text(value: &serde_json::Value) -> String {
    let dumped = tojson(&[to_template(value)]);
    // Rust's own writer serves only values that are too large or too deep.
    dumped.ok().and_then(|text| text.as_str().map(str::to_owned)).unwrap_or_else(|| value.to_string())
}

struct Dump {
    indent: Option<String>,
    item: String,
    key: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Dump {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > MAX_DEPTH || out.len() > MAX_TEXT_BYTES {
            return Err(fault(format!(
                "tojson prints up to {MAX_TEXT_BYTES} bytes and {MAX_DEPTH} values within values"
            )));
        }
        match type_of(value) {
            PythonType::None => out.push_str("null"),
            PythonType::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            PythonType::Int => out.push_str(&value.to_string()),
            PythonType::Float => out.push_str(&float(f64::try_from(value.clone())?)),
            PythonType::Str => self.string(value.as_str().unwrap_or_default(), out),
            PythonType::Dict => {
                let pairs = if self.sort_keys { sorted_pairs(value)? } else { dict_pairs(value) };
                self.items(('{', '}'), pairs.len(), depth, out, |index, out| {
                    let (key, value) = &pairs[index];
                    self.string(&key_text(key)?, out);
                    out.push_str(&self.key);
                    self.write(value, depth + 1, out)
                })?;
            }
            PythonType::List | PythonType::Tuple => {
                let items = items(value)?;
                self.items(('[', ']'), items.len(), depth, out, |index, out| {
                    self.write(&items[index], depth + 1, out)
                })?;
            }
            _ => return Err(fault(format!("Object of type {} is not JSON serializable", type_name(value)))),
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
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(indent.as_str(), depth));
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

/// Converts a key of a dict to JSON's text.
fn key_text(key: &Value) -> Result<String, Error> {
    match type_of(key) {
        PythonType::Str => Ok(key.as_str().unwrap_or_default().to_owned()),
        PythonType::None => Ok("null".to_owned()),
        PythonType::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        PythonType::Float => Ok(float(f64::try_from(key.clone())?)),
        _ if whole(key).is_some() => Ok(key.to_string()),
        _ => Err(fault(format!("keys must be str, int, float, bool or None, not {}", type_name(key)))),
    }
}

fn float(value: f64) -> String {
    if value.is_finite() {
        print::float(value)
    } else if value.is_nan() {
        "NaN".to_owned()
    } else {
        if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dump(json: &str, args: &str) -> String {
        let env = super::super::environment();
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
            assert_eq!(print::float(value), text);
        }
    }
}
