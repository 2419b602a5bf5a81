//! The methods of Python's types that Jinja's immutable sandbox lets templates call.

use minijinja::value::{Tuple, Value};
use minijinja::{Error, ErrorKind, State};

use super::objects::{DictView, dict_pairs};
use super::operators::{pair_tuples, whole};
use super::str_methods;
use super::values::{PythonType, bind, fault, integer, items, type_of};

const DICT_METHODS: [(&str, bool); 11] = [
    ("copy", true),
    ("fromkeys", true),
    ("get", true),
    ("items", true),
    ("keys", true),
    ("values", true),
    ("clear", false),
    ("pop", false),
    ("popitem", false),
    ("setdefault", false),
    ("update", false),
];

const LIST_METHODS: [(&str, bool); 11] = [
    ("copy", true),
    ("count", true),
    ("index", true),
    ("append", false),
    ("clear", false),
    ("extend", false),
    ("insert", false),
    ("pop", false),
    ("remove", false),
    ("reverse", false),
    ("sort", false),
];

const TUPLE_METHODS: [(&str, bool); 2] = [("count", true), ("index", true)];

/// Whether `name` is a method of some type, which an attribute of that name may mean.
pub(super) fn is_method(name: &str) -> bool {
    [PythonType::Dict, PythonType::List, PythonType::Str]
        .iter()
        .any(|kind| method_named(*kind, name).is_some())
}

/// Whether `name` is a method of dicts, which an item of that name may stand for.
pub(super) fn is_dict_method(name: &str) -> bool {
    method_named(PythonType::Dict, name).is_some()
}

/// The method `name` of a type, and whether the sandbox gives it out: not where it would change the value.
pub(super) fn method_named(kind: PythonType, name: &str) -> Option<(&'static str, bool)> {
    let methods: &[(&'static str, bool)] = match kind {
        PythonType::Dict => &DICT_METHODS,
        PythonType::List => &LIST_METHODS,
        PythonType::Tuple | PythonType::Range => &TUPLE_METHODS,
        PythonType::Str => return str_methods::named(name).map(|name| (name, true)),
        _ => &[],
    };
    methods.iter().copied().find(|(method, _)| *method == name)
}

/// Calls the method `name` of `value`.
///
/// # Errors
/// When the type has no such method, the sandbox does not give it out, or its arguments are wrong.
pub(super) fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let kind = type_of(value);
    match method_named(kind, name) {
        Some((_, false)) => {
            Err(fault(format!("access to the method '{name}' is unsafe: it changes its value")))
        }
        Some((name, true)) => match kind {
            PythonType::Str => str_methods::call(value.as_str().unwrap_or_default(), name, args),
            PythonType::Dict => dict_method(state, value, name, args),
            _ => sequence_method(value, name, args),
        },
        None if matches!(kind, PythonType::Int | PythonType::Float | PythonType::Bool) => {
            number_method(value, name, args)
        }
        None => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn dict_method(state: &mut State<'_, '_>, dict: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if name == "get" {
        let [key, default] = bind("get", ["key", "default"], 1, args)?;
        let found = dict.as_object().and_then(|object| object.get_value(&key.unwrap_or_default()));
        return Ok(found.or(default).unwrap_or_else(|| Value::from(())));
    }
    if name == "fromkeys" {
        return minijinja::value::Object::call_method(
            &std::sync::Arc::new(super::objects::DictClass),
            state,
            name,
            args,
        );
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
            let found = items[first..last.max(first)].iter().position(|item| Some(item) == wanted.as_ref());
            found.map(|place| Value::from(first + place)).ok_or_else(|| fault("the value is not in the list"))
        }
        _ => {
            let [] = bind(name, [], 0, args)?;
            Ok(items.into())
        }
    }
}

/// The places that `start` and `stop` name within `length` items, as slices count them.
pub(super) fn window(
    length: usize,
    start: Option<&Value>,
    stop: Option<&Value>,
) -> Result<(usize, usize), Error> {
    let place = |bound: Option<&Value>, default: usize| match super::values::given(bound) {
        None => Ok(default),
        Some(bound) => {
            let (at, length) = (i128::from(integer(bound)?), i128::try_from(length).unwrap_or(i128::MAX));
            let at = if at < 0 { (at + length).max(0) } else { at.min(length) };
            Ok::<_, Error>(usize::try_from(at).unwrap_or(0))
        }
    };
    Ok((place(start, 0)?, place(stop, length)?))
}

fn number_method(number: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let unknown = || Error::from(ErrorKind::UnknownMethod);
    let [] = bind(name, [], 0, args).map_err(|error| if args.is_empty() { unknown() } else { error })?;
    if let Some(whole) = whole(number) {
        return match name {
            "bit_length" => Ok(Value::from(128 - whole.unsigned_abs().leading_zeros())),
            "bit_count" => Ok(Value::from(whole.unsigned_abs().count_ones())),
            "is_integer" => Err(unknown()),
            "conjugate" => Ok(super::operators::int(whole)),
            "as_integer_ratio" => Ok(Tuple::from([super::operators::int(whole), Value::from(1)]).into()),
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
