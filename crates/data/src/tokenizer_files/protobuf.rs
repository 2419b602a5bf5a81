//! Reads the fields of a protobuf message without copies.

/// The value of a field.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum FieldValue<'a> {
    /// An integer, enum or bool.
    Number(u64),
    /// A text, bytes or a message.
    Bytes(&'a [u8]),
    /// Four bytes, such as a float.
    Four([u8; 4]),
    /// Eight bytes, such as a double.
    Eight,
}

/// A field with its number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Field<'a> {
    pub(super) number: u64,
    pub(super) value: FieldValue<'a>,
}

impl<'a> Field<'a> {
    /// The bytes of a text or message.
    ///
    /// # Errors
    /// Fails if the field has another type.
    pub(super) fn bytes(&self) -> Result<&'a [u8], String> {
        match self.value {
            FieldValue::Bytes(bytes) => Ok(bytes),
            _ => Err(self.mistyped("bytes")),
        }
    }

    /// The text.
    ///
    /// # Errors
    /// Fails if the field has another type or is not UTF-8.
    pub(super) fn text(&self) -> Result<&'a str, String> {
        std::str::from_utf8(self.bytes()?).map_err(|_| format!("its field {} is not UTF-8", self.number))
    }

    /// The integer; negative ones have 64 bits.
    ///
    /// # Errors
    /// Fails if the field has another type.
    pub(super) fn integer(&self) -> Result<i64, String> {
        match self.value {
            FieldValue::Number(number) => Ok(number.cast_signed()),
            _ => Err(self.mistyped("a number")),
        }
    }

    /// The 32-bit float.
    ///
    /// # Errors
    /// Fails if the field has another type.
    pub(super) fn float(&self) -> Result<f32, String> {
        match self.value {
            FieldValue::Four(bytes) => Ok(f32::from_le_bytes(bytes)),
            _ => Err(self.mistyped("a float")),
        }
    }

    fn mistyped(&self, expected: &str) -> String {
        format!("its field {} is not {expected}", self.number)
    }
}

/// The fields of one message in order; an error ends them.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: u64) -> Result<&'a [u8], String> {
        let parts = usize::try_from(count).ok().and_then(|count| self.0.split_at_checked(count));
        let (bytes, rest) =
            parts.ok_or_else(|| format!("a field claims {count} bytes; found: {}", self.0.len()))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn varint(&mut self) -> Result<u64, String> {
        let mut number = 0;
        for (at, byte) in self.0.iter().take(10).enumerate() {
            number |= u64::from(byte & 0x7f) << (7 * at);
            if byte & 0x80 == 0 {
                self.0 = &self.0[at + 1..];
                return Ok(number);
            }
        }
        Err("a number has no end".to_owned())
    }

    fn field(&mut self) -> Result<Field<'a>, String> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => FieldValue::Number(self.varint()?),
            1 => self.take(8).map(|_| FieldValue::Eight)?,
            2 => {
                let length = self.varint()?;
                FieldValue::Bytes(self.take(length)?)
            }
            5 => {
                let mut bytes = [0; 4];
                bytes.copy_from_slice(self.take(4)?);
                FieldValue::Four(bytes)
            }
            kind => return Err(format!("a field has the wire type {kind}; accepted: 0, 1, 2, 5")),
        };
        Ok(Field { number: key >> 3, value })
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(bytes: &[u8]) -> Result<Vec<Field<'_>>, String> {
        Fields(bytes).collect()
    }

    #[test]
    fn fields_of_all_types_are_read() {
        let bytes =
            [0x08, 0x96, 0x01, 0x12, 2, b'h', b'i', 0x1d, 0, 0, 0x80, 0xbf, 0x21, 1, 2, 3, 4, 5, 6, 7, 8];
        let parsed = fields(&bytes).unwrap();
        assert_eq!(parsed.iter().map(|field| field.number).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert_eq!(parsed[0].integer(), Ok(150));
        assert_eq!(parsed[1].text(), Ok("hi"));
        assert_eq!(parsed[2].float(), Ok(-1.0));
        assert_eq!(parsed[3].value, FieldValue::Eight);
        assert!(parsed[0].text().unwrap_err().contains("field 1 is not bytes"));
        let minus_one = [0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        assert_eq!(fields(&minus_one).unwrap()[0].integer(), Ok(-1));
    }

    #[test]
    fn broken_messages_are_refused() {
        assert!(fields(&[0x0a, 5, b'a']).unwrap_err().contains("claims 5 bytes; found: 1"));
        assert!(fields(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]).is_err());
        assert!(fields(&[0x80; 12]).unwrap_err().contains("no end"));
        assert!(fields(&[0x0b]).unwrap_err().contains("wire type 3"));
        assert!(fields(&[0x08]).is_err());
        assert!(fields(&[0x0d, 1, 2]).is_err());
        assert!(Fields(&[0x0a, 1, 0xff]).next().unwrap().unwrap().text().is_err());
    }
}
