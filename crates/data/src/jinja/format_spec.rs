//! Formats numbers and texts by Python's format specifications.

use minijinja::Error;

use super::print;
use super::values::{check_text, fault};

/// Maximum number of digits after the point of a float.
const MAX_PRECISION: usize = 4096;

/// A format specification: `[[fill]align][sign][#][0][width][grouping][.precision][type]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FormatSpec {
    pub(super) fill: char,
    pub(super) align: Option<char>,
    pub(super) sign: char,
    pub(super) alternate: bool,
    pub(super) zero: bool,
    pub(super) width: usize,
    pub(super) grouping: Option<char>,
    pub(super) precision: Option<usize>,
    pub(super) kind: Option<char>,
}

impl Default for FormatSpec {
    fn default() -> Self {
        FormatSpec {
            fill: ' ',
            align: None,
            sign: '-',
            alternate: false,
            zero: false,
            width: 0,
            grouping: None,
            precision: None,
            kind: None,
        }
    }
}

impl FormatSpec {
    /// Parses `text`.
    ///
    /// # Errors
    /// Fails if Python does not know it.
    pub(super) fn parse(text: &str) -> Result<Self, Error> {
        let characters: Vec<char> = text.chars().collect();
        let mut spec = FormatSpec::default();
        let (mut at, get) = (0, |at: usize| characters.get(at).copied());
        let is_align = |c: Option<char>| c.is_some_and(|c| "<>=^".contains(c));
        if is_align(get(1)) {
            (spec.fill, spec.align, at) = (characters[0], get(1), 2);
        } else if is_align(get(0)) {
            (spec.align, at) = (get(0), 1);
        }
        if let Some(sign) = get(at).filter(|c| "+- ".contains(*c)) {
            (spec.sign, at) = (sign, at + 1);
        }
        if get(at) == Some('#') {
            (spec.alternate, at) = (true, at + 1);
        }
        if get(at) == Some('0') {
            (spec.zero, at) = (true, at + 1);
        }
        let (width, next) = number(&characters, at)?;
        (spec.width, at) = (width.unwrap_or(0), next);
        if let Some(grouping) = get(at).filter(|c| ",_".contains(*c)) {
            (spec.grouping, at) = (Some(grouping), at + 1);
        }
        if get(at) == Some('.') {
            let (precision, next) = number(&characters, at + 1)?;
            (spec.precision, at) =
                (Some(precision.ok_or_else(|| fault("a format is missing its precision"))?), next);
        }
        if let Some(kind) = get(at) {
            (spec.kind, at) = (Some(kind), at + 1);
        }
        if at == characters.len() {
            Ok(spec)
        } else {
            Err(fault(format!("invalid format specifier '{text}'")))
        }
    }

    /// Formats a text.
    ///
    /// # Errors
    /// Fails if the specification is for numbers, or too wide.
    pub(super) fn text(&self, text: &str) -> Result<String, Error> {
        if !matches!(self.kind, None | Some('s')) || self.sign != '-' || self.align == Some('=') {
            return Err(fault("a format of numbers got a str"));
        }
        let cut: String = match self.precision {
            Some(precision) => text.chars().take(precision).collect(),
            None => text.to_owned(),
        };
        self.pad(&cut, if self.zero { '0' } else { self.fill }, '<')
    }

    /// Formats an int.
    ///
    /// # Errors
    /// Fails if the specification is for texts, or too wide.
    pub(super) fn int(&self, value: i128) -> Result<String, Error> {
        let size = value.unsigned_abs();
        let (prefix, digits) = match self.kind {
            None | Some('d' | 'n') if self.precision.is_none() => ("", size.to_string()),
            Some('x') => ("0x", format!("{size:x}")),
            Some('X') => ("0X", format!("{size:X}")),
            Some('o') => ("0o", format!("{size:o}")),
            Some('b') => ("0b", format!("{size:b}")),
            Some('c') => {
                let c = u32::try_from(value).ok().and_then(char::from_u32);
                return self.pad(&c.ok_or_else(|| fault("%c arg not in range"))?.to_string(), self.fill, '<');
            }
            Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%') => return self.float(value as f64),
            _ => return Err(fault("an int has no such format")),
        };
        let prefix = if self.alternate { prefix } else { "" };
        let group = if matches!(self.kind, None | Some('d' | 'n')) { 3 } else { 4 };
        self.signed(value < 0, prefix, &digits, "", group)
    }

    /// Formats a float.
    ///
    /// # Errors
    /// Fails if the specification is not for floats, or too wide.
    pub(super) fn float(&self, value: f64) -> Result<String, Error> {
        if self.precision.is_some_and(|precision| precision > MAX_PRECISION) {
            return Err(fault(format!("a precision is too large; accepted: up to {MAX_PRECISION}")));
        }
        let size = value.abs();
        let precision = self.precision.unwrap_or(6);
        let digits = match self.kind {
            _ if !value.is_finite() => print::float(size),
            Some('f' | 'F') => format!("{size:.precision$}"),
            Some('%') => format!("{:.precision$}%", size * 100.0),
            Some('e' | 'E') => exponent(size, precision),
            Some('g' | 'G' | 'n') => general(size, precision, self.alternate, false),
            None => match self.precision {
                None => print::float(size),
                Some(precision) => general(size, precision, self.alternate, true),
            },
            _ => return Err(fault("a float has no such format")),
        };
        let upper = matches!(self.kind, Some('E' | 'F' | 'G'));
        let digits = if upper { digits.to_uppercase() } else { digits };
        let whole = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        let negative = value.is_sign_negative() && !value.is_nan();
        self.signed(negative, "", &digits[..whole], &digits[whole..], 3)
    }

    /// Formats a number with its sign, groups of digits and padding.
    fn signed(
        &self,
        negative: bool,
        prefix: &str,
        whole: &str,
        rest: &str,
        group: usize,
    ) -> Result<String, Error> {
        check_text(Some(self.width))?;
        let sign = match (negative, self.sign) {
            (true, _) => "-",
            (false, '+') => "+",
            (false, ' ') => " ",
            _ => "",
        };
        let zeros = (self.zero && self.align.is_none()) || (self.fill == '0' && self.align == Some('='));
        let mut digits = whole.to_owned();
        if zeros {
            // The separators between groups of zeros count for the width, too.
            let width = self.width.saturating_sub(sign.len() + prefix.len() + rest.chars().count());
            let (mut missing, length) = (0, digits.len());
            while grouped_length(length + missing, self.grouping, group) < width {
                missing += 1;
            }
            digits.insert_str(0, &"0".repeat(missing));
        }
        let number = match self.grouping {
            Some(separator) => grouped(&digits, separator, group),
            None => digits,
        };
        if self.align == Some('=') && !zeros {
            let length = sign.len() + prefix.len() + number.len() + rest.chars().count();
            let fill: String = std::iter::repeat_n(self.fill, self.width.saturating_sub(length)).collect();
            return Ok(format!("{sign}{prefix}{fill}{number}{rest}"));
        }
        self.pad(&format!("{sign}{prefix}{number}{rest}"), self.fill, '>')
    }

    fn pad(&self, text: &str, fill: char, align: char) -> Result<String, Error> {
        check_text(self.width.checked_mul(fill.len_utf8()))?;
        let missing = self.width.saturating_sub(text.chars().count());
        let left = match self.align.unwrap_or(align) {
            '<' => 0,
            '^' => missing / 2,
            _ => missing,
        };
        let side = |count| std::iter::repeat_n(fill, count).collect::<String>();
        Ok(format!("{}{text}{}", side(left), side(missing - left)))
    }
}

/// Parses the number that begins at `at`; returns it and the index after it.
pub(super) fn number(characters: &[char], at: usize) -> Result<(Option<usize>, usize), Error> {
    let mut end = at;
    let mut number: Option<usize> = None;
    while let Some(digit) = characters.get(end).and_then(|c| c.to_digit(10)) {
        let sum = number.unwrap_or(0).checked_mul(10).and_then(|tens| tens.checked_add(digit as usize));
        number = Some(sum.ok_or_else(|| fault("a format has too many decimal digits"))?);
        end += 1;
    }
    Ok((number, end))
}

fn grouped_length(digits: usize, separator: Option<char>, group: usize) -> usize {
    digits + separator.map_or(0, |_| digits.saturating_sub(1) / group)
}

fn grouped(digits: &str, separator: char, group: usize) -> String {
    let mut out = String::new();
    for (index, c) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(group) {
            out.push(separator);
        }
        out.push(c);
    }
    out
}

/// `%e`: an exponent of two digits or more.
fn exponent(size: f64, precision: usize) -> String {
    let text = format!("{size:.precision$e}");
    let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, power) = power.strip_prefix('-').map_or(('+', power), |power| ('-', power));
    format!("{digits}e{sign}{power:0>2}")
}

/// `%g`; with `point`, as `format` prints a float of a given precision, which has a digit after its
/// point.
fn general(size: f64, precision: usize, alternate: bool, point: bool) -> String {
    let precision = precision.max(1);
    let scientific = exponent(size, precision - 1);
    let power: i64 = scientific.split_once('e').and_then(|(_, power)| power.parse().ok()).unwrap_or(0);
    let most = i64::try_from(precision).unwrap_or(i64::MAX) - i64::from(point);
    if power < -4 || power >= most {
        let (digits, power) = scientific.split_once('e').unwrap_or((&scientific, "+00"));
        return format!("{}e{power}", if alternate { digits } else { trimmed(digits) });
    }
    let places = usize::try_from(i64::try_from(precision).unwrap_or(i64::MAX) - 1 - power).unwrap_or(0);
    let fixed = format!("{size:.places$}");
    let text = if alternate { &fixed } else { trimmed(&fixed) };
    if point && !text.contains('.') { format!("{text}.0") } else { text.to_owned() }
}

fn trimmed(digits: &str) -> &str {
    if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits }
}

/// The index of the `close` that matches an `open` before `characters`.
pub(super) fn closing(
    characters: impl Iterator<Item = (usize, char)>,
    open: char,
    close: char,
) -> Option<usize> {
    let mut depth = 1;
    for (at, c) in characters {
        depth += i32::from(c == open) - i32::from(c == close);
        if depth == 0 {
            return Some(at);
        }
    }
    None
}
