//! The methods of Python's `str`.

use minijinja::Error;
use minijinja::value::{Tuple, Value};

use super::characters as chars;
use super::objects::dict_pairs;
use super::print::is_printable;
use super::str_format::FormatArguments;
use super::values::{
    PythonType, bind, check_text, fault, flag, given, integer, items, split_arguments, text, type_name,
    type_of, whole, window,
};

/// Calls the method `name` of a text.
///
/// # Errors
/// Fails like Python's method.
pub(super) fn call(s: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    match name {
        "split" | "rsplit" => split(s, name, args),
        "splitlines" => {
            let [keep] = bind(name, ["keepends"], 0, args)?;
            Ok(chars::lines(s, flag(keep.as_ref())).into_iter().map(Value::from).collect())
        }
        "partition" | "rpartition" => partition(s, name, args),
        "strip" | "lstrip" | "rstrip" => strip(s, name, args),
        "removeprefix" | "removesuffix" => {
            let [part] = bind(name, ["part"], 1, args)?;
            let part = part.unwrap_or_default();
            let part = text(&part)?;
            let rest = if name == "removeprefix" { s.strip_prefix(part) } else { s.strip_suffix(part) };
            Ok(Value::from(rest.unwrap_or(s)))
        }
        "startswith" | "endswith" => begins_or_ends(s, name, args),
        "find" | "rfind" | "index" | "rindex" | "count" => search(s, name, args),
        "replace" => {
            let [old, new, count] = bind(name, ["old", "new", "count"], 2, args)?;
            let (old, new) = (old.unwrap_or_default(), new.unwrap_or_default());
            let count = count.as_ref().map_or(Ok(-1), integer)?;
            replace(s, text(&old)?, text(&new)?, count).map(Value::from)
        }
        "center" | "ljust" | "rjust" | "zfill" => pad(s, name, args),
        "expandtabs" => {
            let [size] = bind(name, ["tabsize"], 0, args)?;
            expand_tabs(s, size.as_ref().map_or(Ok(8), integer)?).map(Value::from)
        }
        "join" => {
            let [list] = bind(name, ["iterable"], 1, args)?;
            join(s, &items(&list.unwrap_or_default())?).map(Value::from)
        }
        "format" => {
            let (positional, keywords) = split_arguments(args);
            let keyword =
                |name: &str| keywords.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
            FormatArguments { positional, keyword: &keyword }.format(s).map(Value::from)
        }
        "format_map" => {
            let [map] = bind(name, ["mapping"], 1, args)?;
            let map = map.unwrap_or_default();
            let keyword =
                |name: &str| map.as_object().and_then(|object| object.get_value(&Value::from(name)));
            FormatArguments { positional: &[], keyword: &keyword }.format(s).map(Value::from)
        }
        "translate" => {
            let [table] = bind(name, ["table"], 1, args)?;
            translate(s, &table.unwrap_or_default()).map(Value::from)
        }
        "encode" => Err(fault("encode is not available: a template prints text")),
        _ => {
            let [] = bind(name, [], 0, args)?;
            Ok(plain(s, name))
        }
    }
}

/// The methods without arguments.
fn plain(s: &str, name: &str) -> Value {
    let all = |is: fn(char) -> bool| Value::from(!s.is_empty() && s.chars().all(is));
    let has = |is: fn(char) -> bool| s.chars().any(is);
    match name {
        "upper" => Value::from(s.to_uppercase()),
        "lower" => Value::from(s.to_lowercase()),
        "title" => Value::from(chars::title(s)),
        "capitalize" => Value::from(chars::capitalize(s)),
        "casefold" => Value::from(
            s.chars().flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect::<String>(),
        ),
        "swapcase" => {
            let mut out = String::with_capacity(s.len());
            for c in s.chars() {
                if c.is_uppercase() {
                    out.extend(c.to_lowercase());
                } else if c.is_lowercase() {
                    out.extend(c.to_uppercase());
                } else {
                    out.push(c);
                }
            }
            Value::from(out)
        }
        "isalnum" => all(chars::is_alnum),
        "isalpha" => all(chars::is_alpha),
        "isdecimal" => all(chars::is_decimal),
        "isdigit" => all(chars::is_digit),
        "isnumeric" => all(chars::is_numeric),
        "isspace" => all(chars::is_space),
        "isascii" => Value::from(s.is_ascii()),
        "isprintable" => Value::from(s.chars().all(is_printable)),
        "islower" => Value::from(has(char::is_lowercase) && !has(|c| c.is_uppercase() || chars::is_title(c))),
        "isupper" => Value::from(has(char::is_uppercase) && !has(|c| c.is_lowercase() || chars::is_title(c))),
        "istitle" => Value::from(is_title(s)),
        _ => {
            let begins = s.chars().next().is_some_and(|c| c == '_' || chars::is_alpha(c));
            Value::from(begins && s.chars().all(|c| c == '_' || chars::is_alnum(c)))
        }
    }
}

fn is_title(s: &str) -> bool {
    let (mut within, mut any) = (false, false);
    for c in s.chars() {
        let (upper, lower) = (c.is_uppercase() || chars::is_title(c), c.is_lowercase());
        if (upper && within) || (lower && !within) {
            return false;
        }
        (within, any) = (upper || lower, any || upper || lower);
    }
    any
}

fn split(s: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let [separator, most] = bind(name, ["sep", "maxsplit"], 0, args)?;
    let most = most.as_ref().map_or(Ok(-1), integer)?;
    let most = usize::try_from(most).unwrap_or(usize::MAX - 1);
    let from_end = name == "rsplit";
    let parts: Vec<&str> = match given(separator.as_ref()) {
        Some(separator) => {
            let separator = text(separator)?;
            if separator.is_empty() {
                return Err(fault("empty separator"));
            }
            if from_end {
                s.rsplitn(most + 1, separator).collect()
            } else {
                s.splitn(most + 1, separator).collect()
            }
        }
        None => split_space(s, most, from_end),
    };
    let parts = parts.into_iter().map(Value::from);
    Ok(if from_end { parts.rev().collect() } else { parts.collect() })
}

/// Splits a text at spaces; from the last word to the first if `from_end`.
fn split_space(s: &str, most: usize, from_end: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest =
        if from_end { s.trim_end_matches(chars::is_space) } else { s.trim_start_matches(chars::is_space) };
    while !rest.is_empty() {
        let at = if from_end { rest.rfind(chars::is_space) } else { rest.find(chars::is_space) };
        let Some(at) = at.filter(|_| parts.len() < most) else {
            // The last part keeps the space at its other end.
            parts.push(rest);
            break;
        };
        let space = rest[at..].chars().next().map_or(0, char::len_utf8);
        let (part, more) =
            if from_end { (&rest[at + space..], &rest[..at]) } else { (&rest[..at], &rest[at..]) };
        parts.push(part);
        rest = if from_end {
            more.trim_end_matches(chars::is_space)
        } else {
            more.trim_start_matches(chars::is_space)
        };
    }
    parts
}

fn partition(s: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let [separator] = bind(name, ["sep"], 1, args)?;
    let separator = separator.unwrap_or_default();
    let separator = text(&separator)?;
    if separator.is_empty() {
        return Err(fault("empty separator"));
    }
    let (split, missing) = match name {
        "partition" => (s.split_once(separator), [s, "", ""]),
        _ => (s.rsplit_once(separator), ["", "", s]),
    };
    let parts = split.map_or(missing, |(before, after)| [before, separator, after]);
    Ok(Tuple::from(parts.map(Value::from)).into())
}

fn strip(s: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let [characters] = bind(name, ["chars"], 0, args)?;
    let set: Option<Vec<char>> = match given(characters.as_ref()) {
        Some(characters) => Some(text(characters)?.chars().collect()),
        None => None,
    };
    let is = |c: char| set.as_ref().map_or_else(|| chars::is_space(c), |set| set.contains(&c));
    Ok(Value::from(match name {
        "strip" => s.trim_matches(is),
        "lstrip" => s.trim_start_matches(is),
        _ => s.trim_end_matches(is),
    }))
}

/// The part of `s` between two character indices, and the first of them; `None` if it begins after
/// its end.
fn part<'a>(
    s: &'a str,
    start: Option<&Value>,
    stop: Option<&Value>,
) -> Result<Option<(&'a str, usize)>, Error> {
    if given(start).is_none() && given(stop).is_none() {
        return Ok(Some((s, 0)));
    }
    let length = s.chars().count();
    if given(start)
        .is_some_and(|start| integer(start).is_ok_and(|at| usize::try_from(at).is_ok_and(|at| at > length)))
    {
        return Ok(None);
    }
    let (first, last) = window(length, start, stop)?;
    let byte = |index: usize| s.char_indices().nth(index).map_or(s.len(), |(at, _)| at);
    Ok((first <= last).then(|| (&s[byte(first)..byte(last)], first)))
}

fn begins_or_ends(s: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let [wanted, start, stop] = bind(name, ["prefix", "start", "end"], 1, args)?;
    let wanted = wanted.unwrap_or_default();
    let parts = match type_of(&wanted) {
        PythonType::Str => vec![wanted],
        PythonType::Tuple => items(&wanted)?,
        _ => {
            let why = format!("{name} first arg must be str or a tuple of str, not {}", type_name(&wanted));
            return Err(fault(why));
        }
    };
    let within = part(s, start.as_ref(), stop.as_ref())?;
    for wanted in &parts {
        let wanted = text(wanted)?;
        let is = |s: &str| if name == "startswith" { s.starts_with(wanted) } else { s.ends_with(wanted) };
        if within.is_some_and(|(s, _)| is(s)) {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

fn search(s: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let [wanted, start, stop] = bind(name, ["sub", "start", "end"], 1, args)?;
    let wanted = wanted.unwrap_or_default();
    let wanted = text(&wanted)?;
    let within = part(s, start.as_ref(), stop.as_ref())?;
    if name == "count" {
        let count = within.map_or(0, |(s, _)| {
            if wanted.is_empty() { s.chars().count() + 1 } else { s.matches(wanted).count() }
        });
        return Ok(Value::from(count));
    }
    let index = within.and_then(|(s, first)| {
        let at = if name.starts_with('r') { s.rfind(wanted) } else { s.find(wanted) };
        at.map(|at| first + s[..at].chars().count())
    });
    match index {
        Some(index) => Ok(Value::from(index)),
        None if name.ends_with("index") => Err(fault("substring not found")),
        None => Ok(Value::from(-1)),
    }
}

/// `str.replace`, of the first `count` matches if that is not negative.
///
/// # Errors
/// Fails if the text grows too large.
pub(super) fn replace(s: &str, old: &str, new: &str, count: i64) -> Result<String, Error> {
    let most = usize::try_from(count).unwrap_or(usize::MAX);
    let matches = if old.is_empty() { s.chars().count() + 1 } else { s.matches(old).count() };
    check_text(matches.min(most).checked_mul(new.len()).and_then(|added| added.checked_add(s.len())))?;
    Ok(s.replacen(old, new, most))
}

fn pad(s: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let [width, fill] = bind(name, ["width", "fillchar"], 1, args)?;
    let fill = fill.unwrap_or_else(|| Value::from(" "));
    let mut fill = text(&fill)?.chars();
    let (Some(fill), None) = (fill.next(), fill.next()) else {
        return Err(fault("The fill character must be exactly one character long"));
    };
    let width = usize::try_from(integer(&width.unwrap_or_default())?).unwrap_or(0);
    check_text(width.checked_mul(fill.len_utf8()))?;
    let missing = width.saturating_sub(s.chars().count());
    let side = |fill: char, count: usize| std::iter::repeat_n(fill, count).collect::<String>();
    Ok(Value::from(match name {
        "ljust" => format!("{s}{}", side(fill, missing)),
        "rjust" => format!("{}{s}", side(fill, missing)),
        "zfill" => {
            let (sign, digits) = s.split_at(usize::from(s.starts_with(['+', '-'])));
            format!("{sign}{}{digits}", side('0', missing))
        }
        _ => {
            let left = missing / 2 + (missing & width & 1);
            format!("{}{s}{}", side(fill, left), side(fill, missing - left))
        }
    }))
}

fn expand_tabs(s: &str, size: i64) -> Result<String, Error> {
    let size = usize::try_from(size).unwrap_or(0);
    let (mut out, mut column) = (String::new(), 0);
    for c in s.chars() {
        match c {
            '\t' if size > 0 => {
                let spaces = size - column % size;
                check_text(out.len().checked_add(spaces))?;
                out.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            '\t' => {}
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    Ok(out)
}

/// `str.join`; only for texts.
fn join(separator: &str, parts: &[Value]) -> Result<String, Error> {
    let mut out = String::new();
    for (index, part) in parts.iter().enumerate() {
        let part = part.as_str().ok_or_else(|| {
            fault(format!("sequence item {index}: expected str instance, {} found", type_name(part)))
        })?;
        check_text(Some(out.len() + separator.len() + part.len()))?;
        out.push_str(if index > 0 { separator } else { "" });
        out.push_str(part);
    }
    Ok(out)
}

fn translate(s: &str, table: &Value) -> Result<String, Error> {
    let pairs = dict_pairs(table);
    let mut out = String::new();
    for c in s.chars() {
        let pair = pairs.iter().find(|(key, _)| whole(key) == Some(i128::from(u32::from(c))));
        match pair.map(|(_, value)| value) {
            None => out.push(c),
            Some(value) if value.is_none() => {}
            Some(value) => match (value.as_str(), whole(value)) {
                (Some(text), _) => out.push_str(text),
                (_, Some(code)) => out.extend(u32::try_from(code).ok().and_then(char::from_u32)),
                _ => return Err(fault("character mapping must return integer, None or str")),
            },
        }
        check_text(Some(out.len()))?;
    }
    Ok(out)
}
