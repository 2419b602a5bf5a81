//! Typed access to the keys of a GGUF file, and the record of those that were read.

use std::cell::RefCell;
use std::collections::BTreeSet;

use crate::error::{Error, Result};
use crate::weights::{GgufFile, GgufValue};

/// The keys of a file's architecture.
pub(super) struct ArchKeys<'a> {
    pub(super) file: &'a GgufFile,
    pub(super) arch: &'a str,
    read: RefCell<BTreeSet<String>>,
}

/// Returns a value; of a list of equal values, one.
pub(super) fn single(value: &GgufValue) -> &GgufValue {
    match value {
        GgufValue::List(list) => match list.split_first() {
            Some((first, rest)) if rest.iter().all(|other| other == first) => first,
            _ => value,
        },
        value => value,
    }
}

/// Returns a value as text for a message, cut after some characters.
pub(super) fn shown(value: &GgufValue) -> String {
    match value {
        GgufValue::Integer(number) => number.to_string(),
        GgufValue::Float(number) => number.to_string(),
        GgufValue::Bool(flag) => flag.to_string(),
        GgufValue::Text(text) => format!("{:?}", text.chars().take(80).collect::<String>()),
        GgufValue::List(list) => {
            let first: Vec<String> = list.iter().take(8).map(shown).collect();
            let more = if list.len() > 8 { ", …" } else { "" };
            format!("[{}{more}]", first.join(", "))
        }
    }
}

/// Returns a flag, which some files hold as a number.
pub(super) fn is_set(value: &GgufValue) -> Option<bool> {
    match value {
        GgufValue::Bool(flag) => Some(*flag),
        GgufValue::Integer(number) => Some(*number != 0),
        _ => None,
    }
}

impl<'a> ArchKeys<'a> {
    pub(super) fn new(file: &'a GgufFile, arch: &'a str) -> Self {
        ArchKeys { file, arch, read: RefCell::default() }
    }

    /// Returns the value of `key` of the architecture.
    pub(super) fn get(&self, key: &str) -> Option<&'a GgufValue> {
        let whole = format!("{}.{key}", self.arch);
        let value = self.file.key(&whole);
        self.read.borrow_mut().insert(whole);
        value
    }

    fn typed<T>(
        &self,
        key: &str,
        accepted: &str,
        read: impl Fn(&'a GgufValue) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(single(value)).map(Some).ok_or_else(|| self.refused(key, value, accepted))
    }

    /// Returns the error for a value that no model of the architecture has.
    pub(super) fn refused(&self, key: &str, value: &GgufValue, accepted: &str) -> Error {
        self.file.refused(format!("its key `{}.{key}` is {}; accepted: {accepted}", self.arch, shown(value)))
    }

    pub(super) fn size(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number, the same for all layers", |value| match value {
            GgufValue::Integer(number) => usize::try_from(*number).ok(),
            _ => None,
        })
    }

    /// Returns a size that every file has.
    pub(super) fn required(&self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| self.file.refused(format!("its key `{}.{key}` is missing", self.arch)))
    }

    /// Returns the number of blocks after the others that predict further tokens.
    pub(super) fn further_blocks(&self) -> Result<usize> {
        Ok(self.size("nextn_predict_layers")?.unwrap_or(0))
    }

    /// Returns one value of a list for each of the `layers` blocks of the model, if `value` is such
    /// a list. Lists may go on with the blocks that predict further tokens.
    pub(super) fn of_layers<T>(
        &self,
        value: Option<&GgufValue>,
        layers: usize,
        read: impl Fn(&GgufValue) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let Some(GgufValue::List(list)) = value else { return Ok(None) };
        let fits = self.is_of_layers(list, layers)?;
        Ok(if fits { list.iter().take(layers).map(read).collect() } else { None })
    }

    /// Returns whether `list` has a value for each of the `layers` blocks of the model, or also for
    /// those that predict further tokens.
    pub(super) fn is_of_layers(&self, list: &[GgufValue], layers: usize) -> Result<bool> {
        Ok(list.len() == layers || list.len() == layers + self.further_blocks()?)
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", |value| match value {
            GgufValue::Float(number) => Some(shortest(*number)),
            GgufValue::Integer(number) => Some(*number as f64),
            _ => None,
        })
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true, false", |value| match value {
            GgufValue::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a text", |value| match value {
            GgufValue::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// Refuses a file with a key of its architecture that was not read: it may change the model.
    pub(super) fn refuse_unread(&self) -> Result<()> {
        let (read, start) = (self.read.borrow(), format!("{}.", self.arch));
        let unread = self.file.keys().find(|key| key.starts_with(&start) && !read.contains(*key));
        unread.map_or(Ok(()), |key| {
            let value = self.file.key(key).map(shown).unwrap_or_default();
            Err(self.file.refused(format!("finetune does not know its key `{key}`, which is {value}")))
        })
    }
}

/// Returns the number with the fewest digits that rounds to `number`: that of the original
/// config.json, most often.
pub(super) fn shortest(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}
