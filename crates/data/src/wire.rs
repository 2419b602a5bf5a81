//! Serializes JSON values to bytes for a child process. The reader gets the same value, to the last
//! bit of a float and in the order of keys, faster than through text.

use serde_json::{Map, Number, Value};

/// Maximum depth of values that are read; serde_json reads none deeper.
const MAX_DEPTH: usize = 200;

/// Appends `value` to `out`.
pub(super) fn put(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Null => out.push(b'n'),
        Value::Bool(value) => out.push(if *value { b't' } else { b'f' }),
        Value::Number(number) => {
            let (kind, bits) = match (number.as_u64(), number.as_i64()) {
                (Some(value), _) => (b'u', value),
                (None, Some(value)) => (b'i', value as u64),
                (None, None) => (b'd', number.as_f64().unwrap_or(f64::NAN).to_bits()),
            };
            out.push(kind);
            out.extend(bits.to_le_bytes());
        }
        Value::String(text) => {
            out.push(b's');
            put_text(text, out);
        }
        Value::Array(list) => {
            out.push(b'a');
            out.extend((list.len() as u64).to_le_bytes());
            list.iter().for_each(|value| put(value, out));
        }
        Value::Object(map) => {
            out.push(b'o');
            put_map(map, out);
        }
    }
}

/// Appends a chat to `out`: its tools, then its messages.
pub(super) fn put_chat(messages: &[Value], tools: Option<&Value>, out: &mut Vec<u8>) {
    put(tools.unwrap_or(&Value::Null), out);
    messages.iter().for_each(|message| put(message, out));
}

/// Appends the members of `map` to `out`.
pub(super) fn put_map(map: &Map<String, Value>, out: &mut Vec<u8>) {
    out.extend((map.len() as u64).to_le_bytes());
    for (key, value) in map {
        put_text(key, out);
        put(value, out);
    }
}

/// Appends `text` to `out`.
pub(super) fn put_text(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Takes a value from the front of `bytes`; `None` without a whole one.
pub(super) fn take(bytes: &mut &[u8]) -> Option<Value> {
    take_within(bytes, MAX_DEPTH)
}

fn take_within(bytes: &mut &[u8], depth: usize) -> Option<Value> {
    let depth = depth.checked_sub(1)?;
    Some(match take_byte(bytes)? {
        b'n' => Value::Null,
        b't' => Value::Bool(true),
        b'f' => Value::Bool(false),
        b'u' => Value::from(take_u64(bytes)?),
        b'i' => Value::from(take_u64(bytes)? as i64),
        b'd' => Value::Number(Number::from_f64(f64::from_bits(take_u64(bytes)?))?),
        b's' => Value::String(take_text(bytes)?),
        b'a' => {
            let length = take_u64(bytes)?;
            (0..length).map(|_| take_within(bytes, depth)).collect::<Option<_>>()?
        }
        b'o' => Value::Object(take_map_within(bytes, depth)?),
        _ => return None,
    })
}

/// Takes the members of an object from the front of `bytes`.
pub(super) fn take_map(bytes: &mut &[u8]) -> Option<Map<String, Value>> {
    take_map_within(bytes, MAX_DEPTH)
}

fn take_map_within(bytes: &mut &[u8], depth: usize) -> Option<Map<String, Value>> {
    let length = take_u64(bytes)?;
    (0..length).map(|_| Some((take_text(bytes)?, take_within(bytes, depth)?))).collect()
}

/// Takes a text from the front of `bytes`.
pub(super) fn take_text(bytes: &mut &[u8]) -> Option<String> {
    let length = usize::try_from(take_u64(bytes)?).ok()?;
    let (text, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(std::str::from_utf8(text).ok()?.to_owned())
}

/// Takes a number from the front of `bytes`.
pub(super) fn take_u64(bytes: &mut &[u8]) -> Option<u64> {
    let (number, rest) = bytes.split_first_chunk::<8>()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*number))
}

/// Takes a byte from the front of `bytes`.
pub(super) fn take_byte(bytes: &mut &[u8]) -> Option<u8> {
    let (&byte, rest) = bytes.split_first()?;
    *bytes = rest;
    Some(byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_out_as_they_went_in() {
        let text = r#"{"b": [1, -2, 2.5, 0.1, 1e300, -0.0, true, null, "é\u0000"], "a": {"x": {}, "": []},
                       "n": [18446744073709551615, -9223372036854775808, 5e-324, 123456789.123456789]}"#;
        let value: Value = serde_json::from_str(text).unwrap();
        let mut bytes = Vec::new();
        put(&value, &mut bytes);
        let mut rest = &bytes[..];
        let back = take(&mut rest).unwrap();
        assert!(rest.is_empty());
        assert_eq!(back.to_string(), value.to_string(), "with the order of the keys");
        assert_eq!(back["n"][3].as_f64().map(f64::to_bits), value["n"][3].as_f64().map(f64::to_bits));
        for cut in 0..bytes.len() {
            assert_eq!(take(&mut &bytes[..cut]), None, "{cut}");
        }
        let claims = [&b"a"[..], &u64::MAX.to_le_bytes()].concat();
        assert_eq!(take(&mut &claims[..]), None);
        assert_eq!(take(&mut &[&b"a\x01\0\0\0\0\0\0\0"[..]; 300].concat()[..]), None, "too deep");
    }
}
