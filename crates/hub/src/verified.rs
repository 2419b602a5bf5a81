//! Verifies that the bytes of a cached file match the digest in its name.
//!
//! Downloads are verified as they arrive. A cached file may also come from another program, be cut
//! short or have changed since. So finetune hashes it once before its use, and records the result
//! in a folder of this user, with a stamp that changes with the file. For 16 GB this saves some
//! twenty seconds at each start.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::digest::Digest;
use super::planted;

/// The records of verified files; see the module.
pub(super) struct VerifiedFiles {
    folder: Option<PathBuf>,
}

impl VerifiedFiles {
    /// Opens the records in this folder; without one every file is hashed each time.
    pub(super) fn new(folder: Option<PathBuf>) -> Self {
        VerifiedFiles { folder }
    }

    /// Returns whether the bytes of a file have `digest`. Calls `hashing` with its size before it
    /// reads them.
    ///
    /// # Errors
    /// The file does not exist or cannot be read.
    pub(super) fn is_right(
        &self,
        path: &Path,
        digest: &Digest,
        hashing: impl FnOnce(u64),
    ) -> io::Result<bool> {
        let Some(mut file) = planted::open_file(path)? else { return Ok(false) };
        let facts = file.metadata()?;
        if self.is_noted(digest, &facts) {
            return Ok(true);
        }
        hashing(facts.len());
        let is_right = sum(&mut file, digest, facts.len())? == digest.hex();
        if is_right {
            self.record(digest, &facts);
        }
        Ok(is_right)
    }

    /// Records that a file, verified as it arrived, is right.
    pub(super) fn came(&self, path: &Path, digest: &Digest) {
        if let Ok(facts) = path.metadata() {
            self.record(digest, &facts);
        }
    }

    fn is_noted(&self, digest: &Digest, facts: &Metadata) -> bool {
        let stamp = stamp(facts);
        self.at(digest).is_some_and(|note| {
            planted::short_text(&note, stamp.len() as u64).is_some_and(|noted| noted == stamp)
        })
    }

    /// Writes the record. Without it the file is hashed again next time, so a failure is no error.
    fn record(&self, digest: &Digest, facts: &Metadata) {
        let Some(note) = self.at(digest) else { return };
        let temporary = note.with_extension(format!("tmp-{}", std::process::id()));
        let folder = note.parent().map_or(Ok(()), std::fs::create_dir_all);
        let written = folder.and_then(|()| std::fs::write(&temporary, stamp(facts)));
        let _ = written.and_then(|()| std::fs::rename(&temporary, &note));
    }

    fn at(&self, digest: &Digest) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.join(digest.hex()))
    }
}

/// Returns a stamp that changes if a file is replaced or written; a program cannot set `ctime`
/// back.
fn stamp(facts: &Metadata) -> String {
    // Without the device: its number differs on each node of a cluster and after each start.
    let (inode, size) = (facts.ino(), facts.len());
    let (changed, nanos) = (facts.ctime(), facts.ctime_nsec());
    format!("{inode} {size} {}.{:09} {changed}.{nanos:09}", facts.mtime(), facts.mtime_nsec())
}

fn sum(file: &mut File, digest: &Digest, size: u64) -> io::Result<String> {
    let mut sum = digest.sum(size);
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(sum.hex()),
            count => sum.update(&buffer[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `printf abc | sha256sum` (FIPS 180-2, appendix B.1).
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_file_is_hashed_once_and_again_when_it_changed() {
        let folder = tempfile::tempdir().unwrap();
        let [notes, path] = ["notes", "file"].map(|name| folder.path().join(name));
        let digest = Digest::from_etag(ABC).unwrap();
        let verified = VerifiedFiles::new(Some(notes));
        let look = || {
            let mut hashed = 0;
            let is_right = verified.is_right(&path, &digest, |bytes| hashed += bytes).unwrap();
            (is_right, hashed)
        };
        std::fs::write(&path, "abc").unwrap();
        assert_eq!([look(), look()], [(true, 3), (true, 0)]);
        // Another file of the same name and size, with the time set back.
        let before = path.metadata().unwrap().modified().unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "abd").unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(before).unwrap();
        assert_eq!([look(), look()], [(false, 3), (false, 3)]);
        std::fs::write(&path, "abcd").unwrap();
        assert_eq!(look(), (false, 4));
        std::fs::write(&path, "abc").unwrap();
        verified.came(&path, &digest);
        assert_eq!(look(), (true, 0));
        assert!(VerifiedFiles::new(None).is_right(&path, &digest, |_| {}).unwrap());
    }

    #[test]
    fn what_is_no_file_is_not_right() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        let digest = Digest::from_etag(ABC).unwrap();
        let verified = VerifiedFiles::new(None);
        assert!(!verified.is_right(&link, &digest, |_| {}).unwrap());
        assert!(verified.is_right(&folder.path().join("none"), &digest, |_| {}).is_err());
    }
}
