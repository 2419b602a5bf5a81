//! Python objects in templates: bound methods, views of a dict, ranges, generators.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex};

use minijinja::value::{Enumerator, Object, ObjectRepr, Tuple, Value};
use minijinja::{Error, State};

/// A method of a value without a call, such as `'a'.upper`.
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
        self.value.call_method(state, self.name, args)
    }
}

/// The view that `dict.keys`, `dict.values` or `dict.items` returns.
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

/// A range of ints.
pub(super) struct PythonRange {
    pub(super) start: i64,
    pub(super) stop: i64,
    pub(super) step: i64,
    pub(super) length: usize,
}

impl PythonRange {
    /// The item at index `index`, which must be in the range.
    fn at(&self, index: usize) -> i64 {
        let item = i128::from(self.start) + i128::from(self.step) * i128::try_from(index).unwrap_or(0);
        i64::try_from(item).unwrap_or(self.stop)
    }

    /// The part of the range at the indices `places`, which are `step` apart.
    pub(super) fn part(&self, places: &[usize], step: i64) -> Value {
        let (start, length) = (places.first().map_or(self.stop, |index| self.at(*index)), places.len());
        let step = self.step.saturating_mul(step);
        let stop = places.last().map_or(start, |index| self.at(*index).saturating_add(step));
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
        let index = key.as_usize().filter(|index| *index < self.length)?;
        Some(Value::from(self.at(index)))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.length)
    }
}

/// A named tuple of the filter `groupby`.
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
pub(super) struct PackedArguments {
    pub(super) positional: Vec<Value>,
    pub(super) keywords: Vec<(String, Value)>,
}

impl Object for PackedArguments {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
}

/// Stands for an undefined argument of a macro, which minijinja would treat as missing.
#[derive(Debug)]
pub(super) struct HiddenUndefined;

impl Object for HiddenUndefined {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
}

/// The keys and values of a dict, in its order.
pub(super) fn dict_pairs(dict: &Value) -> Vec<(Value, Value)> {
    dict.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten().collect()
}

/// The pairs of a dict as tuples.
pub(super) fn pair_tuples(dict: &Value) -> Vec<Value> {
    dict_pairs(dict).into_iter().map(|(key, value)| Tuple::from([key, value]).into()).collect()
}

/// A Python generator: it yields each item once, and has neither a length nor an index.
pub(super) struct Generated(Mutex<VecDeque<Value>>);

impl Generated {
    pub(super) fn value(items: Vec<Value>) -> Value {
        Value::from_object(Generated(Mutex::new(items.into())))
    }
}

/// The remaining items of a generator.
struct GeneratedItems(Arc<Generated>);

impl Iterator for GeneratedItems {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        self.0.0.lock().ok()?.pop_front()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.0.0.lock().map_or(0, |items| items.len());
        (left, Some(left))
    }
}

impl fmt::Debug for Generated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<generator object>")
    }
}

impl Object for Generated {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Iter(Box::new(GeneratedItems(self.clone())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<generator object>")
    }
}

/// Implements `Debug` without the contents, because an object may contain itself.
macro_rules! opaque {
    ($($name:ident),*) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!("<", stringify!($name), ">"))
            }
        }
    )*};
}
pub(super) use opaque;

opaque!(GroupItem, PackedArguments);
