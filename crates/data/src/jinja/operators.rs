//! Operators of Python for which minijinja's differ. [`super::rewrite`] writes calls to them into a
//! template.

use std::cmp::Ordering;

use minijinja::value::{Tuple, Value};
use minijinja::{Environment, Error};

use super::Builtin;
use super::attributes::{attribute, item};
use super::objects::{HiddenUndefined, PackedArguments, PythonRange};
use super::print::string;
use super::printf;
use super::values::{
    MAX_DEPTH, PythonType, bind, check_items, check_text, fault, int, integer, is_iterable, items,
    split_arguments, type_name, type_of, whole,
};

/// Functions that rewritten templates call, by name.
const OPERATORS: [(&str, Builtin); 19] = [
    ("mod__", |_, args| two(args, modulo)),
    ("mul__", |_, args| two(args, multiply)),
    ("lt__", |_, args| two(args, |a, b| order(a, b, 0).map(|o| Value::from(o == Some(Ordering::Less))))),
    ("gt__", |_, args| two(args, |a, b| order(a, b, 0).map(|o| Value::from(o == Some(Ordering::Greater))))),
    ("le__", |_, args| two(args, |a, b| order(a, b, 0).map(|o| Value::from(o.is_some_and(Ordering::is_le))))),
    ("ge__", |_, args| two(args, |a, b| order(a, b, 0).map(|o| Value::from(o.is_some_and(Ordering::is_ge))))),
    ("in__", |_, args| two(args, |item, container| contains(container, item).map(Value::from))),
    ("str__", |_, args| one(args, text_of)),
    ("pos__", |_, args| one(args, integer_or_float)),
    ("iter__", |_, args| one(args, iterable)),
    ("slice__", |_, args| slice(args)),
    ("attr__", |_, args| two(args, |value, name| attribute(value, name.as_str().unwrap_or_default()))),
    ("item__", |_, args| two(args, item)),
    ("pack__", |_, args| Ok(pack(args))),
    ("given__", |_, args| one(args, given)),
    ("taken__", |_, args| one(args, taken)),
    ("bound__", |_, args| bound(args)),
    ("varargs__", |_, args| varargs(args)),
    ("kwargs__", |_, args| kwargs(args)),
];

/// Adds the functions that rewritten templates call.
pub(super) fn add(env: &mut Environment<'static>) {
    for (name, function) in OPERATORS {
        env.add_function(name, super::callable(function));
    }
}

fn two(args: &[Value], operator: impl Fn(&Value, &Value) -> Result<Value, Error>) -> Result<Value, Error> {
    match args {
        [left, right] => operator(left, right),
        _ => Err(fault("an operator has two operands")),
    }
}

fn one(args: &[Value], operator: impl Fn(&Value) -> Result<Value, Error>) -> Result<Value, Error> {
    match args {
        [value] => operator(value),
        _ => Err(fault("an operator has one operand")),
    }
}

/// Converts a value with Python's `str`.
pub(super) fn text_of(value: &Value) -> Result<Value, Error> {
    match value.as_str() {
        Some(_) => Ok(value.clone()),
        None => string(value).map(Value::from),
    }
}

fn undefined(value: &Value) -> Result<(), Error> {
    if value.is_undefined() { Err(fault("an operand is undefined")) } else { Ok(()) }
}

/// Python's `%`: the remainder of numbers, or a formatted text.
fn modulo(left: &Value, right: &Value) -> Result<Value, Error> {
    undefined(left)?;
    if let Some(format) = left.as_str() {
        return printf::format(format, right).map(Value::from);
    }
    match (whole(left), whole(right)) {
        (Some(_), Some(0)) => Err(fault("integer modulo by zero")),
        (Some(left), Some(right)) => {
            let remainder = left.checked_rem(right).unwrap_or(0);
            let lower = remainder != 0 && (remainder < 0) != (right < 0);
            Ok(int(if lower { remainder + right } else { remainder }))
        }
        _ => {
            let (left, right) = (real("%", left)?, real("%", right)?);
            if right == 0.0 {
                return Err(fault("float modulo by zero"));
            }
            let remainder = left % right;
            Ok(Value::from(match remainder {
                0.0 => 0.0_f64.copysign(right),
                _ if (remainder < 0.0) != (right < 0.0) => remainder + right,
                _ => remainder,
            }))
        }
    }
}

/// The product of numbers.
fn product(left: &Value, right: &Value) -> Result<Value, Error> {
    match (whole(left), whole(right)) {
        (Some(left), Some(right)) => match left.checked_mul(right) {
            Some(product) => Ok(int(product)),
            None => Err(fault("an int is too large; accepted: 128 bits")),
        },
        _ => Ok(Value::from(real("*", left)? * real("*", right)?)),
    }
}

/// The value of a number as a float.
fn real(operator: &str, value: &Value) -> Result<f64, Error> {
    let number = match type_of(value) {
        PythonType::Float => f64::try_from(value.clone()).ok(),
        _ => whole(value).map(|value| value as f64),
    };
    number.ok_or_else(|| fault(format!("unsupported operand type for {operator}: '{}'", type_name(value))))
}

/// Python's `*`: the product of numbers, or a repeated text or list, which is empty for a negative
/// number.
fn multiply(left: &Value, right: &Value) -> Result<Value, Error> {
    let repeats = |value: &Value| matches!(type_of(value), PythonType::Int | PythonType::Bool);
    let (sequence, count) = match (repeats(left), repeats(right)) {
        (_, true) => (left, right),
        (true, false) => (right, left),
        _ => return product(left, right),
    };
    let count = usize::try_from(integer(count).unwrap_or(0).max(0)).unwrap_or(usize::MAX);
    match type_of(sequence) {
        PythonType::Str => {
            let text = sequence.as_str().unwrap_or_default();
            check_text(text.len().checked_mul(count))?;
            Ok(Value::from(text.repeat(count)))
        }
        kind @ (PythonType::List | PythonType::Tuple) => {
            let items = items(sequence)?;
            check_items(items.len().checked_mul(count))?;
            let repeated: Vec<Value> = std::iter::repeat_n(items, count).flatten().collect();
            Ok(if kind == PythonType::Tuple { Tuple::from(repeated).into() } else { repeated.into() })
        }
        _ => product(left, right),
    }
}

/// Computes Python's unary `+`.
fn integer_or_float(value: &Value) -> Result<Value, Error> {
    match type_of(value) {
        PythonType::Int | PythonType::Float => Ok(value.clone()),
        PythonType::Bool => integer(value).map(Value::from),
        _ => Err(fault(format!("bad operand type for unary +: '{}'", type_name(value)))),
    }
}

/// Compares two values like Python; `None` if one is NaN.
///
/// # Errors
/// Fails if Python does not compare their types.
pub(super) fn order(left: &Value, right: &Value, depth: usize) -> Result<Option<Ordering>, Error> {
    use PythonType as T;
    let is_number = |kind| matches!(kind, T::Int | T::Float | T::Bool);
    match (type_of(left), type_of(right)) {
        (a, b) if is_number(a) && is_number(b) => {
            let number = |value: &Value| match type_of(value) {
                T::Bool => Value::from(i64::from(value.is_true())),
                _ => value.clone(),
            };
            let is_nan = |value: &Value| f64::try_from(value.clone()).is_ok_and(f64::is_nan);
            if is_nan(left) || is_nan(right) {
                return Ok(None);
            }
            Ok(Some(number(left).cmp(&number(right))))
        }
        (T::Str, T::Str) => Ok(Some(left.as_str().cmp(&right.as_str()))),
        (T::List, T::List) | (T::Tuple, T::Tuple) if depth < MAX_DEPTH => {
            let (left, right) = (items(left)?, items(right)?);
            match left.iter().zip(&right).find(|(a, b)| a != b) {
                Some((a, b)) => order(a, b, depth + 1),
                None => Ok(Some(left.len().cmp(&right.len()))),
            }
        }
        _ => Err(fault(format!(
            "'<' not supported between instances of '{}' and '{}'",
            type_name(left),
            type_name(right)
        ))),
    }
}

/// Python's `item in container`.
///
/// # Errors
/// Fails if `container` is no container, a text is searched for another type, or a dict for an
/// unhashable key.
pub(super) fn contains(container: &Value, item: &Value) -> Result<bool, Error> {
    match type_of(container) {
        PythonType::Str => match item.as_str() {
            Some(part) => Ok(container.as_str().unwrap_or_default().contains(part)),
            None => {
                Err(fault(format!("'in <string>' requires string as left operand, not {}", type_name(item))))
            }
        },
        PythonType::Dict => match type_of(item) {
            PythonType::List | PythonType::Dict => {
                Err(fault(format!("unhashable type: '{}'", type_name(item))))
            }
            _ => Ok(container.as_object().is_some_and(|object| object.get_value(item).is_some())),
        },
        _ if is_iterable(container) => Ok(items(container)?.contains(item)),
        _ => Err(fault(format!("argument of type '{}' is not iterable", type_name(container)))),
    }
}

/// The items that a loop runs over.
fn iterable(value: &Value) -> Result<Value, Error> {
    if type_of(value) == PythonType::Str {
        // A loop knows the length of a list.
        Ok(items(value)?.into())
    } else if is_iterable(value) {
        Ok(value.clone())
    } else {
        Err(fault(format!("'{}' object is not iterable", type_name(value))))
    }
}

/// Python's `value[start:stop:step]`; undefined if the value has no slices.
fn slice(args: &[Value]) -> Result<Value, Error> {
    let [value, start, stop, step] = bind("slice", ["value", "start", "stop", "step"], 1, args)?;
    let (value, bound) = (value.unwrap_or_default(), |part: Option<Value>| match part {
        None => Ok(None),
        Some(part) if part.is_none() => Ok(None),
        Some(part) => integer(&part).map(Some),
    });
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    match type_of(&value) {
        PythonType::Undefined => Err(fault("an undefined value has no slices")),
        PythonType::Str => {
            let characters: Vec<char> = value.as_str().unwrap_or_default().chars().collect();
            let places = places(characters.len(), start, stop, step)?;
            Ok(Value::from(places.into_iter().map(|index| characters[index]).collect::<String>()))
        }
        PythonType::Range => {
            let places = places(value.len().unwrap_or(0), start, stop, step)?;
            let part = value.downcast_object_ref::<PythonRange>().map(|range| range.part(&places, step));
            Ok(part.unwrap_or_default())
        }
        kind @ (PythonType::List | PythonType::Tuple) => {
            let items = items(&value)?;
            let places = places(items.len(), start, stop, step)?;
            let part: Vec<Value> = places.into_iter().map(|index| items[index].clone()).collect();
            Ok(if kind == PythonType::Tuple { Tuple::from(part).into() } else { part.into() })
        }
        _ => Ok(Value::UNDEFINED),
    }
}

/// The indices of a slice of `length` items.
fn places(length: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> Result<Vec<usize>, Error> {
    if step == 0 {
        return Err(fault("slice step cannot be zero"));
    }
    let length = i128::try_from(length).unwrap_or(i128::MAX);
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let index_of = |bound: Option<i64>, default: i128| match bound.map(i128::from) {
        None => default,
        Some(index) if index < 0 => (index + length).max(low),
        Some(index) => index.min(high),
    };
    let (mut at, step) = (index_of(start, if step > 0 { low } else { high }), i128::from(step));
    let end = index_of(stop, if step > 0 { high } else { low });
    let mut places = Vec::new();
    while if step > 0 { at < end } else { at > end } {
        places.extend(usize::try_from(at));
        at += step;
    }
    Ok(places)
}

fn pack(args: &[Value]) -> Value {
    let (positional, keywords) = split_arguments(args);
    Value::from_object(PackedArguments { positional: positional.to_vec(), keywords })
}

/// Returns the arguments of a macro call. A macro called by another name than its own gets them
/// unpacked.
fn unpack(packed: &Value) -> (Vec<Value>, Vec<(String, Value)>) {
    match packed.downcast_object_ref::<PackedArguments>() {
        Some(packed) => (packed.positional.clone(), packed.keywords.clone()),
        None if packed.is_undefined() => (Vec::new(), Vec::new()),
        None => (vec![packed.clone()], Vec::new()),
    }
}

/// Hides that an argument of a macro is undefined.
fn given(value: &Value) -> Result<Value, Error> {
    Ok(if value.is_undefined() { Value::from_object(HiddenUndefined) } else { value.clone() })
}

/// Returns the argument of [`given`].
fn taken(value: &Value) -> Result<Value, Error> {
    let hidden = value.downcast_object_ref::<HiddenUndefined>().is_some();
    Ok(if hidden { Value::UNDEFINED } else { value.clone() })
}

/// `bound__(packed, index, name)`: a list of the argument; empty if it is missing.
fn bound(args: &[Value]) -> Result<Value, Error> {
    let [packed, index, name] = bind("bound", ["packed", "index", "name"], 3, args)?;
    let (positional, keywords) = unpack(&packed.unwrap_or_default());
    let (index, name) = (index.and_then(|index| index.as_usize()), name.unwrap_or_default());
    let positional = index.and_then(|index| positional.get(index));
    let keyword =
        keywords.iter().find(|(key, _)| Some(key.as_str()) == name.as_str()).map(|(_, value)| value);
    match (positional, keyword) {
        (Some(_), Some(_)) => Err(fault(format!("a macro got multiple values for argument '{name}'"))),
        (value, keyword) => Ok(value.or(keyword).cloned().into_iter().collect()),
    }
}

/// `varargs__(packed, count, used)`: the arguments after the first `count`.
fn varargs(args: &[Value]) -> Result<Value, Error> {
    let [packed, count, used] = bind("varargs", ["packed", "count", "used"], 3, args)?;
    let (positional, _) = unpack(&packed.unwrap_or_default());
    let count = count.and_then(|count| count.as_usize()).unwrap_or(0);
    let rest: Vec<Value> = positional.into_iter().skip(count).collect();
    if used.is_some_and(|used| used.is_true()) || rest.is_empty() {
        Ok(Tuple::from(rest).into())
    } else {
        Err(fault(format!("a macro takes not more than {count} argument(s)")))
    }
}

/// `kwargs__(packed, names, used)`: the keywords beside `names`.
fn kwargs(args: &[Value]) -> Result<Value, Error> {
    let [packed, names, used] = bind("kwargs", ["packed", "names", "used"], 3, args)?;
    let (_, keywords) = unpack(&packed.unwrap_or_default());
    let names = items(&names.unwrap_or_default())?;
    let rest: Vec<(String, Value)> =
        keywords.into_iter().filter(|(key, _)| !names.contains(&Value::from(key.as_str()))).collect();
    match (used.is_some_and(|used| used.is_true()), rest.first()) {
        (false, Some((key, _))) => Err(fault(format!("a macro takes no keyword argument '{key}'"))),
        _ => Ok(Value::from_pairs(rest)),
    }
}
