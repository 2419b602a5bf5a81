//! Files that a person, a folder or a download gave: opened only where they are regular files, read only up to a bound.
//!
//! A FIFO would be waited for without end, `/dev/zero` read without end, and a link to either looks like any file; a
//! sparse file of a terabyte costs its author nothing. So whatever reads an input opens it here, and the error says
//! what the file is instead.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use super::{Error, Result};

/// Bytes of the largest file that [`read`] takes in one piece: several times the largest tokenizer_config.json there is.
/// As JSON values it may take some forty times as much memory.
pub const MAX_BYTES: u64 = 16 << 20;

/// Opens the file `path`, or the file that a link of this name leads to, for reading; `doing` is what for, as in "read
/// weights".
///
/// # Errors
/// The user's: there is none, or it is a folder, a FIFO, a device or a socket. Storage: it cannot be opened.
pub fn open(doing: &str, path: &Path) -> Result<File> {
    let failed = |error: io::Error| Error::io(doing, path, &error);
    // Looked at before it is opened, for opening alone already waits (a FIFO) or does something (a tape).
    require_regular(doing, path, &std::fs::metadata(path).map_err(failed)?)?;
    let mut options = OpenOptions::new();
    options.read(true);
    // Nothing changes for a regular file; what took its place meanwhile is not waited for.
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open(path).map_err(failed)?;
    require_regular(doing, path, &file.metadata().map_err(failed)?)?;
    Ok(file)
}

/// The whole file `path`, of at most [`MAX_BYTES`].
///
/// # Errors
/// As [`open`]; the user's also: it is larger.
pub fn read(doing: &str, path: &Path) -> Result<Vec<u8>> {
    read_up_to(doing, path, MAX_BYTES)
}

/// The whole file `path`, of at most `max` bytes.
///
/// # Errors
/// As [`open`]; the user's also: it is larger.
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
    // A file that grows meanwhile is no way around the bound.
    let mut contents = Vec::with_capacity(bytes as usize);
    file.take(max + 1).read_to_end(&mut contents).map_err(|error| Error::io(doing, path, &error))?;
    match contents.len() as u64 {
        found if found > max => too_large(found),
        _ => Ok(contents),
    }
}

/// The whole file `path`, of at most [`MAX_BYTES`], as text.
///
/// # Errors
/// As [`read`]; the user's also: it is not UTF-8, with the line.
pub fn read_text(doing: &str, path: &Path) -> Result<String> {
    String::from_utf8(read(doing, path)?).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..valid].iter().filter(|byte| **byte == b'\n').count();
        Error::user(format!("cannot {doing} {}", path.display()))
            .because(format!("it is not UTF-8 text: line {line}, byte {valid} of the file"))
            .hint("save it as UTF-8")
    })
}

fn require_regular(doing: &str, path: &Path, found: &Metadata) -> Result<()> {
    if found.is_file() {
        return Ok(());
    }
    if found.is_dir() {
        return Err(Error::io(doing, path, &io::ErrorKind::IsADirectory.into()));
    }
    Err(Error::user(format!("cannot {doing} {}", path.display()))
        .because(format!("it is {}; accepted: a regular file, or a link to one", kind(found)))
        .hint("write what it gives into a file first"))
}

fn kind(found: &Metadata) -> &'static str {
    let found = found.file_type();
    if found.is_fifo() {
        "a FIFO (pipe)"
    } else if found.is_char_device() || found.is_block_device() {
        "a device"
    } else if found.is_socket() {
        "a socket"
    } else {
        "no regular file"
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
        assert!(error.to_string().contains("line 2, byte 5"), "{error}");
        assert_eq!(error.kind().exit_code(), 1);
        assert_eq!(read("read", folder.path()).expect_err("a folder").kind().exit_code(), 1);
        assert_eq!(read("read", &folder.path().join("b")).expect_err("nothing").kind().exit_code(), 1);
        // A sparse file: what it claims is refused before it is read.
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
