//! Python's `format % values`.

use minijinja::Error;
use minijinja::value::Value;

use super::format_spec::{FormatSpec, closing, number};
use super::objects::dict_pairs;
use super::print::{repr, string};
use super::values::{PythonType, check_text, fault, items, type_name, type_of, whole};

/// The values for a format, in order or by key.
struct FormatValues {
    list: std::vec::IntoIter<Value>,
    keyed: Option<Value>,
}

impl FormatValues {
    fn new(values: &Value) -> Result<Self, Error> {
        let (list, keyed) = match type_of(values) {
            PythonType::Tuple => (items(values)?, None),
            PythonType::List | PythonType::Dict | PythonType::Range | PythonType::Undefined => {
                (vec![values.clone()], Some(values.clone()))
            }
            _ => (vec![values.clone()], None),
        };
        Ok(FormatValues { list: list.into_iter(), keyed })
    }

    fn next(&mut self) -> Result<Value, Error> {
        self.list.next().ok_or_else(|| fault("not enough arguments for format string"))
    }

    fn at(&self, key: &str) -> Result<Value, Error> {
        let dict = self.keyed.as_ref().filter(|keyed| type_of(keyed) == PythonType::Dict);
        let dict = dict.ok_or_else(|| fault("format requires a mapping"))?;
        let entry = dict_pairs(dict).into_iter().find(|(name, _)| name.as_str() == Some(key));
        entry
            .map(|(_, value)| value)
            .ok_or_else(|| fault(format!("the values of a format have no key '{key}'")))
    }

    fn next_size(&mut self) -> Result<i64, Error> {
        super::values::integer(&self.next()?).map_err(|_| fault("* wants int"))
    }
}

/// Python's `format % values`.
///
/// # Errors
/// Fails if the values differ from the format's fields in number or type.
pub(super) fn format(format: &str, values: &Value) -> Result<String, Error> {
    let characters: Vec<char> = format.chars().collect();
    let mut values = FormatValues::new(values)?;
    let (mut out, mut at) = (String::new(), 0);
    while let Some(c) = characters.get(at) {
        at += 1;
        match c {
            '%' => at = print_field(&characters, at, &mut values, &mut out)?,
            c => out.push(*c),
        }
        check_text(Some(out.len()))?;
    }
    if values.keyed.is_none() && values.list.next().is_some() {
        Err(fault("not all arguments converted during string formatting"))
    } else {
        Ok(out)
    }
}

/// Prints the field after a `%` at `at`; returns the index of its end.
fn print_field(
    characters: &[char],
    at: usize,
    values: &mut FormatValues,
    out: &mut String,
) -> Result<usize, Error> {
    let (mut at, mut spec, mut keyed) = (at, FormatSpec::default(), None);
    if characters.get(at) == Some(&'(') {
        let end = key_end(characters, at + 1)?;
        let key: String = characters[at + 1..end].iter().collect();
        keyed = Some(values.at(&key)?);
        at = end + 1;
    }
    while let Some(c) = characters.get(at).filter(|c| "-+ #0".contains(**c)) {
        match c {
            '-' => spec.align = Some('<'),
            '+' => spec.sign = '+',
            ' ' if spec.sign != '+' => spec.sign = ' ',
            '#' => spec.alternate = true,
            '0' => spec.zero = true,
            _ => {}
        }
        at += 1;
    }
    if characters.get(at) == Some(&'*') {
        let size = values.next_size()?;
        if size < 0 {
            spec.align = Some('<');
        }
        (spec.width, at) = (usize::try_from(size.unsigned_abs()).unwrap_or(usize::MAX), at + 1);
    } else {
        let (width, next) = number(characters, at)?;
        (spec.width, at) = (width.unwrap_or(0), next);
    }
    if characters.get(at) == Some(&'.') {
        if characters.get(at + 1) == Some(&'*') {
            spec.precision = Some(usize::try_from(values.next_size()?.max(0)).unwrap_or(usize::MAX));
            at += 2;
        } else {
            let (precision, next) = number(characters, at + 1)?;
            (spec.precision, at) = (Some(precision.unwrap_or(0)), next);
        }
    }
    while characters.get(at).is_some_and(|c| "hlL".contains(*c)) {
        at += 1;
    }
    let kind = *characters.get(at).ok_or_else(|| fault("incomplete format"))?;
    if kind == '%' {
        out.push('%');
        return Ok(at + 1);
    }
    let value = match keyed {
        Some(value) => value,
        None => values.next()?,
    };
    out.push_str(&converted(&value, kind, spec)?);
    Ok(at + 1)
}

/// The index of the `)` of the key that begins at `at`.
fn key_end(characters: &[char], at: usize) -> Result<usize, Error> {
    let rest = characters.iter().copied().enumerate().skip(at);
    closing(rest, '(', ')').ok_or_else(|| fault("incomplete format key"))
}

fn converted(value: &Value, kind: char, spec: FormatSpec) -> Result<String, Error> {
    let spec = FormatSpec { kind: Some(kind), ..spec };
    let text = |text: &str| {
        let align = Some(spec.align.unwrap_or('>'));
        FormatSpec { kind: None, sign: '-', zero: false, align, ..spec.clone() }.text(text)
    };
    match kind {
        's' => text(&string(value)?),
        'r' | 'a' => text(&repr(value)?),
        'c' => match (value.as_str(), whole(value)) {
            (Some(c), _) if c.chars().count() == 1 => text(c),
            (_, Some(code)) => {
                let c = u32::try_from(code).ok().and_then(char::from_u32);
                text(&c.ok_or_else(|| fault("%c arg not in range(0x110000)"))?.to_string())
            }
            _ => Err(fault("%c requires int or char")),
        },
        'd' | 'i' | 'u' => integer(value, spec),
        'x' | 'X' | 'o' => match whole(value) {
            Some(value) => digits(value, spec),
            None => Err(fault(format!("%{kind} format: an integer is required, not {}", type_name(value)))),
        },
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => match type_of(value) {
            PythonType::Float | PythonType::Int | PythonType::Bool => {
                let value =
                    whole(value).map_or_else(|| f64::try_from(value.clone()), |whole| Ok(whole as f64));
                spec.float(value?)
            }
            _ => Err(fault(format!("must be real number, not {}", type_name(value)))),
        },
        kind => Err(fault(format!("unsupported format character '{kind}'"))),
    }
}

fn integer(value: &Value, spec: FormatSpec) -> Result<String, Error> {
    let value = match type_of(value) {
        PythonType::Float => {
            let float = f64::try_from(value.clone())?;
            if !float.is_finite() {
                return Err(fault("a float that is no number has no int"));
            }
            float as i128
        }
        _ => whole(value).ok_or_else(|| {
            fault(format!("%d format: a real number is required, not {}", type_name(value)))
        })?,
    };
    digits(value, FormatSpec { kind: Some('d'), ..spec })
}

/// Formats an int with at least as many digits as the precision.
fn digits(value: i128, spec: FormatSpec) -> Result<String, Error> {
    let Some(precision) = spec.precision else {
        return spec.int(value);
    };
    check_text(Some(precision))?;
    let sign = if spec.sign == '-' { 0 } else { 1 };
    let prefix = if spec.alternate && spec.kind != Some('d') { 2 } else { 0 };
    let width = precision + prefix + if value < 0 { 1 } else { sign };
    let number = FormatSpec { precision: None, zero: true, align: None, width, ..spec.clone() }.int(value)?;
    let width =
        FormatSpec { align: Some(spec.align.unwrap_or('>')), width: spec.width, ..FormatSpec::default() };
    width.text(&number)
}
