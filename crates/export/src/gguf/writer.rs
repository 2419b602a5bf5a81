//! The GGUF container, version 3: a header of keys, values and tensor entries, then the tensors'
//! bytes.
//!
//! Layout and type numbers are those of ggml's `gguf.h` (docs/gguf.md in ggml-org/ggml). Everything
//! is little-endian. Each tensor starts at a multiple of [`ALIGNMENT`] after the header. The caller
//! lists all tensors and then writes the bytes of each in turn, so memory holds only a part of one.
//! The file appears complete or not at all, and replaces no other ([`OutputKind`]).

use std::collections::BTreeSet;
use std::path::Path;

use crate::error::{Error, Result};
use crate::quant::BlockType;
use crate::weights::{OutputFile, OutputKind, miswritten};

/// The output file of an export. It replaces nothing: an existing file may be the only copy.
pub const OUTPUT: OutputKind =
    OutputKind { what: "a GGUF", option: "--output", example: "model.gguf", replaces: None };

/// Alignment that readers assume without `general.alignment`.
const ALIGNMENT: u64 = 32;
const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// Longest name that ggml keeps, with its final NUL (`GGML_MAX_NAME`).
const MAX_NAME_BYTES: usize = 64;

/// The value of a key.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum MetadataValue {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    F32s(Vec<f32>),
    I32s(Vec<i32>),
    Bools(Vec<bool>),
}

impl MetadataValue {
    fn type_id(&self) -> u32 {
        match self {
            Self::U32(_) => 4,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => 8,
            Self::Texts(_) | Self::F32s(_) | Self::I32s(_) | Self::Bools(_) => 9,
        }
    }

    fn put(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::U32(value) => bytes.extend_from_slice(&value.to_le_bytes()),
            Self::F32(value) => bytes.extend_from_slice(&value.to_le_bytes()),
            Self::Bool(value) => bytes.push(u8::from(*value)),
            Self::Text(value) => put_text(value, bytes),
            Self::Texts(values) => put_array(bytes, 8, values, |value, to| put_text(value, to)),
            Self::F32s(values) => put_array(bytes, 6, values, |value, to| to.extend(value.to_le_bytes())),
            Self::I32s(values) => put_array(bytes, 5, values, |value, to| to.extend(value.to_le_bytes())),
            Self::Bools(values) => put_array(bytes, 7, values, |value, to| to.push(u8::from(*value))),
        }
    }
}

/// Appends an array: the type of its values, their number, and each as `put` appends it.
fn put_array<T>(bytes: &mut Vec<u8>, type_id: u32, values: &[T], put: impl Fn(&T, &mut Vec<u8>)) {
    bytes.extend_from_slice(&type_id.to_le_bytes());
    bytes.extend_from_slice(&(values.len() as u64).to_le_bytes());
    values.iter().for_each(|value| put(value, bytes));
}

fn put_text(text: &str, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
}

/// Keys and values in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct GgufMetadata(Vec<(String, MetadataValue)>);

impl GgufMetadata {
    pub(super) fn set(&mut self, key: impl Into<String>, value: MetadataValue) {
        self.0.push((key.into(), value));
    }

    pub(super) fn text(&mut self, key: impl Into<String>, value: impl Into<String>) {
        self.set(key, MetadataValue::Text(value.into()));
    }

    /// Returns all keys and values.
    pub(super) fn entries(&self) -> &[(String, MetadataValue)] {
        &self.0
    }

    pub(super) fn append(&mut self, more: GgufMetadata) {
        self.0.extend(more.0);
    }
}

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorEntry {
    /// The name in the file.
    pub(super) name: String,
    /// The shape, rows first as in safetensors; the file has the reverse order.
    pub(super) shape: Vec<usize>,
    /// The storage type; the length of a row is a multiple of its block.
    pub(super) kind: BlockType,
}

impl TensorEntry {
    /// Returns the bytes of its data, without padding.
    pub(super) fn bytes(&self) -> u64 {
        let blocks = self.shape.iter().map(|&dim| dim as u64).product::<u64>() / self.kind.elements() as u64;
        blocks * self.kind.bytes() as u64
    }
}

/// Receives the bytes of one tensor.
pub(super) struct Sink<'a> {
    entry: &'a TensorEntry,
    left: u64,
    file: &'a mut OutputFile,
}

impl Sink<'_> {
    /// Writes the next bytes.
    ///
    /// # Errors
    /// Storage: the disk is full or fails. Internal: too many bytes.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let entry = self.entry;
        let more = || miswritten(&entry.name, format!("more than its {} bytes were given", entry.bytes()));
        self.left = self.left.checked_sub(bytes.len() as u64).ok_or_else(more)?;
        self.file.put(bytes)
    }
}

/// Writes the new file `path` and returns its size in bytes. Calls `write` once for each entry, in
/// order, to write its bytes.
///
/// # Errors
/// User: `path` exists. Storage: the disk is full or fails; no file is left then. Errors of
/// `write`. Internal: two entries or keys of one name, or `write` gives too few or too many bytes.
pub(super) fn write(
    path: &Path,
    metadata: &GgufMetadata,
    entries: &[TensorEntry],
    mut write: impl FnMut(&TensorEntry, &mut Sink<'_>) -> Result<()>,
) -> Result<u64> {
    let header = header(metadata, entries)?;
    let data: u64 = entries.iter().map(|entry| entry.bytes().next_multiple_of(ALIGNMENT)).sum();
    let folder = path.parent().unwrap_or(path);
    std::fs::create_dir_all(folder).map_err(|error| Error::io("create", folder, &error))?;
    let mut file = OUTPUT.create(path, header.len() as u64 + data)?;
    file.put(&header)?;
    for entry in entries {
        let mut sink = Sink { entry, left: entry.bytes(), file: &mut file };
        write(entry, &mut sink)?;
        if sink.left > 0 {
            let cause = format!("{} of its {} bytes were not given", sink.left, entry.bytes());
            return Err(miswritten(&entry.name, cause));
        }
        let padding = file.written().next_multiple_of(ALIGNMENT) - file.written();
        file.put(&[0; ALIGNMENT as usize][..padding as usize])?;
    }
    file.commit()
}

fn header(metadata: &GgufMetadata, entries: &[TensorEntry]) -> Result<Vec<u8>> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(entries.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&(metadata.0.len() as u64).to_le_bytes());
    let mut names = BTreeSet::new();
    let mut once = |name: &str| {
        if names.insert(name.to_owned()) {
            Ok(())
        } else {
            Err(Error::internal("cannot write a GGUF file").because(format!("`{name}` occurs twice")))
        }
    };
    for (key, value) in &metadata.0 {
        once(key)?;
        put_text(key, &mut bytes);
        bytes.extend_from_slice(&value.type_id().to_le_bytes());
        value.put(&mut bytes);
    }
    let mut offset = 0u64;
    for entry in entries {
        once(&entry.name)?;
        if entry.name.len() >= MAX_NAME_BYTES {
            return Err(Error::internal("cannot write a GGUF file")
                .because(format!("the name `{}` is too long", entry.name)));
        }
        put_text(&entry.name, &mut bytes);
        bytes.extend_from_slice(&(entry.shape.len() as u32).to_le_bytes());
        for &dim in entry.shape.iter().rev() {
            bytes.extend_from_slice(&(dim as u64).to_le_bytes());
        }
        bytes.extend_from_slice(&(entry.kind as u32).to_le_bytes());
        bytes.extend_from_slice(&offset.to_le_bytes());
        offset += entry.bytes().next_multiple_of(ALIGNMENT);
    }
    bytes.resize((bytes.len() as u64).next_multiple_of(ALIGNMENT) as usize, 0);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_the_format_to_the_byte() {
        let mut metadata = GgufMetadata::default();
        metadata.text("k", "ab");
        metadata.set("a", MetadataValue::I32s(vec![-1]));
        let entries = [
            TensorEntry { name: "t".into(), shape: vec![2, 3], kind: BlockType::F16 },
            TensorEntry { name: "u".into(), shape: vec![1], kind: BlockType::F32 },
        ];
        let mut wanted = b"GGUF\x03\0\0\0\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0".to_vec();
        wanted.extend(b"\x01\0\0\0\0\0\0\0k\x08\0\0\0\x02\0\0\0\0\0\0\0ab");
        wanted.extend(b"\x01\0\0\0\0\0\0\0a\x09\0\0\0\x05\0\0\0\x01\0\0\0\0\0\0\0\xff\xff\xff\xff");
        // 3 columns first, then 2 rows; f16 is type 1; 12 bytes are padded to 32.
        wanted.extend(b"\x01\0\0\0\0\0\0\0t\x02\0\0\0\x03\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x01\0\0\0");
        wanted.extend(b"\0\0\0\0\0\0\0\0");
        wanted.extend(b"\x01\0\0\0\0\0\0\0u\x01\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\x20\0\0\0\0\0\0\0");
        wanted.resize(wanted.len().next_multiple_of(32), 0);
        assert_eq!(header(&metadata, &entries).expect("names differ"), wanted);
    }

    #[test]
    fn nothing_is_left_of_a_file_that_failed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("m.gguf");
        let entry = [TensorEntry { name: "t".into(), shape: vec![4], kind: BlockType::F32 }];
        for given in [0, 15, 17] {
            let written =
                write(&path, &GgufMetadata::default(), &entry, |_, sink| sink.write(&vec![0; given]));
            assert!(written.is_err(), "{given} bytes");
            assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0);
        }
        write(&path, &GgufMetadata::default(), &entry, |_, sink| sink.write(&[0; 16])).expect("16 bytes");
        let again = write(&path, &GgufMetadata::default(), &entry, |_, sink| sink.write(&[0; 16]));
        assert!(again.expect_err("exists").to_string().contains("a file of that name exists"));
    }
}
