//! How much the rows of a data file may become in memory: some kilobytes can claim gigabytes.

use serde_json::{Map, Value};

use crate::runtime::machine::host_memory;

/// Rows that any file may hold; a larger number needs a byte of the file each, which rows worth training on have.
const FREE_ROWS: u64 = 100_000;
/// Bytes of rows that any file may hold; beyond them at most [`MAX_EXPANSION`] times its own, and the free memory.
const FREE_BYTES: u64 = 64 << 20;
/// Repeated text is packed some hundredfold, text a person wrote tenfold.
const MAX_EXPANSION: u64 = 500;
/// About what an entry of a row needs beside its name and its value.
const ENTRY_BYTES: u64 = 48;

/// Counts the rows of a file.
#[derive(Debug, Clone)]
pub(super) struct ExpansionBounds {
    file_bytes: u64,
    rows: u64,
    bytes: u64,
    most_bytes: u64,
}

impl ExpansionBounds {
    /// For a file of `file_bytes` bytes.
    pub(super) fn of(file_bytes: u64) -> Self {
        let free = host_memory().map_or(u64::MAX, |memory| memory.available.min(memory.limit));
        let most_bytes = FREE_BYTES.max(file_bytes.saturating_mul(MAX_EXPANSION).min(free));
        ExpansionBounds { file_bytes, rows: 0, bytes: 0, most_bytes }
    }

    /// Counts a row of `size` bytes of memory.
    ///
    /// # Errors
    /// How much it is, and what is accepted.
    pub(super) fn count(&mut self, size: u64) -> Result<(), String> {
        self.rows += 1;
        self.bytes = self.bytes.saturating_add(size);
        self.check_rows(self.rows)?;
        self.check(self.bytes, "rows")
    }

    /// Refuses more unpacked text than the file may become.
    ///
    /// # Errors
    /// How much it is, and what is accepted.
    pub(super) fn check_bytes(&self, bytes: u64) -> Result<(), String> {
        self.check(bytes, "text")
    }

    fn check(&self, bytes: u64, what: &str) -> Result<(), String> {
        if bytes > self.most_bytes {
            return Err(format!(
                "its {} bytes become more than {} bytes of {what}; accepted: {MAX_EXPANSION} times its size, as far as there is free memory",
                self.file_bytes, self.most_bytes
            ));
        }
        Ok(())
    }

    /// Refuses more rows than the file can hold.
    ///
    /// # Errors
    /// How many they are, and what is accepted.
    pub(super) fn check_rows(&self, rows: u64) -> Result<(), String> {
        let most = FREE_ROWS.max(self.file_bytes);
        if rows > most {
            return Err(format!(
                "it claims {rows} rows or more in {} bytes; accepted: {FREE_ROWS}, or a row for each byte",
                self.file_bytes
            ));
        }
        Ok(())
    }
}

/// About the memory that a row takes, in bytes: a null that is one byte in a file is as large as any value here, and every
/// row has names of its own.
pub(super) fn row_bytes(row: &Map<String, Value>) -> u64 {
    row.iter().map(|(name, value)| ENTRY_BYTES + name.len() as u64 + value_bytes(value)).sum()
}

/// At most about the memory that the value of this JSON text takes, in bytes.
pub(super) fn json_text_bytes(text: &[u8]) -> u64 {
    let entries = 1 + text.iter().filter(|byte| **byte == b',' || **byte == b'[').count() as u64;
    text.len() as u64 + entries * (ENTRY_BYTES + size_of::<Value>() as u64)
}

fn value_bytes(value: &Value) -> u64 {
    size_of::<Value>() as u64
        + match value {
            Value::String(text) => text.len() as u64,
            Value::Array(list) => list.iter().map(value_bytes).sum(),
            Value::Object(map) => row_bytes(map),
            _ => 0,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_nulls_count() {
        let row = |value: Value| Map::from_iter([("n".repeat(1000), value)]);
        assert!((1000..1200).contains(&row_bytes(&row(Value::Null))));
        let nulls = row_bytes(&row(Value::Array(vec![Value::Null; 1000])));
        assert!(nulls >= 1000 * size_of::<Value>() as u64, "{nulls}");
    }

    #[test]
    fn rows_that_outgrow_their_file_are_refused() {
        let mut bounds = ExpansionBounds::of(1000);
        assert_eq!(bounds.count(FREE_BYTES), Ok(()));
        let why = bounds.count(1).expect_err("too many");
        assert!(
            why.starts_with("its 1000 bytes become more than 67108864 bytes of rows; accepted: 500 times"),
            "{why}"
        );
        assert!(bounds.check_rows(FREE_ROWS + 1).is_err());
    }
}
