//! The parts that readers of tables share: how a value of a column becomes one of a row, and how reading fails.

use serde_json::{Map, Number, Value};

use super::python_json;
use super::sandbox::ChildEnd;
use super::settle::settle;
use super::unusable::Unusable;

/// A row, or what is wrong with it.
pub(super) type TableRow = Result<Map<String, Value>, String>;

/// The error of a file that was not read to its end.
pub(super) enum ReadFailure {
    /// The disk does not give its bytes.
    Storage(String),
    /// The file or the machine is at fault.
    Child(ChildEnd),
}

impl From<String> for ReadFailure {
    /// The contents of the file are at fault.
    fn from(why: String) -> Self {
        ReadFailure::Child(ChildEnd::ByInput(why))
    }
}

/// Makes objects of the fields of a table, and counts the values that have no form in a row.
#[derive(Default)]
pub(super) struct RowMaker {
    has_marks: bool,
}

impl RowMaker {
    /// The row of the columns `fields`.
    pub(super) fn row(
        mut self,
        make: impl FnOnce(&mut Self) -> Result<Map<String, Value>, String>,
    ) -> TableRow {
        let row = make(&mut self)?;
        if self.has_marks { settle(row) } else { Ok(row) }
    }

    /// A value that JSON cannot hold.
    pub(super) fn unusable(&mut self, kind: Unusable) -> Value {
        self.has_marks = true;
        kind.value()
    }

    /// A float, which may be none that JSON has.
    pub(super) fn float(&mut self, value: f64) -> Value {
        match Number::from_f64(value) {
            Some(number) => Value::Number(number),
            None => self.unusable(Unusable::of_float(value)),
        }
    }

    /// A value that is stored as its JSON text.
    pub(super) fn json(&mut self, text: &str) -> Value {
        match python_json::parse(text.as_bytes()) {
            Ok(parsed) => {
                self.has_marks |= parsed.has_marks;
                parsed.value
            }
            Err(_) => Value::String(text.to_owned()),
        }
    }

    /// Bytes, which may be a text that was written without its type.
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> Value {
        match std::str::from_utf8(bytes) {
            Ok(text) => Value::String(text.to_owned()),
            Err(_) => self.unusable(Unusable::Bytes),
        }
    }
}

/// A moment of `seconds` since 1970 in UTC in the form of `strftime`; none where there is no such date.
pub(super) fn moment(seconds: i64, nanos: u32, form: &str) -> Option<String> {
    Some(chrono::DateTime::from_timestamp(seconds, nanos)?.format(form).to_string())
}
