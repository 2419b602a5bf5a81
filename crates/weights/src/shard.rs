//! One weights file of a model: memory-mapped, or remote with its header only.
//!
//! Headers and a few labels describe a model (names, types, shapes, sizes, formats of quantized
//! tensors). So a [`RangeReader`] suffices to plan a run or describe a model without local weights.
//! Values are then absent, and reading them is an error.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memmap2::{Mmap, UncheckedAdvice};

use super::header::{self, Header, HeaderTensor, clip};
use super::{TensorInfo, readers};
use crate::error::{Error, ErrorCategory, Result};
use crate::runtime::fault_signals::{FaultGuard, guard};

/// Labels at most this far apart are read at once, with the bytes between them.
const READ_THROUGH: usize = 64 << 10;
/// The largest accepted label: larger than any of bitsandbytes.
const MAX_LABEL_BYTES: usize = 64 << 10;

/// Weights files that are not in the folder of their model, but can be read by byte ranges.
pub trait RangeReader {
    /// Returns the names of the files.
    fn files(&self) -> &[String];

    /// Reads a byte range of one of them.
    ///
    /// # Errors
    /// The file cannot be read there.
    fn read(&self, file: &str, range: Range<u64>) -> Result<RemoteRange>;
}

/// A byte range of a remote file.
#[derive(Debug, Clone)]
pub struct RemoteRange {
    /// The requested bytes; fewer if the file ends before.
    pub bytes: Vec<u8>,
    /// The size of the whole file.
    pub file_bytes: u64,
}

#[derive(Debug)]
pub(super) struct Shard {
    pub(super) path: Arc<Path>,
    contents: Contents,
    /// Bytes of all its tensors.
    pub(super) data_bytes: u64,
    /// The texts of its header's `__metadata__`.
    pub(super) metadata: BTreeMap<String, String>,
}

#[derive(Debug)]
enum Contents {
    Mapped(MappedShard),
    /// The labels of its quantized tensors, and the bytes between them, by their first byte in the
    /// file.
    Remote(BTreeMap<usize, Vec<u8>>),
}

/// A mapped file. The guard is dropped before the map.
#[derive(Debug)]
struct MappedShard {
    _guard: FaultGuard,
    map: Mmap,
    file: File,
}

impl Shard {
    /// Maps the file `path`. Also returns its tensors.
    pub(super) fn open(path: &Path) -> Result<(Self, Vec<HeaderTensor>)> {
        let mut shard = Self::map(path)?;
        let whole = shard.whole();
        let Header { tensors, metadata } = header::parse(whole, whole.len() as u64, path)?;
        (shard.data_bytes, shard.metadata) = (data_bytes(&tensors), metadata);
        Ok((shard, tensors))
    }

    /// Maps the file `path` of any format.
    pub(super) fn map(path: &Path) -> Result<Self> {
        let failed = |error| Error::io("open weights", path, &error);
        // Opening a FIFO would block until it has a writer.
        if !std::fs::metadata(path).map_err(failed)?.is_file() {
            return Err(
                Error::user(format!("cannot open weights {}", path.display())).because("it is not a file")
            );
        }
        let file = File::open(path).map_err(failed)?;
        // SAFETY: the map is read-only and lives in the shard; `files` documents the contract that
        // no program truncates the file meanwhile.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        let start = map.as_ptr() as usize;
        let guard = guard(&(start..start + map.len()), &format!("cannot read weights {}", path.display()));
        let contents = Contents::Mapped(MappedShard { _guard: guard, map, file });
        Ok(Shard { path: path.into(), contents, data_bytes: 0, metadata: BTreeMap::new() })
    }

    /// Returns all bytes of a mapped file.
    pub(super) fn whole(&self) -> &[u8] {
        match &self.contents {
            Contents::Mapped(mapped) => &mapped.map,
            Contents::Remote(_) => &[],
        }
    }

    /// Reads the header of a remote file; `path` is its local path if it existed. Also returns its
    /// tensors.
    pub(super) fn open_remote(remote: &dyn RangeReader, path: &Path) -> Result<(Self, Vec<HeaderTensor>)> {
        let name = file_name(path);
        let RemoteRange { bytes: mut start, file_bytes } = remote.read(&name, 0..8)?;
        let end = header::end(&start, file_bytes, path)?;
        start.extend(remote.read(&name, 8..end)?.bytes);
        let Header { tensors, metadata } = header::parse(&start, file_bytes, path)?;
        let contents = Contents::Remote(BTreeMap::new());
        let data_bytes = data_bytes(&tensors);
        Ok((Shard { path: path.into(), contents, data_bytes, metadata }, tensors))
    }

    /// Returns whether only its header is available.
    pub(super) fn is_remote(&self) -> bool {
        matches!(self.contents, Contents::Remote(_))
    }

    /// Checks that the file still has its length at opening: the part of a page after a truncation
    /// reads as zeros, without a fault.
    ///
    /// # Errors
    /// Storage: the length differs, or it cannot be read.
    pub(super) fn check_length(&self) -> Result<()> {
        let Contents::Mapped(MappedShard { map, file, .. }) = &self.contents else { return Ok(()) };
        let now = file.metadata().map_err(|error| Error::io("read weights", &self.path, &error))?.len();
        if now == map.len() as u64 {
            return Ok(());
        }
        let what = format!("cannot read weights {}", self.path.display());
        Err(Error::new(ErrorCategory::Storage, what)
            .because(format!("the file had {} bytes when it was opened and has {now} now", map.len()))
            .hint("put the whole file back, and let no other program change it meanwhile"))
    }

    /// Reads the labels of quantized tensors among `tensors`, which are this file's, unless it is
    /// mapped.
    pub(super) fn read_labels<'t>(
        &mut self,
        remote: &dyn RangeReader,
        tensors: impl Iterator<Item = (&'t String, &'t TensorInfo)>,
    ) -> Result<()> {
        let Contents::Remote(parts) = &mut self.contents else { return Ok(()) };
        let mut labels: Vec<Range<usize>> = Vec::new();
        for (name, info) in tensors.filter(|(name, _)| readers::is_label(name)) {
            if info.range.len() > MAX_LABEL_BYTES {
                return Err(Error::user(format!("cannot read weights {}", self.path.display()))
                    .because(format!("tensor `{}` has {} bytes", clip(name), info.range.len()))
                    .because(format!(
                        "accepted: up to {MAX_LABEL_BYTES} bytes for the description of a quantized tensor"
                    )));
            }
            labels.push(info.range.clone());
        }
        labels.sort_unstable_by_key(|range| range.start);
        let mut reads: Vec<Range<usize>> = Vec::new();
        for label in labels {
            match reads.last_mut() {
                Some(last) if label.start - last.end <= READ_THROUGH => last.end = label.end,
                _ => reads.push(label),
            }
        }
        let name = file_name(&self.path);
        for read in reads {
            parts.insert(read.start, remote.read(&name, read.start as u64..read.end as u64)?.bytes);
        }
        Ok(())
    }

    /// Returns bytes of the file within one tensor, or `None` if they are not available.
    pub(super) fn bytes(&self, range: &Range<usize>) -> Option<&[u8]> {
        match &self.contents {
            Contents::Mapped(mapped) => mapped.map.get(range.clone()),
            Contents::Remote(parts) => {
                let (start, part) = parts.range(..=range.start).next_back()?;
                part.get(range.start - start..range.end - start)
            }
        }
    }

    /// Releases the memory of some pages.
    pub(super) fn discard(&self, range: &Range<usize>) {
        let Contents::Mapped(MappedShard { map, .. }) = &self.contents else { return };
        // SAFETY: dropping pages of a read-only map of a file only makes the next access load them
        // again.
        let advised =
            unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
        // If the system ignores the advice, that costs memory, never correctness.
        drop(advised);
    }
}

fn data_bytes(tensors: &[HeaderTensor]) -> u64 {
    tensors.iter().map(|tensor| tensor.range.len() as u64).sum()
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
