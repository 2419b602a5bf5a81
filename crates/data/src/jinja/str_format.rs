//! Python's `str.format` and `str.format_map`.

use minijinja::Error;
use minijinja::value::Value;

use super::attributes::attribute;
use super::format_spec::{FormatSpec, closing};
use super::print::{repr, string};
use super::values::{PythonType, check_text, fault, type_name, type_of, whole};

/// Maximum depth of formats: a field in the specification of a field.
const MAX_NESTING: usize = 2;

/// The arguments of a call to `str.format`.
pub(super) struct FormatArguments<'a> {
    pub(super) positional: &'a [Value],
    /// Returns the value of a keyword, if the call has it.
    pub(super) keyword: &'a dyn Fn(&str) -> Option<Value>,
}

/// Numbers the fields without a name.
#[derive(Default)]
struct FieldCount {
    automatic: usize,
    manual: bool,
}

impl FormatArguments<'_> {
    /// Python's `text.format(…)`.
    ///
    /// # Errors
    /// Fails if a field is unknown or its value has no such format.
    pub(super) fn format(&self, text: &str) -> Result<String, Error> {
        self.fill(text, MAX_NESTING, &mut FieldCount::default())
    }

    fn fill(&self, text: &str, nesting: usize, count: &mut FieldCount) -> Result<String, Error> {
        if nesting == 0 {
            return Err(fault("Max string recursion exceeded"));
        }
        let (mut out, mut rest) = (String::new(), text);
        while let Some(at) = rest.find(['{', '}']) {
            out.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if rest.starts_with(brace) {
                out.push_str(brace);
                rest = &rest[1..];
            } else if brace == "}" {
                return Err(fault("Single '}' encountered in format string"));
            } else {
                let end = field_end(rest)?;
                out.push_str(&self.field(&rest[..end], nesting, count)?);
                rest = &rest[end + 1..];
            }
            check_text(Some(out.len()))?;
        }
        out.push_str(rest);
        Ok(out)
    }

    /// Formats a field without its braces: `name!conversion:specification`.
    fn field(&self, field: &str, nesting: usize, count: &mut FieldCount) -> Result<String, Error> {
        let bracket = field.find('[').unwrap_or(field.len());
        // A `:` or `!` within brackets belongs to the key.
        let search = match field[..bracket].find([':', '!']) {
            Some(_) => 0,
            None => field[bracket..].find(']').map_or(bracket, |end| bracket + end),
        };
        let end = field[search..].find([':', '!']).map_or(field.len(), |end| search + end);
        let mut value = self.value(&field[..end], count)?;
        let mut rest = &field[end..];
        if let Some(conversion) = rest.strip_prefix('!') {
            value = match conversion.chars().next() {
                Some('s') => Value::from(string(&value)?),
                Some('r' | 'a') => Value::from(repr(&value)?),
                _ => return Err(fault("unknown conversion specifier")),
            };
            rest = &conversion[1..];
        }
        let spec = match rest.strip_prefix(':') {
            Some(spec) if spec.contains('{') => self.fill(spec, nesting - 1, count)?,
            Some(spec) => spec.to_owned(),
            None if rest.is_empty() => String::new(),
            None => return Err(fault("expected ':' after conversion specifier")),
        };
        formatted(&value, &spec)
    }

    fn value(&self, name: &str, count: &mut FieldCount) -> Result<Value, Error> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut path) = name.split_at(end);
        let mut value = match first.parse::<usize>() {
            _ if first.is_empty() => {
                if count.manual {
                    return Err(fault("cannot switch from manual field specification to automatic"));
                }
                count.automatic += 1;
                self.at(count.automatic - 1)?
            }
            Ok(index) => {
                if count.automatic > 0 {
                    return Err(fault("cannot switch from automatic field numbering to manual"));
                }
                count.manual = true;
                self.at(index)?
            }
            Err(_) => {
                (self.keyword)(first).ok_or_else(|| fault(format!("the call has no argument '{first}'")))?
            }
        };
        while !path.is_empty() {
            if let Some(rest) = path.strip_prefix('.') {
                let end = rest.find(['.', '[']).unwrap_or(rest.len());
                value = attribute(&value, &rest[..end])?;
                path = &rest[end..];
            } else {
                let rest = path.strip_prefix('[').ok_or_else(|| fault("a field is malformed"))?;
                let end = rest.find(']').ok_or_else(|| fault("Missing ']' in format string"))?;
                let key = rest[..end].parse::<i64>().map_or_else(|_| Value::from(&rest[..end]), Value::from);
                value = value.get_item(&key)?;
                path = &rest[end + 1..];
            }
        }
        Ok(value)
    }

    fn at(&self, index: usize) -> Result<Value, Error> {
        let why = || fault(format!("Replacement index {index} out of range for positional args tuple"));
        self.positional.get(index).cloned().ok_or_else(why)
    }
}

/// The index of the `}` of the field that begins `text`.
fn field_end(text: &str) -> Result<usize, Error> {
    closing(text.char_indices(), '{', '}').ok_or_else(|| fault("expected '}' before end of string"))
}

/// Python's `format(value, spec)`.
fn formatted(value: &Value, spec: &str) -> Result<String, Error> {
    if spec.is_empty() {
        return string(value);
    }
    let parsed = FormatSpec::parse(spec)?;
    match type_of(value) {
        PythonType::Str => parsed.text(value.as_str().unwrap_or_default()),
        PythonType::Int | PythonType::Bool => parsed.int(whole(value).unwrap_or(0)),
        PythonType::Float => parsed.float(f64::try_from(value.clone())?),
        _ => Err(fault(format!("unsupported format string passed to {}.__format__", type_name(value)))),
    }
}
