//! The lock of a run's folder: one process at a time trains into it.
//!
//! The lock is the operating system's advisory lock on a file, which ends with the process in every
//! case. The file records the holder, for the error message of the next process. Releasing the lock
//! empties the file.
//!
//! A killed process may leave its record behind. On the machine that wrote it (the same boot of the
//! kernel, whatever its host name in a container) a free lock shows that the record is stale. A
//! record of another machine is believed, because not all file systems carry locks between hosts.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{if_there, process};
use crate::clock;
use crate::error::{Error, Result};

/// Number of attempts to open a lock file that was removed or is not filled in yet, and the pause
/// between them.
const TRIES: (usize, Duration) = (50, Duration::from_millis(20));

/// The holder of a lock, as the lock file records it in JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    /// Its host name.
    host: String,
    /// Its process id on that host.
    pid: u32,
    /// The time at which it took the lock, RFC 3339.
    since: String,
    /// The boot id of its kernel, if the system reports one.
    #[serde(default)]
    boot: Option<String>,
}

impl Holder {
    fn this_process() -> Self {
        let since = clock::now_as_text();
        Holder { host: process::host(), pid: std::process::id(), since, boot: process::boot() }
    }

    /// Returns whether it ran on the machine of this process, where locks can be trusted.
    fn is_here(&self) -> bool {
        match (&self.boot, process::boot()) {
            (Some(then), Some(now)) if *then == now => true,
            // After a restart of the machine nothing holds the lock.
            _ => self.host == process::host(),
        }
    }
}

/// The held lock of a folder, released when it is dropped or when the process ends.
#[derive(Debug)]
pub(super) struct FolderLock {
    file: File,
    path: PathBuf,
}

impl FolderLock {
    /// Takes the lock of `folder` at the file `path`, and creates the file and its folder if they
    /// are missing.
    ///
    /// # Errors
    /// User: another process holds the lock, or a process of another host has not released it.
    /// Storage: the file cannot be created.
    pub(super) fn take(folder: &Path, path: &Path) -> Result<Self> {
        let (tries, pause) = TRIES;
        for _ in 0..tries {
            let Some(mut file) = open(path)? else { continue };
            let left = match file.try_lock() {
                Ok(()) if !is_at(&file, path)? => continue,
                Ok(()) => read(&mut file, path)?.filter(|holder| !holder.is_here()),
                Err(TryLockError::WouldBlock) => match read(&mut file, path)? {
                    Some(holder) => return Err(in_use(folder, Some(&holder))),
                    None => {
                        std::thread::sleep(pause);
                        continue;
                    }
                },
                Err(TryLockError::Error(error)) if is_unsupported(&error) => {
                    read(&mut file, path)?.filter(|holder| {
                        let gone = holder.is_here() && !process::is_alive(holder.pid);
                        !gone && holder.pid != std::process::id()
                    })
                }
                Err(TryLockError::Error(error)) => return Err(Error::io("lock", path, &error)),
            };
            return match left {
                Some(holder) if holder.is_here() => Err(in_use(folder, Some(&holder))),
                Some(holder) => Err(left_on_another_host(folder, path, &holder)),
                None => Self::fill(file, path),
            };
        }
        Err(in_use(folder, None))
    }

    fn fill(mut file: File, path: &Path) -> Result<Self> {
        let text = serde_json::to_string(&Holder::this_process())
            .map_err(|e| Error::internal("cannot write a lock").because(e.to_string()))?;
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(text.as_bytes()))
            .map_err(|error| Error::io("write", path, &error))?;
        Ok(FolderLock { file, path: path.to_owned() })
    }

    /// Removes the lock file of a folder that stays unused. Processes that have the file open
    /// detect that.
    pub(super) fn remove(&self) {
        // If this fails, the file is empty soon.
        drop(std::fs::remove_file(&self.path));
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // Closing the file releases the lock; a record left in it is recognised as stale.
        drop(self.file.set_len(0));
    }
}

/// Opens the lock file. Returns `None` if its folder was removed meanwhile.
fn open(path: &Path) -> Result<Option<File>> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(|error| Error::io("create", parent, &error))?;
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    // The target of a link is not this program's to empty.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOFOLLOW);
    match options.open(path) {
        Ok(file) => Ok(Some(file)),
        Err(_) if path.is_symlink() => Err(Error::user(format!("cannot lock {}", path.display()))
            .because("it is a link; accepted: a regular file")
            .hint(format!(
                "run `rm {}`, which keeps the target of the link, and start again",
                path.display()
            ))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("write", path, &error)),
    }
}

/// Returns the holder that the file `path` names, or `None` if it names none.
fn read(file: &mut File, path: &Path) -> Result<Option<Holder>> {
    let mut text = Vec::new();
    file.rewind()
        .and_then(|()| file.read_to_end(&mut text))
        .map_err(|error| Error::io("read", path, &error))?;
    Ok(serde_json::from_slice(&text).ok())
}

/// Returns whether `file` still exists at `path`: its holder may have removed it before this
/// process got the lock.
fn is_at(file: &File, path: &Path) -> Result<bool> {
    use std::os::unix::fs::MetadataExt as _;
    let id = |data: std::fs::Metadata| (data.dev(), data.ino());
    let Some(current) = if_there("look at", path, path.metadata())? else { return Ok(false) };
    let own = file.metadata().map_err(|error| Error::io("look at", path, &error))?;
    Ok(id(own) == id(current))
}

/// Returns whether the file system has no locks, so that only the record names the holder.
fn is_unsupported(error: &std::io::Error) -> bool {
    let codes = [libc::ENOLCK, libc::ENOSYS, libc::EOPNOTSUPP];
    error.kind() == ErrorKind::Unsupported || error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

fn in_use(folder: &Path, holder: Option<&Holder>) -> Error {
    let who = match holder {
        Some(Holder { host, pid, since, .. }) => format!("process {pid} on host {host}, since {since}"),
        None => "another process".to_owned(),
    };
    Error::user(format!("cannot train in {}", folder.display()))
        .because(format!("the folder is in use by {who}"))
        .hint("wait until that run has ended, or give another folder with `--output`")
}

fn left_on_another_host(folder: &Path, path: &Path, holder: &Holder) -> Error {
    let Holder { host, pid, since, .. } = holder;
    Error::user(format!("cannot train in {}", folder.display()))
        .because(format!("process {pid} on host {host} took the folder at {since} and has not released it"))
        .because(format!("this host, {}, cannot see whether that process still runs", process::host()))
        .hint(format!("when you know that it has ended, `rm {}` and start again", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_and_lock() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(".finetune/lock");
        (folder, path)
    }

    #[test]
    fn names_its_holder_and_is_free_after_it() {
        let (folder, path) = folder_and_lock();
        let held = FolderLock::take(folder.path(), &path).expect("free");
        let error = FolderLock::take(folder.path(), &path).expect_err("held").to_string();
        let named = format!("in use by process {} on host {}, since ", std::process::id(), process::host());
        assert!(error.contains(&named), "{error}");
        drop(held);
        assert_eq!(std::fs::read(&path).expect("a file"), b"", "nothing of this machine stays");
        FolderLock::take(folder.path(), &path).expect("free again");
    }

    #[test]
    fn a_record_of_another_host_is_believed_and_one_of_this_host_is_not() {
        let (folder, path) = folder_and_lock();
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        let holder = |host: &str, boot: Option<&str>| Holder {
            host: host.into(),
            pid: 1,
            since: "2026-01-02T03:04:05+00:00".into(),
            boot: boot.map(Into::into),
        };
        let left = |holder: &Holder| {
            std::fs::write(&path, serde_json::to_string(holder).expect("JSON")).expect("written");
        };
        left(&holder("elsewhere", Some("another boot")));
        let error = FolderLock::take(folder.path(), &path).expect_err("another host").to_string();
        assert!(error.contains("process 1 on host elsewhere took the folder at 2026-01-02"), "{error}");
        assert!(error.contains(&format!("hint: when you know that it has ended, `rm {}`", path.display())));
        assert!(std::fs::read_to_string(&path).expect("a file").contains("elsewhere"), "the record stays");
        // The process with id 1 is alive and holds no lock.
        left(&holder(&process::host(), None));
        drop(FolderLock::take(folder.path(), &path).expect("a stale record of this host"));
        if let Some(boot) = process::boot() {
            left(&holder("a container that is gone", Some(&boot)));
            drop(FolderLock::take(folder.path(), &path).expect("a stale record of this machine"));
        }
    }

    #[test]
    fn a_lock_file_that_goes_away_is_made_anew() {
        let (folder, path) = folder_and_lock();
        let held = FolderLock::take(folder.path(), &path).expect("free");
        held.remove();
        let again = FolderLock::take(folder.path(), &path).expect("another file");
        drop(held);
        FolderLock::take(folder.path(), &path).expect_err("still held");
        drop(again);
    }
}
