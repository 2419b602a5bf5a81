//! manifest.json: every other file of the folder with its size and BLAKE3 digest.
//!
//! Each rank digests its files while it writes them. It then lists them in
//! `part-00001-of-00002.json`, which marks them as complete. Rank 0 merges the lists, so that no
//! rank reads the files of another.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::input_file;
use crate::error::{Error, ErrorCategory, Result};
use crate::weights::{Written, write_text};

const FILE: &str = "manifest.json";

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    schema: u32,
    files: Files,
}

/// Files by their name below the folder.
pub(super) type Files = BTreeMap<String, Listed>;

/// The size and digest of a file when it was written.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Listed {
    bytes: u64,
    blake3: String,
}

/// Returns the list entries of the files that a rank wrote into `folder`.
pub(super) fn part(folder: &Path, written: Vec<Written>) -> Files {
    let name = |path: &Path| path.strip_prefix(folder).unwrap_or(path).to_string_lossy().into_owned();
    let listed = |file: &Written| Listed { bytes: file.bytes, blake3: file.digest.to_hex().to_string() };
    written.iter().map(|file| (name(&file.path), listed(file))).collect()
}

/// Lists the complete files of rank `rank` of `size`.
pub(super) fn write_part(folder: &Path, rank: usize, size: usize, files: Files) -> Result<()> {
    write(&folder.join(part_file(rank, size)), files)
}

/// Reads the list of rank `rank` of `size`. Returns `None` if its files are not complete yet.
pub(super) fn read_part(folder: &Path, rank: usize, size: usize) -> Result<Option<Files>> {
    let path = folder.join(part_file(rank, size));
    let Some(text) = super::if_there("read", &path, std::fs::read_to_string(&path))? else { return Ok(None) };
    let part: Manifest = serde_json::from_str(&text)
        .map_err(|e| Error::internal(format!("cannot read {}", path.display())).because(e.to_string()))?;
    Ok(Some(part.files))
}

/// Removes the lists of the ranks `ranks` of `size`.
pub(super) fn remove_parts(folder: &Path, ranks: Range<usize>, size: usize) -> Result<()> {
    for rank in ranks {
        let path = folder.join(part_file(rank, size));
        std::fs::remove_file(&path).map_err(|e| Error::io("remove", &path, &e))?;
    }
    Ok(())
}

fn part_file(rank: usize, size: usize) -> String {
    format!("part-{:05}-of-{size:05}.json", rank + 1)
}

/// Completes `files`, which ranks wrote into `folder`, with all other files in it, and writes the
/// manifest.
///
/// # Errors
/// Storage; one of `files` is missing or has another size.
pub(super) fn complete(folder: &Path, mut files: Files) -> Result<()> {
    let present: BTreeMap<String, PathBuf> = files_below(folder)?.into_iter().collect();
    for (name, wanted) in &files {
        let actual_bytes = present.get(name).and_then(|path| path.metadata().ok()).map(|data| data.len());
        if actual_bytes != Some(wanted.bytes) {
            let problem =
                actual_bytes.map_or_else(|| "is missing".to_owned(), |bytes| format!("has {bytes} bytes"));
            return Err(Error::new(ErrorCategory::Storage, format!("cannot complete {}", folder.display()))
                .because(format!("{name} {problem}, {} were written", wanted.bytes)));
        }
    }
    for (name, path) in present {
        if let Entry::Vacant(file) = files.entry(name) {
            file.insert(listed(&path)?);
        }
    }
    write(&folder.join(FILE), files)
}

fn write(path: &Path, files: Files) -> Result<()> {
    let manifest = Manifest { schema: super::SCHEMA, files };
    let text = serde_json::to_string_pretty(&manifest).map_err(|e| Error::internal(e.to_string()))?;
    write_text(path, &text)?;
    Ok(())
}

/// Returns whether `folder` has a manifest, of any content.
///
/// # Errors
/// Storage: the path cannot be examined.
pub(super) fn is_there(folder: &Path) -> Result<bool> {
    let path = folder.join(FILE);
    match path.metadata() {
        Ok(metadata) => Ok(metadata.is_file()),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(Error::io("look at", &path, &error)),
    }
}

/// Removes the manifest of `folder`.
pub(super) fn remove(folder: &Path) -> Result<()> {
    let path = folder.join(FILE);
    std::fs::remove_file(&path).map_err(|e| Error::io("remove", &path, &e))
}

/// Returns the digest of the manifest of `folder`.
pub(super) fn digest(folder: &Path) -> Result<String> {
    let path = folder.join(FILE);
    let text = input_file::read("read", &path)?;
    Ok(blake3::hash(&text).to_hex().to_string())
}

/// Returns whether `folder` holds exactly the files of its manifest, by names and sizes.
pub(super) fn is_complete(folder: &Path) -> bool {
    let path = folder.join(FILE);
    let manifest = plain(&path).ok().and_then(|()| input_file::read_text("read", &path).ok());
    let manifest = manifest.and_then(|text| serde_json::from_str::<Manifest>(&text).ok());
    let (Some(manifest), Ok(present)) = (manifest, files_below(folder)) else { return false };
    let listed = |(name, path): &(String, PathBuf)| {
        let bytes = path.symlink_metadata().ok().filter(|data| data.is_file()).map(|data| data.len());
        bytes.is_some() && bytes == manifest.files.get(name).map(|file| file.bytes)
    };
    present.len() == manifest.files.len() && present.iter().all(listed)
}

/// Checks every file against the manifest.
pub(super) fn verify(folder: &Path) -> Result<()> {
    let path = folder.join(FILE);
    let damaged = |why: String| {
        Error::user(format!("cannot use checkpoint {}", folder.display()))
            .because(why)
            .hint("`--resume` without a folder takes the newest sound checkpoint of the output folder")
    };
    plain(&path).map_err(|what| damaged(format!("{FILE} is {what}")))?;
    let text = input_file::read_text("read", &path).map_err(|error| match error.kind() {
        // The file exists and cannot be read now, which does not prove it damaged.
        kind if kind != ErrorCategory::User => error,
        _ => damaged(format!("{FILE}: {}", error.causes().join(": "))),
    })?;
    let manifest: Manifest = serde_json::from_str(&text).map_err(|e| damaged(format!("{FILE}: {e}")))?;
    if manifest.schema != super::SCHEMA {
        return Err(damaged(format!(
            "{FILE} has schema {}; this program reads {}",
            manifest.schema,
            super::SCHEMA
        )));
    }
    let present: BTreeMap<String, PathBuf> = files_below(folder)?.into_iter().collect();
    for (name, wanted) in &manifest.files {
        let Some(path) = present.get(name) else { return Err(damaged(format!("{name} is missing"))) };
        plain(path).map_err(|what| damaged(format!("{name} is {what}")))?;
        let actual = listed(path)?;
        if actual.bytes != wanted.bytes {
            return Err(damaged(format!("{name} has {} bytes, {} were written", actual.bytes, wanted.bytes)));
        }
        if actual != *wanted {
            return Err(damaged(format!("{name} is not what was written: its digest differs")));
        }
    }
    match present.keys().find(|name| !manifest.files.contains_key(*name)) {
        Some(name) => Err(damaged(format!("{name} does not belong to it"))),
        None => Ok(()),
    }
}

/// Refuses anything but a plain file at `path`; the error names its kind and a remedy. Opens
/// nothing: a link may lead anywhere, and opening a pipe blocks.
fn plain(path: &Path) -> Result<(), &'static str> {
    match path.symlink_metadata().map(|metadata| metadata.file_type()) {
        Ok(kind) if kind.is_symlink() => Err("a link: put the file itself in its place"),
        Ok(kind) if kind.is_dir() => Err("a folder: put the file itself in its place"),
        Ok(kind) if !kind.is_file() => Err("a pipe or a device: put the file itself in its place"),
        // Opening an unreadable path reports the reason.
        _ => Ok(()),
    }
}

fn listed(path: &Path) -> Result<Listed> {
    let mut hasher = blake3::Hasher::new();
    let file = input_file::open("read", path)?;
    let bytes = std::io::copy(&mut &file, &mut hasher).map_err(|e| Error::io("read", path, &e))?;
    Ok(Listed { bytes, blake3: hasher.finalize().to_hex().to_string() })
}

/// Returns the files of `folder` and its subfolders by relative name, without the manifest.
pub(super) fn files_below(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|e| Error::io("read", folder, &e))? {
        let entry = entry.map_err(|e| Error::io("read", folder, &e))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type().map_err(|e| Error::io("read", &entry.path(), &e))?;
        if kind.is_dir() {
            let inner = files_below(&entry.path())?;
            files.extend(inner.into_iter().map(|(inner, path)| (format!("{name}/{inner}"), path)));
        } else if name != FILE {
            files.push((name, entry.path()));
        }
    }
    Ok(files)
}
