//! Files and folders that a process writes as `<place>.tmp-<pid>` beside their final path, and then
//! renames or removes.
//!
//! Dropping the owner removes them, and so does a signal that ends the process
//! ([`discard_unfinished`]). Leftovers of a killed process are removed by the next one that writes
//! to the same path ([`sweep`]), if no process has the maker's id and no process holds the lock
//! that a maker keeps on them. The lock also detects makers in other containers and, for files on
//! file systems that carry locks between hosts, on other hosts. Folders on file systems that
//! several hosts share stay, and so do leftovers without locks.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::locks::locked;

/// The text between the final name and the id of the writing process.
const MARK: &str = ".tmp-";
/// The suffix of a folder that is being removed.
const REMOVED: &str = "-removed";
/// The suffixes that a temporary name may have after the process id.
const ENDS: [&str; 2] = [REMOVED, "-replaced"];

/// The paths that this process has begun and not finished.
static BEGUN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn begun() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    locked(&BEGUN)
}

/// A file or folder under its temporary name. If it is dropped before the rename, it is removed.
#[derive(Debug)]
pub(crate) struct Unfinished {
    path: PathBuf,
    /// Held for its lock, if the file system has locks.
    _lock: File,
}

impl Unfinished {
    /// Returns the temporary name beside `target` that the process `pid` uses.
    pub(crate) fn beside(target: &Path, pid: u32) -> PathBuf {
        let mut name = target.to_owned().into_os_string();
        name.push(format!("{MARK}{pid}"));
        PathBuf::from(name)
    }

    /// Registers the file or folder that this process has just created at `path` and opened as
    /// `made`.
    ///
    /// # Errors
    /// The system has no more handles.
    pub(crate) fn of(path: PathBuf, made: &File) -> io::Result<Self> {
        let lock = made.try_clone()?;
        // Without a lock no process removes it as a leftover either.
        drop(lock.try_lock());
        begun().insert(path.clone());
        Ok(Unfinished { path, _lock: lock })
    }

    /// Returns its path before the rename.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Renames it to `target`, over an existing file or empty folder.
    ///
    /// # Errors
    /// The rename fails; it then stays unfinished.
    pub(crate) fn replace(&self, target: &Path) -> io::Result<()> {
        self.put(target, |from, to| std::fs::rename(from, to))
    }

    /// Renames a file to `target`, which must not exist.
    ///
    /// # Errors
    /// `AlreadyExists`: `target` exists. The rename fails; the file then stays unfinished.
    pub(crate) fn put_new(&self, target: &Path) -> io::Result<()> {
        self.put(target, rename_new)
    }

    fn put(&self, target: &Path, rename: impl Fn(&Path, &Path) -> io::Result<()>) -> io::Result<()> {
        // A signal finds it either unfinished or renamed.
        let mut begun = begun();
        rename(&self.path, target)?;
        begun.remove(&self.path);
        Ok(())
    }
}

/// Renames a file to a name that does not exist, without replacing a file that appears at the same
/// moment.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    let lacks = |error: &io::Error| {
        use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
        matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported)
    };
    match rename_exclusively(from, to) {
        Err(error) if lacks(&error) => {}
        done => return done,
    }
    // Network file systems do not support that call. Only one process can create a hard link.
    match std::fs::hard_link(from, to) {
        Err(error) if lacks(&error) => {}
        done => return done.map(|()| drop(std::fs::remove_file(from))),
    }
    // Mounted object stores support neither. Only one process can create an empty file, and only
    // that one renames over it.
    File::options().write(true).create_new(true).open(to)?;
    std::fs::rename(from, to).inspect_err(|_| drop(std::fs::remove_file(to)))
}

/// Calls the system's exclusive rename; `Unsupported` if it has none.
fn rename_exclusively(from: &Path, to: &Path) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt as _;
    let (from, to) = (CString::new(from.as_os_str().as_bytes())?, CString::new(to.as_os_str().as_bytes())?);
    // SAFETY: both are texts that end in a zero byte and live until the call returns.
    #[cfg(target_os = "linux")]
    let status = unsafe {
        libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::RENAME_NOREPLACE)
    };
    // SAFETY: as above.
    #[cfg(target_vendor = "apple")]
    let status = unsafe { libc::renamex_np(from.as_ptr(), to.as_ptr(), libc::RENAME_EXCL) };
    #[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
    let status = {
        drop((from, to));
        return Err(io::ErrorKind::Unsupported.into());
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let mut begun = begun();
        if begun.remove(&self.path) {
            discard(&self.path);
        }
    }
}

/// Removes everything that this process has begun, and returns whether that was anything. Later
/// attempts to begin, finish or drop block until the process ends, so the caller must end it.
pub fn discard_unfinished() -> bool {
    let mut begun = begun();
    let paths = std::mem::take(&mut *begun);
    paths.iter().for_each(|path| discard(path));
    std::mem::forget(begun);
    !paths.is_empty()
}

/// Removes a file or a folder; the next process sweeps anything that cannot be removed.
fn discard(path: &Path) {
    if !path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
        drop(std::fs::remove_file(path));
        return;
    }
    // Other threads may still write into it; after a rename they cannot.
    let mut doomed = path.to_owned().into_os_string();
    if !doomed.to_string_lossy().ends_with(REMOVED) {
        doomed.push(REMOVED);
        if std::fs::rename(path, &doomed).is_err() {
            return;
        }
    }
    drop(std::fs::remove_dir_all(doomed));
}

/// Removes leftovers of ended processes in `folder`, under temporary names of paths that are
/// `ours`.
pub fn sweep(folder: &Path, ours: impl Fn(&str) -> bool) {
    let folder = if folder == Path::new("") { Path::new(".") } else { folder };
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let Some((target, pid)) = temporary(&name) else { continue };
        let path = entry.path();
        // A process with this one's id may have been killed in an earlier container.
        let gone = pid == std::process::id() || !is_alive(pid);
        let plain = entry.file_type().is_ok_and(|kind| kind.is_dir() || kind.is_file());
        if ours(target) && gone && plain && !begun().contains(&path) && is_unlocked(&path) {
            discard(&path);
        }
    }
}

/// Returns whether no process holds the lock of a file or folder, on a file system that would
/// report it.
fn is_unlocked(path: &Path) -> bool {
    // On file systems shared with other hosts, a lock reaches all hosts only on a file that is open
    // for writing; one on a folder does not.
    let is_file = path.is_file();
    let opened = OpenOptions::new().read(true).write(is_file).open(path);
    opened.is_ok_and(|file| (is_file || !is_shared(&file)) && file.try_lock().is_ok())
}

/// Returns whether other hosts may share the file system of `file`.
#[cfg(target_os = "linux")]
fn is_shared(file: &File) -> bool {
    use std::os::fd::AsRawFd;
    /// The types that `statfs(2)` returns for NFS, SMB, CIFS, SMB2, FUSE, Lustre, AFS, GPFS and
    /// Ceph.
    const SHARED: [u64; 9] = [
        0x6969,
        0x517B,
        0xFF53_4D42,
        0xFE53_4D42,
        0x6573_5546,
        0x0BD0_0BD0,
        0x5346_414F,
        0x4750_4653,
        0x00C3_6400,
    ];
    let mut facts = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the descriptor is open, and the pointer is to a whole `statfs`, for which zeroes are
    // a valid value.
    let (status, facts) =
        unsafe { (libc::fstatfs(file.as_raw_fd(), facts.as_mut_ptr()), facts.assume_init()) };
    #[allow(clippy::unnecessary_cast, reason = "the field has other types on other systems")]
    let kind = facts.f_type as u64 & 0xFFFF_FFFF;
    status != 0 || SHARED.contains(&kind)
}

#[cfg(not(target_os = "linux"))]
fn is_shared(_: &File) -> bool {
    false
}

/// Returns the final name and the process id in `name`, if it is a temporary name.
pub fn temporary(name: &str) -> Option<(&str, u32)> {
    let (base, maker) = name.rsplit_once(MARK)?;
    let pid = ENDS.iter().find_map(|end| maker.strip_suffix(end)).unwrap_or(maker);
    pid.parse().ok().filter(|number: &u32| number.to_string() == pid).map(|pid| (base, pid))
}

/// Returns whether a process of this host with the id `pid` is alive, and true if the system does
/// not report processes.
pub fn is_alive(pid: u32) -> bool {
    let processes = Path::new("/proc");
    !processes.join("self").exists() || processes.join(pid.to_string()).exists()
}

/// Returns whether `path` exists, also as a link without a target.
///
/// # Errors
/// Storage: the path cannot be examined.
pub fn is_there(path: &Path) -> Result<bool> {
    match path.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(error) => Err(Error::io("look at", path, &error)),
    }
}

/// Returns the names in a folder, sorted, without those that are not UTF-8: this program neither
/// writes nor reads any.
///
/// # Errors
/// Storage: the folder cannot be read.
pub fn names_in(folder: &Path) -> Result<Vec<String>> {
    let failed = |error| Error::io("read", folder, &error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// Flushes a folder and its contents, so that they survive a power cut.
///
/// # Errors
/// Storage: something in it cannot be read or flushed.
pub fn sync_tree(folder: &Path) -> Result<()> {
    let failed = |path: &Path, error: &io::Error| Error::io("flush", path, error);
    for entry in std::fs::read_dir(folder).map_err(|error| failed(folder, &error))? {
        let entry = entry.map_err(|error| failed(folder, &error))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(|error| failed(&path, &error))?;
        if kind.is_dir() {
            sync_tree(&path)?;
        } else if kind.is_file() {
            let synced = File::open(&path).and_then(|file| file.sync_all());
            synced.map_err(|error| failed(&path, &error))?;
        }
    }
    sync_folder(folder)
}

/// Flushes `folder`, so that names created, changed or removed in it survive a power cut.
///
/// # Errors
/// Storage: it cannot be flushed.
pub fn sync_folder(folder: &Path) -> Result<()> {
    let folder = if folder == Path::new("") { Path::new(".") } else { folder };
    let synced = match File::open(folder) {
        // A folder that is writable but not readable cannot be flushed.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
        opened => opened.and_then(|folder| folder.sync_all()),
    };
    // Some file systems have no such call for folders.
    let lacking =
        |error: &io::Error| matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported);
    match synced {
        Err(error) if !lacking(&error) => Err(Error::io("flush", folder, &error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(folder: &Path, name: &str) -> (PathBuf, File) {
        let path = folder.join(name);
        let file = File::create(&path).expect("a file");
        (path, file)
    }

    /// A process id above the kernel's limit, which no process has.
    const GONE: u32 = u32::MAX;

    #[test]
    fn temporary_names_are_read_back() {
        let name = Unfinished::beside(Path::new("a/out"), 17);
        assert_eq!(temporary(&name.to_string_lossy()), Some(("a/out", 17)));
        for (name, parsed) in [
            ("out.tmp-17-removed", Some(("out", 17))),
            ("out.tmp-17-replaced", Some(("out", 17))),
            ("out.tmp-1.tmp-2", Some(("out.tmp-1", 2))),
            ("out.tmp-017", None),
            ("out.tmp-+17", None),
            ("out.tmp-17-mine", None),
            ("out.tmp-", None),
            ("out", None),
        ] {
            assert_eq!(temporary(name), parsed, "{name}");
        }
    }

    #[test]
    fn what_is_dropped_goes_and_what_is_renamed_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, made) = file(folder.path(), "a.tmp-1");
        drop(Unfinished::of(path.clone(), &made).expect("handles"));
        assert!(!path.exists());
        let (path, made) = file(folder.path(), "a.tmp-1");
        Unfinished::of(path, &made).expect("handles").replace(&folder.path().join("a")).expect("renamed");
        assert!(folder.path().join("a").exists());
    }

    /// Only leftovers of the same path are removed, of ended processes without a lock.
    #[test]
    fn leftovers_are_swept_and_nothing_else() {
        let temporary = tempfile::tempdir().expect("a folder");
        let at = |name: String| temporary.path().join(name);
        let own = std::process::id();
        let folder = at(format!("out.tmp-{GONE}"));
        std::fs::create_dir(&folder).expect("a folder");
        std::fs::write(folder.join("x"), "x").expect("a file");
        let gone = [folder, at(format!("out.tmp-{GONE}-removed")), at(format!("out.tmp-{own}"))];
        std::fs::create_dir(&gone[1]).expect("a folder");
        std::fs::write(&gone[2], "of an earlier process").expect("a file");
        let mut remaining = Vec::new();
        for name in ["out", "other.tmp-4294967295", "out.tmp-mine", "out.tmp-1"] {
            remaining.push(at(name.to_owned()));
            std::fs::write(remaining.last().expect("one"), "kept").expect("a file");
        }
        let held = at("out.tmp-4294967294".to_owned());
        let holder = File::create(&held).expect("a file");
        holder.lock().expect("a lock");
        remaining.push(held);
        sweep(temporary.path(), |name| name == "out");
        for path in &gone {
            assert!(!path.exists(), "{} stayed", path.display());
        }
        for path in &remaining {
            assert!(path.exists(), "{} went", path.display());
        }
    }
}
