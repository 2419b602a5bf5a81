//! Python's view of template values: their types, their items, and the arguments of a call.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::objects::{DictView, Generated, GroupItem, PythonRange};

/// Maximum bytes of a text that a filter, a method or an operator makes.
pub(super) const MAX_TEXT_BYTES: usize = 64 << 20;
/// Maximum items of a list that a filter, a method or an operator makes.
pub(super) const MAX_ITEMS: usize = 1 << 22;
/// Maximum depth of values that are printed or compared. A template can build a value that contains
/// itself.
pub(super) const MAX_DEPTH: usize = 150;

/// Python types of template values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PythonType {
    Undefined,
    None,
    Bool,
    Int,
    Float,
    Str,
    List,
    Tuple,
    Dict,
    Namespace,
    Generator,
    View,
    Range,
    /// Functions, macros, `loop` and other objects.
    Other,
}

/// The type of `value`.
pub(super) fn type_of(value: &Value) -> PythonType {
    match value.kind() {
        ValueKind::Undefined => PythonType::Undefined,
        ValueKind::None => PythonType::None,
        ValueKind::Bool => PythonType::Bool,
        ValueKind::Number if value.is_integer() => PythonType::Int,
        ValueKind::Number => PythonType::Float,
        ValueKind::String => PythonType::Str,
        ValueKind::Seq if value.is_tuple() => PythonType::Tuple,
        ValueKind::Seq if value.downcast_object_ref::<PythonRange>().is_some() => PythonType::Range,
        ValueKind::Seq if value.downcast_object_ref::<GroupItem>().is_some() => PythonType::Tuple,
        ValueKind::Seq => PythonType::List,
        ValueKind::Iterable if value.downcast_object_ref::<Generated>().is_some() => PythonType::Generator,
        ValueKind::Iterable if value.downcast_object_ref::<DictView>().is_some() => PythonType::View,
        // minijinja computes sums and products of lists lazily.
        ValueKind::Iterable => PythonType::List,
        ValueKind::Map => match value.as_object().map(|object| object.type_name()) {
            Some(name) if name.ends_with("::Namespace") => PythonType::Namespace,
            Some(name) if name.ends_with("::Loop") || name.ends_with("::Macro") => PythonType::Other,
            _ => PythonType::Dict,
        },
        _ => PythonType::Other,
    }
}

/// The name of the type of `value` in Python's errors.
pub(super) fn type_name(value: &Value) -> &'static str {
    match type_of(value) {
        PythonType::Undefined => "Undefined",
        PythonType::None => "NoneType",
        PythonType::Bool => "bool",
        PythonType::Int => "int",
        PythonType::Float => "float",
        PythonType::Str => "str",
        PythonType::List => "list",
        PythonType::Tuple => "tuple",
        PythonType::Dict => "dict",
        PythonType::Namespace => "Namespace",
        PythonType::Generator => "generator",
        PythonType::View => "dict_items",
        PythonType::Range => "range",
        PythonType::Other => "object",
    }
}

/// An error with the reason `why`.
pub(super) fn fault(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why.into())
}

/// Refuses a text of more than [`MAX_TEXT_BYTES`]; `None` is a size that overflowed.
pub(super) fn check_text(bytes: Option<usize>) -> Result<(), Error> {
    match bytes {
        Some(bytes) if bytes <= MAX_TEXT_BYTES => Ok(()),
        _ => Err(fault(format!("a text is too large; accepted: up to {MAX_TEXT_BYTES} bytes"))),
    }
}

/// Refuses a list of more than [`MAX_ITEMS`]; `None` is a size that overflowed.
pub(super) fn check_items(items: Option<usize>) -> Result<(), Error> {
    match items {
        Some(items) if items <= MAX_ITEMS => Ok(()),
        _ => Err(fault(format!("a list is too large; accepted: up to {MAX_ITEMS} items"))),
    }
}

/// Returns whether Python can iterate over `value`.
pub(super) fn is_iterable(value: &Value) -> bool {
    use PythonType as T;
    !matches!(type_of(value), T::None | T::Bool | T::Int | T::Float | T::Namespace | T::Other)
        || value.as_object().is_some_and(|object| object.type_name().ends_with("::Loop"))
}

/// The items that Python's `iter` yields: characters of a text, keys of a dict.
///
/// # Errors
/// Fails if `value` cannot be iterated.
pub(super) fn items(value: &Value) -> Result<Vec<Value>, Error> {
    if !is_iterable(value) {
        return Err(fault(format!("'{}' object is not iterable", type_name(value))));
    }
    let mut items = Vec::new();
    for item in value.try_iter()?.checked() {
        items.push(item?);
        check_items(Some(items.len()))?;
    }
    Ok(items)
}

/// Python's `len`.
///
/// # Errors
/// Fails if `value` has no length.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    use PythonType as T;
    match type_of(value) {
        T::Undefined => Ok(0),
        T::Str => Ok(value.as_str().unwrap_or_default().chars().count()),
        T::List | T::Tuple | T::Dict | T::View | T::Range => match value.len() {
            Some(length) => Ok(length),
            None => Ok(value.try_iter()?.count()),
        },
        _ => Err(fault(format!("object of type '{}' has no len()", type_name(value)))),
    }
}

/// Converts Python's `int` or `bool`.
///
/// # Errors
/// Fails if `value` is of another type or does not fit.
pub(super) fn integer(value: &Value) -> Result<i64, Error> {
    match type_of(value) {
        PythonType::Bool => Ok(i64::from(value.is_true())),
        PythonType::Int => i64::try_from(value.clone()),
        _ => Err(fault(format!("'{}' object cannot be interpreted as an integer", type_name(value)))),
    }
}

/// The text of a `str`.
///
/// # Errors
/// Fails if `value` is no `str`.
pub(super) fn text(value: &Value) -> Result<&str, Error> {
    value.as_str().ok_or_else(|| fault(format!("a str is required, not '{}'", type_name(value))))
}

/// Returns the arguments of a call to `name` in the order of `parameters`; the first `required` are
/// mandatory.
///
/// # Errors
/// Fails if arguments are missing, too many, unknown or given twice.
pub(super) fn bind<const N: usize>(
    name: &str,
    parameters: [&str; N],
    required: usize,
    args: &[Value],
) -> Result<[Option<Value>; N], Error> {
    let (positional, keywords) = split_arguments(args);
    if positional.len() > N {
        let why = format!("{name}() takes up to {N} arguments but {} were given", positional.len());
        return Err(fault(why));
    }
    let mut bound = [const { None }; N];
    for (argument, value) in bound.iter_mut().zip(positional) {
        *argument = Some(value.clone());
    }
    for (key, value) in keywords {
        match parameters.iter().position(|parameter| *parameter == key) {
            Some(index) if bound[index].is_none() => bound[index] = Some(value),
            Some(_) => return Err(fault(format!("{name}() got multiple values for argument '{key}'"))),
            None => return Err(fault(format!("{name}() got an unexpected keyword argument '{key}'"))),
        }
    }
    match bound.iter().take(required).position(Option::is_none) {
        Some(index) => Err(fault(format!("{name}() is missing the argument '{}'", parameters[index]))),
        None => Ok(bound),
    }
}

/// The positional arguments of a call, and those with keywords.
pub(super) fn split_arguments(args: &[Value]) -> (&[Value], Vec<(String, Value)>) {
    match args.split_last() {
        Some((last, positional)) if last.is_kwargs() => {
            let pairs = last.as_object().and_then(|object| object.try_iter_pairs());
            let named = pairs.into_iter().flatten().map(|(key, value)| (key.to_string(), value));
            (positional, named.collect())
        }
        _ => (args, Vec::new()),
    }
}

/// Joins arguments of a call; reverses [`split_arguments`].
pub(super) fn join_arguments(positional: Vec<Value>, keywords: Vec<(String, Value)>) -> Vec<Value> {
    let mut args = positional;
    if !keywords.is_empty() {
        args.push(keywords.into_iter().collect::<Kwargs>().into());
    }
    args
}

/// Returns an argument unless it is missing or None.
pub(super) fn given(argument: Option<&Value>) -> Option<&Value> {
    argument.filter(|value| !value.is_none())
}

/// Returns whether a flag is present and true.
pub(super) fn flag(argument: Option<&Value>) -> bool {
    argument.is_some_and(Value::is_true)
}

/// The value of an int or bool.
pub(super) fn whole(value: &Value) -> Option<i128> {
    match type_of(value) {
        PythonType::Bool => Some(i128::from(value.is_true())),
        PythonType::Int => i128::try_from(value.clone()).ok(),
        _ => None,
    }
}

/// An int, in minijinja's shortest form.
pub(super) fn int(value: i128) -> Value {
    i64::try_from(value).map_or_else(|_| Value::from(value), Value::from)
}

/// The indices of `start` and `stop` within `length` items, by the rules of slices.
pub(super) fn window(
    length: usize,
    start: Option<&Value>,
    stop: Option<&Value>,
) -> Result<(usize, usize), Error> {
    let index_of = |bound: Option<&Value>, default: usize| match given(bound) {
        None => Ok(default),
        Some(bound) => {
            let (at, length) = (i128::from(integer(bound)?), i128::try_from(length).unwrap_or(i128::MAX));
            let at = if at < 0 { (at + length).max(0) } else { at.min(length) };
            Ok::<_, Error>(usize::try_from(at).unwrap_or(0))
        }
    };
    Ok((index_of(start, 0)?, index_of(stop, length)?))
}
