//! Downloads the files of one commit into the cache.
//!
//! It requests sizes and digests first, so that a refusal comes before the first byte and the total
//! is known. Bytes go to `blobs/<digest>.part`, which a later run continues. Once size and digest
//! are right, it flushes the file and renames it to the blob. It deletes a damaged file and
//! downloads it once more from the start. It does not request files that the cache holds, but
//! verifies them once.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::PathBuf;

use super::cache::HubCache;
use super::client::{Bytes, Client, Facts, HttpFault, Patience, broken};
use super::digest::Sum;
use super::speed::SpeedWatch;
use super::{DownloadEvent, DownloadProgress, planted};
use crate::error::{Error, ErrorCategory, Result};

/// One commit of one repository, on the hub and in the cache.
pub(super) struct Download<'a> {
    pub(super) client: &'a Client<'a>,
    pub(super) store: &'a HubCache,
    pub(super) commit: &'a str,
    pub(super) gated: bool,
}

impl Download<'_> {
    /// Downloads the files that the snapshot does not hold; the caller has checked their names.
    pub(super) fn fetch(&self, files: &[&str], progress: &mut DownloadProgress<'_>) -> Result<()> {
        let mut wanted = Vec::new();
        for &file in files {
            let hashing = |bytes| progress(DownloadEvent::Check { file, bytes });
            if !self.store.holds(self.commit, file, hashing)? {
                wanted.push((file, self.client.facts(self.commit, file, self.gated, progress)?));
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let bytes = wanted.iter().map(|(_, facts)| facts.size).sum();
        progress(DownloadEvent::Plan { files: wanted.len(), bytes });
        for (file, facts) in &wanted {
            self.fetch_one(file, facts, progress)
                .map_err(|error| error.during(format!("cannot download `{file}`")))?;
        }
        Ok(())
    }

    fn fetch_one(&self, file: &str, facts: &Facts, progress: &mut DownloadProgress<'_>) -> Result<()> {
        let digest = facts.digest.hex();
        let _lock = self.store.lock(digest, || progress(DownloadEvent::Waiting { file }))?;
        // Another revision, file or process may have downloaded it.
        let blob = self.store.blob(digest);
        let has_size =
            blob.symlink_metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == facts.size);
        let hashing = |bytes| progress(DownloadEvent::Check { file, bytes });
        if !has_size || !self.store.is_right(&blob, &facts.digest, hashing)? {
            let part = self.complete(file, facts, progress)?;
            self.store.put(&part, &facts.digest)?;
        }
        self.store.link(self.commit, file, digest)
    }

    /// Downloads a part file until it is whole and verified, and returns its path.
    fn complete(&self, file: &str, facts: &Facts, progress: &mut DownloadProgress<'_>) -> Result<PathBuf> {
        let mut part = DownloadPart::open(self.store.blob(facts.digest.hex()).with_extension("part"), facts)?;
        progress(DownloadEvent::Start { file, bytes: facts.size, present: part.len });
        let mut patience = Patience::new(self.client.retry());
        let least = self.client.retry().least_speed;
        let mut watch = SpeedWatch::new(least);
        let mut furthest = part.len;
        let mut was_damaged = false;
        loop {
            match self.receive(file, facts, &mut part, &mut watch, progress) {
                Ok(()) if part.is_right(facts) => {
                    part.file.sync_all().map_err(|e| Error::io("write", &part.path, &e))?;
                    progress(DownloadEvent::Finish { file });
                    return Ok(part.path);
                }
                Ok(()) => {
                    let actual = part.sum.hex();
                    part.clear(facts)?;
                    if was_damaged {
                        std::fs::remove_file(&part.path).map_err(|e| Error::io("remove", &part.path, &e))?;
                        return Err(damaged(facts, &actual));
                    }
                    was_damaged = true;
                    furthest = 0;
                    progress(DownloadEvent::Start { file, bytes: facts.size, present: 0 });
                }
                Err(HttpFault::Final(error)) => return Err(error),
                Err(HttpFault::Passing { reason, wait }) => {
                    // A hub that sends some bytes and hangs up makes no progress.
                    if part.len >= furthest + least.bytes() {
                        furthest = part.len;
                        patience.renew();
                    }
                    self.client.pause(&mut patience, reason, wait, progress)?;
                }
            }
        }
    }

    /// Makes one attempt at the rest of the file. Succeeds if the file has the announced size or
    /// more.
    fn receive(
        &self,
        file: &str,
        facts: &Facts,
        part: &mut DownloadPart,
        watch: &mut SpeedWatch,
        progress: &mut DownloadProgress<'_>,
    ) -> Result<(), HttpFault> {
        if part.len >= facts.size {
            return Ok(());
        }
        let reader = match self.client.bytes(self.commit, file, part.len, self.gated)? {
            Bytes::From(start, reader) => {
                if start != part.len {
                    part.clear(facts).map_err(HttpFault::Final)?;
                    progress(DownloadEvent::Start { file, bytes: facts.size, present: 0 });
                }
                reader
            }
            Bytes::BeyondEnd => {
                part.clear(facts).map_err(HttpFault::Final)?;
                let reason = "the server holds fewer bytes than it announced".to_owned();
                return Err(HttpFault::Passing { reason, wait: None });
            }
        };
        let mut reader = watch.over(reader);
        let mut buffer = vec![0; 1 << 18];
        loop {
            let count = match reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(broken(error)),
            };
            part.append(&buffer[..count]).map_err(HttpFault::Final)?;
            progress(DownloadEvent::Advance { bytes: count as u64 });
            if part.len > facts.size {
                return Ok(());
            }
        }
        if part.len < facts.size {
            let reason = format!("the connection ended after {} of {} bytes", part.len, facts.size);
            return Err(HttpFault::Passing { reason, wait: None });
        }
        Ok(())
    }
}

fn damaged(facts: &Facts, digest: &str) -> Error {
    Error::new(ErrorCategory::Transient, "the downloaded bytes are damaged, twice in a row")
        .because(format!("their digest is {digest}, the hub announced {}", facts.digest.hex()))
        .because("finetune has deleted them")
        .hint("try again; if the error stays, a mirror (HF_ENDPOINT) or a proxy changes files")
}

/// A partial download, with the sum of its bytes.
struct DownloadPart {
    path: PathBuf,
    file: File,
    len: u64,
    sum: Sum,
}

impl DownloadPart {
    /// Opens the file of an earlier run, or an empty one, and sums its bytes.
    fn open(path: PathBuf, facts: &Facts) -> Result<Self> {
        let failed = |e: std::io::Error| Error::io("write", &path, &e);
        let file = planted::open_part(&path).map_err(failed)?;
        let mut part = DownloadPart { path: path.clone(), file, len: 0, sum: facts.digest.sum(facts.size) };
        if part.file.metadata().map_err(failed)?.len() > facts.size {
            part.clear(facts)?;
        }
        let mut buffer = vec![0; 1 << 18];
        loop {
            let count = part.file.read(&mut buffer).map_err(failed)?;
            if count == 0 {
                return Ok(part);
            }
            part.sum.update(&buffer[..count]);
            part.len += count as u64;
        }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| Error::io("write", &self.path, &e))?;
        self.sum.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn clear(&mut self, facts: &Facts) -> Result<()> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.rewind());
        emptied.map_err(|e| Error::io("write", &self.path, &e))?;
        self.len = 0;
        self.sum = facts.digest.sum(facts.size);
        Ok(())
    }

    fn is_right(&self, facts: &Facts) -> bool {
        self.len == facts.size && self.sum.hex() == facts.digest.hex()
    }
}
