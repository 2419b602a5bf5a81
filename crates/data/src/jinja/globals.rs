//! The globals of Jinja.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use minijinja::value::{Object, ObjectRepr, Value, from_args};
use minijinja::{Error, ErrorKind, State};

use super::methods::from_keys;
use super::objects::{PythonRange, dict_pairs, opaque};
use super::values::{PythonType, bind, fault, integer, items, split_arguments, type_of};

/// Maximum number of items of a range in Jinja's sandbox.
const MAX_RANGE: usize = 100_000;

/// Python's `range`.
///
/// # Errors
/// Fails if the arguments are no integers or the range has more than 100,000 items.
pub(super) fn range(args: &[Value]) -> Result<Value, Error> {
    let (start, stop, step) = match args {
        [stop] => (0, integer(stop)?, 1),
        [start, stop] => (integer(start)?, integer(stop)?, 1),
        [start, stop, step] => (integer(start)?, integer(stop)?, integer(step)?),
        _ => return Err(fault("range expected 1 to 3 arguments")),
    };
    let length = range_length(start, stop, step)?;
    if length > MAX_RANGE {
        return Err(fault(format!("range has too many elements; accepted: up to {MAX_RANGE}")));
    }
    Ok(PythonRange { start, stop, step, length }.into())
}

fn range_length(start: i64, stop: i64, step: i64) -> Result<usize, Error> {
    let (start, stop, step) = (i128::from(start), i128::from(stop), i128::from(step));
    let distance = match step {
        0 => return Err(fault("range() arg 3 must not be zero")),
        1.. => stop - start,
        _ => start - stop,
    };
    let steps = (distance.max(0) + step.abs() - 1) / step.abs();
    Ok(usize::try_from(steps).unwrap_or(usize::MAX))
}

/// The object that Jinja's `cycler` gives.
pub(super) struct ItemCycler {
    items: Vec<Value>,
    index: AtomicUsize,
}

impl ItemCycler {
    /// A cycler of the arguments.
    ///
    /// # Errors
    /// Fails without arguments.
    pub(super) fn from_arguments(args: &[Value]) -> Result<Value, Error> {
        if args.is_empty() {
            return Err(fault("at least one item has to be provided"));
        }
        Ok(Value::from_object(ItemCycler { items: args.to_vec(), index: AtomicUsize::new(0) }))
    }

    fn current(&self) -> Value {
        self.items[self.index.load(Ordering::Relaxed) % self.items.len()].clone()
    }
}

impl Object for ItemCycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_str()? {
            "current" => Some(self.current()),
            "items" => Some(self.items.iter().cloned().collect()),
            "pos" => Some(Value::from(self.index.load(Ordering::Relaxed))),
            _ => None,
        }
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        name: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        let () = from_args(args)?;
        match name {
            "next" => {
                let item = self.current();
                self.index
                    .store((self.index.load(Ordering::Relaxed) + 1) % self.items.len(), Ordering::Relaxed);
                Ok(item)
            }
            "reset" => {
                self.index.store(0, Ordering::Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

/// The object that Jinja's `joiner` gives.
pub(super) struct ItemJoiner {
    separator: Value,
    used: AtomicBool,
}

impl ItemJoiner {
    /// A joiner with the separator of the arguments; `", "` by default.
    ///
    /// # Errors
    /// Fails if the call has more arguments.
    pub(super) fn from_arguments(args: &[Value]) -> Result<Value, Error> {
        let [separator] = bind("joiner", ["sep"], 0, args)?;
        let separator = separator.unwrap_or_else(|| Value::from(", "));
        Ok(Value::from_object(ItemJoiner { separator, used: AtomicBool::new(false) }))
    }
}

impl Object for ItemJoiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let () = from_args(args)?;
        if self.used.swap(true, Ordering::Relaxed) { Ok(self.separator.clone()) } else { Ok(Value::from("")) }
    }
}

/// Python's `dict` for templates: `dict(…)` and `dict.fromkeys(…)`.
#[derive(Debug)]
pub(super) struct DictClass;

impl Object for DictClass {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let (positional, keywords) = split_arguments(args);
        let mut pairs = match positional {
            [] => Vec::new(),
            [from] => pairs(from)?,
            _ => return Err(fault("dict expected at most 1 argument")),
        };
        pairs.extend(keywords.into_iter().map(|(key, value)| (Value::from(key), value)));
        Ok(Value::from_pairs(pairs))
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        name: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        match name {
            "fromkeys" => from_keys(args),
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

/// The pairs of a dict, or of an iterable of pairs.
fn pairs(from: &Value) -> Result<Vec<(Value, Value)>, Error> {
    if type_of(from) == PythonType::Dict {
        return Ok(dict_pairs(from));
    }
    let mut pairs = Vec::new();
    for item in items(from)? {
        match &items(&item)?[..] {
            [key, value] => pairs.push((key.clone(), value.clone())),
            _ => return Err(fault("a dict is made of pairs")),
        }
    }
    Ok(pairs)
}

/// transformers' `namespace`: minijinja's, without names that begin with an underscore.
pub(super) fn namespace(state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
    let (positional, keywords) = split_arguments(args);
    let made = Object::call(&Arc::new(DictClass), state, args)?;
    let names = positional.iter().flat_map(|from| from.try_iter().into_iter().flatten());
    let names = names.filter_map(|name| name.as_str().map(str::to_owned));
    if let Some(name) =
        names.chain(keywords.into_iter().map(|(name, _)| name)).find(|name| name.starts_with('_'))
    {
        return Err(fault(format!(
            "a namespace stores no name that begins with an underscore, but got '{name}'"
        )));
    }
    minijinja::functions::namespace(Some(made.into()))
}

opaque!(ItemCycler, ItemJoiner);
