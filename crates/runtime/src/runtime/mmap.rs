//! A mapped file with flat runs of values, for parameters that do not fit in memory.
//!
//! The file is unlinked right after it is opened, so that it disappears with the process in any
//! case. Its length is allocated at once: a full disk is an error of [`MappedFile::create`], not a
//! fault in the middle of a step. Values are copied in and out ([`super::param_storage`]), because
//! candle's tensors own their memory and cannot be views of the file. Pages are released after each
//! use, so that they count as disk cache.

use std::fs::{File, OpenOptions, remove_file};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};

use candle_core::DType;
use memmap2::{Advice, MmapOptions, MmapRaw, UncheckedAdvice};

use super::cpu_tensor::PlainElement;
use crate::error::{Error, ErrorCategory, Result};
use crate::runtime::buffer::{Buffer, ElementType};
use crate::runtime::disk_space::DiskSpace;
use crate::runtime::fault_signals::{FaultGuard, guard};
use crate::units;

/// Alignment of runs in bytes: pages, so that advice on one run does not affect its neighbour.
const ALIGN: usize = 4096;

/// A mapped file that is divided into runs.
#[derive(Debug)]
pub struct MappedFile {
    _guard: FaultGuard,
    map: MmapRaw,
    taken: AtomicUsize,
    /// Lock of readers and writers of all runs.
    turn: RwLock<()>,
}

/// Values in a mapped file. A clone shares the memory.
#[derive(Debug, Clone)]
pub struct MappedSlice {
    file: Arc<MappedFile>,
    /// Offset of the values in the file, in bytes.
    start: usize,
    len: usize,
    dtype: DType,
}

impl MappedFile {
    /// Bytes of the file that a run of `len` values uses.
    pub fn file_bytes(len: usize, dtype: DType) -> usize {
        (len * dtype.size_in_bytes()).next_multiple_of(ALIGN)
    }

    /// Checks that [`MappedFile::create`] would succeed now, without allocating.
    ///
    /// # Errors
    /// Same as [`MappedFile::create`].
    pub fn check(folder: &Path, bytes: usize) -> Result<()> {
        open(folder, bytes).map(drop)
    }

    /// Creates a file of `bytes` bytes in `folder`, without a name.
    ///
    /// # Errors
    /// The folder is missing or not writable ([`ErrorCategory::User`]); the disk has too little
    /// space ([`ErrorCategory::Storage`]).
    pub fn create(folder: &Path, bytes: usize) -> Result<Arc<Self>> {
        let bytes = bytes.max(ALIGN);
        let file = open(folder, bytes)?;
        let refuse = |error: io::Error| disk_full(folder, bytes, error.to_string());
        allocate(&file, bytes).map_err(refuse)?;
        let map = MmapOptions::new().len(bytes).map_raw(&file).map_err(refuse)?;
        let start = map.as_ptr() as usize;
        let what = format!("cannot use the parameters kept in a file in {}", folder.display());
        let guarded = guard(&(start..start + map.len()), &what);
        Ok(Arc::new(MappedFile { _guard: guarded, map, taken: AtomicUsize::new(0), turn: RwLock::new(()) }))
    }

    /// Next `len` values, initially zero.
    ///
    /// # Errors
    /// The file has too few bytes left.
    pub fn run(self: &Arc<Self>, len: usize, dtype: DType) -> Result<MappedSlice> {
        let bytes = Self::file_bytes(len, dtype);
        let start = self.taken.fetch_add(bytes, Ordering::Relaxed);
        if start + bytes > self.map.len() {
            return Err(Error::internal(format!("a mapped file of {} bytes is used up", self.map.len())));
        }
        Ok(MappedSlice { file: Arc::clone(self), start, len, dtype })
    }
}

impl MappedSlice {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the run has no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Dtype of the values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The `len` values from `start`.
    ///
    /// # Errors
    /// The range exceeds this run.
    pub fn narrow(&self, start: usize, len: usize) -> Result<Self> {
        if start.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::internal(format!("values {start} and {len} more of a run of {}", self.len)));
        }
        let start = self.start + start * self.dtype.size_in_bytes();
        Ok(MappedSlice { file: Arc::clone(&self.file), start, len, dtype: self.dtype })
    }

    /// Passes the values to `read`, which must not write to a run of this file.
    ///
    /// # Errors
    /// The values have another type than `T`.
    pub fn read<T: PlainElement, R>(&self, read: impl FnOnce(&[T]) -> R) -> Result<R> {
        let address = self.address::<T>()?;
        let turn = self.file.turn.read().map_err(|_| Error::internal("a panic in a mapped file"))?;
        // SAFETY: the run is inside the map, which `self` keeps, starts at a multiple of the size
        // of `T` and was zeroed or written as `T`, whose bit patterns are all valid; writers wait
        // for `turn`.
        let result = read(unsafe { std::slice::from_raw_parts(address, self.len) });
        drop(turn);
        self.evict();
        Ok(result)
    }

    /// Passes the values to `write` for changes. It must not read a run of this file.
    ///
    /// # Errors
    /// The values have another type than `T`.
    pub fn write<T: PlainElement, R>(&self, write: impl FnOnce(&mut [T]) -> R) -> Result<R> {
        let address = self.address::<T>()?;
        let turn = self.file.turn.write().map_err(|_| Error::internal("a panic in a mapped file"))?;
        // SAFETY: as in `read`; `turn` excludes all other readers and writers.
        let result = write(unsafe { std::slice::from_raw_parts_mut(address, self.len) });
        drop(turn);
        self.evict();
        Ok(result)
    }

    /// Memory of the run, for collectives. It stays valid while the result lives.
    ///
    /// # Errors
    /// The values' dtype cannot be sent.
    pub fn memory(&self) -> Result<Buffer> {
        let (element, address) = match self.dtype {
            DType::U8 => (ElementType::U8, self.address::<u8>()? as usize),
            DType::BF16 => (ElementType::Bf16, self.address::<half::bf16>()? as usize),
            _ => (ElementType::F32, self.address::<f32>()? as usize),
        };
        // SAFETY: the clone of `file` keeps the map in place. The strategies' schedule keeps others
        // off it during a collective, as for tensors.
        Ok(unsafe { Buffer::new(address, self.len, element, Arc::clone(&self.file) as _) })
    }

    /// Asks the system to read the run ahead of its use.
    pub fn prefetch(&self) {
        // Ignored advice costs time, never correctness.
        drop(self.file.map.advise_range(Advice::WillNeed, self.start, self.bytes()));
    }

    /// Removes the run's pages from this process; the file keeps their contents.
    pub fn evict(&self) {
        // SAFETY: pages of a shared file map are loaded again at the next access.
        let advised = unsafe {
            self.file.map.unchecked_advise_range(UncheckedAdvice::DontNeed, self.start, self.bytes())
        };
        drop(advised);
    }

    fn bytes(&self) -> usize {
        self.len * self.dtype.size_in_bytes()
    }

    fn address<T: PlainElement>(&self) -> Result<*mut T> {
        if T::DTYPE != self.dtype {
            return Err(Error::internal(format!("{:?} wanted of a run of {:?}", T::DTYPE, self.dtype)));
        }
        // SAFETY: `start` is inside the map.
        Ok(unsafe { self.file.map.as_mut_ptr().add(self.start) }.cast())
    }
}

/// Opens a new file without a name in `folder`, if `bytes` are free.
fn open(folder: &Path, bytes: usize) -> Result<File> {
    let file = nameless(folder).map_err(|error| {
        let kind = match error.kind() {
            ErrorKind::NotFound
            | ErrorKind::PermissionDenied
            | ErrorKind::NotADirectory
            | ErrorKind::ReadOnlyFilesystem => ErrorCategory::User,
            _ => ErrorCategory::Storage,
        };
        Error::new(kind, format!("cannot create a file in {}", folder.display()))
            .because(error.to_string())
            .hint("set `parallel.offload_folder` to another folder")
    })?;
    // Some file systems fill the disk completely before they report an error.
    match DiskSpace::of(&file).filter(|space| space.free < bytes as u64) {
        Some(space) => Err(disk_full(folder, bytes, format!("{} available", units::bytes(space.free)))),
        None => Ok(file),
    }
}

fn disk_full(folder: &Path, bytes: usize, why: String) -> Error {
    let size = units::bytes(bytes as u64);
    Error::new(ErrorCategory::Storage, format!("cannot reserve {size} in {}", folder.display()))
        .because(why)
        .hint("free space there, or set `parallel.offload_folder` to a folder on another disk")
}

/// Creates a file in `folder` and removes its name.
fn nameless(folder: &Path) -> io::Result<File> {
    static MADE: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".finetune-offload-{}-{number}", std::process::id()));
        match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
            // Another process with this number, perhaps in another container, made it.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
            Ok(file) => return remove_file(&path).map(|()| file),
        }
    }
}

/// Allocates `bytes` for `file` on the disk.
#[cfg(target_os = "linux")]
fn allocate(file: &File, bytes: usize) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let len = libc::off_t::try_from(bytes).map_err(|_| io::Error::from(ErrorKind::FileTooLarge))?;
    // SAFETY: the descriptor is open.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Allocates `bytes` for `file` on the disk by writing zeros, for systems without a call for it.
#[cfg(not(target_os = "linux"))]
fn allocate(mut file: &File, bytes: usize) -> io::Result<()> {
    use io::Write;
    let zeros = vec![0u8; 1 << 20];
    let mut rest = bytes;
    while rest > 0 {
        let part = rest.min(zeros.len());
        file.write_all(&zeros[..part])?;
        rest -= part;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_hold_what_is_written() -> Result<()> {
        let folder = tempfile::tempdir().unwrap();
        let file = MappedFile::create(folder.path(), MappedFile::file_bytes(3, DType::F32) * 2)?;
        let (a, b) = (file.run(3, DType::F32)?, file.run(7, DType::U8)?);
        a.write(|values: &mut [f32]| values.copy_from_slice(&[1.0, 2.0, 3.0]))?;
        b.write(|values: &mut [u8]| values.fill(9))?;
        assert_eq!(a.narrow(1, 2)?.read(|values: &[f32]| values.to_vec())?, [2.0, 3.0]);
        assert_eq!(b.read(|values: &[u8]| values.to_vec())?, [9; 7]);
        assert!(a.narrow(2, 2).is_err() && a.read(|_: &[u8]| ()).is_err() && file.run(1, DType::U8).is_err());
        // No file must remain, whatever happens next.
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        Ok(())
    }

    #[test]
    fn a_full_disk_and_a_missing_folder_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let full = MappedFile::create(folder.path(), 1 << 60).unwrap_err();
        assert_eq!(full.kind(), ErrorCategory::Storage);
        assert!(full.what().starts_with("cannot reserve 1048576 TiB in"), "{full}");
        assert!(full.causes()[0].ends_with("available"), "{full}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let missing = MappedFile::create(&folder.path().join("none"), 1).unwrap_err();
        assert_eq!(missing.kind(), ErrorCategory::User);
    }
}
