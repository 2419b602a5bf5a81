//! Reads data files into rows, each with its position.
//!
//! A source is a file or a folder, such as a hub data set. Lines of JSON, a JSON array or an object
//! that holds one, CSV and TSV with a header, Parquet and Arrow give one row a record. A `.txt` or
//! `.md` file is one row with the whole text, a *document*, which encoding cuts into consecutive
//! chunks instead of shortening it. The contents of a file decide its container before its name
//! does: see `container`. A record that cannot be read becomes a `BadRow`, so that one broken
//! line hides no other row.

use std::collections::{HashSet, VecDeque};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::container::{FileKind, read_file};
use super::other_files::ACCEPTED;
pub use super::raw_rows::{DataFile, RawRow};
use super::saved_dataset;
use crate::error::{Error, Result};
use crate::runtime::machine::host_memory;
use crate::units;

/// Maximum depth of searched folders; data sets of the hub nest two or three levels.
const MAX_FOLDER_DEPTH: usize = 6;

/// The files of a folder to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Split {
    /// Files named for training; all files if none is named for a split.
    #[default]
    Train,
    /// Files named for validation, else for test; all files if none is named for a split.
    Eval,
    /// Files named for validation.
    Validation,
    /// Files named for test.
    Test,
}

impl Split {
    /// Returns the split with this name.
    ///
    /// # Errors
    /// Fails with a user error if files have no such split.
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "train" => Ok(Split::Train),
            "validation" => Ok(Split::Validation),
            "test" => Ok(Split::Test),
            _ => Err(Error::user(format!("cannot read the split \"{name}\""))
                .because("accepted: train, validation, test")
                .hint("of a data set on the hub, write `id:configuration/split`")),
        }
    }
}

/// Reads a data file, or all data files of a folder in the order of their names.
///
/// # Errors
/// Fails if the path does not exist, is no data file, holds no data file, or a file as a whole
/// cannot be read. Single records that cannot be read are in [`DataFile::bad`].
pub fn read(path: &Path, split: Split) -> Result<DataFile> {
    let about = std::fs::metadata(path).map_err(|e| Error::io("read the data set", path, &e))?;
    let mut source = DataFile::default();
    if about.is_dir() {
        let mut found = FoundFiles::default();
        found.list(path, 0)?;
        // Links last, so that a folder is read under its own name.
        while let Some((link, depth)) = found.links.pop_front() {
            found.list(&link, depth)?;
        }
        found.files.sort();
        source.notes.append(&mut found.notes);
        source.files = choose(path, found.files, split, &mut source.notes)?;
    } else {
        source.files = vec![path.to_owned()];
    }
    refuse_more_than_memory(path, &source.files)?;
    for file in source.files.clone() {
        read_file(&file, &mut source)?;
    }
    Ok(source)
}

/// Refuses files that are larger than the free memory, which must hold their rows.
fn refuse_more_than_memory(path: &Path, files: &[PathBuf]) -> Result<()> {
    let bytes: u64 = files.iter().filter_map(|file| Some(file.metadata().ok()?.len())).sum();
    match host_memory() {
        Some(memory) if bytes > memory.available => {
            Err(Error::user(format!("cannot read the data set {}", path.display()))
                .because(format!(
                    "its files have {}, and {} of memory are free; rows are kept in memory",
                    units::bytes(bytes),
                    units::bytes(memory.available)
                ))
                .hint("train on a part of it"))
        }
        _ => Ok(()),
    }
}

/// The data files below a folder.
#[derive(Default)]
struct FoundFiles {
    files: Vec<PathBuf>,
    /// Device and inode number of each listed folder: several links may lead to one, or to one
    /// above.
    listed: HashSet<(u64, u64)>,
    /// Links to folders not listed yet, with their depths.
    links: VecDeque<(PathBuf, usize)>,
    notes: Vec<String>,
}

impl FoundFiles {
    fn list(&mut self, folder: &Path, depth: usize) -> Result<()> {
        let cannot = |e: std::io::Error| Error::io("list the data folder", folder, &e);
        let about = std::fs::metadata(folder).map_err(cannot)?;
        if !self.listed.insert((about.dev(), about.ino())) {
            self.notes
                .push(format!("left out {}: it leads to a folder that is read already", folder.display()));
            return Ok(());
        }
        if let Some(mut saved) = saved_dataset::files(folder)? {
            self.files.append(&mut saved);
            return Ok(());
        }
        let entries = std::fs::read_dir(folder).map_err(cannot)?;
        let mut paths = entries.map(|entry| Ok(entry.map_err(cannot)?.path())).collect::<Result<Vec<_>>>()?;
        // Of two links to one folder, the same one must always be skipped.
        paths.sort();
        for path in paths {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            if name.starts_with('.') {
                continue;
            }
            if path.is_dir() {
                if depth == MAX_FOLDER_DEPTH {
                    continue;
                }
                if path.is_symlink() {
                    self.links.push_back((path, depth + 1));
                } else {
                    self.list(&path, depth + 1)?;
                }
            } else if FileKind::of(&path).is_some()
                && !describes_a_data_set(name)
                && !saved_dataset::is_cached(name)
            {
                self.files.push(path);
            }
        }
        Ok(())
    }
}

/// Returns whether a file beside the data is not data itself.
fn describes_a_data_set(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    ["readme", "license", "licence", "notice", "changelog"].iter().any(|stem| name.starts_with(stem))
        || ["dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"]
            .contains(&name.as_str())
}

fn choose(
    folder: &Path,
    mut files: Vec<PathBuf>,
    split: Split,
    notes: &mut Vec<String>,
) -> Result<Vec<PathBuf>> {
    if files.is_empty() {
        return Err(Error::user(format!("cannot read the data set {}", folder.display()))
            .because("the folder holds no data file")
            .because(ACCEPTED));
    }
    let is_text = |path: &PathBuf| FileKind::of(path) == Some(FileKind::Text);
    if files.iter().any(is_text) && !files.iter().all(is_text) {
        let before = files.len();
        files.retain(|path| !is_text(path));
        notes.push(format!("left out {} text files beside {} data files", before - files.len(), files.len()));
    }
    let wanted: &[SplitName] = match split {
        Split::Train => &[SplitName::Train],
        Split::Eval => &[SplitName::Validation, SplitName::Test],
        Split::Validation => &[SplitName::Validation],
        Split::Test => &[SplitName::Test],
    };
    for named in wanted {
        let chosen: Vec<PathBuf> =
            files.iter().filter(|path| SplitName::of(folder, path) == Some(*named)).cloned().collect();
        if !chosen.is_empty() {
            if chosen.len() < files.len() {
                notes.push(format!(
                    "took the {} split: {} of {} files",
                    named.name(),
                    chosen.len(),
                    files.len()
                ));
            }
            return Ok(chosen);
        }
    }
    if matches!(split, Split::Validation | Split::Test) {
        return Err(Error::user(format!("cannot find the split in {}", folder.display()))
            .because(format!("none of its files is named for {}", wanted[0].name()))
            .hint(
                "remove `split`, give the path of one file, or rename a file, such as to validation.jsonl",
            ));
    }
    if split == Split::Eval && files.iter().any(|path| SplitName::of(folder, path).is_some()) {
        return Err(Error::user(format!("cannot find evaluation rows in {}", folder.display()))
            .because("it has files named for training, but none for validation or test")
            .hint("name the file to evaluate on in `data.eval`"));
    }
    Ok(files)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SplitName {
    Train,
    Validation,
    Test,
}

impl SplitName {
    fn name(self) -> &'static str {
        match self {
            SplitName::Train => "train",
            SplitName::Validation => "validation",
            SplitName::Test => "test",
        }
    }

    /// The split in a file's name (`train-00000-of-00001`, `gsm8k_test`), else in those of its
    /// folders.
    fn of(root: &Path, path: &Path) -> Option<Self> {
        let inside = path.strip_prefix(root).unwrap_or(path).with_extension("");
        inside.iter().rev().filter_map(|part| part.to_str()).find_map(|part| {
            part.split(|c: char| !c.is_ascii_alphabetic()).find_map(|word| {
                match word.to_ascii_lowercase().as_str() {
                    "train" | "training" => Some(SplitName::Train),
                    "valid" | "validation" | "val" | "dev" | "eval" => Some(SplitName::Validation),
                    "test" | "testing" => Some(SplitName::Test),
                    _ => None,
                }
            })
        })
    }
}
