//! Detects the container of a data file, by its first bytes before its name, and calls the reader
//! for it.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::expansion::ExpansionBounds;
use super::other_files::{self, OtherFile};
use super::raw_rows::{DataFile, RawRow, TextFile};
use super::table_rows::TableKind;
use super::unpack::{Packing, unpack};
use super::{
    BadRow, Origin, RowFault, RowFaultKind, RowOrigin, csv_rows, json_reader, python_json, table_rows,
    text_encoding,
};
use crate::error::input_file;
use crate::error::{Error, Result};

/// Kind of a data file by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileKind {
    /// JSON values one after the other.
    Lines,
    /// One JSON value; the reader also accepts lines.
    Json,
    /// A table in a binary format.
    Table(TableKind),
    /// A text table with this delimiter.
    Csv(u8),
    /// A text that is one document.
    Text,
}

impl FileKind {
    /// Returns the kind by the extension of `path`; for `.gz` and `.zst`, by the extension before.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let extension = extension(path)?;
        match extension.as_str() {
            "gz" | "zst" => Self::of_extension(&self::extension(&path.with_extension(""))?),
            _ => Self::of_extension(&extension),
        }
    }

    fn of_extension(extension: &str) -> Option<Self> {
        Some(match extension {
            "jsonl" | "ndjson" => FileKind::Lines,
            "json" => FileKind::Json,
            "parquet" => FileKind::Table(TableKind::Parquet),
            "arrow" | "feather" => FileKind::Table(TableKind::Arrow),
            "csv" => FileKind::Csv(b','),
            "tsv" => FileKind::Csv(b'\t'),
            "txt" | "md" => FileKind::Text,
            _ => return None,
        })
    }
}

fn extension(path: &Path) -> Option<String> {
    Some(path.extension()?.to_str()?.to_ascii_lowercase())
}

/// Reads the rows of one file into `source`.
///
/// # Errors
/// Fails if the file cannot be read or its container is not supported.
pub(super) fn read_file(path: &Path, source: &mut DataFile) -> Result<()> {
    let Some(kind) = FileKind::of(path) else { return Err(other_files::refused_name(path)) };
    let file: Arc<Path> = Arc::from(path);
    let mut opened = input_file::open("read the data file", path)?;
    let failed = |error: std::io::Error| Error::io("read the data file", path, &error);
    let file_bytes = opened.metadata().map_err(failed)?.len();
    let mut head = Vec::new();
    (&opened).take(512).read_to_end(&mut head).map_err(failed)?;
    opened.rewind().map_err(failed)?;
    if let Some(packing) = Packing::of(&head) {
        return read_packed(&file, opened, file_bytes, (packing, kind), source);
    }
    if let Some(table) = TableKind::of(&head) {
        if kind != FileKind::Table(table) {
            source.notes.push(format!("{} is {}, by its first bytes", path.display(), table.name()));
        }
        return table_rows::read(&file, opened, table, source);
    }
    if let Some(other) = OtherFile::of(&head) {
        return Err(other.refused(path));
    }
    if let FileKind::Table(table) = kind
        && !is_json(&head)
    {
        // An Arrow stream has no magic number, and its own reader describes a broken file best.
        return table_rows::read(&file, opened, table, source);
    }
    if matches!(extension(path).as_deref(), Some("gz" | "zst")) && !head.is_empty() {
        source.notes.push(format!("{} is not packed, though its name says so", path.display()));
    }
    drop(opened);
    let bytes = input_file::read_up_to("read the data file", path, u64::MAX - 1)?;
    read_text(&file, &bytes, (kind, file_bytes, None), source)
}

fn read_packed(
    file: &Arc<Path>,
    opened: File,
    file_bytes: u64,
    (packing, kind): (Packing, FileKind),
    source: &mut DataFile,
) -> Result<()> {
    let bounds = ExpansionBounds::of(file_bytes);
    let bytes = unpack(file, opened, packing, &bounds)?;
    let unpack_first = |what: &str| {
        Error::user(format!("cannot read the data file {}", file.display()))
            .because(format!("it is {what}, packed with {}", packing.name()))
            .hint(match packing {
                Packing::Gzip => "unpack it first: gunzip -k FILE",
                Packing::Zstd => "unpack it first: zstd -d FILE",
            })
    };
    if let Some(table) = TableKind::of(&bytes) {
        return Err(unpack_first(table.name()));
    }
    if let Some(inner) = Packing::of(&bytes) {
        return Err(unpack_first(inner.name()));
    }
    if let Some(other) = OtherFile::of(&bytes) {
        return Err(unpack_first(other.name()));
    }
    if !matches!(extension(file).as_deref(), Some("gz" | "zst")) {
        source.notes.push(format!("{} is packed with {} and was unpacked", file.display(), packing.name()));
    }
    read_text(file, &bytes, (kind, file_bytes, Some(bounds)), source)
}

fn read_text(
    file: &Arc<Path>,
    bytes: &[u8],
    (kind, file_bytes, packed): (FileKind, u64, Option<ExpansionBounds>),
    source: &mut DataFile,
) -> Result<()> {
    let (bytes, encoding) = text_encoding::utf8(file, bytes)?;
    if let Some(encoding) = encoding {
        source.notes.push(format!("{} is {encoding} text", file.display()));
    }
    let text = TextFile { file: file.clone(), bytes, file_bytes, packed };
    match kind {
        FileKind::Csv(_) if begins_with_row(&text.bytes) => {
            source.notes.push(format!("{} holds JSON, by its first line", file.display()));
            json_reader::rows(&text, source)
        }
        FileKind::Csv(delimiter) => csv_rows::csv(&text, delimiter, source),
        FileKind::Text => {
            if begins_with_row(&text.bytes) {
                let file = file.display();
                source.notes.push(format!(
                    "{file} is read as text; name it .jsonl to read its lines as rows of JSON"
                ));
            }
            document(text, source);
            Ok(())
        }
        FileKind::Json | FileKind::Lines | FileKind::Table(_) => {
            if let FileKind::Table(table) = kind {
                source.notes.push(format!("{} is no {} file but JSON", file.display(), table.name()));
            }
            let first = text.bytes.trim_ascii_start().first();
            match first {
                Some(byte) if kind == FileKind::Json && !b"[{".contains(byte) => {
                    let content = String::from_utf8_lossy(text.bytes.trim_ascii_start());
                    let first_char = content.chars().next().unwrap_or_default();
                    let why = format!("it begins with {first_char:?}; a JSON array or object is needed");
                    Err(Error::user(format!("cannot read the data file {}", file.display())).because(why))
                }
                _ => json_reader::rows(&text, source),
            }
        }
    }
}

/// Returns whether a file that begins as `head` may be JSON.
fn is_json(head: &[u8]) -> bool {
    let text = head.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(head).trim_ascii_start();
    text.first().is_some_and(|byte| b"[{".contains(byte)) && !text.contains(&0)
}

/// Returns whether the first line is a JSON object.
fn begins_with_row(bytes: &[u8]) -> bool {
    let line =
        bytes.trim_ascii_start().split(|byte| matches!(byte, b'\n' | b'\r')).next().unwrap_or_default();
    line.starts_with(b"{") && python_json::is_json(line)
}

fn document(text: TextFile<'_>, source: &mut DataFile) {
    let origin = Origin { file: text.file, row: RowOrigin::Line(1) };
    let text = match String::from_utf8(text.bytes.into_owned()) {
        Ok(text) => text,
        Err(error) => {
            let why = format!("not UTF-8 at byte {}", error.utf8_error().valid_up_to() + 1);
            source.bad.push(BadRow { origin, fault: RowFault::new(RowFaultKind::Unreadable, why) });
            return;
        }
    };
    if !text.trim().is_empty() {
        let value = Map::from_iter([("text".to_owned(), Value::String(text))]);
        source.rows.push(RawRow { value, origin, document: true, format: None });
    }
}
