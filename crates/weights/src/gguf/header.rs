//! The header of one GGUF file, validated as untrusted input.
//!
//! The format (ggml's `gguf.h`): magic, version, the numbers of tensors and keys, the keys with
//! typed values, an entry for each tensor, then the tensors' bytes, each aligned. Everything is
//! little-endian. Allocates nothing for a mere claim of a header, and touches no tensor byte.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use crate::error::{Error, Result};
use crate::header::clip;
use crate::quant::BlockType;

const MAGIC: &[u8; 4] = b"GGUF";
/// The first bytes of a file.
pub(super) const VERSIONS: [u32; 2] = [2, 3];
/// Alignment of tensors without `general.alignment`.
const ALIGNMENT: u64 = 32;
/// The longest accepted name of a key or a tensor.
const MAX_NAME_BYTES: u64 = 4096;
/// The most values of all lists together: eight times those of the largest vocabulary in use.
const MAX_VALUES: u64 = 1 << 23;
/// The number of the type f32 of a value.
const F32: u32 = 6;
/// The most dimensions of a tensor in ggml.
const MAX_DIMS: u32 = 4;

/// The value of a key.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// A whole number of any width.
    Integer(i64),
    /// A number in f32.
    Float(f32),
    /// A truth value, true or false.
    Bool(bool),
    /// A text in UTF-8.
    Text(String),
    /// A list of values of one type.
    List(Vec<GgufValue>),
}

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgufTensor {
    /// The name in the file.
    pub name: String,
    /// The type of its blocks.
    pub kind: BlockType,
    /// The shape, rows first as in safetensors; the file has the reverse order.
    pub shape: Vec<usize>,
    /// Its bytes in the file.
    pub range: Range<usize>,
}

/// The contents of a header.
#[derive(Debug)]
pub(super) struct GgufHeader {
    pub(super) keys: BTreeMap<String, GgufValue>,
    pub(super) tensors: Vec<GgufTensor>,
    /// The keys with numbers or lists of f32, as tensors with a row for each number.
    pub(super) lists: Vec<GgufTensor>,
}

/// Parses the header of `file`, the whole contents of `path`.
///
/// # Errors
/// User: the header is malformed, or the file ends before its tensors do.
pub(super) fn parse(file: &[u8], path: &Path) -> Result<GgufHeader> {
    parse_checked(file).map_err(|cause| {
        Error::user(format!("cannot read weights {}", path.display()))
            .because(cause)
            .hint("download or save the file again")
    })
}

fn parse_checked(file: &[u8]) -> Result<GgufHeader, String> {
    let mut reader = HeaderReader { file, at: 0, values: 0 };
    check_start(&mut reader)?;
    let (tensor_count, key_count) = (reader.u64()?, reader.u64()?);
    let (mut keys, mut lists) = (BTreeMap::new(), Vec::new());
    for _ in 0..key_count {
        let key = reader.name("key")?;
        let kind = reader.u32()?;
        let start = reader.at;
        let value = reader.value(kind).map_err(|cause| format!("key `{}`: {cause}", clip(&key)))?;
        // The type and the number of the values of a list come first.
        let (count, before, is_f32) = match &value {
            GgufValue::List(list) => (list.len(), 12, file[start..].starts_with(&F32.to_le_bytes())),
            _ => (1, 0, kind == F32),
        };
        let range = start + before..reader.at;
        let tensor = || GgufTensor { name: key.clone(), kind: BlockType::F32, shape: vec![count, 1], range };
        lists.extend((is_f32 && count > 0).then(tensor));
        if keys.insert(key.clone(), value).is_some() {
            return Err(format!("key `{}` is in its header twice", clip(&key)));
        }
    }
    let alignment = match keys.get("general.alignment") {
        None => ALIGNMENT,
        Some(GgufValue::Integer(alignment)) if (1..=1 << 20).contains(alignment) => alignment.unsigned_abs(),
        Some(other) => return Err(format!("`general.alignment` is {other:?}; accepted: 1 to 1048576")),
    };
    let mut entries = Vec::new();
    for _ in 0..tensor_count {
        entries.push(entry(&mut reader)?);
    }
    let start = (reader.at as u64).next_multiple_of(alignment);
    let tensors = entries.into_iter().map(|entry| with_range(entry, start, alignment, file.len()));
    let tensors = tensors.collect::<Result<Vec<_>, String>>()?;
    check_apart(&tensors)?;
    Ok(GgufHeader { keys, tensors, lists })
}

fn check_start(reader: &mut HeaderReader<'_>) -> Result<(), String> {
    let bytes = reader.file.len();
    if bytes < 24 {
        return Err(format!("it has {bytes} bytes; a GGUF file has at least 24"));
    }
    let magic = reader.take(4)?;
    if magic != MAGIC {
        return Err(format!(
            "it starts with \"{}\"; a GGUF file starts with \"GGUF\"",
            clip(&String::from_utf8_lossy(magic))
        ));
    }
    let version = reader.u32()?;
    if VERSIONS.contains(&version) {
        return Ok(());
    }
    if VERSIONS.contains(&version.swap_bytes()) {
        return Err("it is a GGUF file for machines of big-endian numbers; accepted: little-endian".into());
    }
    Err(format!("its version of GGUF is {version}; accepted: 2, 3"))
}

/// A tensor before the position of the data is known; `start` counts from there.
struct Entry {
    tensor: GgufTensor,
    start: u64,
    bytes: u64,
}

fn entry(reader: &mut HeaderReader<'_>) -> Result<Entry, String> {
    let name = reader.name("tensor")?;
    let shown = clip(&name);
    let count = reader.u32()?;
    if !(1..=MAX_DIMS).contains(&count) {
        return Err(format!("tensor `{shown}` has {count} dimensions; accepted: 1 to {MAX_DIMS}"));
    }
    let mut shape = Vec::new();
    for _ in 0..count {
        let size = reader.u64()?;
        let size = usize::try_from(size).ok().filter(|size| *size > 0);
        shape.push(size.ok_or_else(|| format!("tensor `{shown}` has a dimension of 0, or a too large one"))?);
    }
    shape.reverse();
    let number = reader.u32()?;
    let kind = BlockType::of_number(number).ok_or_else(|| {
        let accepted = BlockType::ALL.map(BlockType::name).join(", ");
        format!("tensor `{shown}` has the type number {number} of ggml; accepted: {accepted}")
    })?;
    let row = shape.last().copied().unwrap_or_default();
    if !kind.divides(row) {
        let block = kind.elements();
        return Err(format!("tensor `{shown}` has rows of {row} in {kind}; accepted: multiples of {block}"));
    }
    let elements = shape.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim as u64));
    let blocks = elements.map(|elements| elements / kind.elements() as u64);
    let bytes = blocks.and_then(|blocks| blocks.checked_mul(kind.bytes() as u64));
    let bytes = bytes.ok_or_else(|| format!("tensor `{shown}` has shape {shape:?}, more than 2^64 bytes"))?;
    let start = reader.u64()?;
    Ok(Entry { tensor: GgufTensor { name, kind, shape, range: 0..0 }, start, bytes })
}

/// Returns the tensor with its place in the file; `data` is the start of all.
fn with_range(entry: Entry, data: u64, alignment: u64, file_bytes: usize) -> Result<GgufTensor, String> {
    let Entry { mut tensor, start, bytes } = entry;
    let shown = clip(&tensor.name);
    if !start.is_multiple_of(alignment) {
        return Err(format!("tensor `{shown}` starts at byte {start}; accepted: multiples of {alignment}"));
    }
    let end = data.checked_add(start).and_then(|first| first.checked_add(bytes));
    let end = end.and_then(|end| usize::try_from(end).ok()).filter(|end| *end <= file_bytes);
    let Some(end) = end else {
        return Err(format!(
            "it is truncated: tensor `{shown}` has {bytes} bytes from byte {start} of the data on; the file has {file_bytes} in all"
        ));
    };
    tensor.range = end - bytes as usize..end;
    Ok(tensor)
}

fn check_apart(tensors: &[GgufTensor]) -> Result<(), String> {
    let mut names = BTreeSet::new();
    if let Some(twice) = tensors.iter().find(|tensor| !names.insert(tensor.name.as_str())) {
        return Err(format!("tensor `{}` is in its header twice", clip(&twice.name)));
    }
    let mut ordered: Vec<&GgufTensor> = tensors.iter().collect();
    ordered.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
    match ordered.windows(2).find(|pair| pair[1].range.start < pair[0].range.end) {
        Some(pair) => {
            let [first, second] = [clip(&pair[0].name), clip(&pair[1].name)];
            Err(format!("tensors `{first}` and `{second}` overlap"))
        }
        None => Ok(()),
    }
}

/// Reads a header from its start.
struct HeaderReader<'a> {
    file: &'a [u8],
    at: usize,
    /// The number of values of lists so far.
    values: u64,
}

impl<'a> HeaderReader<'a> {
    fn take(&mut self, count: u64) -> Result<&'a [u8], String> {
        let end = usize::try_from(count).ok().and_then(|count| self.at.checked_add(count));
        let part = end.and_then(|end| self.file.get(self.at..end));
        let part = part.ok_or_else(|| {
            let left = self.file.len() - self.at;
            format!("it is truncated: its header needs {count} bytes where {left} follow")
        })?;
        self.at += part.len();
        Ok(part)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N as u64)?);
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self) -> Result<String, String> {
        let count = self.u64()?;
        let text = std::str::from_utf8(self.take(count)?);
        text.map(str::to_owned).map_err(|error| format!("a text is not UTF-8: {error}"))
    }

    fn name(&mut self, of: &str) -> Result<String, String> {
        let start = self.at;
        let name = self.text()?;
        let bytes = name.len() as u64;
        if bytes > MAX_NAME_BYTES {
            return Err(format!(
                "the name of the {of} at byte {start} has {bytes} bytes; accepted: up to {MAX_NAME_BYTES}"
            ));
        }
        Ok(name)
    }

    fn value(&mut self, kind: u32) -> Result<GgufValue, String> {
        if kind != 9 {
            return self.scalar(kind);
        }
        let (kind, count) = (self.u32()?, self.u64()?);
        self.values = self.values.saturating_add(count);
        if self.values > MAX_VALUES {
            return Err(format!("its lists have {} values; accepted: up to {MAX_VALUES}", self.values));
        }
        let mut list = Vec::new();
        for _ in 0..count {
            list.push(self.scalar(kind)?);
        }
        Ok(GgufValue::List(list))
    }

    fn scalar(&mut self, kind: u32) -> Result<GgufValue, String> {
        let integer = |value: i64| Ok(GgufValue::Integer(value));
        match kind {
            0 => integer(u8::from_le_bytes(self.array()?).into()),
            1 => integer(i8::from_le_bytes(self.array()?).into()),
            2 => integer(u16::from_le_bytes(self.array()?).into()),
            3 => integer(i16::from_le_bytes(self.array()?).into()),
            4 => integer(self.u32()?.into()),
            5 => integer(i32::from_le_bytes(self.array()?).into()),
            6 => Ok(GgufValue::Float(f32::from_le_bytes(self.array()?))),
            7 => match self.array()? {
                [0] => Ok(GgufValue::Bool(false)),
                [1] => Ok(GgufValue::Bool(true)),
                [other] => Err(format!("a truth value is {other}; accepted: 0, 1")),
            },
            8 => self.text().map(GgufValue::Text),
            10 => {
                let value = self.u64()?;
                let count = i64::try_from(value);
                count
                    .map(GgufValue::Integer)
                    .map_err(|_| format!("a number is {value}; accepted: below 2^63"))
            }
            11 => integer(i64::from_le_bytes(self.array()?)),
            12 => Ok(GgufValue::Float(f64::from_le_bytes(self.array()?) as f32)),
            other => Err(format!("its type is number {other}; accepted: 0 to 12, lists of single values")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    }

    /// A header with one key of `value` and the tensors `entries`, each of a name and its rest.
    fn file(value: &[u8], entries: &[(&str, &[u8])], data: usize) -> Vec<u8> {
        let counts = [entries.len() as u64, 1];
        let mut bytes = [&MAGIC[..], &3u32.to_le_bytes()].concat();
        bytes.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
        bytes.extend(text("a"));
        bytes.extend(value);
        entries.iter().for_each(|(name, rest)| bytes.extend([&text(name)[..], rest].concat()));
        bytes.resize(bytes.len().next_multiple_of(32) + data, 0);
        bytes
    }

    fn entry(dims: &[u64], kind: u32, start: u64) -> Vec<u8> {
        let mut bytes = (dims.len() as u32).to_le_bytes().to_vec();
        bytes.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(start.to_le_bytes());
        bytes
    }

    const TRUE: [u8; 5] = [7, 0, 0, 0, 1];

    #[test]
    fn entries_have_rows_first_and_places_in_the_file() {
        let matrix = entry(&[32, 3], 8, 32);
        let bytes = file(&TRUE, &[("x", &entry(&[2], 0, 0)), ("y", &matrix)], 32 + 102);
        let header = parse_checked(&bytes).expect("valid");
        assert_eq!(header.keys["a"], GgufValue::Bool(true));
        assert_eq!(header.tensors[1].shape, [3, 32]);
        assert_eq!(header.tensors[1].range, bytes.len() - 102..bytes.len());
        assert_eq!(header.tensors[0].range.len(), 8);
        for end in 0..bytes.len() {
            assert!(parse_checked(&bytes[..end]).is_err(), "{end}");
        }
    }

    #[test]
    fn lists_of_f32_have_places_in_the_file() {
        let of = |kind: u32, count: u64, values: &[u8]| {
            let value = [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), &count.to_le_bytes(), values].concat();
            let bytes = file(&value, &[], 0);
            let lists = parse_checked(&bytes).expect("valid").lists;
            lists.first().map(|list| (list.shape.clone(), bytes[list.range.clone()].to_vec()))
        };
        let values: Vec<u8> = [1.5f32, -2.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(of(6, 2, &values), Some((vec![2, 1], values.clone())));
        assert_eq!((of(12, 1, &values), of(6, 0, &[])), (None, None));
        let one = [&6u32.to_le_bytes()[..], &values[..4]].concat();
        let bytes = file(&one, &[], 0);
        let lists = parse_checked(&bytes).expect("valid").lists;
        assert_eq!((&lists[0].shape, &bytes[lists[0].range.clone()]), (&vec![1, 1], &values[..4]));
        assert!(parse_checked(&file(&TRUE, &[], 0)).expect("valid").lists.is_empty());
    }

    /// Each would allocate what it claims, read another tensor, or end the process.
    #[test]
    fn hostile_headers_are_refused() {
        let list = |kind: u32, count: u64| {
            [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), &count.to_le_bytes()].concat()
        };
        let bad =
            |value: &[u8], entries: &[(&str, &[u8])]| parse_checked(&file(value, entries, 64)).unwrap_err();
        assert!(bad(&list(8, 1 << 40), &[]).contains("1099511627776 values"));
        assert!(bad(&list(8, 1 << 20), &[]).contains("truncated"));
        assert!(bad(&list(9, 1), &[]).contains("number 9"));
        assert!(bad(&[13, 0, 0, 0], &[]).contains("number 13"));
        assert!(bad(&[7, 0, 0, 0, 2], &[]).contains("truth value is 2"));
        let wrong = |dims: &[u64], kind, start| bad(&TRUE, &[("x", &entry(dims, kind, start))]);
        assert!(wrong(&[33], 2, 0).contains("rows of 33 in q4_0"));
        assert!(wrong(&[0], 0, 0).contains("a dimension of 0"));
        assert!(wrong(&[], 0, 0).contains("0 dimensions"));
        assert!(wrong(&[1; 5], 0, 0).contains("5 dimensions"));
        assert!(wrong(&[1 << 40, 1 << 40], 0, 0).contains("2^64 bytes"));
        assert!(wrong(&[32], 16, 0).contains("type number 16"));
        assert!(wrong(&[4], 0, 8).contains("multiples of 32"));
        assert!(wrong(&[4], 0, 1 << 40).contains("truncated"));
        assert!(wrong(&[4], 0, u64::MAX - 31).contains("truncated"));
        let one = entry(&[4], 0, 0);
        assert!(bad(&TRUE, &[("x", &one), ("x", &one)]).contains("twice"));
        assert!(bad(&TRUE, &[("x", &one), ("y", &one)]).contains("overlap"));
        let mut swapped = file(&TRUE, &[], 0);
        swapped[4..8].copy_from_slice(&3u32.to_be_bytes());
        assert!(parse_checked(&swapped).unwrap_err().contains("big-endian"));
        swapped[4..8].copy_from_slice(&1u32.to_le_bytes());
        assert!(parse_checked(&swapped).unwrap_err().contains("version of GGUF is 1"));
        swapped[0] = b'X';
        assert!(parse_checked(&swapped).unwrap_err().contains("starts with \"XGUF\""));
    }
}
