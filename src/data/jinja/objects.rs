//! Objects of Python that templates meet: bound methods, views of a dict, ranges, and the globals that keep a state.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use minijinja::value::{Enumerator, Object, ObjectRepr, Value, from_args};
use minijinja::{Error, ErrorKind, State};

use super::methods::call_method;
use super::values::{bind, fault, integer, split_arguments};

/// A method of a value, as `'a'.upper` without a call.
pub(super) struct BoundMethod {
    pub(super) value: Value,
    pub(super) name: &'static str,
}

impl fmt::Debug for BoundMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<built-in method {}>", self.name)
    }
}

impl Object for BoundMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        call_method(state, &self.value, self.name, args)
    }
}

/// The views that `dict.keys`, `dict.values` and `dict.items` give.
pub(super) struct DictView {
    pub(super) name: &'static str,
    pub(super) items: Vec<Value>,
}

impl fmt::Debug for DictView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Object for DictView {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items.clone())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.items.len())
    }
}

/// Python's `range`.
pub(super) struct PythonRange {
    start: i64,
    stop: i64,
    step: i64,
    length: usize,
}

/// Items of a range that Jinja's sandbox accepts.
const MAX_RANGE: usize = 100_000;

impl PythonRange {
    /// The range of the arguments of a call.
    ///
    /// # Errors
    /// When they are no integers or the range has more than 100,000 items.
    pub(super) fn from_arguments(args: &[Value]) -> Result<Value, Error> {
        let (start, stop, step) = match args {
            [stop] => (0, integer(stop)?, 1),
            [start, stop] => (integer(start)?, integer(stop)?, 1),
            [start, stop, step] => (integer(start)?, integer(stop)?, integer(step)?),
            _ => return Err(fault("range expected 1 to 3 arguments")),
        };
        let length = Self::count(start, stop, step)?;
        if length > MAX_RANGE {
            return Err(fault(format!("range has too many elements; accepted: up to {MAX_RANGE}")));
        }
        Ok(Self { start, stop, step, length }.into())
    }

    fn count(start: i64, stop: i64, step: i64) -> Result<usize, Error> {
        let (start, stop, step) = (i128::from(start), i128::from(stop), i128::from(step));
        let distance = match step {
            0 => return Err(fault("range() arg 3 must not be zero")),
            1.. => stop - start,
            _ => start - stop,
        };
        let steps = (distance.max(0) + step.abs() - 1) / step.abs();
        Ok(usize::try_from(steps).unwrap_or(usize::MAX))
    }

    /// The part of the range that `places`, in steps of `step`, name.
    pub(super) fn part(&self, places: &[usize], step: i64) -> Value {
        let at = |place: usize| self.start + self.step * i64::try_from(place).unwrap_or(i64::MAX);
        let (start, length) = (places.first().map_or(self.stop, |place| at(*place)), places.len());
        let step = self.step.saturating_mul(step);
        let stop = places.last().map_or(start, |place| at(*place).saturating_add(step));
        let stop = if places.len() > 1 || step == self.step { stop.min(self.stop.max(start)) } else { stop };
        Self { start, stop, step, length }.into()
    }

    /// The text that Python prints for it.
    pub(super) fn text(&self) -> String {
        match self.step {
            1 => format!("range({}, {})", self.start, self.stop),
            step => format!("range({}, {}, {step})", self.start, self.stop),
        }
    }
}

impl From<PythonRange> for Value {
    fn from(range: PythonRange) -> Self {
        Value::from_object(range)
    }
}

impl fmt::Debug for PythonRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

impl Object for PythonRange {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let place = key.as_usize().filter(|place| *place < self.length)?;
        Some(Value::from(self.start + self.step * i64::try_from(place).ok()?))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.length)
    }
}

/// Jinja's `cycler`.
#[derive(Debug)]
pub(super) struct ItemCycler {
    items: Vec<Value>,
    place: AtomicUsize,
}

impl ItemCycler {
    /// A cycler of the arguments.
    ///
    /// # Errors
    /// When there are none.
    pub(super) fn from_arguments(args: &[Value]) -> Result<Value, Error> {
        if args.is_empty() {
            return Err(fault("at least one item has to be provided"));
        }
        Ok(Value::from_object(ItemCycler { items: args.to_vec(), place: AtomicUsize::new(0) }))
    }

    fn current(&self) -> Value {
        self.items[self.place.load(Ordering::Relaxed) % self.items.len()].clone()
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
            "pos" => Some(Value::from(self.place.load(Ordering::Relaxed))),
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
                self.place
                    .store((self.place.load(Ordering::Relaxed) + 1) % self.items.len(), Ordering::Relaxed);
                Ok(item)
            }
            "reset" => {
                self.place.store(0, Ordering::Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

/// Jinja's `joiner`.
#[derive(Debug)]
pub(super) struct ItemJoiner {
    separator: Value,
    used: AtomicBool,
}

impl ItemJoiner {
    /// A joiner with the separator of the arguments, `", "` if there is none.
    ///
    /// # Errors
    /// When there are more arguments.
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
        match self.used.swap(true, Ordering::Relaxed) {
            true => Ok(self.separator.clone()),
            false => Ok(Value::from("")),
        }
    }
}

/// Python's `dict` as a template calls it: `dict(…)` and `dict.fromkeys(…)`.
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
            "fromkeys" => {
                let [keys, value] = bind("fromkeys", ["iterable", "value"], 1, args)?;
                let value = value.unwrap_or_else(|| Value::from(()));
                let keys = super::values::items(&keys.unwrap_or_default())?;
                Ok(Value::from_pairs(keys.into_iter().map(|key| (key, value.clone()))))
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

/// The pairs of a dict, or of an iterable of pairs.
fn pairs(from: &Value) -> Result<Vec<(Value, Value)>, Error> {
    if super::values::type_of(from) == super::values::PythonType::Dict {
        return Ok(dict_pairs(from));
    }
    let mut pairs = Vec::new();
    for item in super::values::items(from)? {
        match &super::values::items(&item)?[..] {
            [key, value] => pairs.push((key.clone(), value.clone())),
            _ => return Err(fault("a dict is made of pairs")),
        }
    }
    Ok(pairs)
}

/// The keys and values of a dict, in its order.
pub(super) fn dict_pairs(dict: &Value) -> Vec<(Value, Value)> {
    dict.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten().collect()
}

/// A named tuple of the filter `groupby`.
#[derive(Debug)]
pub(super) struct GroupItem {
    pub(super) grouper: Value,
    pub(super) list: Value,
}

impl Object for GroupItem {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match (key.as_str(), key.as_usize()) {
            (Some("grouper"), _) | (None, Some(0)) => Some(self.grouper.clone()),
            (Some("list"), _) | (None, Some(1)) => Some(self.list.clone()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(2)
    }
}

/// The arguments of a call to a macro that reads `varargs` or `kwargs`.
#[derive(Debug)]
pub(super) struct PackedArguments {
    pub(super) positional: Vec<Value>,
    pub(super) keywords: Vec<(String, Value)>,
}

impl Object for PackedArguments {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
}

/// An undefined argument of a macro, where minijinja would take it for a missing one.
#[derive(Debug)]
pub(super) struct HiddenUndefined;

impl Object for HiddenUndefined {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
}
