//! The folder of an adapter. PEFT saves named adapters in subfolders with these names.

use std::path::{Path, PathBuf};

use super::CONFIG_FILE;
use crate::error::{Error, Result};

/// Returns the folder of the adapter in `folder`: itself, or its only subfolder with an adapter, as
/// PEFT saves named adapters.
///
/// # Errors
/// User: several subfolders hold an adapter.
pub fn one_below(folder: &Path) -> Result<PathBuf> {
    let holds = |folder: &Path| folder.join(CONFIG_FILE).is_file();
    let Some(entries) = std::fs::read_dir(folder).ok().filter(|_| !holds(folder)) else {
        return Ok(folder.to_owned());
    };
    let mut below_folders: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|below| holds(below)).collect();
    below_folders.sort();
    match below_folders.as_slice() {
        [] => Ok(folder.to_owned()),
        [one] => Ok(one.clone()),
        [first, ..] => {
            let names: Vec<String> = below_folders.iter().map(|below| below.display().to_string()).collect();
            Err(Error::user(format!("cannot choose an adapter in {}", folder.display()))
                .because(format!("these folders hold one each: {}", names.join(", ")))
                .hint(format!("give one of them, such as {}", first.display())))
        }
    }
}
