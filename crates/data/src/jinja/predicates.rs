//! Jinja's tests, such as `value is even`.

use std::cmp::Ordering;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, State};

use super::Predicate;
use super::operators::{contains, order};
use super::print::string;
use super::str_methods;
use super::values::{PythonType, fault, is_iterable, length, type_name, type_of, whole};

/// Tests by name, for which minijinja's differ.
pub(super) const TESTS: [(&str, Predicate); 37] = [
    ("odd", |_, args| Ok(remainder(args, 2)? == 1.0)),
    ("even", |_, args| Ok(remainder(args, 2)? == 0.0)),
    ("divisibleby", divisible),
    ("none", |_, args| Ok(one(args)?.is_none())),
    ("boolean", |_, args| Ok(kind(args)? == PythonType::Bool)),
    ("false", |_, args| Ok(kind(args)? == PythonType::Bool && !one(args)?.is_true())),
    ("true", |_, args| Ok(kind(args)? == PythonType::Bool && one(args)?.is_true())),
    ("integer", |_, args| Ok(kind(args)? == PythonType::Int)),
    ("float", |_, args| Ok(kind(args)? == PythonType::Float)),
    ("number", |_, args| Ok(matches!(kind(args)?, PythonType::Int | PythonType::Float | PythonType::Bool))),
    ("string", |_, args| Ok(kind(args)? == PythonType::Str)),
    ("lower", |_, args| cased(args, "islower")),
    ("upper", |_, args| cased(args, "isupper")),
    ("mapping", |_, args| Ok(kind(args)? == PythonType::Dict)),
    ("sequence", |_, args| Ok(is_sequence(one(args)?))),
    ("iterable", |_, args| Ok(is_iterable(one(args)?))),
    ("callable", |_, args| Ok(is_callable(one(args)?))),
    ("sameas", same),
    ("escaped", |_, args| Ok(one(args)?.is_safe())),
    ("in", |_, args| two(args, |item, container| contains(container, item))),
    ("==", |_, args| two(args, |a, b| Ok(a == b))),
    ("eq", |_, args| two(args, |a, b| Ok(a == b))),
    ("equalto", |_, args| two(args, |a, b| Ok(a == b))),
    ("!=", |_, args| two(args, |a, b| Ok(a != b))),
    ("ne", |_, args| two(args, |a, b| Ok(a != b))),
    (">", |_, args| ordered(args, Ordering::is_gt)),
    ("gt", |_, args| ordered(args, Ordering::is_gt)),
    ("greaterthan", |_, args| ordered(args, Ordering::is_gt)),
    ("ge", |_, args| ordered(args, Ordering::is_ge)),
    (">=", |_, args| ordered(args, Ordering::is_ge)),
    ("<", |_, args| ordered(args, Ordering::is_lt)),
    ("lt", |_, args| ordered(args, Ordering::is_lt)),
    ("lessthan", |_, args| ordered(args, Ordering::is_lt)),
    ("<=", |_, args| ordered(args, Ordering::is_le)),
    ("le", |_, args| ordered(args, Ordering::is_le)),
    ("defined", |_, args| Ok(!one(args)?.is_undefined())),
    ("undefined", |_, args| Ok(one(args)?.is_undefined())),
];

fn one(args: &[Value]) -> Result<&Value, Error> {
    match args {
        [value] => Ok(value),
        _ => Err(fault("a test without arguments got some")),
    }
}

fn kind(args: &[Value]) -> Result<PythonType, Error> {
    one(args).map(type_of)
}

fn two(args: &[Value], test: impl Fn(&Value, &Value) -> Result<bool, Error>) -> Result<bool, Error> {
    match args {
        [left, right] => test(left, right),
        _ => Err(fault("a test takes one argument")),
    }
}

fn ordered(args: &[Value], is: fn(Ordering) -> bool) -> Result<bool, Error> {
    two(args, |left, right| Ok(order(left, right, 0)?.is_some_and(is)))
}

/// The remainder of a number, never negative.
fn remainder(args: &[Value], divisor: i128) -> Result<f64, Error> {
    let value = one(args)?;
    match whole(value) {
        Some(number) => Ok(number.rem_euclid(divisor) as f64),
        None if type_of(value) == PythonType::Float => {
            Ok(f64::try_from(value.clone())?.rem_euclid(divisor as f64))
        }
        None => Err(fault(format!("unsupported operand type for %: '{}'", type_name(value)))),
    }
}

fn divisible(_: &mut State<'_, '_>, args: &[Value]) -> Result<bool, Error> {
    two(args, |value, divisor| match (whole(value), whole(divisor)) {
        (_, Some(0)) => Err(fault("integer modulo by zero")),
        (Some(value), Some(divisor)) => Ok(value.checked_rem(divisor).unwrap_or(0) == 0),
        _ => {
            let divisor = f64::try_from(divisor.clone())?;
            if divisor == 0.0 {
                Err(fault("float modulo by zero"))
            } else {
                Ok(f64::try_from(value.clone())? % divisor == 0.0)
            }
        }
    })
}

fn cased(args: &[Value], method: &str) -> Result<bool, Error> {
    Ok(str_methods::call(&string(one(args)?)?, method, &[])?.is_true())
}

/// Returns whether a value has a length and items.
fn is_sequence(value: &Value) -> bool {
    match type_of(value) {
        PythonType::View => false,
        _ => length(value).is_ok(),
    }
}

/// Returns whether a value can be called: functions, macros, methods, and an undefined value, whose
/// call raises.
fn is_callable(value: &Value) -> bool {
    match type_of(value) {
        PythonType::Undefined => true,
        PythonType::Other if value.kind() == ValueKind::Plain => {
            value.downcast_object_ref::<super::globals::ItemCycler>().is_none()
        }
        PythonType::Other => true,
        _ => false,
    }
}

/// Returns whether two values are one object. Equal constants, texts and numbers are, because
/// Python shares small ones.
fn same(_: &mut State<'_, '_>, args: &[Value]) -> Result<bool, Error> {
    two(args, |left, right| {
        if type_of(left) != type_of(right) {
            return Ok(false);
        }
        if left.as_object().is_some() {
            Ok(minijinja::tests::is_sameas(left, right))
        } else {
            Ok(left == right)
        }
    })
}
