//! The cache folder, in the layout that `huggingface_hub` and the crate hf-hub share:
//! `models--owner--name/{blobs/<digest>, snapshots/<commit>/<file> -> ../../blobs/<digest>,
//! refs/<revision>}`.
//!
//! A blob appears under its name only when it is whole and verified. finetune writes a reference
//! after the last file of its snapshot, so the snapshot of its own reference is complete. finetune
//! verifies files of other programs before it uses them (`verified`), and does not write through
//! files that other users planted (`planted`). A user who may write to a cache can still put
//! another model into it, whole and with digests of its own.

use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::{Cache, CacheRepo, Repo};

use super::digest::Digest;
use super::names::is_commit;
use super::planted;
use super::verified::VerifiedFiles;
use crate::error::{Error, Result};

/// Longer than the hash of a commit with white space around it.
const MAX_REF_BYTES: u64 = 256;

/// The part of the cache that belongs to one repository.
pub(super) struct HubCache {
    folder: PathBuf,
    layout: CacheRepo,
    revision: String,
    verified: VerifiedFiles,
}

impl HubCache {
    pub(super) fn new(cache_dir: &Path, repo: &Repo, verified: VerifiedFiles) -> Self {
        let cache = Cache::new(cache_dir.to_owned());
        HubCache {
            folder: cache_dir.join(repo.folder_name()),
            layout: cache.repo(repo.clone()),
            revision: repo.revision().to_owned(),
            verified,
        }
    }

    /// Returns the folder that holds the files of a commit under their names.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.layout.pointer_path(commit)
    }

    /// Returns whether the cache holds a file of a commit with the bytes of the digest that its
    /// link names. Calls `hashing` with their number before it reads them.
    pub(super) fn holds(&self, commit: &str, file: &str, hashing: impl FnOnce(u64)) -> Result<bool> {
        let path = self.snapshot(commit).join(file);
        if !path.is_file() {
            return Ok(false);
        }
        match path.read_link() {
            Ok(target) => {
                let name = target.file_name().and_then(|name| name.to_str());
                // A link to elsewhere, such as an administrator's, names no digest.
                name.and_then(Digest::from_etag)
                    .map_or(Ok(true), |digest| self.is_right(&path, &digest, hashing))
            }
            // A plain file, as on a file system without symbolic links, names no digest either.
            Err(_) => Ok(true),
        }
    }

    /// Returns whether a file holds the bytes of a digest; `hashing` as in [`HubCache::holds`].
    pub(super) fn is_right(&self, path: &Path, digest: &Digest, hashing: impl FnOnce(u64)) -> Result<bool> {
        self.verified.is_right(path, digest, hashing).map_err(|e| Error::io("read", path, &e))
    }

    /// Moves a part file, whole and verified, to the blob of its digest.
    pub(super) fn put(&self, part: &Path, digest: &Digest) -> Result<()> {
        let blob = self.blob(digest.hex());
        std::fs::rename(part, &blob).map_err(|e| Error::io("write", &blob, &e))?;
        self.verified.came(&blob, digest);
        Ok(())
    }

    /// Returns the path of the blob with a digest, present or not.
    pub(super) fn blob(&self, digest: &str) -> PathBuf {
        self.layout.blob_path(digest)
    }

    /// Returns the commit of the revision at its last download, if its snapshot is still in the
    /// cache.
    pub(super) fn known_commit(&self) -> Option<String> {
        let commit = if is_commit(&self.revision) {
            self.revision.clone()
        } else {
            planted::short_text(&self.reference(), MAX_REF_BYTES)?.trim().to_owned()
        };
        (is_commit(&commit) && self.snapshot(&commit).is_dir()).then_some(commit)
    }

    /// Records the commit that the revision now stands for.
    pub(super) fn set_commit(&self, commit: &str) -> Result<()> {
        if is_commit(&self.revision) || self.known_commit().as_deref() == Some(commit) {
            return Ok(());
        }
        let reference = self.reference();
        let folder = reference.parent().unwrap_or(&self.folder);
        planted::make_folder(&self.folder, folder)?;
        let temporary = folder.join(format!(".{commit}.{}.ref", std::process::id()));
        let failed = |e: std::io::Error| Error::io("write a reference in", folder, &e);
        replaceable(&temporary).map_err(failed)?;
        let written = planted::create(&temporary).and_then(|mut file| file.write_all(commit.as_bytes()));
        // A rename replaces a link, where writing would follow it.
        written.and_then(|()| std::fs::rename(&temporary, &reference)).map_err(failed)
    }

    /// Returns the path of the file that holds the commit of the revision.
    fn reference(&self) -> PathBuf {
        self.folder.join("refs").join(&self.revision)
    }

    /// Returns the names of all files of a snapshot, sorted, as the hub lists them.
    pub(super) fn files(&self, commit: &str) -> Result<Vec<String>> {
        let root = self.snapshot(commit);
        let mut names = Vec::new();
        list(&root, "", &mut names).map_err(|e| Error::io("list", &root, &e))?;
        names.sort();
        Ok(names)
    }

    /// Links a blob into a snapshot under the name of a file.
    pub(super) fn link(&self, commit: &str, file: &str, digest: &str) -> Result<()> {
        let pointer = self.snapshot(commit).join(file);
        let failed = |e: std::io::Error| Error::io("put a file at", &pointer, &e);
        if let Some(parent) = pointer.parent() {
            planted::make_folder(&self.folder, parent)?;
        }
        // From `snapshots/<commit>/a/b` up to the folder of the repository.
        let up = "../".repeat(2 + file.matches('/').count());
        let temporary = pointer.with_file_name(format!(".{digest}.{}.link", std::process::id()));
        replaceable(&temporary).map_err(failed)?;
        match symlink(format!("{up}blobs/{digest}"), &temporary) {
            Ok(()) => std::fs::rename(&temporary, &pointer).map_err(failed),
            // On a file system without symbolic links the file itself moves there, as in Python's
            // cache.
            Err(_) => std::fs::rename(self.blob(digest), &pointer).map_err(failed),
        }
    }

    /// Waits until no other process downloads this blob; `waiting` is called once if that takes a
    /// while. Returns the lock, which keeps other processes off until dropped; none on a file
    /// system without locks.
    pub(super) fn lock(&self, digest: &str, mut waiting: impl FnMut()) -> Result<Option<File>> {
        let blob = self.blob(digest);
        if let Some(folder) = blob.parent() {
            planted::make_folder(&self.folder, folder)?;
        }
        // The name and the kind of lock that hf-hub uses, so that it waits for finetune too.
        let path = blob.with_extension("lock");
        let file = planted::open_lock(&path).map_err(|e| Error::io("create", &path, &e))?;
        let mut has_warned = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::WouldBlock) => {}
                // Some cluster file systems have no locks. The digest still keeps damage out.
                Err(TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => return Ok(None),
                Err(TryLockError::Error(e)) => return Err(Error::io("lock", &path, &e)),
            }
            if !has_warned {
                waiting();
                has_warned = true;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Removes a file at the name of a temporary file, such as one that a killed process left.
fn replaceable(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Collects the names of the files below a folder, links followed, with `/` between their parts.
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

#[cfg(test)]
mod tests {
    use super::*;
    use hf_hub::RepoType;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn store(folder: &Path, revision: &str) -> HubCache {
        let repo = Repo::with_revision("a/b".into(), RepoType::Model, revision.into());
        HubCache::new(folder, &repo, VerifiedFiles::new(None))
    }

    #[test]
    fn a_linked_blob_is_a_file_of_the_snapshot() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path(), "refs/pr/1");
        // `printf rows | sha256sum`
        let digest = "bc51e9e65d79e1c90ba544ab2eae1044ccdf8c1af7a559ba375cba4276f7d99e";
        let blob = store.blob(digest);
        std::fs::create_dir_all(blob.parent().unwrap()).unwrap();
        std::fs::write(&blob, "rows").unwrap();
        store.link(COMMIT, "data/en/train.jsonl", digest).unwrap();
        store.link(COMMIT, "data/en/train.jsonl", digest).unwrap();
        assert!(store.holds(COMMIT, "data/en/train.jsonl", |_| {}).unwrap());
        assert!(!store.holds(COMMIT, "data/en/none.jsonl", |_| {}).unwrap());
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
