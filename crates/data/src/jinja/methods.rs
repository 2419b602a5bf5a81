//! The methods of Python's types that Jinja's immutable sandbox lets templates call.

use minijinja::value::{Tuple, Value};
use minijinja::{Error, ErrorKind};

use super::method_names::method_named;
use super::objects::{DictView, dict_pairs, pair_tuples};
use super::str_methods;
use super::values::{PythonType, bind, fault, int, items, type_of, whole, window};

/// Calls the method `name` of `value`.
///
/// # Errors
/// Fails if the type has no such method, the sandbox hides it, or its arguments are wrong.
pub(super) fn call_method(value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let kind = type_of(value);
    match method_named(kind, name) {
        Some((_, false)) => {
            Err(fault(format!("access to the method '{name}' is unsafe: it changes its value")))
        }
        Some((name, true)) => match kind {
            PythonType::Str => str_methods::call(value.as_str().unwrap_or_default(), name, args),
            PythonType::Dict => dict_method(value, name, args),
            _ => sequence_method(value, name, args),
        },
        None if matches!(kind, PythonType::Int | PythonType::Float | PythonType::Bool) => {
            number_method(value, name, args)
        }
        None => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn dict_method(dict: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if name == "fromkeys" {
        return from_keys(args);
    }
    if name == "get" {
        let [key, default] = bind("get", ["key", "default"], 1, args)?;
        let item = dict.as_object().and_then(|object| object.get_value(&key.unwrap_or_default()));
        return Ok(item.or(default).unwrap_or_else(|| Value::from(())));
    }
    let [] = bind(name, [], 0, args)?;
    let (name, items) = match name {
        "keys" => ("dict_keys", dict_pairs(dict).into_iter().map(|(key, _)| key).collect()),
        "values" => ("dict_values", dict_pairs(dict).into_iter().map(|(_, value)| value).collect()),
        "items" => ("dict_items", pair_tuples(dict)),
        _ => return Ok(Value::from_pairs(dict_pairs(dict))),
    };
    Ok(Value::from_object(DictView { name, items }))
}

fn sequence_method(sequence: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let items = items(sequence)?;
    match name {
        "count" => {
            let [wanted] = bind("count", ["value"], 1, args)?;
            Ok(Value::from(items.iter().filter(|item| Some(*item) == wanted.as_ref()).count()))
        }
        "index" => {
            let [wanted, start, stop] = bind("index", ["value", "start", "stop"], 1, args)?;
            let (first, last) = window(items.len(), start.as_ref(), stop.as_ref())?;
            let index = items[first..last.max(first)].iter().position(|item| Some(item) == wanted.as_ref());
            index.map(|index| Value::from(first + index)).ok_or_else(|| fault("the value is not in the list"))
        }
        _ => {
            let [] = bind(name, [], 0, args)?;
            Ok(items.into())
        }
    }
}

fn number_method(number: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let unknown = || Error::from(ErrorKind::UnknownMethod);
    let [] = bind(name, [], 0, args).map_err(|error| if args.is_empty() { unknown() } else { error })?;
    if let Some(whole) = whole(number) {
        return match name {
            "bit_length" => Ok(Value::from(128 - whole.unsigned_abs().leading_zeros())),
            "bit_count" => Ok(Value::from(whole.unsigned_abs().count_ones())),
            "is_integer" => Err(unknown()),
            "conjugate" => Ok(int(whole)),
            "as_integer_ratio" => Ok(Tuple::from([int(whole), Value::from(1)]).into()),
            _ => Err(unknown()),
        };
    }
    let float = f64::try_from(number.clone())?;
    match name {
        "is_integer" => Ok(Value::from(float.is_finite() && float.fract() == 0.0)),
        "conjugate" => Ok(number.clone()),
        _ => Err(unknown()),
    }
}

/// Python's `dict.fromkeys`.
///
/// # Errors
/// Fails if the keys cannot be iterated.
pub(super) fn from_keys(args: &[Value]) -> Result<Value, Error> {
    let [keys, value] = bind("fromkeys", ["iterable", "value"], 1, args)?;
    let value = value.unwrap_or_else(|| Value::from(()));
    let keys = items(&keys.unwrap_or_default())?;
    Ok(Value::from_pairs(keys.into_iter().map(|key| (key, value.clone()))))
}
