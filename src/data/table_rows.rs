//! Rows of CSV, TSV and Parquet files.
//!
//! A CSV column is text whatever it looks like; a Parquet column keeps its type and may be nested (message lists
//! are). Parquet is read by records, not through Arrow: a tenth of the code to build, and data sets for
//! fine-tuning are small beside what reading costs.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row as Record};
use serde_json::{Map, Number, Value};

use super::raw_rows::{DataFile, RawRow};
use super::{BadRow, Origin, RowFault, RowFaultKind, RowOrigin};
use crate::error::{Error, Result};

/// Reads a table with a header line.
pub(super) fn csv(file: &Arc<Path>, delimiter: u8, source: &mut DataFile) -> Result<()> {
    let opened = File::open(file).map_err(|e| Error::io("read the data file", file, &e))?;
    let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).flexible(true).from_reader(opened);
    let cannot = |e: csv::Error| {
        Error::user(format!("cannot read the data file {}", file.display())).because(e.to_string())
    };
    let header = reader.headers().map_err(cannot)?.clone();
    let names: Vec<String> =
        header.iter().map(|name| name.trim_start_matches('\u{FEFF}').to_owned()).collect();
    if let Some(twice) = names.iter().enumerate().find(|(i, name)| names[..*i].contains(name)) {
        return Err(Error::user(format!("cannot read the data file {}", file.display()))
            .because(format!("its header names the column {:?} twice", twice.1)));
    }
    let mut record = csv::ByteRecord::new();
    loop {
        match reader.read_byte_record(&mut record) {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(e) => return Err(cannot(e)),
        }
        let line = record.position().map_or(0, csv::Position::line);
        let origin = Origin { file: file.clone(), place: RowOrigin::Line(line) };
        match fields(&names, &record) {
            Ok(value) => source.rows.push(RawRow { value, origin, document: false }),
            Err(why) => {
                source.bad.push(BadRow { origin, fault: RowFault::new(RowFaultKind::Unreadable, why) });
            }
        }
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

/// Reads all row groups of a Parquet file.
pub(super) fn parquet(file: &Arc<Path>, source: &mut DataFile) -> Result<()> {
    let opened = File::open(file).map_err(|e| Error::io("read the data file", file, &e))?;
    let cannot = |e: parquet::errors::ParquetError| {
        Error::user(format!("cannot read the data file {}", file.display())).because(e.to_string())
    };
    let reader = SerializedFileReader::new(opened).map_err(cannot)?;
    let records = reader.get_row_iter(None).map_err(cannot)?;
    for (index, record) in records.enumerate() {
        let origin = Origin { file: file.clone(), place: RowOrigin::Row(index as u64 + 1) };
        // A broken page breaks what follows too: the file, not the row, is at fault.
        let record = record.map_err(cannot)?;
        match object(&record) {
            Ok(value) => source.rows.push(RawRow { value, origin, document: false }),
            Err(why) => {
                source.bad.push(BadRow { origin, fault: RowFault::new(RowFaultKind::Unreadable, why) });
            }
        }
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
