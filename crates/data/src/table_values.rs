//! Shared parts of the readers of tables: conversion of column values, and errors of reading.

use serde_json::{Map, Number, Value};

use super::python_json;
use super::sandbox::ChildEnd;
use super::settle::settle;
use super::unusable::Unusable;

/// A row, or its fault.
pub(super) type TableRow = Result<Map<String, Value>, String>;

/// Error of a file that was not read to its end.
pub(super) enum ReadFailure {
    /// The disk fails to read its bytes.
    Storage(String),
    /// The file or the machine is at fault.
    Child(ChildEnd),
}

impl From<String> for ReadFailure {
    /// Converts a fault of the file's contents.
    fn from(why: String) -> Self {
        ReadFailure::Child(ChildEnd::ByInput(why))
    }
}

/// Makes objects of the fields of a table, and records whether a value has no form in JSON.
#[derive(Default)]
pub(super) struct RowMaker {
    has_marks: bool,
}

impl RowMaker {
    /// Makes a row with `make`, and settles its marked values.
    pub(super) fn row(
        mut self,
        make: impl FnOnce(&mut Self) -> Result<Map<String, Value>, String>,
    ) -> TableRow {
        let row = make(&mut self)?;
        if self.has_marks { settle(row) } else { Ok(row) }
    }

    /// Marks a value that JSON cannot hold.
    pub(super) fn unusable(&mut self, kind: Unusable) -> Value {
        self.has_marks = true;
        kind.value()
    }

    /// Converts a float; marks it if it is not finite.
    pub(super) fn float(&mut self, value: f64) -> Value {
        match Number::from_f64(value) {
            Some(number) => Value::Number(number),
            None => self.unusable(Unusable::of_float(value)),
        }
    }

    /// Parses a value that is stored as JSON text; text that is not JSON stays a string.
    pub(super) fn json(&mut self, text: &str) -> Value {
        match python_json::parse(text.as_bytes()) {
            Ok(parsed) => {
                self.has_marks |= parsed.has_marks;
                parsed.value
            }
            Err(_) => Value::String(text.to_owned()),
        }
    }

    /// Converts bytes, which may be a text without its type; marks them if they are not UTF-8.
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> Value {
        match std::str::from_utf8(bytes) {
            Ok(text) => Value::String(text.to_owned()),
            Err(_) => self.unusable(Unusable::Bytes),
        }
    }
}

/// Formats `seconds` since 1970 in UTC by `strftime`; `None` if the date does not exist.
pub(super) fn moment(seconds: i64, nanos: u32, form: &str) -> Option<String> {
    Some(chrono::DateTime::from_timestamp(seconds, nanos)?.format(form).to_string())
}
