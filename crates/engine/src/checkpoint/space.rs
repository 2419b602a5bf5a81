//! Whether a disk has room for what is to be written, asked before anything is.

use std::path::Path;

use crate::error::{Error, ErrorCategory, Result};
use crate::runtime::mmap::MappedFile;
use crate::units;

/// Refuses to write `bytes` bytes into the existing `folder` where fewer are free; `what` cannot be done then. A system
/// that does not tell, and a folder that cannot be written to at all, are left to the write itself.
///
/// # Errors
/// Storage: there is no room.
pub(super) fn require_room(folder: &Path, bytes: u64, what: &str) -> Result<()> {
    let wanted = usize::try_from(bytes).unwrap_or(usize::MAX);
    let found = if bytes == 0 { Ok(()) } else { MappedFile::check(folder, wanted) };
    match found {
        Err(error) if error.kind() == ErrorCategory::Storage => {
            let needed = format!("{} are needed on the disk of {}", units::bytes(bytes), folder.display());
            Err(Error::new(ErrorCategory::Storage, what)
                .because(format!("{needed}: {}", error.causes().join(": ")))
                .hint("make room on that disk, and go on with `--resume` or start again; or lower `checkpoint.keep_last`; or give an `--output` on another disk"))
        }
        _ => Ok(()),
    }
}
