//! The cache folder, in the layout that `huggingface_hub` and the crate hf-hub share:
//! `models--owner--name/{blobs/<digest>, snapshots/<commit>/<file> -> ../../blobs/<digest>, refs/<revision>}`.
//!
//! A blob appears under its name only when it is whole and verified; a reference is written after the last file of
//! its snapshot, so what a reference of ours names is complete.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::{Cache, CacheRepo, Repo};

use super::names::is_commit;
use crate::error::{Error, Result};

/// The part of the cache that belongs to one repository.
pub(super) struct HubCache {
    folder: PathBuf,
    layout: CacheRepo,
    revision: String,
}

/// Keeps other processes off a blob until dropped.
pub(super) struct Lock {
    _file: Option<File>,
}

impl HubCache {
    pub(super) fn new(cache_dir: &Path, repo: &Repo) -> Self {
        let cache = Cache::new(cache_dir.to_owned());
        HubCache {
            folder: cache_dir.join(repo.folder_name()),
            layout: cache.repo(repo.clone()),
            revision: repo.revision().to_owned(),
        }
    }

    /// The folder in which the files of a commit stand under their names.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.layout.pointer_path(commit)
    }

    /// Whether a file of a commit is here.
    pub(super) fn holds(&self, commit: &str, file: &str) -> bool {
        self.snapshot(commit).join(file).is_file()
    }

    /// Where the bytes with a digest are or will be.
    pub(super) fn blob(&self, digest: &str) -> PathBuf {
        self.layout.blob_path(digest)
    }

    /// The commit that the revision stood for when it was last downloaded, if its snapshot is still here.
    pub(super) fn known_commit(&self) -> Option<String> {
        let commit = if is_commit(&self.revision) {
            self.revision.clone()
        } else {
            std::fs::read_to_string(self.folder.join("refs").join(&self.revision)).ok()?.trim().to_owned()
        };
        (is_commit(&commit) && self.snapshot(&commit).is_dir()).then_some(commit)
    }

    /// Notes that the revision now stands for this commit.
    pub(super) fn set_commit(&self, commit: &str) -> Result<()> {
        if is_commit(&self.revision) || self.known_commit().as_deref() == Some(commit) {
            return Ok(());
        }
        self.layout.create_ref(commit).map_err(|e| Error::io("write a reference in", &self.folder, &e))
    }

    /// The names of all files of a snapshot, as the hub would list them.
    pub(super) fn files(&self, commit: &str) -> Result<Vec<String>> {
        let root = self.snapshot(commit);
        let mut names = Vec::new();
        list(&root, "", &mut names).map_err(|e| Error::io("list", &root, &e))?;
        names.sort();
        Ok(names)
    }

    /// Makes a blob appear in a snapshot under the name of a file.
    pub(super) fn link(&self, commit: &str, file: &str, digest: &str) -> Result<()> {
        let pointer = self.snapshot(commit).join(file);
        let failed = |e: std::io::Error| Error::io("put a file at", &pointer, &e);
        if let Some(parent) = pointer.parent() {
            std::fs::create_dir_all(parent).map_err(failed)?;
        }
        // From `snapshots/<commit>/a/b` up to the folder of the repository.
        let up = "../".repeat(2 + file.matches('/').count());
        let temporary = pointer.with_file_name(format!(".{digest}.{}.link", std::process::id()));
        match symlink(Path::new(&format!("{up}blobs/{digest}")), &temporary) {
            Ok(()) => std::fs::rename(&temporary, &pointer).map_err(failed),
            // A file system without symbolic links: the file itself takes the place, as in Python's cache.
            Err(_) => std::fs::rename(self.blob(digest), &pointer).map_err(failed),
        }
    }

    /// Waits until no other process downloads this blob; `waiting` is called once if that takes a while.
    pub(super) fn lock(&self, digest: &str, mut waiting: impl FnMut()) -> Result<Lock> {
        let blob = self.blob(digest);
        if let Some(folder) = blob.parent() {
            std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, &e))?;
        }
        // The name and the kind of lock that hf-hub takes, so that it waits for us as well.
        let path = blob.with_extension("lock");
        let file = File::create(&path).map_err(|e| Error::io("create", &path, &e))?;
        let mut told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Lock { _file: Some(file) }),
                Err(TryLockError::WouldBlock) => {}
                // Some cluster file systems have no locks. The digest still keeps damage out.
                Err(TryLockError::Error(e)) if e.kind() == std::io::ErrorKind::Unsupported => {
                    return Ok(Lock { _file: None });
                }
                Err(TryLockError::Error(e)) => return Err(Error::io("lock", &path, &e)),
            }
            if !told {
                waiting();
                told = true;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// The names of the files below a folder, links followed, with `/` between their parts.
fn list(folder: &Path, prefix: &str, names: &mut Vec<String>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let name = format!("{prefix}{name}");
        if entry.file_type()?.is_dir() {
            list(&entry.path(), &format!("{name}/"), names)?;
        } else if entry.path().is_file() {
            names.push(name);
        }
    }
    Ok(())
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    std::os::windows::fs::symlink_file(target, link)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hf_hub::RepoType;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn store(folder: &Path, revision: &str) -> HubCache {
        HubCache::new(folder, &Repo::with_revision("a/b".into(), RepoType::Model, revision.into()))
    }

    #[test]
    fn a_linked_blob_is_a_file_of_the_snapshot() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path(), "refs/pr/1");
        let blob = store.blob("d1");
        std::fs::create_dir_all(blob.parent().unwrap()).unwrap();
        std::fs::write(&blob, "rows").unwrap();
        store.link(COMMIT, "data/en/train.jsonl", "d1").unwrap();
        store.link(COMMIT, "data/en/train.jsonl", "d1").unwrap();
        assert!(store.holds(COMMIT, "data/en/train.jsonl"));
        assert_eq!(store.files(COMMIT).unwrap(), ["data/en/train.jsonl"]);
        let path = folder.path().join("models--a--b/snapshots").join(COMMIT).join("data/en/train.jsonl");
        assert_eq!(std::fs::read_to_string(path).unwrap(), "rows");
        assert_eq!(store.known_commit(), None);
        store.set_commit(COMMIT).unwrap();
        assert_eq!(store.known_commit().as_deref(), Some(COMMIT));
        assert!(folder.path().join("models--a--b/refs/refs/pr/1").is_file());
    }

    #[test]
    fn a_reference_that_is_no_commit_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path(), "main");
        let refs = folder.path().join("models--a--b/refs");
        std::fs::create_dir_all(&refs).unwrap();
        for text in ["", "../../..", COMMIT] {
            std::fs::write(refs.join("main"), text).unwrap();
            assert_eq!(store.known_commit(), None, "{text}");
        }
    }

    #[test]
    fn one_holder_of_a_lock_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path(), "main");
        let first = store.lock("d1", || panic!("nobody holds it")).unwrap();
        let held = std::cell::Cell::new(Some(first));
        let mut waited = 0;
        let _second = store.lock("d1", || {
            waited += 1;
            drop(held.take());
        });
        assert_eq!(waited, 1);
    }
}
