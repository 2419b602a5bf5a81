//! Limits for the memory that a data file's rows take: some kilobytes can expand to gigabytes.

use serde_json::{Map, Value};

use crate::runtime::machine::host_memory;

/// Number of rows that any file may hold; a larger number requires a byte of the file for each row.
const FREE_ROWS: u64 = 100_000;
/// Bytes of rows that any file may hold. Beyond them, the limit is [`MAX_EXPANSION`] times the
/// file's size, and at most the free memory.
const FREE_BYTES: u64 = 64 << 20;
/// Maximum ratio of memory to file size. Repeated text compresses some hundredfold, written text
/// tenfold.
const MAX_EXPANSION: u64 = 500;
/// Approximate bytes of an entry of a row, beside its name and its value.
const ENTRY_BYTES: u64 = 48;

/// Counts the rows of a file and refuses those beyond its limits.
#[derive(Debug, Clone)]
pub(super) struct ExpansionBounds {
    file_bytes: u64,
    rows: u64,
    bytes: u64,
    most_bytes: u64,
}

impl ExpansionBounds {
    /// Makes the limits for a file of `file_bytes` bytes.
    pub(super) fn of(file_bytes: u64) -> Self {
        let free = host_memory().map_or(u64::MAX, |memory| memory.available.min(memory.limit));
        let most_bytes = FREE_BYTES.max(file_bytes.saturating_mul(MAX_EXPANSION).min(free));
        ExpansionBounds { file_bytes, rows: 0, bytes: 0, most_bytes }
    }

    /// Counts a row of `size` bytes of memory.
    ///
    /// # Errors
    /// Fails with the size found and the accepted one.
    pub(super) fn count(&mut self, size: u64) -> Result<(), String> {
        self.rows += 1;
        self.bytes = self.bytes.saturating_add(size);
        self.check_rows(self.rows)?;
        self.check(self.bytes, "rows")
    }

    /// Refuses more unpacked text than the limit of the file.
    ///
    /// # Errors
    /// Fails with the size found and the accepted one.
    pub(super) fn check_bytes(&self, bytes: u64) -> Result<(), String> {
        self.check(bytes, "text")
    }

    fn check(&self, bytes: u64, what: &str) -> Result<(), String> {
        if bytes > self.most_bytes {
            return Err(format!(
                "its {} bytes become more than {} bytes of {what}; accepted: {MAX_EXPANSION} times its size, and at most the free memory",
                self.file_bytes, self.most_bytes
            ));
        }
        Ok(())
    }

    /// Refuses more rows than the file can hold.
    ///
    /// # Errors
    /// Fails with the number found and the accepted one.
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

/// Estimates the memory of a row, in bytes. A null, one byte in a file, is as large here as any
/// value, and every row holds its own names.
pub(super) fn row_bytes(row: &Map<String, Value>) -> u64 {
    row.iter().map(|(name, value)| ENTRY_BYTES + name.len() as u64 + value_bytes(value)).sum()
}

/// Estimates the maximum memory of the value of a JSON text, in bytes.
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
