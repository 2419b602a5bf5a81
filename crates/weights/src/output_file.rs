//! A file at a path that the user names: written under a temporary name beside it, flushed, then
//! renamed.
//!
//! No existing file is replaced, even one that appears meanwhile, except an older file of the same
//! kind if the kind permits that. Links are never followed.

use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use super::unfinished::{Unfinished, sweep, sync_folder};
use super::write::write_failed;
use crate::error::{Error, ErrorCategory, Result};

/// A kind of file that the user names: its name in messages, and the files that it may replace.
#[derive(Debug, Clone, Copy)]
pub struct OutputKind {
    /// The file with its article, such as `a GGUF`.
    pub what: &'static str,
    /// The command-line option with the path, such as `--output`.
    pub option: &'static str,
    /// A usual name, which messages propose inside a folder.
    pub example: &'static str,
    /// The first bytes of an older file that a new one may replace; `None` if it replaces nothing.
    pub replaces: Option<&'static str>,
}

/// A file under its temporary name. If it is dropped before [`OutputFile::commit`], it is removed.
#[derive(Debug)]
pub struct OutputFile {
    kind: OutputKind,
    path: PathBuf,
    temporary: Unfinished,
    out: BufWriter<File>,
    written: u64,
    needed: u64,
}

impl OutputKind {
    /// Refuses a path with anything but an older file that may be replaced. Returns whether such a
    /// file exists.
    ///
    /// # Errors
    /// User: a folder, a link or another file is at `path`. Storage: it cannot be examined.
    pub fn refuse_taken(self, path: &Path) -> Result<bool> {
        let refused = |why: String| Error::user(format!("cannot write {}", path.display())).because(why);
        let elsewhere =
            |other: &str| format!("give another path with `{}`, or remove the {other}", self.option);
        let metadata = match path.symlink_metadata() {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(Error::io("write", path, &error)),
        };
        if metadata.is_dir() {
            let proposed = path.join(self.example);
            return Err(refused(format!("it is a folder; {} is one file", self.what)).hint(format!(
                "write `{} {}`",
                self.option,
                proposed.display()
            )));
        }
        if metadata.is_symlink() {
            return Err(
                refused("it is a link; finetune does not write through links".into()).hint(elsewhere("link"))
            );
        }
        let Some(beginning) = self.replaces else {
            return Err(refused("a file of that name exists".into()).hint(elsewhere("file")));
        };
        if begins_with(path, beginning).map_err(|error| Error::io("read", path, &error))? {
            return Ok(true);
        }
        Err(refused(format!("a file of that name exists, and it is not {}", self.what))
            .hint(elsewhere("file")))
    }

    /// Creates the temporary file of `path`, for about `needed` bytes, beside it. Removes leftovers
    /// of killed processes for the path.
    ///
    /// # Errors
    /// User: as for [`OutputKind::refuse_taken`]; the temporary name exists already. Storage: the
    /// file cannot be created.
    pub fn create(self, path: &Path, needed: u64) -> Result<OutputFile> {
        // A normalized path has no trailing slash.
        let path: PathBuf = path.components().collect();
        self.refuse_taken(&path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        sweep(path.parent().unwrap_or(Path::new("")), |base| base == name);
        let temporary = Unfinished::beside(&path, std::process::id());
        let cannot = |error: io::Error| write_failed(&path, needed, self.option, &error);
        let opened = File::options().write(true).create_new(true).open(&temporary);
        let file = opened.map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => Error::user(format!("cannot write {}", path.display()))
                .because(format!("its temporary name, {}, exists already", temporary.display()))
                .hint(format!(
                    "if no other process writes it, run `rm {}` and start again",
                    temporary.display()
                )),
            ErrorKind::NotFound => Error::io("write", &path, &error),
            _ => cannot(error),
        })?;
        let temporary = Unfinished::of(temporary, &file).map_err(cannot)?;
        let out = BufWriter::with_capacity(1 << 20, file);
        Ok(OutputFile { kind: self, path, temporary, out, written: 0, needed })
    }

    /// Writes the file `path`, completely or not at all.
    ///
    /// # Errors
    /// The same as for [`OutputKind::create`] and [`OutputFile::commit`].
    pub fn write(self, path: &Path, text: &str) -> Result<()> {
        let mut file = self.create(path, text.len() as u64)?;
        file.put(text.as_bytes())?;
        file.commit().map(drop)
    }
}

impl OutputFile {
    /// Adds bytes to the file.
    ///
    /// # Errors
    /// Storage: the disk is full or fails.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|error| self.failed(&error))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    /// Returns the number of bytes so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Flushes the file and gives it its name; returns its size.
    ///
    /// # Errors
    /// User: a file appeared at its path meanwhile. Storage: the disk is full or fails. The
    /// temporary file is then removed, and the file at the path stays.
    pub fn commit(mut self) -> Result<u64> {
        self.out.flush().map_err(|error| self.failed(&error))?;
        self.out.get_ref().sync_all().map_err(|error| self.failed(&error))?;
        loop {
            let older = self.kind.refuse_taken(&self.path).map_err(|error| match error.kind() {
                ErrorCategory::User => error.because("it appeared while finetune wrote the new file"),
                _ => error,
            })?;
            let put = if older { Unfinished::replace } else { Unfinished::put_new };
            match put(&self.temporary, &self.path) {
                // Another process was faster: check its file.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                done => {
                    done.map_err(|error| self.failed(&error))?;
                    break;
                }
            }
        }
        self.path.parent().map_or(Ok(()), sync_folder)?;
        Ok(self.written)
    }

    fn failed(&self, source: &io::Error) -> Error {
        write_failed(&self.path, self.needed, self.kind.option, source)
    }
}

/// Returns whether `path` is a plain file with this beginning.
fn begins_with(path: &Path, beginning: &str) -> io::Result<bool> {
    // Opening a pipe blocks, and a link may have appeared meanwhile.
    let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Ok(false);
    }
    let mut start = Vec::new();
    file.take(beginning.len() as u64).read_to_end(&mut start)?;
    Ok(start == beginning.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: OutputKind =
        OutputKind { what: "a page", option: "--html", example: "plan.html", replaces: Some("<page>") };

    #[test]
    fn only_an_older_file_of_its_kind_is_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let text = |name: &str| std::fs::read_to_string(at(name)).expect("a file");
        PAGE.write(&at("p"), "<page>1").expect("nothing is there");
        PAGE.write(&at("p"), "<page>2").expect("a page is there");
        assert_eq!(text("p"), "<page>2");
        let once = OutputKind { replaces: None, ..PAGE };
        std::fs::write(at("mine"), "<pag").expect("a file");
        std::fs::write(at("none"), "").expect("a file");
        std::fs::create_dir(at("folder")).expect("a folder");
        std::os::unix::fs::symlink("p", at("link")).expect("a link");
        std::os::unix::fs::symlink("nowhere", at("loose")).expect("a link");
        for (kind, name, why) in [
            (once, "p", "a file of that name exists"),
            (PAGE, "mine", "a file of that name exists, and it is not a page"),
            (PAGE, "none", "a file of that name exists, and it is not a page"),
            (PAGE, "folder", "it is a folder; a page is one file"),
            (PAGE, "folder/", "it is a folder; a page is one file"),
            (PAGE, "link", "it is a link; finetune does not write through links"),
            (PAGE, "loose", "it is a link; finetune does not write through links"),
        ] {
            let error = kind.write(&at(name), "<page>3").expect_err(name);
            assert_eq!(error.causes(), [why], "{name}");
        }
        assert_eq!((text("p"), text("mine")), ("<page>2".to_owned(), "<pag".to_owned()));
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 6, "no temporary file");
    }

    /// A file that appeared during writing stays, unless it is an older file of the same kind.
    #[test]
    fn what_comes_meanwhile_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("p");
        let begin = || {
            let mut file = PAGE.create(&path, 7).expect("nothing is there");
            file.put(b"<page>1").expect("room");
            file
        };
        let file = begin();
        std::fs::write(&path, "precious").expect("a file");
        let error = file.commit().expect_err("it came meanwhile");
        assert_eq!(error.causes().last().expect("one"), "it appeared while finetune wrote the new file");
        assert_eq!(std::fs::read(&path).expect("a file"), b"precious");
        std::fs::remove_file(&path).expect("a file");
        let file = begin();
        std::fs::write(&path, "<page>0").expect("a file");
        file.commit().expect("an older page");
        assert_eq!(std::fs::read(&path).expect("a file"), b"<page>1");
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }
}
