//! One value of an Arrow column as JSON.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Date32Type, Date64Type, Decimal32Type, Decimal64Type, Decimal128Type, Decimal256Type, Float16Type,
    Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, Time32MillisecondType,
    Time32SecondType, Time64MicrosecondType, Time64NanosecondType, TimestampMicrosecondType,
    TimestampMillisecondType, TimestampNanosecondType, TimestampSecondType, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef};
use arrow_schema::{DataType, Field, FieldRef, Fields, TimeUnit};
use serde_json::{Map, Value};

use super::table_values::{RowMaker, moment};
use super::unusable::Unusable;

/// Returns the values at `index` of the columns, or of a struct's fields, without nulls.
///
/// # Errors
/// Names the column if a key is outside its dictionary.
pub(super) fn columns_at(
    maker: &mut RowMaker,
    fields: &Fields,
    columns: &[ArrayRef],
    index: usize,
) -> Result<Map<String, Value>, String> {
    let mut members = Map::new();
    for (field, column) in fields.iter().zip(columns) {
        let value = value_at(maker, field, column, index)?;
        if !value.is_null() {
            members.insert(field.name().clone(), value);
        }
    }
    Ok(members)
}

fn value_at(maker: &mut RowMaker, field: &Field, array: &dyn Array, index: usize) -> Result<Value, String> {
    if array.is_null(index) {
        return Ok(Value::Null);
    }
    Ok(match array.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => Value::Bool(array.as_boolean().value(index)),
        DataType::Utf8 => text(maker, field, array.as_string::<i32>().value(index)),
        DataType::LargeUtf8 => text(maker, field, array.as_string::<i64>().value(index)),
        DataType::Utf8View => text(maker, field, array.as_string_view().value(index)),
        DataType::Binary => maker.bytes(array.as_binary::<i32>().value(index)),
        DataType::LargeBinary => maker.bytes(array.as_binary::<i64>().value(index)),
        DataType::BinaryView => maker.bytes(array.as_binary_view().value(index)),
        DataType::FixedSizeBinary(_) => maker.bytes(array.as_fixed_size_binary().value(index)),
        DataType::Float16 => maker.float(array.as_primitive::<Float16Type>().value(index).to_f64()),
        DataType::Float32 => maker.float(array.as_primitive::<Float32Type>().value(index).into()),
        DataType::Float64 => maker.float(array.as_primitive::<Float64Type>().value(index)),
        DataType::List(inner) => list(maker, inner, &array.as_list::<i32>().value(index))?,
        DataType::LargeList(inner) => list(maker, inner, &array.as_list::<i64>().value(index))?,
        DataType::ListView(inner) => list(maker, inner, &array.as_list_view::<i32>().value(index))?,
        DataType::LargeListView(inner) => list(maker, inner, &array.as_list_view::<i64>().value(index))?,
        DataType::FixedSizeList(inner, _) => list(maker, inner, &array.as_fixed_size_list().value(index))?,
        DataType::Struct(fields) => {
            Value::Object(columns_at(maker, fields, array.as_struct().columns(), index)?)
        }
        DataType::Map(entries, _) => map(maker, entries, array, index)?,
        DataType::Dictionary(_, _) => {
            let dictionary = array.as_any_dictionary();
            match integer(dictionary.keys(), index).and_then(|key| key.as_u64()) {
                Some(key) if (key as usize) < dictionary.values().len() => {
                    value_at(maker, field, dictionary.values(), key as usize)?
                }
                _ => {
                    return Err(format!("the column {:?} has a key outside its dictionary", field.name()));
                }
            }
        }
        _ => match integer(array, index) {
            Some(number) => number,
            None => plain_text(array, index).map_or_else(|| maker.unusable(Unusable::Type), Value::String),
        },
    })
}

/// Returns a text as a string; parses it if its column is of type `arrow.json`, the type `Json` of
/// datasets.
fn text(maker: &mut RowMaker, field: &Field, text: &str) -> Value {
    if field.extension_type_name() == Some("arrow.json") {
        return maker.json(text);
    }
    Value::String(text.to_owned())
}

fn list(maker: &mut RowMaker, inner: &FieldRef, elements: &dyn Array) -> Result<Value, String> {
    (0..elements.len()).map(|index| value_at(maker, inner, elements, index)).collect()
}

/// Converts the entries of a map to an object. Null values stay: the writer of the row put them
/// there.
fn map(maker: &mut RowMaker, entries: &FieldRef, array: &dyn Array, index: usize) -> Result<Value, String> {
    let DataType::Struct(fields) = entries.data_type() else { return Ok(maker.unusable(Unusable::Type)) };
    let entries = array.as_map().value(index);
    let mut object = Map::new();
    let [keys, values] = entries.columns() else { return Ok(maker.unusable(Unusable::Type)) };
    for entry in 0..entries.len() {
        let key = match value_at(maker, &fields[0], keys, entry)? {
            Value::String(key) => key,
            other => other.to_string(),
        };
        object.insert(key, value_at(maker, &fields[1], values, entry)?);
    }
    Ok(Value::Object(object))
}

/// An integer of any width.
fn integer(array: &dyn Array, index: usize) -> Option<Value> {
    Some(match array.data_type() {
        DataType::Int8 => array.as_primitive::<Int8Type>().value(index).into(),
        DataType::Int16 => array.as_primitive::<Int16Type>().value(index).into(),
        DataType::Int32 => array.as_primitive::<Int32Type>().value(index).into(),
        DataType::Int64 => array.as_primitive::<Int64Type>().value(index).into(),
        DataType::UInt8 => array.as_primitive::<UInt8Type>().value(index).into(),
        DataType::UInt16 => array.as_primitive::<UInt16Type>().value(index).into(),
        DataType::UInt32 => array.as_primitive::<UInt32Type>().value(index).into(),
        DataType::UInt64 => array.as_primitive::<UInt64Type>().value(index).into(),
        _ => return None,
    })
}

/// Formats decimals, dates and times as the Parquet reader does.
fn plain_text(array: &dyn Array, index: usize) -> Option<String> {
    let parts = |value: i64, per_second: i64| {
        (value.div_euclid(per_second), (value.rem_euclid(per_second) * (1_000_000_000 / per_second)) as u32)
    };
    let stamp = |value: i64, per_second: i64, form: &str| {
        let (seconds, nanos) = parts(value, per_second);
        moment(seconds, nanos, form).unwrap_or_else(|| value.to_string())
    };
    const DAY: &str = "%Y-%m-%d";
    Some(match array.data_type() {
        DataType::Decimal32(_, _) => array.as_primitive::<Decimal32Type>().value_as_string(index),
        DataType::Decimal64(_, _) => array.as_primitive::<Decimal64Type>().value_as_string(index),
        DataType::Decimal128(_, _) => array.as_primitive::<Decimal128Type>().value_as_string(index),
        DataType::Decimal256(_, _) => array.as_primitive::<Decimal256Type>().value_as_string(index),
        DataType::Date32 => {
            stamp(i64::from(array.as_primitive::<Date32Type>().value(index)) * 86_400, 1, DAY)
        }
        DataType::Date64 => stamp(array.as_primitive::<Date64Type>().value(index), 1000, DAY),
        DataType::Timestamp(TimeUnit::Second, _) => {
            stamp(array.as_primitive::<TimestampSecondType>().value(index), 1, "%Y-%m-%d %H:%M:%S %:z")
        }
        DataType::Timestamp(TimeUnit::Millisecond, _) => stamp(
            array.as_primitive::<TimestampMillisecondType>().value(index),
            1000,
            "%Y-%m-%d %H:%M:%S%.3f %:z",
        ),
        DataType::Timestamp(TimeUnit::Microsecond, _) => stamp(
            array.as_primitive::<TimestampMicrosecondType>().value(index),
            1_000_000,
            "%Y-%m-%d %H:%M:%S%.6f %:z",
        ),
        DataType::Timestamp(TimeUnit::Nanosecond, _) => stamp(
            array.as_primitive::<TimestampNanosecondType>().value(index),
            1_000_000_000,
            "%Y-%m-%d %H:%M:%S%.9f %:z",
        ),
        DataType::Time32(TimeUnit::Second) => {
            stamp(array.as_primitive::<Time32SecondType>().value(index).into(), 1, "%H:%M:%S")
        }
        DataType::Time32(_) => {
            stamp(array.as_primitive::<Time32MillisecondType>().value(index).into(), 1000, "%H:%M:%S%.3f")
        }
        DataType::Time64(TimeUnit::Microsecond) => {
            stamp(array.as_primitive::<Time64MicrosecondType>().value(index), 1_000_000, "%H:%M:%S%.6f")
        }
        DataType::Time64(_) => {
            stamp(array.as_primitive::<Time64NanosecondType>().value(index), 1_000_000_000, "%H:%M:%S%.9f")
        }
        _ => return None,
    })
}
