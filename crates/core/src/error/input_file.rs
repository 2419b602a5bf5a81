//! Opens input files of any origin: only regular files, and reads them only up to a bound.
//!
//! A FIFO would block forever, `/dev/zero` never ends, a link hides both, and a sparse file of a
//! terabyte costs nothing to make. So every reader of an input opens it here, and the error names
//! the kind of file found.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use super::{Error, Result};

/// Default limit of [`read`] in bytes: several times the largest known tokenizer_config.json.
/// Parsed as JSON, a file of this size may take about forty times as much memory.
pub const MAX_BYTES: u64 = 16 << 20;

/// Opens the regular file `path`, or the target of a link, for reading. `doing` names the action in
/// errors, such as "read weights".
///
/// # Errors
/// User error: `path` is missing, a folder, a FIFO, a device or a socket. Storage error: it cannot
/// be opened.
pub fn open(doing: &str, path: &Path) -> Result<File> {
    let failed = |error: io::Error| Error::io(doing, path, &error);
    // Checked before opening, because opening alone may block (a FIFO) or act (a tape).
    require_regular(doing, path, &std::fs::metadata(path).map_err(failed)?)?;
    let mut options = OpenOptions::new();
    options.read(true);
    // No effect on a regular file; a FIFO that replaced it meanwhile does not block.
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open(path).map_err(failed)?;
    require_regular(doing, path, &file.metadata().map_err(failed)?)?;
    Ok(file)
}

/// Reads the whole file `path`, of at most [`MAX_BYTES`].
///
/// # Errors
/// Same as [`open`]; also a user error if the file is larger.
pub fn read(doing: &str, path: &Path) -> Result<Vec<u8>> {
    read_up_to(doing, path, MAX_BYTES)
}

/// Reads the whole file `path`, of at most `max` bytes.
///
/// # Errors
/// Same as [`open`]; also a user error if the file is larger.
pub fn read_up_to(doing: &str, path: &Path, max: u64) -> Result<Vec<u8>> {
    let file = open(doing, path)?;
    let too_large = |bytes: u64| {
        Err(Error::user(format!("cannot {doing} {}", path.display()))
            .because(format!("it has {bytes} bytes or more; accepted: up to {max}")))
    };
    let bytes = file.metadata().map_err(|error| Error::io(doing, path, &error))?.len();
    if bytes > max {
        return too_large(bytes);
    }
    // The bound also holds for a file that grows meanwhile.
    let mut contents = Vec::with_capacity(bytes as usize);
    file.take(max + 1).read_to_end(&mut contents).map_err(|error| Error::io(doing, path, &error))?;
    match contents.len() as u64 {
        bytes if bytes > max => too_large(bytes),
        _ => Ok(contents),
    }
}

/// Reads the whole file `path`, of at most [`MAX_BYTES`], as text.
///
/// # Errors
/// Same as [`read`]; also a user error with the line if the file is not UTF-8.
pub fn read_text(doing: &str, path: &Path) -> Result<String> {
    String::from_utf8(read(doing, path)?).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..valid].iter().filter(|byte| **byte == b'\n').count();
        Error::user(format!("cannot {doing} {}", path.display()))
            .because(format!(
                "it is not UTF-8 text: the first bad byte is in line {line}, {valid} bytes after the beginning of the file"
            ))
            .hint("save it as UTF-8")
    })
}

fn require_regular(doing: &str, path: &Path, metadata: &Metadata) -> Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    if metadata.is_dir() {
        return Err(Error::io(doing, path, &io::ErrorKind::IsADirectory.into()));
    }
    Err(Error::user(format!("cannot {doing} {}", path.display()))
        .because(format!("it is {}; accepted: a regular file, or a link to one", kind(metadata)))
        .hint("write its contents to a file first"))
}

fn kind(metadata: &Metadata) -> &'static str {
    let file_type = metadata.file_type();
    if file_type.is_fifo() {
        "a FIFO (pipe)"
    } else if file_type.is_char_device() || file_type.is_block_device() {
        "a device"
    } else if file_type.is_socket() {
        "a socket"
    } else {
        "not a regular file"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_within_their_bound_and_as_utf_8() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.json");
        std::fs::write(&path, b"ab\ncd\xFF").expect("a file");
        assert_eq!(read_up_to("read", &path, 6).expect("bytes"), b"ab\ncd\xFF");
        let error = read_up_to("read", &path, 5).expect_err("6 bytes of 5");
        assert!(error.to_string().contains("accepted: up to 5"), "{error}");
        let error = read_text("read", &path).expect_err("no text");
        assert!(error.to_string().contains("line 2, 5 bytes after"), "{error}");
        assert_eq!(error.kind().exit_code(), 1);
        assert_eq!(read("read", folder.path()).expect_err("a folder").kind().exit_code(), 1);
        assert_eq!(read("read", &folder.path().join("b")).expect_err("nothing").kind().exit_code(), 1);
        // A sparse file is refused by its size, before any read.
        File::options()
            .write(true)
            .open(&path)
            .and_then(|file| file.set_len(1 << 40))
            .expect("a sparse file");
        assert!(read("read", &path).is_err());
    }

    #[test]
    fn devices_and_fifos_are_refused_at_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/dev/zero", &link).expect("a link");
        let fifo = folder.path().join("fifo");
        let name = std::ffi::CString::new(fifo.to_str().expect("a name")).expect("a name");
        // SAFETY: `name` is a C string that outlives the call.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        for (path, kind) in [(&link, "a device"), (&fifo, "a FIFO")] {
            let error = open("read", path).expect_err("no file");
            assert!(error.to_string().contains(kind), "{error}");
            assert_eq!(error.kind().exit_code(), 1);
        }
    }
}
