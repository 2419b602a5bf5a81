//! Writes safetensors with tensors in any order: each part goes to its position in its file as soon
//! as it is available.
//!
//! Quantization turns one weight into several tensors. Some of them are known only after the whole
//! weight was read, and a file has the wider types first. So the layout is fixed before anything is
//! written. Texts of unknown length are at the end of a file, with space for the longest; unused
//! space is cut off. The header is written last and padded with spaces, as the format allows. The
//! caller writes into a [`super::AtomicDir`], so that all files appear at once.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::unfinished::sync_folder;
use super::write::{header, miswritten, shard_names, split_groups, write_failed};
use super::{ClassNames, Metadata, RetainedTensors, StoredDtype, WriteEntry, write_index};
use crate::error::{Error, Result};

/// A tensor of the planned layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlannedFile {
    /// A tensor of known type and shape.
    Sized(WriteEntry),
    /// Bytes (u8, one dimension), at most this many.
    Text(String, usize),
}

impl PlannedFile {
    /// Returns its name and storage, for a text at its longest.
    fn entry(&self) -> WriteEntry {
        match self {
            PlannedFile::Sized(entry) => entry.clone(),
            PlannedFile::Text(name, longest) => {
                WriteEntry { name: name.clone(), dtype: StoredDtype::U8, shape: vec![*longest], stack: None }
            }
        }
    }
}

/// A tensor in its file.
struct TensorSlot {
    entry: WriteEntry,
    is_text: bool,
    /// The position of its bytes in the file; texts get theirs at the end.
    start: u64,
    /// Number of bytes still to be written; of a text, all or none.
    left: u64,
}

struct PlannedShard {
    path: PathBuf,
    file: File,
    slots: Vec<TensorSlot>,
    metadata: Metadata,
    header_bytes: usize,
    texts: Vec<u8>,
    texts_start: u64,
}

/// Writes the weights of a model to one or several files.
pub struct RandomAccessWriter {
    folder: PathBuf,
    shards: Vec<PlannedShard>,
    /// Name → (shard, slot).
    places: HashMap<String, (usize, usize)>,
}

impl RandomAccessWriter {
    /// Lays out files of at most `shard_bytes` each (a group is never split) in `folder`, which
    /// exists and is empty. `groups` are tensors that readers need in one file. In the files they
    /// have the names of `class`. `metadata` goes into each file's header.
    ///
    /// # Errors
    /// Storage: the files cannot be created. Internal: two tensors have one name.
    pub fn create(
        folder: &Path,
        groups: &[Vec<PlannedFile>],
        (class, metadata): (&'static ClassNames, &Metadata),
        shard_bytes: u64,
    ) -> Result<Self> {
        let names = RetainedTensors::default().named_by(class);
        let groups = groups.iter().map(|group| group.iter().collect::<Vec<_>>());
        let shards = split_groups(groups, |planned: &&PlannedFile| planned.entry().bytes(), shard_bytes);
        let mut writer =
            RandomAccessWriter { folder: folder.into(), shards: Vec::new(), places: HashMap::new() };
        for (name, planned) in shard_names(shards.len()).iter().zip(shards) {
            let shard = PlannedShard::create(folder.join(name), planned, &names, metadata)?;
            let places = shard.slots.iter().enumerate();
            let index = writer.shards.len();
            writer.places.extend(places.map(|(slot, planned)| (planned.entry.name.clone(), (index, slot))));
            writer.shards.push(shard);
        }
        Ok(writer)
    }

    /// Writes bytes of tensor `name` from its byte `at` on. Each byte must be written once, and a
    /// text in one call.
    ///
    /// # Errors
    /// Storage: the disk is full or fails. Internal: the tensor was not planned or is smaller.
    pub fn write(&mut self, name: &str, at: u64, bytes: &[u8]) -> Result<()> {
        let unplanned = || miswritten(name, "it was not planned");
        let &(shard, slot) = self.places.get(name).ok_or_else(unplanned)?;
        self.shards[shard].write(slot, at, bytes)
    }

    /// Writes headers and, for several files, the index. Returns the files with their sizes.
    ///
    /// # Errors
    /// Storage: the disk is full or fails. Internal: bytes of a tensor are missing.
    pub fn finish(self) -> Result<Vec<(PathBuf, u64)>> {
        let mut files = Vec::with_capacity(self.shards.len());
        let mut entries = Vec::new();
        for shard in self.shards {
            let (path, bytes, written) = shard.finish()?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            entries.extend(written.into_iter().map(|entry| (entry, name.clone())));
            files.push((path, bytes));
        }
        if files.len() > 1 {
            let index =
                write_index(&self.folder, entries.iter().map(|(entry, name)| (entry, name.as_str())))?;
            files.push((index.path, index.bytes));
        }
        sync_folder(&self.folder)?;
        Ok(files)
    }
}

impl PlannedShard {
    fn create(
        path: PathBuf,
        planned: Vec<&PlannedFile>,
        names: &RetainedTensors,
        metadata: &Metadata,
    ) -> Result<Self> {
        let mut slots: Vec<TensorSlot> = planned
            .into_iter()
            .map(|planned| {
                let is_text = matches!(planned, PlannedFile::Text(..));
                let entry = names.named_as_stored(planned.entry());
                TensorSlot { left: entry.bytes(), entry, is_text, start: 0 }
            })
            .collect();
        slots.sort_by_key(|slot| (slot.is_text, std::cmp::Reverse(slot.entry.dtype.size_bytes())));
        // Shorter texts have no more digits in their offsets: the header can only shrink.
        let header_bytes = header(&slots.iter().map(|slot| &slot.entry).collect::<Vec<_>>(), metadata)?.len();
        let mut end = header_bytes as u64;
        for slot in slots.iter_mut().filter(|slot| !slot.is_text) {
            slot.start = end;
            end += slot.entry.bytes();
        }
        let file = File::create(&path).map_err(|error| Error::io("write", &path, &error))?;
        let (texts, metadata) = (Vec::new(), metadata.clone());
        Ok(PlannedShard { path, file, slots, metadata, header_bytes, texts, texts_start: end })
    }

    fn write(&mut self, slot: usize, at: u64, bytes: &[u8]) -> Result<()> {
        let slot = &mut self.slots[slot];
        let (size, len) = (slot.entry.bytes(), bytes.len() as u64);
        let fits = at.checked_add(len).is_some_and(|end| end <= size) && len <= slot.left;
        if !fits || (slot.is_text && at > 0) {
            let cause = format!("{len} bytes from {at} on were given of {size}, {} are left", slot.left);
            return Err(miswritten(&slot.entry.name, cause));
        }
        if slot.is_text {
            // Kept in memory until all texts before it are complete.
            slot.start = self.texts.len() as u64;
            (slot.entry.shape, slot.left) = (vec![bytes.len()], 0);
            self.texts.extend_from_slice(bytes);
            return Ok(());
        }
        slot.left -= len;
        let start = slot.start + at;
        self.put(start, bytes)
    }

    fn put(&mut self, start: u64, bytes: &[u8]) -> Result<()> {
        let put = |file: &mut File| -> io::Result<()> {
            file.seek(SeekFrom::Start(start))?;
            file.write_all(bytes)
        };
        put(&mut self.file).map_err(|error| write_failed(&self.path, self.needed(), "--output", &error))
    }

    fn needed(&self) -> u64 {
        self.header_bytes as u64 + self.slots.iter().map(|slot| slot.entry.bytes()).sum::<u64>()
    }

    /// Writes texts and header. Returns the path, the file's size and its entries.
    fn finish(mut self) -> Result<(PathBuf, u64, Vec<WriteEntry>)> {
        if let Some(slot) = self.slots.iter().find(|slot| slot.left > 0) {
            let cause = format!("{} of its {} bytes were not given", slot.left, slot.entry.bytes());
            return Err(miswritten(&slot.entry.name, cause));
        }
        // Texts are stored in the order of their arrival.
        self.slots.sort_by_key(|slot| (slot.is_text, slot.start));
        let mut header =
            header(&self.slots.iter().map(|slot| &slot.entry).collect::<Vec<_>>(), &self.metadata)?;
        let padded = self.header_bytes as u64 - 8;
        header[..8].copy_from_slice(&padded.to_le_bytes());
        header.resize(self.header_bytes, b' ');
        let texts = std::mem::take(&mut self.texts);
        self.put(self.texts_start, &texts)?;
        self.put(0, &header)?;
        let bytes = self.texts_start + texts.len() as u64;
        self.file.sync_all().map_err(|error| write_failed(&self.path, bytes, "--output", &error))?;
        Ok((self.path, bytes, self.slots.into_iter().map(|slot| slot.entry).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelFiles;

    fn sized(name: &str, dtype: StoredDtype, shape: &[usize]) -> PlannedFile {
        PlannedFile::Sized(WriteEntry { name: name.into(), dtype, shape: shape.into(), stack: None })
    }

    #[test]
    fn parts_in_any_order_make_the_files_that_were_planned() {
        let folder = tempfile::tempdir().expect("a folder");
        let groups = [
            vec![
                sized("a", StoredDtype::U8, &[4]),
                PlannedFile::Text("a.text".into(), 1000),
                sized("a.scale", StoredDtype::F32, &[1]),
            ],
            vec![sized("b", StoredDtype::U8, &[2]), PlannedFile::Text("b.text".into(), 1000)],
            vec![sized("c", StoredDtype::BF16, &[2])],
        ];
        let plain = (&ClassNames::USUAL, &Metadata::new());
        let mut writer = RandomAccessWriter::create(folder.path(), &groups, plain, 2010).expect("two files");
        for (name, at, bytes) in [
            ("b.text", 0, &b"second"[..]),
            ("a", 2, &[3, 4]),
            ("c", 0, &[9, 9, 9, 9]),
            ("a.text", 0, b"one"),
            ("a", 0, &[1, 2]),
            ("a.scale", 0, &[0, 0, 128, 63]),
            ("b", 0, &[5, 6]),
        ] {
            writer.write(name, at, bytes).expect(name);
        }
        assert!(writer.write("a", 0, &[0]).is_err(), "more than planned");
        assert!(writer.write("d", 0, &[0]).is_err(), "not planned");
        assert_eq!(writer.finish().expect("complete").len(), 3, "two files and an index");
        let files = ModelFiles::open(folder.path()).expect("readable");
        assert_eq!(files.bytes("a").expect("a"), [1, 2, 3, 4]);
        assert_eq!(files.bytes("a.text").expect("text"), b"one");
        assert_eq!(files.bytes("b.text").expect("text"), b"second");
        assert_eq!(files.bytes("b").expect("b"), [5, 6]);
        assert_eq!(files.bytes("c").expect("c"), [9, 9, 9, 9]);
        let mut scale = [0f32];
        files.read_f32("a.scale", &mut scale).expect("scale");
        assert_eq!(scale, [1.0]);
        assert_ne!(files.info("b").expect("b").file, files.info("c").expect("c").file);
    }

    #[test]
    fn a_part_that_is_missing_is_noticed() {
        let folder = tempfile::tempdir().expect("a folder");
        let groups = [vec![sized("a", StoredDtype::U8, &[4])]];
        let plain = (&ClassNames::USUAL, &Metadata::new());
        let mut writer = RandomAccessWriter::create(folder.path(), &groups, plain, 100).expect("a file");
        writer.write("a", 0, &[1, 2, 3]).expect("three bytes");
        let error = writer.finish().expect_err("one byte is missing");
        assert_eq!(error.causes(), ["1 of its 4 bytes were not given"]);
    }
}
