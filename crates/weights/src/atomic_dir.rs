//! A folder that appears complete or not at all: filled under a temporary name beside its final
//! one, flushed, then renamed.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::unfinished::{self, Unfinished, sync_folder, sync_tree};
use crate::error::{Error, Result};

/// A folder during writing. If it is dropped before [`AtomicDir::commit`], it is removed.
#[derive(Debug)]
pub struct AtomicDir {
    target: PathBuf,
    temporary: Unfinished,
}

impl AtomicDir {
    /// Creates the temporary folder of `target` beside it, and removes leftovers of killed
    /// processes for `target`.
    ///
    /// # Errors
    /// User: something other than an empty folder is at `target`. Storage: the folder cannot be
    /// created.
    pub fn create(target: &Path) -> Result<Self> {
        let occupied = match std::fs::read_dir(target) {
            Ok(mut entries) => {
                let first = entries.next().transpose();
                first.map_err(|error| Error::io("read", target, &error))?.is_some()
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
            Err(error) => return Err(Error::io("write to", target, &error)),
        };
        if occupied {
            return Err(Error::user(format!("cannot write to {}", target.display()))
                .because("the folder is not empty")
                .hint("give a new or empty folder as `--output`"));
        }
        let path = resolved(target)?;
        if let (Some(parent), Some(name)) = (path.parent(), path.file_name()) {
            unfinished::sweep(parent, |base| base == name.to_string_lossy());
        }
        Self::beside(&path)
    }

    /// Creates the temporary folder of `target` beside it. The caller handles anything at `target`
    /// before the commit.
    ///
    /// # Errors
    /// User: the temporary name exists already. Storage: the folder cannot be created.
    pub fn beside(target: &Path) -> Result<Self> {
        // `out/` and `out` are the same path; a sibling needs the name alone.
        let path: PathBuf = target.components().collect();
        let temporary = Self::shared(&path, std::process::id());
        let cannot = |error| Error::io("create", &temporary, &error);
        temporary.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(cannot)?;
        match std::fs::create_dir(&temporary) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                let temporary = temporary.display();
                Err(Error::user(format!("cannot write to {}", path.display()))
                    .because(format!(
                        "its temporary name {temporary} exists already, perhaps from a killed run"
                    ))
                    .hint(format!("if you need nothing in it, run `rm -r {temporary}` and start again")))
            }
            Err(error) => Err(cannot(error)),
            Ok(()) => {
                let made = File::open(&temporary);
                let temporary_folder = made.and_then(|made| Unfinished::of(temporary.clone(), &made));
                temporary_folder.map(|temporary| Self { target: path, temporary }).map_err(cannot)
            }
        }
    }

    /// Returns its final path.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Returns the number in the temporary name, for other writers to the folder
    /// ([`AtomicDir::shared`]).
    pub fn tag(&self) -> u32 {
        std::process::id()
    }

    /// Returns the temporary folder that another process or thread created for `target` with this
    /// tag.
    pub fn shared(target: &Path, tag: u32) -> PathBuf {
        let path: PathBuf = target.components().collect();
        Unfinished::beside(&path, tag)
    }

    /// Returns the path to write to until the commit.
    pub fn path(&self) -> &Path {
        self.temporary.path()
    }

    /// Flushes all files in the folder, of any writer, and gives the folder its name.
    ///
    /// # Errors
    /// Storage: a flush or the rename fails.
    pub fn commit(self) -> Result<()> {
        self.sync()?;
        self.rename()
    }

    /// Runs the first half of the commit: afterwards the contents of the folder survive a power
    /// cut.
    ///
    /// # Errors
    /// Storage: a flush fails.
    pub fn sync(&self) -> Result<()> {
        sync_tree(self.path())
    }

    /// Runs the second half of the commit: renames the folder, which was flushed before.
    ///
    /// # Errors
    /// Storage: the rename or the flush after it fails.
    pub fn rename(self) -> Result<()> {
        let path = self.target;
        self.temporary.replace(&path).map_err(|error| Error::io("write to", &path, &error))?;
        path.parent().map_or(Ok(()), sync_folder)
    }
}

/// Resolves `target` to a path that a rename can replace: follows links and resolves `.`.
fn resolved(target: &Path) -> Result<PathBuf> {
    let link = target.symlink_metadata().is_ok_and(|metadata| metadata.is_symlink());
    let named =
        target.components().next_back().is_some_and(|last| matches!(last, std::path::Component::Normal(_)));
    if named && !link {
        return Ok(target.components().collect());
    }
    target.canonicalize().map_err(|error| {
        Error::user(format!("cannot write to {}", target.display()))
            .because(format!("it is a link, and its target cannot be opened: {error}"))
            .hint("create that folder, or give another one as `--output`")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).expect("a folder");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("one").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_a_killed_process_left_goes() {
        let parent = tempfile::tempdir().expect("a folder");
        let left = parent.path().join(format!("out.tmp-{}", u32::MAX));
        std::fs::create_dir(&left).expect("a folder");
        std::fs::write(left.join("model.safetensors"), "half").expect("a file");
        let folder = AtomicDir::create(&parent.path().join("out/")).expect("a new folder");
        // The folder of another active writer to the same path stays.
        assert_eq!(names(parent.path()), [format!("out.tmp-{}", std::process::id())]);
        unfinished::sweep(parent.path(), |base| base == "out");
        std::fs::write(folder.path().join("a"), "a").expect("a file");
        folder.commit().expect("committed");
        assert_eq!(names(parent.path()), ["out"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_followed_to_an_empty_folder_and_nowhere_else() {
        let parent = tempfile::tempdir().expect("a folder");
        let at = |name: &str| parent.path().join(name);
        std::fs::create_dir(at("there")).expect("a folder");
        std::os::unix::fs::symlink("there", at("link")).expect("a link");
        std::os::unix::fs::symlink("nowhere", at("loose")).expect("a link");
        let folder = AtomicDir::create(&at("link")).expect("an empty folder");
        std::fs::write(folder.path().join("a"), "a").expect("a file");
        folder.commit().expect("committed");
        assert!(at("there/a").is_file() && at("link/a").is_file());
        let error = AtomicDir::create(&at("loose")).expect_err("leads nowhere").to_string();
        assert!(error.contains("it is a link, and its target cannot be opened: No such file"), "{error}");
    }
}
