//! The delimiter of a text table: that of its file extension, unless the header shows another.

/// Delimiters that programs write; Excel writes `;` where the comma is the decimal sign.
const KNOWN: [u8; 4] = [b',', b';', b'\t', b'|'];
/// Number of first records, the header included, that must have equally many fields.
const LOOKED_AT: usize = 20;

/// The beginning of a table.
pub(super) struct TableStart {
    pub(super) delimiter: u8,
    /// The first byte of the header.
    pub(super) start: usize,
    /// Number of lines before the header.
    pub(super) lines_before: u64,
    /// A note for the user if the delimiter is not `promised`; it continues the file name.
    pub(super) note: Option<String>,
}

/// Finds the header and the delimiter of the table `bytes`; its file extension implies `promised`.
pub(super) fn find(bytes: &[u8], promised: u8) -> TableStart {
    let plain = |delimiter| TableStart { delimiter, start: 0, lines_before: 0, note: None };
    // Excel may name the delimiter in a line of its own.
    if let [b's', b'e', b'p', b'=', delimiter, rest @ ..] = bytes
        && KNOWN.contains(delimiter)
        && let Some(line_end) = [&b"\r\n"[..], b"\n"].into_iter().find(|end| rest.starts_with(end))
    {
        return TableStart { start: 5 + line_end.len(), lines_before: 1, ..plain(*delimiter) };
    }
    let others = KNOWN.into_iter().filter(|known| *known != promised);
    let best = match counts(bytes, promised).first() {
        Some(1) => others.max_by_key(|other| equal_fields(bytes, *other).unwrap_or(0)),
        _ => None,
    };
    match best.filter(|other| equal_fields(bytes, *other).is_some()) {
        Some(delimiter) => TableStart {
            note: Some(format!("has fields separated by {:?}, by its header", char::from(delimiter))),
            ..plain(delimiter)
        },
        None => plain(promised),
    }
}

/// The number of fields if it is the same in all first records, and at least two.
fn equal_fields(bytes: &[u8], delimiter: u8) -> Option<usize> {
    let counts = counts(bytes, delimiter);
    let first = *counts.first()?;
    (first > 1 && counts.iter().all(|count| *count == first)).then_some(first)
}

/// The number of fields of each of the first records.
fn counts(bytes: &[u8], delimiter: u8) -> Vec<usize> {
    let mut reader =
        csv::ReaderBuilder::new().delimiter(delimiter).flexible(true).has_headers(false).from_reader(bytes);
    let records = reader.byte_records().take(LOOKED_AT);
    records.map_while(|record| Some(record.ok()?.len())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_shows_the_delimiter() {
        for (text, promised, delimiter) in [
            ("prompt;completion\na;b\nc, d;e\n", b',', b';'),
            ("prompt\tcompletion\na\tb\n", b',', b'\t'),
            ("prompt|completion\na|\"b|c\"\n", b',', b'|'),
            ("prompt,completion\na,b\n", b'\t', b','),
            ("prompt,completion\na;b,c\n", b',', b','),
            ("prompt;completion\na;b;c\n", b',', b','),
            ("text\na; b\n", b',', b','),
            ("text\n", b',', b','),
            ("", b',', b','),
        ] {
            let start = find(text.as_bytes(), promised);
            assert_eq!((start.delimiter, start.start), (delimiter, 0), "{text:?}");
            assert_eq!(start.note.is_some(), delimiter != promised, "{text:?}");
        }
        let start = find(b"sep=;\r\na;b\r\n", b',');
        assert_eq!((start.delimiter, start.start, start.lines_before), (b';', 7, 1));
    }
}
