//! Rows of Parquet files.
//!
//! The reader goes record by record, not through Arrow: fine-tuning data sets are small, so speed
//! does not matter.

use std::fs::File;
use std::io;

use parquet::basic::{Compression, LogicalType};
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row as Record};
use parquet::schema::types::Type;
use serde_json::{Map, Value};

use super::expansion::ExpansionBounds;
use super::table_values::{ReadFailure, RowMaker, TableRow, moment};

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

/// Passes the rows of a file of `bytes` bytes to `emit` until it returns an error.
///
/// # Errors
/// Fails if the file cannot be read or `emit` refuses a row.
pub(super) fn read_rows(
    file: File,
    bytes: u64,
    mut emit: impl FnMut(TableRow) -> Result<(), String>,
) -> Result<(), ReadFailure> {
    let reader = SerializedFileReader::new(file)?;
    readable_codecs(reader.metadata())?;
    let bounds = ExpansionBounds::of(bytes);
    let rows = reader.metadata().file_metadata().num_rows();
    bounds.check_rows(u64::try_from(rows).map_err(|_| format!("it claims {rows} rows"))?)?;
    let schema = reader.metadata().file_metadata().schema();
    for record in reader.get_row_iter(None)? {
        // A broken page also breaks later rows: the file, not the row, is at fault.
        let record = record?;
        emit(RowMaker::default().row(|maker| object(maker, &record, Some(schema))))?;
    }
    Ok(())
}

/// Refuses LZO, the only codec that the crate cannot unpack.
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

fn object(
    maker: &mut RowMaker,
    record: &Record,
    schema: Option<&Type>,
) -> Result<Map<String, Value>, String> {
    let member = |name: &str| {
        let fields = schema.filter(|schema| schema.is_group())?.get_fields();
        fields.iter().find(|field| field.name() == name).map(|field| &**field)
    };
    let fields = record.get_column_iter().filter(|(_, field)| !matches!(field, Field::Null));
    fields.map(|(name, field)| Ok((name.clone(), json(maker, field, member(name))?))).collect()
}

/// The type of the elements of a list, or of the values of a map, if it is nested by the format's
/// rules.
fn inner(schema: Option<&Type>, index: usize) -> Option<&Type> {
    let repeated = schema.filter(|schema| schema.is_group())?.get_fields().first()?;
    let fields = if repeated.is_group() { repeated.get_fields() } else { return Some(repeated) };
    if fields.len() == index + 1 { fields.get(index).map(|field| &**field) } else { Some(repeated) }
}

/// Returns whether texts of this type are JSON, such as the type `Json` of datasets.
fn is_json(schema: &Type) -> bool {
    matches!(schema.get_basic_info().logical_type_ref(), Some(LogicalType::Json))
}

/// Converts a value to JSON; `schema` is its type in the file, if known.
fn json(maker: &mut RowMaker, field: &Field, schema: Option<&Type>) -> Result<Value, String> {
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
        Field::Float16(value) => maker.float(f64::from(*value)),
        Field::Float(value) => maker.float(f64::from(*value)),
        Field::Double(value) => maker.float(*value),
        Field::Str(value) if schema.is_some_and(is_json) => maker.json(value),
        Field::Str(value) => Value::String(value.clone()),
        Field::Bytes(value) => maker.bytes(value.data()),
        Field::Group(group) => Value::Object(object(maker, group, schema)?),
        Field::ListInternal(list) => {
            let schema = inner(schema, 0);
            let elements = list.elements().iter().map(|element| json(maker, element, schema));
            Value::Array(elements.collect::<Result<_, _>>()?)
        }
        Field::MapInternal(map) => {
            let mut value = Map::new();
            for (key, entry) in map.entries() {
                let key = match json(maker, key, None)? {
                    Value::String(key) => key,
                    other => other.to_string(),
                };
                value.insert(key, json(maker, entry, inner(schema, 1))?);
            }
            Value::Object(value)
        }
        // The crate fails on a date outside the calendar.
        Field::Date(days) if moment(i64::from(*days) * 86_400, 0, "%Y").is_none() => Value::from(*days),
        Field::TimestampMillis(value) if moment(value.div_euclid(1000), 0, "%Y").is_none() => {
            Value::from(*value)
        }
        Field::TimestampMicros(value) if moment(value.div_euclid(1_000_000), 0, "%Y").is_none() => {
            Value::from(*value)
        }
        // Times and decimals use the crate's display form.
        other => Value::String(other.to_string()),
    })
}
