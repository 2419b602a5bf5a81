//! Jinja's filters of lists and dicts.

use minijinja::value::Value;
use minijinja::{Error, State};

use super::Builtin;
use super::attributes::{AttributePath, attribute};
use super::method_names::method_named;
use super::objects::{Generated, pair_tuples};
use super::print::string;
use super::sorting;
use super::values::{
    PythonType, bind, check_items, check_text, fault, flag, given, int, integer, items, join_arguments,
    length, split_arguments, type_name, type_of, whole,
};

/// Filters by name.
pub(super) const FILTERS: [(&str, Builtin); 26] = [
    ("attr", |_, args| attr(args)),
    ("batch", |_, args| batch(args)),
    ("count", |_, args| count(args)),
    ("d", |_, args| default(args)),
    ("default", |_, args| default(args)),
    ("dictsort", |_, args| sorting::dictsort(args)),
    ("first", |_, args| first(args)),
    ("groupby", |_, args| sorting::groupby(args)),
    ("items", |_, args| pairs(args)),
    ("join", |_, args| join(args)),
    ("last", |_, args| last(args)),
    ("length", |_, args| count(args)),
    ("list", |_, args| list(args)),
    ("map", map),
    ("max", |_, args| sorting::extreme(args, "max")),
    ("min", |_, args| sorting::extreme(args, "min")),
    ("reject", |state, args| select(state, args, false, false)),
    ("rejectattr", |state, args| select(state, args, true, false)),
    ("reverse", |_, args| reverse(args)),
    ("select", |state, args| select(state, args, false, true)),
    ("selectattr", |state, args| select(state, args, true, true)),
    ("slice", |_, args| slice(args)),
    ("sort", |_, args| sorting::sort(args)),
    ("sum", |_, args| sum(args)),
    ("unique", |_, args| sorting::unique(args)),
    ("random", |_, _| Err(fault("the filter random is not available: each run prints the same"))),
];

fn attr(args: &[Value]) -> Result<Value, Error> {
    let [value, name] = bind("attr", ["obj", "name"], 2, args)?;
    let (value, name) = (value.unwrap_or_default(), name.unwrap_or_default());
    let name = super::values::text(&name)?;
    match type_of(&value) {
        // Items are no attributes.
        PythonType::Dict | PythonType::List | PythonType::Str => match method_named(type_of(&value), name) {
            Some(_) => attribute(&value, name),
            None => Ok(Value::UNDEFINED),
        },
        _ => attribute(&value, name),
    }
}

fn batch(args: &[Value]) -> Result<Value, Error> {
    let [value, size, fill] = bind("batch", ["value", "linecount", "fill_with"], 2, args)?;
    let size = usize::try_from(integer(&size.unwrap_or_default())?).unwrap_or(0);
    let all = items(&value.unwrap_or_default())?;
    let mut batches: Vec<Vec<Value>> = all.chunks(size.max(1)).map(<[Value]>::to_vec).collect();
    if let (Some(fill), Some(last)) = (given(fill.as_ref()), batches.last_mut()) {
        check_items(Some(size))?;
        last.resize(size.max(last.len()), fill.clone());
    }
    Ok(Generated::value(batches.into_iter().map(Value::from).collect()))
}

fn slice(args: &[Value]) -> Result<Value, Error> {
    let [value, slices, fill] = bind("slice", ["value", "slices", "fill_with"], 2, args)?;
    let slices = usize::try_from(integer(&slices.unwrap_or_default())?).unwrap_or(0);
    check_items(Some(slices))?;
    if slices == 0 {
        return Err(fault("integer division or modulo by zero"));
    }
    let all = items(&value.unwrap_or_default())?;
    let (size, longer) = (all.len() / slices, all.len() % slices);
    let mut rest = all.into_iter();
    let parts = (0..slices).map(|index| {
        let mut part: Vec<Value> = rest.by_ref().take(size + usize::from(index < longer)).collect();
        part.extend(given(fill.as_ref()).filter(|_| index >= longer).cloned());
        Value::from(part)
    });
    Ok(Generated::value(parts.collect()))
}

fn count(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("length", ["obj"], 1, args)?;
    length(&value.unwrap_or_default()).map(Value::from)
}

fn default(args: &[Value]) -> Result<Value, Error> {
    let [value, default, boolean] = bind("default", ["value", "default_value", "boolean"], 1, args)?;
    let value = value.unwrap_or_default();
    if value.is_undefined() || (flag(boolean.as_ref()) && !value.is_true()) {
        Ok(default.unwrap_or_else(|| Value::from("")))
    } else {
        Ok(value)
    }
}

fn first(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("first", ["seq"], 1, args)?;
    let value = value.unwrap_or_default();
    if super::values::is_iterable(&value) {
        Ok(value.try_iter()?.next().unwrap_or_default())
    } else {
        Err(fault(format!("'{}' object is not iterable", type_name(&value))))
    }
}

fn last(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("last", ["seq"], 1, args)?;
    let value = value.unwrap_or_default();
    match type_of(&value) {
        PythonType::Generator => Err(fault("'generator' object is not reversible")),
        _ => Ok(items(&value)?.pop().unwrap_or_default()),
    }
}

fn list(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("list", ["value"], 1, args)?;
    Ok(items(&value.unwrap_or_default())?.into())
}

fn reverse(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("reverse", ["value"], 1, args)?;
    let value = value.unwrap_or_default();
    if let Some(text) = value.as_str() {
        return Ok(Value::from(text.chars().rev().collect::<String>()));
    }
    let mut items = items(&value).map_err(|_| fault("argument must be iterable"))?;
    items.reverse();
    match type_of(&value) {
        PythonType::Generator => Ok(items.into()),
        _ => Ok(Generated::value(items)),
    }
}

fn pairs(args: &[Value]) -> Result<Value, Error> {
    let [value] = bind("items", ["value"], 1, args)?;
    let value = value.unwrap_or_default();
    match type_of(&value) {
        PythonType::Undefined => Ok(Generated::value(Vec::new())),
        PythonType::Dict => Ok(Generated::value(pair_tuples(&value))),
        _ => Err(fault("Can only get item pairs from a mapping.")),
    }
}

fn join(args: &[Value]) -> Result<Value, Error> {
    let [value, separator, attribute] = bind("join", ["value", "d", "attribute"], 1, args)?;
    let path = AttributePath::of(attribute.as_ref());
    let separator = separator.map_or(Ok(String::new()), |separator| string(&separator))?;
    let mut out = String::new();
    for (index, item) in items(&value.unwrap_or_default())?.iter().enumerate() {
        let item = path.get(item, None)?;
        out.push_str(if index > 0 { &separator } else { "" });
        match item.as_str() {
            Some(text) => out.push_str(text),
            None => out.push_str(&string(&item)?),
        }
        check_text(Some(out.len()))?;
    }
    Ok(Value::from(out))
}

fn sum(args: &[Value]) -> Result<Value, Error> {
    let [value, attribute, start] = bind("sum", ["iterable", "attribute", "start"], 1, args)?;
    let path = AttributePath::of(attribute.as_ref());
    let mut sum = start.unwrap_or_else(|| Value::from(0));
    if sum.as_str().is_some() {
        return Err(fault("sum() can't sum strings"));
    }
    for item in items(&value.unwrap_or_default())? {
        sum = add(&sum, &path.get(&item, None)?)?;
    }
    Ok(sum)
}

fn add(left: &Value, right: &Value) -> Result<Value, Error> {
    use PythonType as T;
    let unsupported = || {
        fault(format!("unsupported operand type(s) for +: '{}' and '{}'", type_name(left), type_name(right)))
    };
    if let (Some(left), Some(right)) = (whole(left), whole(right)) {
        return left
            .checked_add(right)
            .map(int)
            .ok_or_else(|| fault("an int is too large; accepted: 128 bits"));
    }
    let float = |value: &Value| match type_of(value) {
        T::Float => f64::try_from(value.clone()).ok(),
        _ => whole(value).map(|whole| whole as f64),
    };
    match (type_of(left), type_of(right)) {
        (T::List, T::List) => {
            let mut both = items(left)?;
            both.extend(items(right)?);
            check_items(Some(both.len()))?;
            Ok(both.into())
        }
        _ => match (float(left), float(right)) {
            (Some(left), Some(right)) => Ok(Value::from(left + right)),
            _ => Err(unsupported()),
        },
    }
}

fn map(state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
    let (positional, keywords) = split_arguments(args);
    let (value, rest) = positional.split_first().ok_or_else(|| fault("map takes a value"))?;
    if !value.is_true() {
        return Ok(Generated::value(Vec::new()));
    }
    let all = items(value)?;
    let mut mapped = Vec::with_capacity(all.len());
    let named = |name: &str| keywords.iter().find(|(key, _)| key == name).map(|(_, value)| value);
    if let (true, Some(attribute)) = (rest.is_empty(), named("attribute")) {
        if let Some((key, _)) = keywords.iter().find(|(key, _)| key != "attribute" && key != "default") {
            return Err(fault(format!("Unexpected keyword argument '{key}'")));
        }
        let (path, default) = (AttributePath::of(Some(attribute)), given(named("default")));
        for item in &all {
            mapped.push(path.get(item, default)?);
        }
        return Ok(Generated::value(mapped));
    }
    let (name, rest) = rest.split_first().ok_or_else(|| fault("map requires a filter argument"))?;
    let name = super::values::text(name)?;
    for item in all {
        let args = std::iter::once(item).chain(rest.iter().cloned()).collect();
        mapped.push(state.apply_filter(name, &join_arguments(args, keywords.clone()))?);
    }
    Ok(Generated::value(mapped))
}

/// The filters `select`, `reject`, `selectattr` and `rejectattr`.
fn select(state: &mut State<'_, '_>, args: &[Value], attribute: bool, wanted: bool) -> Result<Value, Error> {
    let (positional, keywords) = split_arguments(args);
    let (value, mut rest) = positional.split_first().ok_or_else(|| fault("select takes a value"))?;
    let mut path = AttributePath::default();
    if attribute {
        let (name, more) = rest.split_first().ok_or_else(|| fault("Missing parameter for attribute name"))?;
        (path, rest) = (AttributePath::of(Some(name)), more);
    }
    let mut selected = Vec::new();
    if !value.is_true() {
        return Ok(Generated::value(selected));
    }
    for item in items(value)? {
        let subject = path.get(&item, None)?;
        let passes = match rest.split_first() {
            None => subject.is_true(),
            Some((test, rest)) => {
                let args = std::iter::once(subject).chain(rest.iter().cloned()).collect();
                state.perform_test(super::values::text(test)?, &join_arguments(args, keywords.clone()))?
            }
        };
        if passes == wanted {
            selected.push(item);
        }
    }
    Ok(Generated::value(selected))
}
