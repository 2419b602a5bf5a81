//! Write and read speed of a disk, measured with a file of bounded size. The file has no name, so
//! that it never remains.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use serde::Serialize;

use crate::doctor::fact_lines::{FactLine, line};
use crate::runtime::disk_space::DiskSpace;
use crate::units;

/// Largest number of bytes to write and read.
const FILE_BYTES: u64 = 64 << 20;
/// Bytes of a single write or read.
const BLOCK_BYTES: usize = 4 << 20;
/// Time limit of writing, and of reading. The speed counts the bytes done by then.
const LIMIT: Duration = Duration::from_secs(1);

/// Measured speed of a folder's disk.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct DiskSpeed {
    /// Purpose of the folder.
    name: &'static str,
    folder: PathBuf,
    free_bytes: Option<u64>,
    total_bytes: Option<u64>,
    rates: Option<DiskRates>,
    /// Reason for a missing measurement.
    failure: Option<String>,
}

/// Rates of a disk, in 10^6 bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct DiskRates {
    /// Rate of writing, with the time of `fsync`.
    write_mb_per_sec: f64,
    read_mb_per_sec: f64,
    /// Bytes written and read again.
    bytes: u64,
    /// True if the page cache was bypassed; else reading may have been from memory.
    direct: bool,
}

impl DiskSpeed {
    /// Measures the disk of `folder`, or of its nearest existing parent. `name` is the purpose of
    /// the folder.
    pub(crate) fn measure(name: &'static str, folder: &Path) -> Self {
        let absolute = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        let existing = absolute.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("/"));
        let space = File::open(existing).ok().and_then(|folder| DiskSpace::of(&folder));
        let speed = |rates, failure| DiskSpeed {
            name,
            folder: existing.to_owned(),
            free_bytes: space.map(|space| space.free),
            total_bytes: space.map(|space| space.total),
            rates,
            failure,
        };
        match space {
            Some(space) if space.free < 2 * FILE_BYTES => {
                speed(None, Some(format!("not measured: only {} free", units::bytes(space.free))))
            }
            _ => match rates(existing) {
                Ok(rates) => speed(Some(rates), None),
                Err(error) => speed(None, Some(format!("cannot be measured: {error}"))),
            },
        }
    }

    /// Formats the speed as a line.
    pub(crate) fn line(&self) -> FactLine {
        let rates = self.rates.map(|rates| rates.text()).or(self.failure.clone()).unwrap_or_default();
        let free = self.free_bytes.zip(self.total_bytes).map_or_else(String::new, |(free, total)| {
            format!(", {} of {} free", units::bytes(free), units::bytes(total))
        });
        line(format!("disk of the {}", self.name), format!("{}: {rates}{free}", self.folder.display()))
    }
}

impl DiskRates {
    fn text(&self) -> String {
        let DiskRates { write_mb_per_sec, read_mb_per_sec, bytes, direct } = self;
        let cached = if *direct { "" } else { ", possibly from memory" };
        format!(
            "writes {write_mb_per_sec:.0} MB/s, reads {read_mb_per_sec:.0} MB/s{cached} ({} tried)",
            units::bytes(*bytes)
        )
    }
}

/// Writes a file in `folder`, syncs it to the disk and reads it again.
fn rates(folder: &Path) -> io::Result<DiskRates> {
    let (file, direct) = nameless(folder)?;
    // Direct access needs whole pages.
    let mut block = MmapMut::map_anon(BLOCK_BYTES)?;
    // Some disks and file systems store nothing for zeroes, so the bytes are random.
    getrandom::fill(&mut block).map_err(|error| io::Error::other(error.to_string()))?;
    let started = Instant::now();
    let written = blocks(FILE_BYTES, |at| file.write_all_at(&block, at))?;
    file.sync_all()?;
    let write_secs = started.elapsed().as_secs_f64();
    if !direct {
        drop_cached(&file);
    }
    let started = Instant::now();
    let read = blocks(written, |at| file.read_exact_at(&mut block, at))?;
    let read_secs = started.elapsed().as_secs_f64();
    let rate = |bytes: u64, secs: f64| bytes as f64 / 1e6 / secs.max(1e-9);
    let (write_mb_per_sec, read_mb_per_sec) = (rate(written, write_secs), rate(read, read_secs));
    Ok(DiskRates { write_mb_per_sec, read_mb_per_sec, bytes: written, direct })
}

/// Calls `block` for one offset after another until `bytes` are done or the time limit has passed.
/// It checks the time after each block.
fn blocks(bytes: u64, mut block: impl FnMut(u64) -> io::Result<()>) -> io::Result<u64> {
    let (started, mut done) = (Instant::now(), 0);
    while done < bytes && (done == 0 || started.elapsed() < LIMIT) {
        block(done)?;
        done += BLOCK_BYTES as u64;
    }
    Ok(done)
}

/// Creates a file without a name in `folder`. It bypasses the page cache if the file system can;
/// the flag is true then.
fn nameless(folder: &Path) -> io::Result<(File, bool)> {
    let path = folder.join(format!(".finetune-disk-speed-{}", std::process::id()));
    let open = |flags| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).custom_flags(flags).open(&path)
    };
    #[cfg(target_os = "linux")]
    let direct = match open(libc::O_DIRECT) {
        // Some file systems refuse the flag only after the file has been made.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            drop(std::fs::remove_file(&path));
            None
        }
        other => Some(other?),
    };
    #[cfg(not(target_os = "linux"))]
    let direct: Option<File> = None;
    let is_direct = direct.is_some();
    let file = direct.map_or_else(|| open(0), Ok)?;
    std::fs::remove_file(&path)?;
    Ok((file, is_direct))
}

/// Advises the system to drop the file's pages from memory.
#[cfg(target_os = "linux")]
fn drop_cached(file: &File) {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor is open; advice changes nothing but speed.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// Does nothing, because other systems have no such call.
#[cfg(not(target_os = "linux"))]
fn drop_cached(_file: &File) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_measured_and_left_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let speed = DiskSpeed::measure("test", &folder.path().join("not/yet/there"));
        let rates = speed.rates.expect("a temporary folder can be written to");
        assert!(rates.write_mb_per_sec > 0.0 && rates.read_mb_per_sec > 0.0, "{rates:?}");
        assert!(rates.bytes >= BLOCK_BYTES as u64 && rates.bytes <= FILE_BYTES, "{rates:?}");
        assert_eq!(speed.folder, folder.path());
        assert!(speed.free_bytes.is_some() && speed.free_bytes <= speed.total_bytes, "{speed:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_cannot_be_written_to_is_told() {
        let speed = DiskSpeed::measure("test", Path::new("/proc"));
        let (_, text) = speed.line();
        assert!(speed.rates.is_none() && text.starts_with("/proc: "), "{text}");
    }
}
