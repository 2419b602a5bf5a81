//! A folder that appears whole or not at all: filled under a temporary name beside its place, then renamed.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A folder being filled; dropped before [`AtomicDir::commit`], it leaves nothing.
#[derive(Debug)]
pub struct AtomicDir {
    place: PathBuf,
    temporary: PathBuf,
}

impl AtomicDir {
    /// Starts the folder that will be `place`, beside it.
    ///
    /// # Errors
    /// The user's: something other than an empty folder is at `place`. Storage: the folder cannot be made.
    pub fn create(place: &Path) -> Result<Self> {
        let occupied = match std::fs::read_dir(place) {
            Ok(mut entries) => entries.next().is_some(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
            Err(error) => return Err(Error::io("write to", place, &error)),
        };
        if occupied {
            return Err(Error::user(format!("cannot write to {}", place.display()))
                .because("the folder is not empty")
                .hint("give a new or empty folder as `--output`"));
        }
        Self::beside(place)
    }

    /// Starts the folder that will be `place`, beside it; what is at `place` is the caller's care before the commit.
    ///
    /// # Errors
    /// The user's: something has the temporary name. Storage: the folder cannot be made.
    pub fn beside(place: &Path) -> Result<Self> {
        // `out/` and `out` are one place; a sibling needs the name alone.
        let place: PathBuf = place.components().collect();
        let temporary = Self::shared(&place, std::process::id());
        let cannot = |error| Error::io("create", &temporary, &error);
        temporary.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(cannot)?;
        match std::fs::create_dir(&temporary) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                let temporary = temporary.display();
                Err(Error::user(format!("cannot write to {}", place.display()))
                    .because(format!(
                        "{temporary}, its temporary name, is taken, perhaps by a run that was killed"
                    ))
                    .hint(format!("`rm -r {temporary}` if nothing in it is yours, and start again")))
            }
            made => made.map_err(cannot).map(|()| Self { place, temporary }),
        }
    }

    /// Where it will be.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// The number in the temporary name, for others who write into the folder ([`AtomicDir::shared`]).
    pub fn tag(&self) -> u32 {
        std::process::id()
    }

    /// Where the folder that another process or thread made for `place`, with this tag, is filled.
    pub fn shared(place: &Path, tag: u32) -> PathBuf {
        let place: PathBuf = place.components().collect();
        let mut temporary = place.into_os_string();
        temporary.push(format!(".tmp-{tag}"));
        PathBuf::from(temporary)
    }

    /// Where to write until the commit.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Gives the folder its name.
    ///
    /// # Errors
    /// Storage: the rename fails.
    pub fn commit(self) -> Result<()> {
        std::fs::rename(&self.temporary, &self.place)
            .map_err(|error| Error::io("write to", &self.place, &error))
    }
}

impl Drop for AtomicDir {
    fn drop(&mut self) {
        // Others may still write into it; under another name nothing of theirs comes in between.
        let mut doomed = self.temporary.clone().into_os_string();
        doomed.push("-removed");
        // After a commit there is nothing of that name; before it a failed removal changes nothing for the caller.
        if std::fs::rename(&self.temporary, &doomed).is_ok() {
            drop(std::fs::remove_dir_all(doomed));
        }
    }
}
