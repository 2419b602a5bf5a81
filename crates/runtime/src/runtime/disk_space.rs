//! Capacity of a file system.

use std::fs::File;
use std::os::fd::AsRawFd;

/// Capacity of a file system, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskSpace {
    /// Total size of the file system.
    pub total: u64,
    /// Free bytes that this user can write.
    pub free: u64,
}

impl DiskSpace {
    /// Capacity of the file system of an open file or folder; none if the system does not report
    /// it.
    pub fn of(file: &File) -> Option<Self> {
        let mut facts = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
        // SAFETY: the descriptor is open, and the pointer is to a whole `statvfs`, for which zeroes
        // are a valid value.
        let (status, facts) = unsafe {
            let status = libc::fstatvfs(file.as_raw_fd(), facts.as_mut_ptr());
            (status, facts.assume_init())
        };
        #[allow(clippy::unnecessary_cast, reason = "the fields have other types on other systems")]
        let bytes = |blocks| (blocks as u64).saturating_mul(facts.f_frsize as u64);
        // A file system of zero blocks reports no size.
        (status == 0 && facts.f_blocks > 0)
            .then(|| DiskSpace { total: bytes(facts.f_blocks), free: bytes(facts.f_bavail) })
    }
}
