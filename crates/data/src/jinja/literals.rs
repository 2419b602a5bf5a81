//! Texts in a template with escapes that minijinja does not know.

/// Returns `literal`, quotes included, with its escapes resolved as in Python. `None` if minijinja
/// reads it alike, or Python refuses it.
pub(super) fn resolve(literal: &str) -> Option<String> {
    let quote = literal.chars().next()?;
    let inner = literal.get(1..literal.len().checked_sub(1)?)?;
    let plain = |(at, _): (usize, &str)| {
        matches!(inner.as_bytes().get(at + 1), Some(b'n' | b't' | b'r' | b'\\' | b'\'' | b'"'))
    };
    if inner.match_indices('\\').all(plain) {
        return None;
    }
    let mut out = String::from(quote);
    let mut rest = inner;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let (text, length) = escape(rest)?;
        for c in text.chars() {
            match c {
                '\\' => out.push_str("\\\\"),
                c if c == quote => out.extend(['\\', c]),
                c => out.push(c),
            }
        }
        rest = &rest[length..];
    }
    out.push_str(rest);
    out.push(quote);
    Some(out)
}

/// The text that an escape stands for, with its length; `rest` follows the backslash.
fn escape(rest: &str) -> Option<(String, usize)> {
    let first = rest.chars().next()?;
    let code = |digits: usize| {
        let code = u32::from_str_radix(rest.get(1..=digits)?, 16).ok()?;
        Some((char::from_u32(code)?.to_string(), digits + 1))
    };
    let simple = match first {
        '\n' => Some(""),
        '\\' => Some("\\"),
        '\'' => Some("'"),
        '"' => Some("\""),
        'a' => Some("\u{7}"),
        'b' => Some("\u{8}"),
        'f' => Some("\u{c}"),
        'n' => Some("\n"),
        'r' => Some("\r"),
        't' => Some("\t"),
        'v' => Some("\u{b}"),
        _ => None,
    };
    if let Some(text) = simple {
        return Some((text.to_owned(), 1));
    }
    match first {
        'x' => code(2),
        'u' => code(4),
        'U' => code(8),
        'N' => None,
        '0'..='7' => {
            let length = rest.bytes().take(3).take_while(|b| (b'0'..=b'7').contains(b)).count();
            let code = u32::from_str_radix(&rest[..length], 8).ok()?;
            Some((char::from_u32(code)?.to_string(), length))
        }
        c => Some((format!("\\{c}"), c.len_utf8())),
    }
}
