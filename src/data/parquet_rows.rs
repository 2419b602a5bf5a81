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

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row as Record};
use serde_json::{Map, Number, Value};

use super::expansion::{ExpansionBounds, row_bytes};
use super::raw_rows::{DataFile, RawRow};
use super::sandbox::{self, SandboxedChild, SandboxedWork, write_frame};
use super::sandbox_limits::SandboxLimits;
use super::wire;
use super::{BadRow, Origin, RowFault, RowFaultKind, RowOrigin};
use crate::contained::contain;
use crate::error::input_file;
use crate::error::{Error, Result};

/// Rows for which the processor time of a child is counted together.
const ROWS_PER_REQUEST: u64 = 64;

/// A row, or what is wrong with it.
type ParquetRow = Result<Map<String, Value>, String>;

/// Reads all row groups of a Parquet file.
pub(super) fn parquet(file: &Arc<Path>, source: &mut DataFile) -> Result<()> {
    let cannot =
        |why: String| Error::user(format!("cannot read the data file {}", file.display())).because(why);
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
    contain(|| read_rows(opened, bytes, |row| take(row, 0))).unwrap_or_else(Err).map_err(cannot)
}

/// The kinds of an answer's first byte.
const ROW: u8 = 0;
const BAD_ROW: u8 = 1;
const FAILED: u8 = 2;
const END: u8 = 3;

fn ask_child(
    opened: File,
    take: &mut impl FnMut(ParquetRow, u64) -> Result<(), String>,
) -> Result<(), String> {
    let child = SandboxedChild::start(SandboxedWork::Parquet, Some(Stdio::from(opened)));
    let mut child = child.map_err(|error| error.in_one_line())?;
    let broken = || "its process gave no answer that can be read".to_owned();
    loop {
        let answer = child.next()?;
        let (&kind, mut body) = answer.split_first().ok_or_else(broken)?;
        match kind {
            END => return Ok(()),
            FAILED => return Err(String::from_utf8_lossy(body).into_owned()),
            BAD_ROW => take(Err(String::from_utf8_lossy(body).into_owned()), answer.len() as u64)?,
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
    limits.begin(bytes)?;
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
        let again = if rows % ROWS_PER_REQUEST == 0 { limits.begin(bytes) } else { Ok(()) };
        again.and_then(|()| write_frame(&mut answers, &answer)).map_err(|error| {
            let why = error.to_string();
            gone = Some(error);
            why
        })
    };
    let outcome = contain(|| read_rows(file, bytes, emit)).unwrap_or_else(Err);
    if let Some(error) = gone {
        return Err(error);
    }
    let last = outcome.map_or_else(|why| [&[FAILED][..], why.as_bytes()].concat(), |()| vec![END]);
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
) -> Result<(), String> {
    let cannot = |e: parquet::errors::ParquetError| e.to_string();
    let reader = SerializedFileReader::new(file).map_err(cannot)?;
    let bounds = ExpansionBounds::of(bytes);
    let rows = reader.metadata().file_metadata().num_rows();
    bounds.check_rows(u64::try_from(rows).map_err(|_| format!("it claims {rows} rows"))?)?;
    for record in reader.get_row_iter(None).map_err(cannot)? {
        // A broken page breaks what follows too: the file, not the row, is at fault.
        let record = record.map_err(cannot)?;
        emit(object(&record))?;
    }
    Ok(())
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
