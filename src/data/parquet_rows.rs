//! Rows of Parquet files: a column keeps its type and may be nested (message lists are).
//!
//! Parquet is read by records, not through Arrow: a tenth of the code to build, and data sets for fine-tuning are small
//! beside what reading costs. The crate believes the sizes that a file claims, and some kilobytes can claim gigabytes,
//! so the binary reads them in a process of its own (see [`super::sandbox`]) that hands the rows over one by one.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row as Record};
use serde_json::{Map, Number, Value};

use super::expansion::{ExpansionBounds, row_bytes};
use super::raw_rows::{DataFile, RawRow};
use super::sandbox::{
    self, BYTES_PER_SECOND, ChildEnd, REQUEST_TIME, SandboxedChild, SandboxedWork, UNREADABLE, time_for_size,
    write_frame,
};
use super::sandbox_limits::SandboxLimits;
use super::wire;
use super::{BadRow, Origin, RowFault, RowFaultKind, RowOrigin};
use crate::contained::contain;
use crate::error::input_file;
use crate::error::{Error, ErrorCategory, Result};

/// Rows for which the processor time of a child is counted together.
const ROWS_PER_REQUEST: u64 = 64;

/// A row, or what is wrong with it.
type ParquetRow = Result<Map<String, Value>, String>;

/// Reads all row groups of a Parquet file.
pub(super) fn parquet(file: &Arc<Path>, source: &mut DataFile) -> Result<()> {
    let cannot = |failure: ReadFailure| match failure {
        ReadFailure::Storage(why) => {
            let what = format!("cannot read the data file {}", file.display());
            Error::new(ErrorCategory::Storage, what).because(why)
        }
        ReadFailure::Child(end) => end.into_error(format!("cannot read the data file {}", file.display())),
    };
    let opened = input_file::open("read the data file", file)?;
    let bytes = opened.metadata().map_err(|e| Error::io("read the data file", file, &e))?.len();
    let mut bounds = ExpansionBounds::of(bytes);
    let mut index = 0;
    let mut take = |row: ParquetRow, size: u64| -> Result<(), String> {
        index += 1;
        bounds.count(row.as_ref().map_or(size, |row| size.max(row_bytes(row))))?;
        let origin = Origin { file: file.clone(), place: RowOrigin::Row(index) };
        match row {
            Ok(value) => source.rows.push(RawRow { value, origin, document: false }),
            Err(why) => {
                source.bad.push(BadRow { origin, fault: RowFault::new(RowFaultKind::Unreadable, why) });
            }
        }
        Ok(())
    };
    if sandbox::is_available() {
        return ask_child(opened, &mut take).map_err(cannot);
    }
    contain(|| read_rows(opened, bytes, |row| take(row, 0)))
        .unwrap_or_else(|panic| Err(panic.into()))
        .map_err(cannot)
}

/// The error of a file that was not read to its end.
enum ReadFailure {
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

impl From<ParquetError> for ReadFailure {
    fn from(error: ParquetError) -> Self {
        if let ParquetError::External(source) = &error
            && source.downcast_ref::<io::Error>().is_some_and(|io| io.raw_os_error().is_some())
        {
            return ReadFailure::Storage(source.to_string());
        }
        error.to_string().into()
    }
}

/// The kinds of an answer's first byte.
const ROW: u8 = 0;
const BAD_ROW: u8 = 1;
const FAILED: u8 = 2;
const END: u8 = 3;
const NOT_READ: u8 = 4;

fn ask_child(
    opened: File,
    take: &mut impl FnMut(ParquetRow, u64) -> Result<(), String>,
) -> Result<(), ReadFailure> {
    let child = SandboxedChild::start(SandboxedWork::Parquet, Some(Stdio::from(opened)));
    let mut child = child.map_err(|error| ReadFailure::Child(ChildEnd::ByMachine(error)))?;
    let broken = || ReadFailure::from(UNREADABLE.to_owned());
    loop {
        let answer = child.next().map_err(ReadFailure::Child)?;
        let (&kind, mut body) = answer.split_first().ok_or_else(broken)?;
        let said = || String::from_utf8_lossy(body).into_owned();
        match kind {
            END => return Ok(()),
            FAILED => return Err(said().into()),
            NOT_READ => return Err(ReadFailure::Storage(said())),
            BAD_ROW => take(Err(said()), answer.len() as u64)?,
            ROW => {
                let row = wire::take_map(&mut body).ok_or_else(broken)?;
                take(Ok(row), answer.len() as u64)?;
            }
            _ => return Err(broken()),
        }
    }
}

/// The work of a child: the rows of the file that is its standard input.
///
/// # Errors
/// Whoever asks has gone.
pub(super) fn serve(limits: &SandboxLimits) -> io::Result<()> {
    let file = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let bytes = file.metadata()?.len();
    let mut answers = io::BufWriter::with_capacity(1 << 16, io::stdout().lock());
    let (mut gone, mut rows, mut answer) = (None, 0, Vec::new());
    let time = REQUEST_TIME + time_for_size(bytes, BYTES_PER_SECOND);
    limits.begin(bytes, time)?;
    let emit = |row: ParquetRow| -> Result<(), String> {
        answer.clear();
        match row {
            Ok(row) => {
                answer.push(ROW);
                wire::put_map(&row, &mut answer);
            }
            Err(why) => {
                answer.push(BAD_ROW);
                answer.extend(why.as_bytes());
            }
        }
        rows += 1;
        let again = if rows % ROWS_PER_REQUEST == 0 { limits.begin(bytes, time) } else { Ok(()) };
        again.and_then(|()| write_frame(&mut answers, &answer)).map_err(|error| {
            let why = error.to_string();
            gone = Some(error);
            why
        })
    };
    let outcome = contain(|| read_rows(file, bytes, emit)).unwrap_or_else(|panic| Err(panic.into()));
    if let Some(error) = gone {
        return Err(error);
    }
    let last = match outcome {
        Ok(()) => vec![END],
        Err(ReadFailure::Storage(why)) => [&[NOT_READ][..], why.as_bytes()].concat(),
        Err(ReadFailure::Child(ChildEnd::ByInput(why))) => [&[FAILED][..], why.as_bytes()].concat(),
        Err(ReadFailure::Child(ChildEnd::ByMachine(error))) => {
            [&[FAILED][..], error.in_one_line().as_bytes()].concat()
        }
    };
    write_frame(&mut answers, &last)?;
    answers.flush()
}

/// Hands the rows of a file of `bytes` bytes to `emit`, until that refuses.
///
/// # Errors
/// Why the file cannot be read.
fn read_rows(
    file: File,
    bytes: u64,
    mut emit: impl FnMut(ParquetRow) -> Result<(), String>,
) -> Result<(), ReadFailure> {
    let reader = SerializedFileReader::new(file)?;
    readable_codecs(reader.metadata())?;
    let bounds = ExpansionBounds::of(bytes);
    let rows = reader.metadata().file_metadata().num_rows();
    bounds.check_rows(u64::try_from(rows).map_err(|_| format!("it claims {rows} rows"))?)?;
    for record in reader.get_row_iter(None)? {
        // A broken page breaks what follows too: the file, not the row, is at fault.
        emit(object(&record?))?;
    }
    Ok(())
}

/// Refuses a codec that cannot be unpacked: LZO, which nothing writes any more.
fn readable_codecs(metadata: &ParquetMetaData) -> Result<(), String> {
    let mut columns = metadata.row_groups().iter().flat_map(|group| group.columns());
    match columns.find(|column| column.compression() == Compression::LZO) {
        Some(column) => Err(format!(
            "its column {} is packed with LZO; accepted: none, snappy, zstd, gzip, brotli, lz4; write it again with zstd",
            column.column_path()
        )),
        None => Ok(()),
    }
}

fn object(record: &Record) -> Result<Map<String, Value>, String> {
    record
        .get_column_iter()
        .map(|(name, field)| match json(field) {
            Ok(value) => Ok((name.clone(), value)),
            Err(why) => Err(format!("the column {name:?} {why}")),
        })
        .collect()
}

fn json(field: &Field) -> Result<Value, String> {
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(value) => Value::Bool(*value),
        Field::Byte(value) => Value::from(*value),
        Field::Short(value) => Value::from(*value),
        Field::Int(value) => Value::from(*value),
        Field::Long(value) => Value::from(*value),
        Field::UByte(value) => Value::from(*value),
        Field::UShort(value) => Value::from(*value),
        Field::UInt(value) => Value::from(*value),
        Field::ULong(value) => Value::from(*value),
        Field::Float(value) => number(f64::from(*value))?,
        Field::Double(value) => number(*value)?,
        Field::Str(value) => Value::String(value.clone()),
        // Strings written without their logical type.
        Field::Bytes(value) => match std::str::from_utf8(value.data()) {
            Ok(text) => Value::String(text.to_owned()),
            Err(_) => return Err("holds bytes that are not UTF-8".to_owned()),
        },
        Field::Group(group) => Value::Object(object(group)?),
        Field::ListInternal(list) => {
            Value::Array(list.elements().iter().map(json).collect::<Result<_, _>>()?)
        }
        Field::MapInternal(map) => {
            let mut value = Map::new();
            for (key, entry) in map.entries() {
                match json(key)? {
                    Value::String(key) => value.insert(key, json(entry)?),
                    other => return Err(format!("holds a map with the key {other}")),
                };
            }
            Value::Object(value)
        }
        // Dates, times and decimals are no text to train on; they are shown as Parquet shows them.
        other => Value::String(other.to_string()),
    })
}

fn number(value: f64) -> Result<Value, String> {
    Number::from_f64(value).map(Value::Number).ok_or_else(|| format!("holds {value}"))
}
