//! Attributes and items of values, as Jinja's sandbox looks them up.

use minijinja::Error;
use minijinja::value::Value;

use super::method_names::method_named;
use super::objects::BoundMethod;
use super::values::{given, type_of};

/// Python's `value.name`, where `name` is a method of some type.
pub(super) fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    match method_named(type_of(value), name) {
        Some((name, true)) => Ok(Value::from_object(BoundMethod { value: value.clone(), name })),
        // A method that Jinja's sandbox hides is undefined.
        Some((_, false)) => Ok(Value::UNDEFINED),
        None => value.get_attr(name),
    }
}

/// Jinja's `value[key]`: an item, or else a method of that name.
pub(super) fn item(value: &Value, key: &Value) -> Result<Value, Error> {
    let item = value.get_item(key)?;
    match key.as_str() {
        Some(name) if item.is_undefined() => attribute(value, name),
        _ => Ok(item),
    }
}

/// A path of attributes, such as `"address.city"`.
#[derive(Default)]
pub(super) struct AttributePath(Vec<Value>);

impl AttributePath {
    pub(super) fn parse(path: &str) -> Self {
        let part = |part: &str| part.parse::<u64>().map_or_else(|_| Value::from(part), Value::from);
        AttributePath(path.split('.').map(part).collect())
    }

    pub(super) fn new(path: &Value) -> Self {
        path.as_str().map_or_else(|| AttributePath(vec![path.clone()]), Self::parse)
    }

    pub(super) fn of(path: Option<&Value>) -> Self {
        given(path).map_or_else(Self::default, Self::new)
    }

    /// Returns the value at this path of `of`; `default` replaces undefined values on the way.
    ///
    /// # Errors
    /// Fails if a part of the path is looked up in an undefined value.
    pub(super) fn get(&self, of: &Value, default: Option<&Value>) -> Result<Value, Error> {
        let mut value = of.clone();
        for part in &self.0 {
            value = item(&value, part)?;
            if let Some(default) = default.filter(|_| value.is_undefined()) {
                value = default.clone();
            }
        }
        Ok(value)
    }
}
