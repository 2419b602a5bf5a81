//! Jinja's filters that compare the items of a list.

use std::cmp::Ordering;
use std::collections::HashSet;

use minijinja::Error;
use minijinja::value::{Tuple, Value};

use super::attributes::AttributePath;
use super::objects::{Generated, GroupItem, dict_pairs, pair_tuples};
use super::operators::order;
use super::values::{MAX_DEPTH, PythonType, bind, fault, flag, given, items, type_name, type_of};

/// Returns a text in lower case unless `sensitive`; another value unchanged.
fn without_case(value: Value, sensitive: bool) -> Value {
    match value.as_str() {
        Some(text) if !sensitive => Value::from(text.to_lowercase()),
        _ => value,
    }
}

/// Returns whether `left` comes before `right`.
fn before(left: &Value, right: &Value) -> Result<bool, Error> {
    Ok(order(left, right, 0)? == Some(Ordering::Less))
}

/// Sorts by keys, with Python's stability.
fn sort_by_key(mut keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<Value>, Error> {
    if reverse {
        keyed.reverse();
    }
    let mut sorted = merge_sort(keyed)?;
    if reverse {
        sorted.reverse();
    }
    Ok(sorted.into_iter().map(|(_, value)| value).collect())
}

/// Merge sort, because comparisons in the standard library's sorts cannot fail.
fn merge_sort(mut keyed: Vec<(Value, Value)>) -> Result<Vec<(Value, Value)>, Error> {
    if keyed.len() < 2 {
        return Ok(keyed);
    }
    let right = merge_sort(keyed.split_off(keyed.len() / 2))?;
    let left = merge_sort(keyed)?;
    let mut merged = Vec::with_capacity(left.len() + right.len());
    let (mut left, mut right) = (left.into_iter().peekable(), right.into_iter().peekable());
    while let (Some(first), Some(second)) = (left.peek(), right.peek()) {
        let from = if before(&second.0, &first.0)? { &mut right } else { &mut left };
        merged.extend(from.next());
    }
    merged.extend(left);
    merged.extend(right);
    Ok(merged)
}

pub(super) fn sort(args: &[Value]) -> Result<Value, Error> {
    let parameters = ["value", "reverse", "case_sensitive", "attribute"];
    let [value, reverse, sensitive, attribute] = bind("sort", parameters, 1, args)?;
    let sensitive = flag(sensitive.as_ref());
    let paths: Vec<AttributePath> = match given(attribute.as_ref()) {
        None => vec![AttributePath::default()],
        Some(attribute) => match attribute.as_str() {
            Some(text) => text.split(',').map(AttributePath::parse).collect(),
            None => vec![AttributePath::new(attribute)],
        },
    };
    let mut keyed = Vec::new();
    for item in items(&value.unwrap_or_default())? {
        let mut key = Vec::with_capacity(paths.len());
        for path in &paths {
            key.push(without_case(path.get(&item, None)?, sensitive));
        }
        keyed.push((Value::from(key), item));
    }
    Ok(sort_by_key(keyed, flag(reverse.as_ref()))?.into())
}

pub(super) fn dictsort(args: &[Value]) -> Result<Value, Error> {
    let [value, sensitive, by, reverse] =
        bind("dictsort", ["value", "case_sensitive", "by", "reverse"], 1, args)?;
    let value = value.unwrap_or_default();
    let column = match by.as_ref().map_or(Some("key"), |by| by.as_str()) {
        Some("key") => 0,
        Some("value") => 1,
        _ => return Err(fault("You can only sort by either \"key\" or \"value\"")),
    };
    if type_of(&value) != PythonType::Dict {
        return Err(fault(format!("'{}' object has no attribute 'items'", type_name(&value))));
    }
    let sensitive = flag(sensitive.as_ref());
    let keyed = pair_tuples(&value).into_iter().map(|pair| {
        let key = pair.get_item_by_index(column).unwrap_or_default();
        (without_case(key, sensitive), pair)
    });
    Ok(sort_by_key(keyed.collect(), flag(reverse.as_ref()))?.into())
}

/// The filters `min` and `max`.
pub(super) fn extreme(args: &[Value], name: &str) -> Result<Value, Error> {
    let [value, sensitive, attribute] = bind(name, ["value", "case_sensitive", "attribute"], 1, args)?;
    let (sensitive, path) = (flag(sensitive.as_ref()), AttributePath::of(attribute.as_ref()));
    let mut best: Option<(Value, Value)> = None;
    for item in items(&value.unwrap_or_default())? {
        let key = without_case(path.get(&item, None)?, sensitive);
        let better = match &best {
            None => true,
            Some((other, _)) if name == "min" => before(&key, other)?,
            Some((other, _)) => before(other, &key)?,
        };
        if better {
            best = Some((key, item));
        }
    }
    Ok(best.map(|(_, item)| item).unwrap_or_default())
}

pub(super) fn unique(args: &[Value]) -> Result<Value, Error> {
    let [value, sensitive, attribute] = bind("unique", ["value", "case_sensitive", "attribute"], 1, args)?;
    let (sensitive, path) = (flag(sensitive.as_ref()), AttributePath::of(attribute.as_ref()));
    let (mut seen, mut unique) = (HashSet::new(), Vec::new());
    for item in items(&value.unwrap_or_default())? {
        let key = without_case(path.get(&item, None)?, sensitive);
        if matches!(type_of(&key), PythonType::List | PythonType::Dict) {
            return Err(fault(format!("unhashable type: '{}'", type_name(&key))));
        }
        let key = if type_of(&key) == PythonType::Bool { Value::from(i64::from(key.is_true())) } else { key };
        if seen.insert(key) {
            unique.push(item);
        }
    }
    Ok(Generated::value(unique))
}

pub(super) fn groupby(args: &[Value]) -> Result<Value, Error> {
    let parameters = ["value", "attribute", "default", "case_sensitive"];
    let [value, attribute, default, sensitive] = bind("groupby", parameters, 2, args)?;
    let (sensitive, path) = (flag(sensitive.as_ref()), AttributePath::of(attribute.as_ref()));
    let default = given(default.as_ref());
    let mut keyed = Vec::new();
    for item in items(&value.unwrap_or_default())? {
        keyed.push((without_case(path.get(&item, default)?, sensitive), item));
    }
    let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
    for (key, item) in merge_sort(keyed)? {
        match groups.last_mut() {
            Some((last, group)) if *last == key => group.push(item),
            _ => groups.push((key, vec![item])),
        }
    }
    let mut named = Vec::new();
    for (_, list) in groups {
        let grouper = path.get(&list[0], default)?;
        named.push(Value::from_object(GroupItem { grouper, list: list.into() }));
    }
    Ok(named.into())
}

/// Returns a value with its dicts sorted by key.
pub(super) fn with_sorted_keys(value: &Value, depth: usize) -> Result<Value, Error> {
    if depth > MAX_DEPTH {
        return Err(fault(format!("a value has more than {MAX_DEPTH} values within values")));
    }
    let inner = |values: Vec<Value>| {
        values.iter().map(|value| with_sorted_keys(value, depth + 1)).collect::<Result<Vec<Value>, Error>>()
    };
    match type_of(value) {
        PythonType::List => Ok(inner(items(value)?)?.into()),
        PythonType::Tuple => Ok(Tuple::from(inner(items(value)?)?).into()),
        PythonType::Dict => {
            let keyed = pair_tuples(value)
                .into_iter()
                .map(|pair| (pair.get_item_by_index(0).unwrap_or_default(), pair));
            let mut pairs = Vec::new();
            for pair in sort_by_key(keyed.collect(), false)? {
                let (key, value) = (pair.get_item_by_index(0)?, pair.get_item_by_index(1)?);
                pairs.push((key, with_sorted_keys(&value, depth + 1)?));
            }
            Ok(Value::from_pairs(pairs))
        }
        _ => Ok(value.clone()),
    }
}

/// Returns the pairs of a dict sorted by key.
pub(super) fn sorted_pairs(dict: &Value) -> Result<Vec<(Value, Value)>, Error> {
    let keyed =
        dict_pairs(dict).into_iter().map(|(key, value)| (key.clone(), Tuple::from([key, value]).into()));
    let mut pairs = Vec::new();
    for pair in sort_by_key(keyed.collect(), false)? {
        pairs.push((pair.get_item_by_index(0)?, pair.get_item_by_index(1)?));
    }
    Ok(pairs)
}
