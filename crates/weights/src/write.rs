//! Writes safetensors: tensors are streamed one at a time into files that appear completely or not
//! at all.
//!
//! The caller lists the tensors and then supplies each one's values in turn, so memory holds at
//! most one tensor. A file is written as `<name>.tmp-<pid>` beside its path, flushed to the disk,
//! then renamed. The bytes depend on the tensors alone: names in the given order (wider types
//! first, as readers need each tensor aligned to its element), one metadata entry, no time stamps.
//! The BLAKE3 digest is computed during writing.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::stack::Stack;
use super::transpose::transposed;
use super::unfinished::{Unfinished, names_in, sync_folder};
use super::{INDEX_FILE, MODEL_FILE, StoredDtype, StoredElement};
use crate::error::{Error, ErrorCategory, Result};
use crate::units;

/// Number of values converted at once.
const CHUNK: usize = 1 << 16;

/// A tensor to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteEntry {
    /// Its name in the file.
    pub name: String,
    /// The type in which it is stored.
    pub dtype: StoredDtype,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// The stored tensor that it is a part of, if any. Its parts are consecutive entries.
    pub stack: Option<Arc<Stack>>,
}

impl WriteEntry {
    /// Returns the name of the tensor in the file.
    pub fn stored_name(&self) -> &str {
        self.stack.as_ref().map_or(&self.name, |stack| &stack.name)
    }

    /// Returns the bytes of its data in the file.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().map(|&dim| dim as u64).product::<u64>() * self.dtype.size_bytes() as u64
    }
}

/// A written file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Path of the file.
    pub path: PathBuf,
    /// Size of the file.
    pub bytes: u64,
    /// The BLAKE3 digest of its contents.
    pub digest: blake3::Hash,
}

/// Texts by name in a header's `__metadata__`, which readers of weights ignore.
pub type Metadata = BTreeMap<String, String>;

/// Writes the values of one tensor, in one or several calls.
pub struct TensorSink<'a> {
    entry: &'a WriteEntry,
    left: u64,
    file: &'a mut UnfinishedFile,
    buffer: Vec<u8>,
}

impl TensorSink<'_> {
    /// Writes the next values, row by row, rounded to the entry's type.
    ///
    /// # Errors
    /// Storage: the disk is full or fails. Internal: too many values, or the entry does not hold
    /// floats.
    pub fn write_values<T: StoredElement>(&mut self, values: &[T]) -> Result<()> {
        let entry = self.entry;
        let is_transposed = entry.stack.as_ref().is_some_and(|stack| stack.transposed);
        for values in values.chunks(CHUNK) {
            let mut bytes = std::mem::take(&mut self.buffer);
            if !T::encode(values, entry.dtype, &mut bytes) {
                let cause = format!("floats were given for {}", entry.dtype);
                return Err(miswritten(&entry.name, cause));
            }
            if is_transposed {
                self.buffer = bytes;
                continue;
            }
            self.write_bytes(&bytes)?;
            bytes.clear();
            self.buffer = bytes;
        }
        // The transpose needs the whole matrix.
        if let (true, &[rows, columns]) = (self.buffer.len() as u64 == entry.bytes(), &entry.shape[..])
            && is_transposed
        {
            let bytes = std::mem::take(&mut self.buffer);
            self.write_bytes(&transposed(&bytes, [rows, columns], entry.dtype.size_bytes()))?;
        }
        Ok(())
    }

    /// Writes the next bytes in the format of the file: little-endian, row by row; of a part of a
    /// transposed stack, column by column.
    ///
    /// # Errors
    /// Storage: the disk is full or fails. Internal: too many bytes.
    pub fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let entry = self.entry;
        let more = || miswritten(&entry.name, format!("more than its {} bytes were given", entry.bytes()));
        self.left = self.left.checked_sub(bytes.len() as u64).ok_or_else(more)?;
        self.file.put(bytes)
    }
}

/// Returns the error of a caller that does not write the tensor `name` as it was planned.
pub fn miswritten(name: &str, cause: impl Into<String>) -> Error {
    Error::internal(format!("cannot write tensor `{name}`")).because(cause)
}

/// Writes `entries` to the single file `path`. `write` is called once for each and passes its
/// values to the sink.
///
/// # Errors
/// Storage: the disk is full or fails; an earlier file at `path` then stays. Errors of `write`.
/// Internal: two entries of one name, or `write` passes too few or too many values.
pub fn write_file(
    path: &Path,
    entries: &[WriteEntry],
    write: impl FnMut(&WriteEntry, &mut TensorSink<'_>) -> Result<()>,
) -> Result<Written> {
    write_file_with(path, entries, &Metadata::new(), write)
}

/// Works like [`write_file`], with `metadata` in the header's `__metadata__` beside `format`, which
/// is always "pt".
///
/// # Errors
/// The same as for [`write_file`].
pub fn write_file_with(
    path: &Path,
    entries: &[WriteEntry],
    metadata: &Metadata,
    mut write: impl FnMut(&WriteEntry, &mut TensorSink<'_>) -> Result<()>,
) -> Result<Written> {
    let unfinished = write_temporary(path, entries, metadata, &mut write)?;
    let written = unfinished.commit()?;
    sync_folder_of(path)?;
    Ok(written)
}

/// Writes a model's weights into `folder`: model.safetensors if they fit in `shard_bytes`,
/// otherwise `model-00001-of-0000N.safetensors` and so on with the index. No file is renamed before
/// all are complete.
///
/// # Errors
/// The same as for [`write_file`]; user: `folder` holds other weights, which readers would take for
/// part of these.
pub fn write_sharded(
    folder: &Path,
    entries: &[WriteEntry],
    shard_bytes: u64,
    mut write: impl FnMut(&WriteEntry, &mut TensorSink<'_>) -> Result<()>,
) -> Result<Vec<Written>> {
    let shards = split(entries, shard_bytes);
    let mut written = write_shards(folder, &shards, 0..shards.len(), &mut write)?;
    written.extend(write_index_of(folder, &shards)?);
    sync_folder(folder)?;
    Ok(written)
}

/// Writes the shards `mine` of a model's `shards`. The caller must have the other shards written,
/// and then the index ([`write_index_of`]).
///
/// # Errors
/// The same as for [`write_sharded`].
pub fn write_shards(
    folder: &Path,
    shards: &[Vec<WriteEntry>],
    mine: Range<usize>,
    mut write: impl FnMut(&WriteEntry, &mut TensorSink<'_>) -> Result<()>,
) -> Result<Vec<Written>> {
    let names = shard_names(shards.len());
    refuse_other_weights(folder, &names)?;
    let mut unfinished = Vec::with_capacity(mine.len());
    for (name, shard) in names[mine.clone()].iter().zip(&shards[mine]) {
        unfinished.push(write_temporary(&folder.join(name), shard, &Metadata::new(), &mut write)?);
    }
    unfinished.into_iter().map(UnfinishedFile::commit).collect()
}

/// Writes the index of a model of several `shards`; a single shard needs none.
///
/// # Errors
/// Storage: the disk is full or fails.
pub fn write_index_of(folder: &Path, shards: &[Vec<WriteEntry>]) -> Result<Option<Written>> {
    if shards.len() < 2 {
        return Ok(None);
    }
    let names = shard_names(shards.len());
    let places = names.iter().zip(shards);
    let map = places.flat_map(|(name, shard)| shard.iter().map(move |entry| (entry, name.as_str())));
    write_index(folder, map).map(Some)
}

/// Writes model.safetensors.index.json: each tensor with the name of its shard, in the given order.
///
/// # Errors
/// Storage: the disk is full or fails.
pub fn write_index<'a>(
    folder: &Path,
    tensors: impl IntoIterator<Item = (&'a WriteEntry, &'a str)>,
) -> Result<Written> {
    let (mut total_size, mut weight_map) = (0, serde_json::Map::new());
    for (entry, shard) in tensors {
        total_size += entry.bytes();
        weight_map.insert(entry.stored_name().to_owned(), shard.into());
    }
    let index = serde_json::json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
    write_text(&folder.join(INDEX_FILE), &format!("{index:#}\n"))
}

/// Replaces the file `path` with `text`, completely or not at all.
///
/// # Errors
/// Storage: the disk is full or fails; an earlier file at `path` then stays.
pub fn write_text(path: &Path, text: &str) -> Result<Written> {
    let mut file = UnfinishedFile::create(path, text.len() as u64)?;
    file.put(text.as_bytes())?;
    let written = file.commit()?;
    sync_folder_of(path)?;
    Ok(written)
}

/// Returns the names of a model's files, as in transformers.
pub fn shard_names(shards: usize) -> Vec<String> {
    match shards {
        1 => vec![MODEL_FILE.into()],
        n => (1..=n).map(|i| format!("model-{i:05}-of-{n:05}.safetensors")).collect(),
    }
}

/// Splits entries into shards of at most `shard_bytes`, in order, with a new shard if the next
/// entry does not fit. A tensor larger than a shard gets a separate one.
pub fn split(entries: &[WriteEntry], shard_bytes: u64) -> Vec<Vec<WriteEntry>> {
    split_groups(
        entries.chunk_by(are_of_one_stack).map(<[WriteEntry]>::to_vec),
        WriteEntry::bytes,
        shard_bytes,
    )
}

/// Works like [`split`] for groups that stay whole.
pub fn split_groups<T>(
    groups: impl IntoIterator<Item = Vec<T>>,
    bytes: impl Fn(&T) -> u64,
    shard_bytes: u64,
) -> Vec<Vec<T>> {
    let (mut shards, mut filled) = (vec![Vec::new()], 0);
    for group in groups {
        let size: u64 = group.iter().map(&bytes).sum();
        if filled > 0 && filled + size > shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += size;
        if let Some(shard) = shards.last_mut() {
            shard.extend(group);
        }
    }
    shards
}

fn refuse_other_weights(folder: &Path, names: &[String]) -> Result<()> {
    for name in names_in(folder)? {
        let ours = names.contains(&name) || (name == INDEX_FILE && names.len() > 1);
        let weights = name.starts_with("model") && (name.ends_with(".safetensors") || name == INDEX_FILE);
        if weights && !ours {
            return Err(Error::user(format!("cannot write weights to {}", folder.display()))
                .because(format!(
                    "it holds other weights ({name}), which readers would take for part of these"
                ))
                .hint("give an empty folder as `--output`"));
        }
    }
    Ok(())
}

fn write_temporary(
    path: &Path,
    entries: &[WriteEntry],
    metadata: &Metadata,
    write: &mut impl FnMut(&WriteEntry, &mut TensorSink<'_>) -> Result<()>,
) -> Result<UnfinishedFile> {
    let mut ordered: Vec<&WriteEntry> = entries.iter().collect();
    ordered.sort_by_key(|entry| std::cmp::Reverse(entry.dtype.size_bytes()));
    let header = header(&ordered, metadata)?;
    let needed = header.len() as u64 + ordered.iter().map(|entry| entry.bytes()).sum::<u64>();
    let mut file = UnfinishedFile::create(path, needed)?;
    file.put(&header)?;
    for entry in ordered {
        let mut sink = TensorSink { entry, left: entry.bytes(), file: &mut file, buffer: Vec::new() };
        write(entry, &mut sink)?;
        if sink.left > 0 {
            let cause = format!("{} of its {} bytes were not given", sink.left, entry.bytes());
            return Err(miswritten(&entry.name, cause));
        }
    }
    Ok(file)
}

/// Returns the length and the JSON object, padded with spaces so that the data starts at a multiple
/// of 8.
pub(super) fn header(entries: &[&WriteEntry], metadata: &Metadata) -> Result<Vec<u8>> {
    let mut json = serde_json::Map::new();
    let mut texts = serde_json::json!({ "format": "pt" });
    for (key, text) in metadata {
        texts[key] = text.as_str().into();
    }
    json.insert("__metadata__".into(), texts);
    let mut offset = 0;
    for entry in stored(entries)? {
        let end = offset + entry.bytes;
        let tensor = serde_json::json!({
            "dtype": entry.dtype.name(), "shape": entry.shape, "data_offsets": [offset, end]
        });
        if json.insert(entry.name.to_owned(), tensor).is_some() {
            return Err(Error::internal("cannot write weights")
                .because(format!("tensor `{}` is to be written twice", entry.name)));
        }
        offset = end;
    }
    let mut json = serde_json::Value::Object(json).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(&json);
    Ok(header)
}

/// A tensor as a header has it: one entry, or all parts of a stack.
struct HeaderEntry<'a> {
    name: &'a str,
    dtype: StoredDtype,
    shape: &'a [usize],
    bytes: u64,
}

/// Returns the tensors that a header has for `entries`.
///
/// # Errors
/// Internal: the parts of a stack are not consecutive, or are not all of it.
fn stored<'a>(entries: &[&'a WriteEntry]) -> Result<Vec<HeaderEntry<'a>>> {
    let of_group = |group: &[&'a WriteEntry]| {
        let bytes = group.iter().map(|entry| entry.bytes()).sum();
        let first = group[0];
        let Some(stack) = &first.stack else {
            return Ok(HeaderEntry { name: &first.name, dtype: first.dtype, shape: &first.shape, bytes });
        };
        if stack.shape.is_empty() {
            return Ok(HeaderEntry { name: &stack.name, dtype: first.dtype, shape: &first.shape, bytes });
        }
        let whole = WriteEntry { shape: stack.shape.clone(), ..first.clone() }.bytes();
        if whole != bytes {
            return Err(Error::internal(format!("cannot write tensor `{}`", stack.name))
                .because(format!("{bytes} of its {whole} bytes come one after the other")));
        }
        Ok(HeaderEntry { name: &stack.name, dtype: first.dtype, shape: &stack.shape, bytes })
    };
    entries.chunk_by(|one, next| are_of_one_stack(one, next)).map(of_group).collect()
}

/// Returns whether two entries are parts of one stack.
fn are_of_one_stack(one: &WriteEntry, other: &WriteEntry) -> bool {
    one.stack.is_some() && one.stack == other.stack
}

/// A file under its temporary name. If it is dropped before [`UnfinishedFile::commit`], it is
/// removed.
struct UnfinishedFile {
    path: PathBuf,
    temporary: PathBuf,
    out: BufWriter<File>,
    hasher: blake3::Hasher,
    written: u64,
    needed: u64,
}

impl UnfinishedFile {
    fn create(path: &Path, needed: u64) -> Result<Self> {
        let temporary = Unfinished::beside(path, std::process::id());
        // Not `create_new`: an ended process with the same id may have left one. A link there is
        // not followed.
        let mut options = File::options();
        options.write(true).create(true).truncate(true).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(&temporary).map_err(|error| Error::io("write", path, &error))?;
        let out = BufWriter::with_capacity(1 << 20, file);
        Ok(Self { path: path.into(), temporary, out, hasher: blake3::Hasher::new(), written: 0, needed })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|error| self.failed(&error))?;
        self.hasher.update(bytes);
        self.written += bytes.len() as u64;
        Ok(())
    }

    fn commit(mut self) -> Result<Written> {
        self.out.flush().map_err(|error| self.failed(&error))?;
        self.out.get_ref().sync_all().map_err(|error| self.failed(&error))?;
        std::fs::rename(&self.temporary, &self.path).map_err(|error| self.failed(&error))?;
        Ok(Written { path: self.path.clone(), bytes: self.written, digest: self.hasher.finalize() })
    }

    fn failed(&self, source: &io::Error) -> Error {
        write_failed(&self.path, self.needed, "--output", source)
    }
}

/// Returns the error of a write to `path`, a file of `needed` bytes below the path of the option
/// `option`.
pub(super) fn write_failed(path: &Path, needed: u64, option: &str, source: &io::Error) -> Error {
    let error = Error::new(ErrorCategory::Storage, format!("cannot write {}", path.display()))
        .because(format!("{source}; the file needs {}", units::bytes(needed)));
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            error.hint(format!("free space on that disk, or choose another path with `{option}`"))
        }
        _ => error,
    }
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        // After a commit the name does not exist; before it, a failed removal changes nothing for
        // the caller.
        drop(std::fs::remove_file(&self.temporary));
    }
}

/// Flushes the folder of `path`, so that renames survive a power cut.
pub(super) fn sync_folder_of(path: &Path) -> Result<()> {
    path.parent().map_or(Ok(()), sync_folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, dtype: StoredDtype, shape: &[usize]) -> WriteEntry {
        WriteEntry { name: name.into(), dtype, shape: shape.into(), stack: None }
    }

    #[test]
    fn splits_in_order_and_never_cuts_a_tensor() {
        let entries: Vec<WriteEntry> =
            [4, 4, 100, 1, 2, 9].iter().map(|&n| entry(&format!("t{n}"), StoredDtype::U8, &[n])).collect();
        let sizes: Vec<Vec<u64>> = split(&entries, 10)
            .iter()
            .map(|shard| shard.iter().map(|entry| entry.bytes()).collect())
            .collect();
        assert_eq!(sizes, [vec![4, 4], vec![100], vec![1, 2], vec![9]]);
    }

    /// The parts of a stack stay in one file, where they have one name and no gap.
    #[test]
    fn parts_of_a_stack_are_one_tensor() {
        let stack = Some(Arc::new(Stack { name: "experts".into(), shape: vec![2, 3], transposed: false }));
        let part = |name| WriteEntry { stack: stack.clone(), ..entry(name, StoredDtype::BF16, &[3]) };
        let entries = [entry("a", StoredDtype::BF16, &[1]), part("first"), part("second")];
        let sizes: Vec<usize> = split(&entries, 8).iter().map(Vec::len).collect();
        assert_eq!(sizes, [1, 2]);
        let text = |entries: &[&WriteEntry]| {
            header(entries, &Metadata::new()).map(|bytes| String::from_utf8_lossy(&bytes[8..]).into_owned())
        };
        let joined = text(&entries.each_ref()).expect("all parts");
        assert!(
            joined.contains(r#""experts":{"dtype":"BF16","shape":[2,3],"data_offsets":[2,14]}"#),
            "{joined}"
        );
        let torn = text(&[&entries[1], &entries[0], &entries[2]]).expect_err("a gap");
        assert!(torn.to_string().contains("6 of its 12 bytes"), "{torn}");
    }

    #[test]
    fn header_is_the_format_to_the_byte() {
        let (a, b) = (entry("a", StoredDtype::F32, &[2]), entry("b", StoredDtype::BF16, &[]));
        let header = header(&[&a, &b], &Metadata::new()).expect("two names");
        let json = concat!(
            r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"#,
            r#""b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}}"#,
        );
        assert_eq!(header[..8], (json.len().next_multiple_of(8) as u64).to_le_bytes());
        assert_eq!(std::str::from_utf8(&header[8..]).expect("UTF-8").trim_end_matches(' '), json);
        assert_eq!(header.len() % 8, 0);
    }
}
