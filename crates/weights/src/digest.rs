//! The digest of every byte of a model's weights. A background thread computes it during loading,
//! and it is cached for unchanged files.
//!
//! A cached digest is found by a file's path, size, inode and times (the last write, and the last
//! change of any kind, which no copy preserves). If it has weights that other tools packed, also by
//! config.json, which says how to decode them. The digest of a file written just before it was
//! read is not cached: a further write within the same tick of the file system's clock would be
//! undetected.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::identity::combined;
use super::sidecar_files::CONFIG_FILE;
use super::stored_parts::StoredParts;
use super::{ModelFiles, write_text};
use crate::error::{Error, Result};
use crate::runtime::thread_pool::in_own_pool;
use crate::threads;

/// Number of bytes hashed before their pages are released.
const PIECE: usize = 8 << 20;
/// The most threads that hash; one reads as fast as most disks, and loading needs the others.
const MOST_THREADS: usize = 4;
/// A file changed less than this long before it was read may change again undetected.
const SETTLED: Duration = Duration::from_secs(2);
/// The schema version of [`CachedDigest`].
const SCHEMA: u32 = 1;

/// The digest of the weights in a folder, while it is computed.
#[derive(Debug)]
pub struct DigestTask(JoinHandle<Result<String>>);

impl DigestTask {
    /// Starts to digest the weights in `folder`, which it opens again. Digests of unchanged files
    /// come from the cache folder `cache`, which also gets the new one.
    ///
    /// # Errors
    /// The same as for [`ModelFiles::open`]; no thread can be started.
    pub fn start(folder: &Path, cache: PathBuf) -> Result<Self> {
        let files = ModelFiles::open(folder)?;
        let work = move || digest(&files, &cache);
        threads::start("digest", work).map(DigestTask)
    }

    /// Waits for the digest and returns it in hex.
    ///
    /// # Errors
    /// The files cannot be read.
    pub fn wait(self) -> Result<String> {
        self.0.join().unwrap_or_else(|_| Err(Error::internal("the thread that digests the weights panicked")))
    }
}

fn digest(files: &ModelFiles, cache: &Path) -> Result<String> {
    let begin = SystemTime::now();
    let is_packed = |name| files.parts(name).is_some_and(StoredParts::is_packed);
    let config = files.names().any(is_packed).then(|| files.folder().join(CONFIG_FILE));
    let paths = || files.files().map(|(path, _)| path).chain(config.as_deref());
    let stamps = || paths().map(FileStamp::of).collect::<Option<Vec<_>>>();
    let before = stamps();
    if let Some(known) = before.as_ref().and_then(|stamps| CachedDigest::find(cache, stamps)) {
        return Ok(known);
    }
    let threads =
        std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 4).clamp(1, MOST_THREADS));
    let digest = in_own_pool(threads, || whole(files))?.to_hex().to_string();
    if let Some(stamps) = before.filter(|before| {
        before.iter().all(|stamp| stamp.is_older_than(begin)) && stamps().as_ref() == Some(before)
    }) {
        // A digest that cannot be cached is computed again next time.
        drop(CachedDigest { schema: SCHEMA, files: stamps, digest: digest.clone() }.write(cache));
    }
    Ok(digest)
}

/// Digests every byte that loading reads, in the order of the files.
fn whole(files: &ModelFiles) -> Result<blake3::Hash> {
    let mut places: BTreeMap<(usize, usize, usize), &str> = BTreeMap::new();
    let key = |shard: usize, range: &Range<usize>| (shard, range.start, range.end);
    for (name, info) in files.tensors() {
        places.insert(key(info.shard, &info.range), name);
        let parts = files.parts(name).into_iter().flat_map(StoredParts::places);
        places.extend(parts.map(|span| (key(span.shard, &span.range), name)));
    }
    let mut hashes: BTreeMap<(usize, usize, usize), blake3::Hash> = BTreeMap::new();
    for (span, name) in places {
        let (shard, start, end) = span;
        let mut hasher = blake3::Hasher::new();
        for at in (start..end).step_by(PIECE) {
            let piece = at..end.min(at + PIECE);
            hasher.update_rayon(files.stored(name, shard, &piece)?);
            files.discard_range(shard, &piece);
        }
        hashes.insert(span, hasher.finalize());
    }
    combined(files, |name, shard, range| match hashes.get(&key(shard, range)) {
        Some(hash) => Ok(hash.as_bytes().to_vec()),
        None => Err(Error::internal(format!("no digest of tensor {name}"))),
    })
}

/// The data that identify an unchanged file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileStamp {
    path: PathBuf,
    bytes: u64,
    /// Seconds and nanoseconds of the last write.
    modified: (i64, i64),
    /// The time of the last change of any kind, which programs cannot set.
    changed: (i64, i64),
    inode: u64,
}

impl FileStamp {
    fn of(path: &Path) -> Option<Self> {
        let path = path.canonicalize().ok()?;
        let data: Metadata = path.metadata().ok()?;
        Some(FileStamp {
            path,
            bytes: data.len(),
            modified: (data.mtime(), data.mtime_nsec()),
            changed: (data.ctime(), data.ctime_nsec()),
            inode: data.ino(),
        })
    }

    fn is_older_than(&self, moment: SystemTime) -> bool {
        let settled = moment.checked_sub(SETTLED).and_then(|moment| moment.duration_since(UNIX_EPOCH).ok());
        let settled = settled.and_then(|since| i64::try_from(since.as_secs()).ok());
        settled.is_some_and(|settled| self.modified.0 < settled && self.changed.0 < settled)
    }
}

/// A cached digest and its files.
#[derive(Debug, Serialize, Deserialize)]
struct CachedDigest {
    schema: u32,
    files: Vec<FileStamp>,
    digest: String,
}

impl CachedDigest {
    /// Returns the cache file for the digest of `files`. A later digest of the same paths replaces
    /// an earlier one.
    fn cache_path(folder: &Path, files: &[FileStamp]) -> PathBuf {
        let mut hasher = blake3::Hasher::new();
        for stamp in files {
            hasher.update(stamp.path.as_os_str().as_encoded_bytes()).update(&[0]);
        }
        folder.join(format!("{}.json", hasher.finalize().to_hex()))
    }

    fn find(folder: &Path, files: &[FileStamp]) -> Option<String> {
        let text = std::fs::read_to_string(Self::cache_path(folder, files)).ok()?;
        let stored: CachedDigest = serde_json::from_str(&text).ok()?;
        (stored.schema == SCHEMA && stored.files == files).then_some(stored.digest)
    }

    fn write(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, &e))?;
        let text = serde_json::to_string(self).map_err(|e| Error::internal(e.to_string()))?;
        write_text(&Self::cache_path(folder, &self.files), &text).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait_for(folder: &Path, cache: &Path) -> String {
        DigestTask::start(folder, cache.to_owned()).and_then(DigestTask::wait).expect("digested")
    }

    /// config.json says how the weights of other tools are decoded.
    #[test]
    fn packed_weights_are_known_again_with_their_config() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().join("tests/golden");
        let golden = golden.join("qbases/models/tiny-fp8-block");
        let cache = tempfile::tempdir().expect("a folder");
        let first = wait_for(&golden, cache.path());
        let entry =
            std::fs::read_dir(cache.path()).expect("listed").next().expect("one").expect("read").path();
        let text = std::fs::read_to_string(&entry).expect("read").replace(&first, "as kept");
        std::fs::write(&entry, &text).expect("written");
        assert_eq!(wait_for(&golden, cache.path()), "as kept");
        let (weights, config) = text.rsplit_once("\"bytes\":").expect("two stamps");
        assert!(weights.ends_with("config.json\","), "{weights}");
        std::fs::write(&entry, format!("{weights}\"bytes\":1{config}")).expect("written");
        assert_eq!(wait_for(&golden, cache.path()), first);
    }

    /// Each bit counts, at any position; a file in the cache is not read, a changed one is.
    #[test]
    fn every_byte_counts_and_files_are_known_again() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .nth(2)
            .unwrap()
            .join("tests/golden/quant/tiny-llama-bnb-nf4");
        let (folder, cache) =
            (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let path = folder.path().join("model.safetensors");
        let bytes = std::fs::read(golden.join("model.safetensors")).expect("golden");
        let first = wait_for(&golden, cache.path());
        let names = || std::fs::read_dir(cache.path()).expect("listed").count();
        let files = ModelFiles::open(&golden).expect("opens");
        let mut places: Vec<usize> = Vec::new();
        for (name, info) in files.tensors().step_by(5) {
            places.extend([info.range.start, (info.range.start + info.range.end) / 2, info.range.end - 1]);
            let parts = files.parts(name).into_iter().flat_map(StoredParts::places);
            places.extend(parts.map(|part| part.range.start));
        }
        assert!(places.len() > 12, "{places:?}");
        for at in places {
            let mut bytes = bytes.clone();
            bytes[at] ^= 4;
            std::fs::write(&path, bytes).expect("written");
            assert_ne!(wait_for(folder.path(), cache.path()), first, "byte {at}");
        }
        std::fs::write(&path, &bytes).expect("written");
        assert_eq!(wait_for(folder.path(), cache.path()), first);
        // Just written: not cached.
        assert_eq!(names(), 1, "the golden files alone");
        let entry =
            std::fs::read_dir(cache.path()).expect("listed").next().expect("one").expect("read").path();
        let text = std::fs::read_to_string(&entry).expect("read");
        std::fs::write(&entry, text.replace(&first, "as kept")).expect("written");
        assert_eq!(wait_for(&golden, cache.path()), "as kept");
        std::fs::write(&entry, text.replace("\"bytes\":", "\"bytes\":1")).expect("written");
        assert_eq!(wait_for(&golden, cache.path()), first, "another size");
        std::fs::write(&entry, "no JSON").expect("written");
        assert_eq!(wait_for(&golden, cache.path()), first);
    }
}
