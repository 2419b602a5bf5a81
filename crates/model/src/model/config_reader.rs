//! Typed access to config.json.

use std::collections::BTreeMap;
use std::fmt::Display;

use serde_json::Value;

use crate::error::{Error, Result};

/// Typed access to the keys of a JSON object. Errors name the key, the value found and the accepted
/// type.
pub(super) struct ConfigReader<'a> {
    object: &'a serde_json::Map<String, Value>,
}

impl<'a> ConfigReader<'a> {
    pub(super) fn new(value: &'a Value) -> Result<Self> {
        match value {
            Value::Object(object) => Ok(ConfigReader { object }),
            other => {
                Err(Error::user("config.json does not hold an object").because(format!("found {other}")))
            }
        }
    }

    /// Returns all keys.
    pub(super) fn object(&self) -> &'a serde_json::Map<String, Value> {
        self.object
    }

    /// Returns the value of `key`; a null counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Returns every key that is not null with its value as text, in the order of keys. Equal
    /// numbers have equal texts, independent of their notation.
    pub(super) fn texts(&self) -> BTreeMap<String, String> {
        let values = self.object.iter().filter(|(_, value)| !value.is_null());
        values.map(|(key, value)| (key.clone(), text(value))).collect()
    }

    /// Returns whether the key is present, even as null.
    pub(super) fn mentions(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    fn typed<T>(&self, key: &str, wanted: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| refused(key, value, wanted))
    }

    pub(super) fn opt_usize(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    /// Returns a token id; `None` if the key is absent or the number negative, which means no such
    /// token.
    pub(super) fn opt_token(&self, key: &str) -> Result<Option<u32>> {
        let id = self.typed(key, "the id of a token, or -1 or null for none", |v| {
            v.as_i64().filter(|id| *id <= i64::from(u32::MAX))
        })?;
        Ok(id.and_then(|id| u32::try_from(id).ok()))
    }

    /// Returns a size from 1 to `most`, if the key is present. `most` is far beyond any model. It
    /// protects code that allocates by sizes before the memory is checked.
    pub(super) fn opt_size(&self, key: &str, most: usize) -> Result<Option<usize>> {
        let size = self.opt_usize(key)?;
        match size {
            Some(size) if !(1..=most).contains(&size) => Err(refused(key, size, &format!("1 to {most}"))),
            _ => Ok(size),
        }
    }

    /// Works like [`ConfigReader::opt_size`] for a required key.
    pub(super) fn size(&self, key: &str, most: usize) -> Result<usize> {
        self.opt_size(key, most)?.ok_or_else(|| {
            Error::user(format!("`{key}` is missing")).because("every model of this family has it")
        })
    }

    pub(super) fn opt_f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// Returns a number above 0, if the key is present.
    pub(super) fn above_zero(&self, key: &str) -> Result<Option<f64>> {
        match self.opt_f64(key)? {
            Some(value) if value <= 0.0 => Err(refused(key, value, "above 0")),
            value => Ok(value),
        }
    }

    pub(super) fn f64_or(&self, key: &str, default: f64) -> Result<f64> {
        Ok(self.opt_f64(key)?.unwrap_or(default))
    }

    pub(super) fn bool_or(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub(super) fn opt_str(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a text", Value::as_str)
    }

    pub(super) fn opt_keys(&self, key: &str) -> Result<Option<ConfigReader<'a>>> {
        Ok(self.typed(key, "an object", Value::as_object)?.map(|object| ConfigReader { object }))
    }

    pub(super) fn opt_list(&self, key: &str) -> Result<Option<&'a Vec<Value>>> {
        self.typed(key, "a list", Value::as_array)
    }

    pub(super) fn f64_list(&self, key: &str) -> Result<Option<Vec<f64>>> {
        self.typed(key, "a list of numbers", |v| v.as_array()?.iter().map(Value::as_f64).collect())
    }
}

/// Returns the error of a key with an unusable value.
pub(super) fn refused(key: &str, value: impl Display, accepted: &str) -> Error {
    Error::user(format!("`{key}` is {value}")).because(format!("accepted: {accepted}"))
}

fn text(value: &Value) -> String {
    match value {
        Value::Number(number) => number.as_f64().map_or_else(|| number.to_string(), |n| format!("{n:?}")),
        Value::Array(list) => format!("[{}]", list.iter().map(text).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}
