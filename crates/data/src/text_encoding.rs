//! Converts a text file to UTF-8, from the encoding that its byte order mark announces.
//!
//! A file in another encoding without a mark is one error, with the likely encodings and the
//! command to convert it. If most lines are UTF-8, each other line is a bad row.

use std::borrow::Cow;
use std::path::Path;

use crate::error::{Error, Result};

/// One of this many non-ASCII lines may be UTF-8 by chance, in a file that is not.
const BY_CHANCE: usize = 10;

/// Returns the text of `bytes` without its byte order mark, and the encoding if it is not UTF-8.
///
/// # Errors
/// Fails if `file` is in an unsupported encoding or is no text.
pub(super) fn utf8<'a>(file: &Path, bytes: &'a [u8]) -> Result<(Cow<'a, [u8]>, Option<&'static str>)> {
    let cannot =
        |why: String| Error::user(format!("cannot read the data file {}", file.display())).because(why);
    let convert = |from: &str| {
        let name = file.file_name().unwrap_or_default().display().to_string();
        if name.ends_with(".gz") || name.ends_with(".zst") {
            return format!("unpack it, and convert what is in it: iconv -f {from} -t UTF-8");
        }
        format!("convert it: iconv -f {from} -t UTF-8 {name} > utf8-{name}")
    };
    let marks: [(&[u8], &str); 5] = [
        (b"\xFF\xFE\0\0", "UTF-32LE"),
        (b"\0\0\xFE\xFF", "UTF-32BE"),
        (b"\xEF\xBB\xBF", "UTF-8"),
        (b"\xFF\xFE", "UTF-16LE"),
        (b"\xFE\xFF", "UTF-16BE"),
    ];
    let marked = marks.into_iter().find_map(|(mark, name)| Some((bytes.strip_prefix(mark)?, name)));
    let text = match marked {
        Some((text, "UTF-8")) => text,
        Some((text, name @ ("UTF-16LE" | "UTF-16BE"))) => {
            return match utf16(text, name == "UTF-16LE") {
                Ok(text) => Ok((Cow::Owned(text.into_bytes()), Some(name))),
                Err(at) => Err(cannot(format!(
                    "its byte order mark says {name}, but byte {} begins no character of it",
                    at + 2
                ))),
            };
        }
        Some((_, name)) => {
            return Err(cannot(format!("it is {name} text; accepted: UTF-8, UTF-16")).hint(convert(name)));
        }
        None => bytes,
    };
    match guess(text) {
        None => Ok((Cow::Borrowed(text), None)),
        Some(guess) => {
            let error = cannot(format!("it is not UTF-8: {}", guess.why));
            Err(match guess.convert_from {
                Some(from) => error.hint(convert(from)),
                None => error,
            })
        }
    }
}

/// Decodes UTF-16 code units; fails with the index of the first byte that begins no character.
fn utf16(bytes: &[u8], little: bool) -> Result<String, usize> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let unit = |pair: &[u8; 2]| if little { u16::from_le_bytes(*pair) } else { u16::from_be_bytes(*pair) };
    let mut text = String::with_capacity(pairs.len());
    let mut at = 0;
    for character in char::decode_utf16(pairs.iter().map(unit)) {
        let character = character.map_err(|_| at)?;
        text.push(character);
        at += 2 * character.len_utf16();
    }
    if rest.is_empty() { Ok(text) } else { Err(at) }
}

/// The probable encoding of bytes that are not UTF-8.
struct EncodingGuess {
    why: String,
    /// Name of the encoding for `iconv`.
    convert_from: Option<&'static str>,
}

/// Guesses the encoding of a file that is not UTF-8; `None` if all or most of its lines are.
fn guess(bytes: &[u8]) -> Option<EncodingGuess> {
    if let Some(guess) = guess_wide(bytes) {
        return Some(guess);
    }
    let (mut valid, mut invalid, mut line) = (0, 0, 1);
    let mut first = None;
    let mut start = 0;
    for part in bytes.split_inclusive(|byte| *byte == b'\n' || *byte == b'\r') {
        if !part.is_ascii() {
            match std::str::from_utf8(part) {
                Ok(_) => valid += 1,
                Err(error) => {
                    invalid += 1;
                    first = first.or(Some((line, start + error.valid_up_to())));
                }
            }
        }
        start += part.len();
        let is_end = part.ends_with(b"\n") || bytes.get(start) != Some(&b'\n');
        line += u64::from(is_end);
    }
    let (first_line, at) = first?;
    let is_one_of_many = invalid == 1 && line > 2;
    if is_one_of_many || valid * BY_CHANCE >= invalid {
        return None;
    }
    let (likely, from) = narrow(bytes);
    let lines = if invalid == 1 { "one line holds".to_owned() } else { format!("{invalid} lines hold") };
    Some(EncodingGuess {
        why: format!(
            "byte {at}, on line {first_line}, is 0x{:02X}, and {lines} such bytes; it is probably {likely}",
            bytes[at]
        ),
        convert_from: Some(from),
    })
}

/// Guesses UTF-16 or UTF-32 without a byte order mark, which have zeros in ASCII characters; other
/// files with many zeros are no text.
fn guess_wide(bytes: &[u8]) -> Option<EncodingGuess> {
    let head = &bytes[..bytes.len().min(1 << 16)];
    let zeros =
        |from: usize, step: usize| head.iter().skip(from).step_by(step).filter(|byte| **byte == 0).count();
    let all = zeros(0, 1);
    if all * 20 < head.len() || all == 0 {
        return None;
    }
    let (even, odd) = (zeros(0, 2), zeros(1, 2));
    let name = match () {
        () if all * 10 > head.len() * 7 => {
            if head[0] == 0 {
                "UTF-32BE"
            } else {
                "UTF-32LE"
            }
        }
        () if odd > 9 * even => "UTF-16LE",
        () if even > 9 * odd => "UTF-16BE",
        () => {
            let why = format!("{all} of its first {} bytes are zero, so it is no text", head.len());
            return Some(EncodingGuess { why, convert_from: None });
        }
    };
    let why = format!("it is probably {name} without a byte order mark");
    Some(EncodingGuess { why, convert_from: Some(name) })
}

/// The likely encodings of bytes above 127 that are no UTF-8, and the most likely one.
pub(super) fn narrow(bytes: &[u8]) -> (&'static str, &'static str) {
    let high = |byte: &u8| *byte >= 0x80;
    let total = bytes.iter().filter(|byte| high(byte)).count();
    let alone = (0..bytes.len())
        .filter(|at| high(&bytes[*at]))
        .filter(|at| !bytes[at + 1..].first().is_some_and(high) && !bytes[..*at].last().is_some_and(high))
        .count();
    if alone * 2 > total {
        if bytes.iter().any(|byte| (0x80..0xA0).contains(byte)) {
            return ("Windows-1252 (the Latin-1 of Windows)", "WINDOWS-1252");
        }
        return ("Latin-1 (ISO-8859-1)", "ISO-8859-1");
    }
    ("GB18030, Shift-JIS, EUC-KR, Big5 or Windows-1251", "GB18030")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<String, String> {
        match utf8(Path::new("d/rows.jsonl"), bytes) {
            Ok((text, _)) => Ok(String::from_utf8_lossy(&text).into_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn units(text: &str, little: bool, mark: bool) -> Vec<u8> {
        let mark = if mark { "\u{FEFF}" } else { "" };
        let units = mark.encode_utf16().chain(text.encode_utf16());
        units.flat_map(|unit| if little { unit.to_le_bytes() } else { unit.to_be_bytes() }).collect()
    }

    #[test]
    fn marks_decide() {
        let text = "{\"a\": \"é😀\"}\r\n";
        assert_eq!(read(text.as_bytes()).as_deref(), Ok(text));
        assert_eq!(read(&[b"\xEF\xBB\xBF", text.as_bytes()].concat()).as_deref(), Ok(text));
        for little in [true, false] {
            assert_eq!(read(&units(text, little, true)).as_deref(), Ok(text));
            let name = if little { "UTF-16LE" } else { "UTF-16BE" };
            let why = read(&units(text, little, false)).unwrap_err();
            assert!(why.contains(&format!("probably {name} without a byte order mark")), "{why}");
            assert!(why.contains(&format!("iconv -f {name} -t UTF-8 rows.jsonl > utf8-rows.jsonl")), "{why}");
        }
        let mut cut = units(text, true, true);
        cut.pop();
        assert!(read(&cut).unwrap_err().contains("begins no character"));
        let why = read(b"\xFF\xFE\x41\0\0\xD8\x41\0").unwrap_err();
        assert!(why.contains("says UTF-16LE, but byte 4 begins no character"), "{why}");
        assert!(read(b"\xFF\xFE\0\0a\0\0\0").unwrap_err().contains("it is UTF-32LE text"));
        assert!(read(b"{\0\0\0a\0\0\0}\0\0\0").unwrap_err().contains("UTF-32LE"));
        assert_eq!(read(b"").as_deref(), Ok(""));
    }

    #[test]
    fn other_encodings_are_one_error() {
        let why = read(b"{\"a\": 1}\r\n{\"a\": \"caf\xE9\"}\r\n{\"a\": \"na\xEFf\"}\r\n").unwrap_err();
        assert!(why.contains("byte 20, on line 2, is 0xE9, and 2 lines hold such bytes"), "{why}");
        assert!(why.contains("Latin-1") && why.contains("iconv -f ISO-8859-1"), "{why}");
        assert!(read(b"\x93a\x94\n").unwrap_err().contains("Windows-1252"));
        assert!(read(b"\xC4\xE3\xBA\xC3\n").unwrap_err().contains("GB18030"));
        assert!(read(&[0, 1, 2, 0, 0, 3, 0, 0xFF]).unwrap_err().contains("no text"));
        // One bad line among good ones is no other encoding.
        assert!(read(b"{\"a\": 1}\n{\"a\": \"\xE9\"}\n").is_ok());
        assert!(read("{\"a\": \"é\"}\n".as_bytes()).is_ok());
        assert!(read(b"{\"a\": \"\xC3\xA9\"}\n{\"a\": \"\xE9\"}\n").is_ok());
    }
}
