//! Rows of CSV and TSV files with a header line. Every column is text, even if it holds numbers.

use std::collections::HashSet;
use std::io::Read;

use serde_json::{Map, Value};

use super::expansion::{ExpansionBounds, row_bytes};
use super::json_cut::line_ends;
use super::raw_rows::{DataFile, RawRow, TextFile};
use super::{BadRow, Origin, RowFault, RowFaultKind, RowOrigin, csv_delimiters};
use crate::error::{Error, Result};

/// Maximum number of columns; each costs every row a string.
const MAX_COLUMNS: usize = 4096;

/// Reads a table with a header line, whose file extension implies `delimiter`.
pub(super) fn csv(text: &TextFile<'_>, delimiter: u8, source: &mut DataFile) -> Result<()> {
    let file = &text.file;
    let table = csv_delimiters::find(&text.bytes, delimiter);
    if let Some(note) = &table.note {
        source.notes.push(format!("{} {note}", file.display()));
    }
    let delimiter = table.delimiter;
    // Every row holds the names of all columns.
    let mut bounds = ExpansionBounds::of(text.file_bytes);
    let opened = QuoteWatch::new(&text.bytes[table.start..], delimiter);
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).flexible(true).from_reader(opened);
    let cannot =
        |why: String| Error::user(format!("cannot read the data file {}", file.display())).because(why);
    let failed = |e: csv::Error| cannot(e.to_string());
    let header = reader.headers().map_err(failed)?.clone();
    if header.len() > MAX_COLUMNS {
        return Err(cannot(format!(
            "its header names {} columns; accepted: up to {MAX_COLUMNS}",
            header.len()
        )));
    }
    let names: Vec<String> = header.iter().map(str::to_owned).collect();
    let mut seen = HashSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(name.as_str())) {
        return Err(cannot(format!("its header names the column {twice:?} twice")));
    }
    let mut record = csv::ByteRecord::new();
    let mut counter = LineCounter { bytes: &text.bytes, at: table.start, line: 1 + table.lines_before };
    while reader.read_byte_record(&mut record).map_err(failed)? {
        let start = record.position().map_or(0, csv::Position::byte);
        let line = counter.line_of(table.start + start as usize);
        let origin = Origin { file: file.clone(), row: RowOrigin::Line(line) };
        match fields(&names, &record) {
            Ok(value) => {
                bounds.count(row_bytes(&value)).map_err(cannot)?;
                source.rows.push(RawRow { value, origin, document: false, format: None });
            }
            Err(why) => {
                source.bad.push(BadRow { origin, fault: RowFault::new(RowFaultKind::Unreadable, why) });
            }
        }
    }
    match reader.get_ref().unclosed() {
        None => Ok(()),
        Some(line) => Err(cannot(format!(
            "the quoted field that begins on line {} does not end: all after it would be part of it",
            table.lines_before + line
        ))
        .hint("close the quote; a quote inside of a quoted field is written twice")),
    }
}

fn fields(names: &[String], record: &csv::ByteRecord) -> Result<Map<String, Value>, String> {
    if record.len() != names.len() {
        return Err(format!("{} fields; the header has {}", record.len(), names.len()));
    }
    let mut value = Map::new();
    for (name, field) in names.iter().zip(record) {
        let text = std::str::from_utf8(field).map_err(|_| format!("the column {name:?} is not UTF-8"))?;
        value.insert(name.clone(), Value::String(text.to_owned()));
    }
    Ok(value)
}

/// Counts lines up to records in file order: the crate `csv` counts a CR LF one record late.
struct LineCounter<'a> {
    bytes: &'a [u8],
    at: usize,
    line: u64,
}

impl LineCounter<'_> {
    /// The line of the record that begins at `start`, or after the line ends there.
    fn line_of(&mut self, start: usize) -> u64 {
        let is_end = |byte: &&u8| matches!(byte, b'\n' | b'\r');
        let begins = start + self.bytes[start..].iter().take_while(is_end).count();
        self.line += line_ends(&self.bytes[self.at..begins]);
        self.at = begins;
        self.line
    }
}

/// State of the field that a byte is in, by the rules of the crate `csv`: a quote opens a field
/// only at its beginning. A doubled quote is a literal one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FieldState {
    Begins,
    Unquoted,
    Quoted,
    /// After a quote inside of quotes: the end of the field, or half of a quote.
    Closing,
}

/// Forwards the bytes of a table and tracks an open quoted field, which the crate `csv` silently
/// ends with the file.
struct QuoteWatch<R> {
    inner: R,
    delimiter: u8,
    state: FieldState,
    line: u64,
    opened_on: u64,
    /// True after a carriage return, which ends a line together with a line feed.
    after_return: bool,
}

impl<R: Read> QuoteWatch<R> {
    fn new(inner: R, delimiter: u8) -> Self {
        QuoteWatch { inner, delimiter, state: FieldState::Begins, line: 1, opened_on: 1, after_return: false }
    }

    /// The line on which an open quoted field begins.
    fn unclosed(&self) -> Option<u64> {
        (self.state == FieldState::Quoted).then_some(self.opened_on)
    }

    fn pass(&mut self, byte: u8) {
        self.line += u64::from(byte == b'\r' || (byte == b'\n' && !self.after_return));
        self.after_return = byte == b'\r';
        let ends = byte == self.delimiter || byte == b'\n' || byte == b'\r';
        self.state = match self.state {
            FieldState::Quoted if byte == b'"' => FieldState::Closing,
            FieldState::Quoted => FieldState::Quoted,
            FieldState::Begins if byte == b'"' => {
                self.opened_on = self.line;
                FieldState::Quoted
            }
            FieldState::Closing if byte == b'"' => FieldState::Quoted,
            _ if ends => FieldState::Begins,
            _ => FieldState::Unquoted,
        };
    }
}

impl<R: Read> Read for QuoteWatch<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.inner.read(buffer)?;
        buffer[..read].iter().for_each(|byte| self.pass(*byte));
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_quotes_are_seen_where_the_reader_sees_them() {
        for (text, open) in [
            ("a,b\n1,2\n", None),
            ("a,b\n\"1\",\"2\"\n", None),
            ("a,b\n\"1,2\n3,4\n", Some(2)),
            ("a,b\n1,\"2 \"\" 3\n", Some(2)),
            ("a,b\n1,2\"\n3,4\n", None),
            ("\"a\",b\n\"x\ny\",\"z", Some(3)),
            ("\"a\",b\r\n\"x\r\ny\",\"z", Some(3)),
            ("\"a\",b\r\"x\ry\",\"z", Some(3)),
            ("\"a,b\n", Some(1)),
            ("a,b\n\"1\"x,\"2\"\"\"\n", None),
        ] {
            let mut watch = QuoteWatch::new(text.as_bytes(), b',');
            std::io::copy(&mut watch, &mut std::io::sink()).unwrap();
            assert_eq!(watch.unclosed(), open, "{text:?}");
        }
    }
}
