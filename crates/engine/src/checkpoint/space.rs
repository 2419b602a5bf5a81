//! Checks the free space of a disk before anything is written to it.

use std::path::Path;

use crate::error::{Error, ErrorCategory, Result};
use crate::runtime::mmap::MappedFile;
use crate::units;

/// Refuses to write `bytes` bytes into the existing `folder` if fewer are free; `what` is the title
/// of the error. If the system does not report free space, or the folder is not writable, the write
/// itself fails later.
///
/// # Errors
/// Storage: not enough free space.
pub(super) fn require_room(folder: &Path, bytes: u64, what: &str) -> Result<()> {
    let wanted = usize::try_from(bytes).unwrap_or(usize::MAX);
    let result = if bytes == 0 { Ok(()) } else { MappedFile::check(folder, wanted) };
    match result {
        Err(error) if error.kind() == ErrorCategory::Storage => {
            let needed = format!("{} are needed on the disk of {}", units::bytes(bytes), folder.display());
            Err(Error::new(ErrorCategory::Storage, what)
                .because(format!("{needed}: {}", error.causes().join(": ")))
                .hint("free space on that disk, and continue with `--resume` or start again; or lower `checkpoint.keep_last`; or give an `--output` on another disk"))
        }
        _ => Ok(()),
    }
}
