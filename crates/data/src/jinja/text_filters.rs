//! Jinja's filters of texts.

use std::sync::OnceLock;

use minijinja::Error;
use minijinja::value::Value;
use regex::Regex;

use super::operators::text_of;
use super::print::{repr, string};
use super::values::{
    PythonType, bind, check_text, fault, flag, given, integer, split_arguments, text, type_name, type_of,
};
use super::{Builtin, characters, printf, str_methods, wrapping};

/// Filters by name.
pub(super) const FILTERS: [(&str, Builtin); 15] = [
    ("capitalize", |_, args| method(args, "capitalize")),
    ("upper", |_, args| method(args, "upper")),
    ("lower", |_, args| method(args, "lower")),
    ("title", |_, args| title(args)),
    ("trim", |_, args| trim(args)),
    ("string", |_, args| as_string(args)),
    ("center", |_, args| center(args)),
    ("replace", |_, args| replace(args)),
    ("format", |_, args| format(args)),
    ("indent", |_, args| indent(args)),
    ("truncate", |_, args| truncate(args)),
    ("wordwrap", |_, args| wrapping::wordwrap(args)),
    ("wordcount", |_, args| wordcount(args)),
    ("pprint", |_, args| pprint(args)),
    ("urlize", |_, _| Err(fault("the filter urlize is not available"))),
];

/// The text of a filter's value, its first argument.
fn subject(args: &[Value]) -> Result<String, Error> {
    string(args.first().unwrap_or(&Value::UNDEFINED))
}

/// Calls the method `name` of the value's text.
fn method(args: &[Value], name: &str) -> Result<Value, Error> {
    str_methods::call(&subject(args)?, name, args.get(1..).unwrap_or_default())
}

fn as_string(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("string", ["object"], 1, args)?;
    let value = value.unwrap_or_default();
    text_of(&value)
}

fn title(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("title", ["s"], 1, args)?;
    let (mut out, mut begins) = (String::new(), true);
    for c in string(&value.unwrap_or_default())?.chars() {
        let separates = matches!(c, '-' | '(' | '{' | '[' | '<') || characters::is_space(c);
        if begins {
            out.extend(c.to_uppercase())
        } else {
            out.extend(c.to_lowercase())
        }
        begins = separates;
    }
    Ok(Value::from(out))
}

fn trim(args: &[Value]) -> Result<Value, Error> {
    let [value, chars] = bind("trim", ["value", "chars"], 1, args)?;
    let chars: Vec<Value> = chars.into_iter().collect();
    str_methods::call(&string(&value.unwrap_or_default())?, "strip", &chars)
}

fn center(args: &[Value]) -> Result<Value, Error> {
    let [value, width] = bind("center", ["value", "width"], 1, args)?;
    let width = width.unwrap_or_else(|| Value::from(80));
    str_methods::call(&string(&value.unwrap_or_default())?, "center", &[width])
}

fn replace(args: &[Value]) -> Result<Value, Error> {
    let [value, old, new, count] = bind("replace", ["s", "old", "new", "count"], 3, args)?;
    let [value, old, new] = [value, old, new].map(|part| string(&part.unwrap_or_default()));
    let count = given(count.as_ref()).map_or(Ok(-1), integer)?;
    str_methods::replace(&value?, &old?, &new?, count).map(Value::from)
}

fn format(args: &[Value]) -> Result<Value, Error> {
    let (positional, keywords) = split_arguments(args);
    let values = positional.get(1..).unwrap_or_default();
    let values = match (values.is_empty(), keywords.is_empty()) {
        (false, false) => {
            return Err(fault("can't handle positional and keyword arguments at the same time"));
        }
        (_, false) => Value::from_pairs(keywords),
        _ => Value::from(minijinja::value::Tuple::from(values)),
    };
    printf::format(&subject(positional)?, &values).map(Value::from)
}

fn indent(args: &[Value]) -> Result<Value, Error> {
    let [value, width, first, blank] = bind("indent", ["s", "width", "first", "blank"], 1, args)?;
    let value = value.unwrap_or_default();
    let (first, blank) = (flag(first.as_ref()), flag(blank.as_ref()));
    let indention = match width {
        None => "    ".to_owned(),
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => {
                let width = usize::try_from(integer(&width)?).unwrap_or(0);
                check_text(Some(width))?;
                " ".repeat(width)
            }
        },
    };
    // Jinja adds a line end before it splits the lines.
    let with_end = format!("{}\n", text(&value)?);
    let lines = characters::lines(&with_end, false);
    check_text(indention.len().checked_mul(lines.len()).and_then(|added| added.checked_add(with_end.len())))?;
    let mut out = String::new();
    for (index, line) in lines.into_iter().enumerate() {
        out.push_str(if index > 0 { "\n" } else { "" });
        if (index == 0 && first) || (index > 0 && (blank || !line.is_empty())) {
            out.push_str(&indention);
        }
        out.push_str(line);
    }
    Ok(Value::from(out))
}

fn truncate(args: &[Value]) -> Result<Value, Error> {
    let parameters = ["s", "length", "killwords", "end", "leeway"];
    let [value, length, kill, end, leeway] = bind("truncate", parameters, 1, args)?;
    let value = value.unwrap_or_default();
    let end = end.unwrap_or_else(|| Value::from("..."));
    let end = text(&end)?;
    let size = |argument: Option<&Value>, default: usize| match argument {
        None => Ok(default),
        Some(argument) => {
            usize::try_from(integer(argument)?).map_err(|_| fault("truncate takes no negative length"))
        }
    };
    let (length, leeway) = (size(length.as_ref(), 255)?, size(given(leeway.as_ref()), 5)?);
    let limit = length.checked_sub(end.chars().count());
    let limit =
        limit.ok_or_else(|| fault(format!("expected length >= {}, got {length}", end.chars().count())))?;
    let whole = match type_of(&value) {
        PythonType::Undefined => "",
        _ => text(&value)?,
    };
    if whole.chars().count() <= length.saturating_add(leeway) {
        return Ok(value);
    }
    let cut: String = whole.chars().take(limit).collect();
    let cut = if flag(kill.as_ref()) {
        cut.as_str()
    } else {
        cut.rsplit_once(' ').map_or(cut.as_str(), |(words, _)| words)
    };
    Ok(Value::from(format!("{cut}{end}")))
}

fn wordcount(args: &[Value]) -> Result<Value, Error> {
    static WORD: OnceLock<Option<Regex>> = OnceLock::new();
    let [value] = bind("wordcount", ["s"], 1, args)?;
    let text = string(&value.unwrap_or_default())?;
    let word = WORD.get_or_init(|| Regex::new(r"[\p{L}\p{N}_]+").ok());
    Ok(Value::from(word.as_ref().map_or(0, |word| word.find_iter(&text).count())))
}

/// Python's `pprint.pformat`, for values that fit on a line.
fn pprint(args: &[Value]) -> Result<Value, Error> {
    const LINE: usize = 80;
    let [value] = bind("pprint", ["value"], 1, args)?;
    let value = value.unwrap_or_default();
    let shown = repr(&super::sorting::with_sorted_keys(&value, 0)?)?;
    if shown.chars().count() <= LINE {
        Ok(Value::from(shown))
    } else {
        Err(fault(format!("pprint prints up to {LINE} characters, and a {} has more", type_name(&value))))
    }
}
