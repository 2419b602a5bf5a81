//! Jinja's filters of numbers.

use minijinja::Error;
use minijinja::value::Value;

use super::Builtin;
use super::characters::{is_decimal, is_space};
use super::values::{PythonType, bind, fault, flag, int, integer, type_name, type_of, whole};

/// Filters by name.
pub(super) const FILTERS: [(&str, Builtin); 5] = [
    ("abs", |_, args| absolute(args)),
    ("int", |_, args| to_int(args)),
    ("float", |_, args| to_float(args)),
    ("round", |_, args| round(args)),
    ("filesizeformat", |_, args| file_size(args)),
];

fn absolute(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("abs", ["x"], 1, args)?;
    let value = value.unwrap_or_default();
    match (whole(&value), type_of(&value)) {
        (Some(number), _) => number.checked_abs().map(int).ok_or_else(too_large),
        (None, PythonType::Float) => Ok(Value::from(f64::try_from(value)?.abs())),
        _ => Err(fault(format!("bad operand type for abs(): '{}'", type_name(&value)))),
    }
}

fn too_large() -> Error {
    fault("an int is too large; accepted: 128 bits")
}

fn to_int(args: &[Value]) -> Result<Value, Error> {
    let [value, default, base] = bind("int", ["value", "default", "base"], 1, args)?;
    let value = value.unwrap_or_default();
    let base = base.as_ref().map_or(Ok(10), integer)?;
    let parsed = match type_of(&value) {
        PythonType::Undefined => return Err(fault("an undefined value has no int")),
        PythonType::Str => {
            let text = value.as_str().unwrap_or_default();
            match parse_int(text, base)? {
                Some(number) => Some(number),
                None => parse_float(text).filter(|float| float.is_finite()).map(from_float).transpose()?,
            }
        }
        PythonType::Float => {
            let float = f64::try_from(value)?;
            if float.is_infinite() {
                return Err(fault("cannot convert float infinity to integer"));
            }
            if float.is_nan() { None } else { Some(from_float(float)?) }
        }
        _ => whole(&value),
    };
    Ok(parsed.map_or_else(|| default.unwrap_or_else(|| Value::from(0)), int))
}

fn from_float(float: f64) -> Result<i128, Error> {
    if float.abs() < 1e38 { Ok(float as i128) } else { Err(too_large()) }
}

/// Python's `int(text, base)`; `None` if it raises a `ValueError`.
fn parse_int(text: &str, base: i64) -> Result<Option<i128>, Error> {
    if base != 0 && !(2..=36).contains(&base) {
        return Ok(None);
    }
    let text = text.trim_matches(is_space);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let lower = digits.to_ascii_lowercase();
    let (mut base, mut digits) = (u32::try_from(base).unwrap_or(10), lower.as_str());
    for (prefix, radix) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if let Some(rest) = digits.strip_prefix(prefix).filter(|_| base == radix || base == 0) {
            (base, digits) = (radix, rest.strip_prefix('_').unwrap_or(rest));
        }
    }
    let zeros = base == 0 && digits.starts_with('0') && digits.contains(|c: char| c != '0' && c != '_');
    if zeros || digits.is_empty() || digits.starts_with('_') || digits.ends_with('_') || digits.contains("__")
    {
        return Ok(None);
    }
    let base = if base == 0 { 10 } else { base };
    let mut number: i128 = 0;
    for c in digits.chars().filter(|c| *c != '_') {
        let Some(digit) = digit(c).filter(|digit| *digit < base) else {
            return Ok(None);
        };
        let next =
            number.checked_mul(i128::from(base)).and_then(|number| number.checked_add(i128::from(digit)));
        number = next.ok_or_else(too_large)?;
    }
    Ok(Some(if negative { -number } else { number }))
}

/// The value of a digit of any script.
fn digit(c: char) -> Option<u32> {
    if c.is_ascii() {
        return c.to_digit(36);
    }
    if !is_decimal(c) {
        return None;
    }
    // Mathematical digits follow one another without a gap.
    if ('\u{1d7ce}'..='\u{1d7ff}').contains(&c) {
        return Some((u32::from(c) - 0x1d7ce) % 10);
    }
    let before = |distance: u32| char::from_u32(u32::from(c) - distance).is_some_and(is_decimal);
    Some((1..10).take_while(|distance| before(*distance)).count() as u32)
}

/// Python's `float(text)`; `None` if it raises a `ValueError`.
fn parse_float(text: &str) -> Option<f64> {
    let text = text.trim_matches(is_space);
    let around = |at: usize, step: isize| {
        at.checked_add_signed(step).and_then(|at| text.as_bytes().get(at)).is_some_and(u8::is_ascii_digit)
    };
    if text.match_indices('_').any(|(at, _)| !around(at, -1) || !around(at, 1)) {
        return None;
    }
    text.replace('_', "").parse().ok()
}

fn to_float(args: &[Value]) -> Result<Value, Error> {
    let [value, default] = bind("float", ["value", "default"], 1, args)?;
    let value = value.unwrap_or_default();
    let parsed = match type_of(&value) {
        PythonType::Undefined => return Err(fault("an undefined value has no float")),
        PythonType::Str => parse_float(value.as_str().unwrap_or_default()),
        PythonType::Float => f64::try_from(value).ok(),
        _ => whole(&value).map(|number| number as f64),
    };
    Ok(parsed.map_or_else(|| default.unwrap_or_else(|| Value::from(0.0)), Value::from))
}

fn round(args: &[Value]) -> Result<Value, Error> {
    let [value, precision, method] = bind("round", ["value", "precision", "method"], 1, args)?;
    let value = value.unwrap_or_default();
    let precision = precision.as_ref().map_or(Ok(0), integer)?;
    let method = method.unwrap_or_else(|| Value::from("common"));
    let method = method.as_str().filter(|method| ["common", "ceil", "floor"].contains(method));
    let method = method.ok_or_else(|| fault("method must be common, ceil or floor"))?;
    let number = match (whole(&value), type_of(&value)) {
        (Some(number), _) if method == "common" => return round_int(number, precision).map(int),
        (Some(number), _) => number as f64,
        (None, PythonType::Float) => f64::try_from(value)?,
        _ => return Err(fault(format!("type {} doesn't define __round__ method", type_name(&value)))),
    };
    if method == "common" {
        return Ok(Value::from(round_float(number, precision)));
    }
    let scale = 10f64.powi(i32::try_from(precision).unwrap_or(i32::MAX));
    let scaled = number * scale;
    if !scaled.is_finite() {
        return Err(fault("cannot convert float infinity to integer"));
    }
    let scaled = if method == "ceil" { scaled.ceil() } else { scaled.floor() };
    // An int has no negative zero.
    Ok(Value::from((scaled + 0.0) / scale))
}

fn round_int(number: i128, precision: i64) -> Result<i128, Error> {
    let Some(power) = u32::try_from(precision.saturating_neg()).ok().filter(|power| *power > 0) else {
        return Ok(number);
    };
    let Some(unit) = 10i128.checked_pow(power) else {
        return Ok(0);
    };
    let (below, rest) = (number.div_euclid(unit), number.rem_euclid(unit));
    let up = rest * 2 > unit || (rest * 2 == unit && below % 2 != 0);
    (below + i128::from(up)).checked_mul(unit).ok_or_else(too_large)
}

/// Python's `round`: to the nearest, ties to an even digit.
fn round_float(number: f64, precision: i64) -> f64 {
    if !number.is_finite() || precision > 330 {
        return number;
    }
    match usize::try_from(precision) {
        Ok(places) => format!("{number:.places$}").parse().unwrap_or(number),
        Err(_) if precision < -330 => 0.0_f64.copysign(number),
        Err(_) => {
            let unit = 10f64.powi(i32::try_from(precision.saturating_neg()).unwrap_or(i32::MAX));
            (number / unit).round_ties_even() * unit
        }
    }
}

fn file_size(args: &[Value]) -> Result<Value, Error> {
    let [value, binary] = bind("filesizeformat", ["value", "binary"], 1, args)?;
    let value = value.unwrap_or_default();
    let bytes = match type_of(&value) {
        PythonType::Str => parse_float(value.as_str().unwrap_or_default()),
        PythonType::Float => f64::try_from(value).ok(),
        _ => whole(&value).map(|number| number as f64),
    };
    let bytes = bytes.ok_or_else(|| fault("could not convert to float"))?;
    let (base, prefixes) = if flag(binary.as_ref()) {
        (1024.0, ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"])
    } else {
        (1000.0, ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"])
    };
    if bytes == 1.0 {
        return Ok(Value::from("1 Byte"));
    }
    if bytes < base {
        return Ok(Value::from(format!("{} Bytes", bytes.trunc())));
    }
    let (mut unit, mut last) = (base, "");
    for prefix in prefixes {
        (unit, last) = (unit * base, prefix);
        if bytes < unit {
            break;
        }
    }
    Ok(Value::from(format!("{:.1} {last}", base * bytes / unit)))
}
