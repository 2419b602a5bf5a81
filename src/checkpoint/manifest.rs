//! manifest.json: every other file of the folder with its size and BLAKE3 digest.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::weights::write_text;

const FILE: &str = "manifest.json";

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    schema: u32,
    files: BTreeMap<String, Listed>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Listed {
    bytes: u64,
    blake3: String,
}

/// Writes the manifest of everything in `folder`.
pub(super) fn write(folder: &Path) -> Result<()> {
    let mut files = BTreeMap::new();
    for (name, path) in files_below(folder)? {
        files.insert(name, listed(&path)?);
    }
    let manifest = Manifest { schema: super::SCHEMA, files };
    let text = serde_json::to_string_pretty(&manifest).map_err(|e| Error::internal(e.to_string()))?;
    write_text(&folder.join(FILE), &text)?;
    Ok(())
}

/// Checks every file against the manifest.
pub(super) fn verify(folder: &Path) -> Result<()> {
    let path = folder.join(FILE);
    let damaged = |why: String| {
        Error::user(format!("cannot use checkpoint {}", folder.display()))
            .because(why)
            .hint("`--resume` without a folder takes the newest sound checkpoint of the output folder")
    };
    let text = std::fs::read_to_string(&path).map_err(|e| damaged(format!("{FILE}: {e}")))?;
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
        let found = listed(path)?;
        if found.bytes != wanted.bytes {
            return Err(damaged(format!("{name} has {} bytes, {} were written", found.bytes, wanted.bytes)));
        }
        if found != *wanted {
            return Err(damaged(format!("{name} is not what was written: its digest differs")));
        }
    }
    match present.keys().find(|name| !manifest.files.contains_key(*name)) {
        Some(name) => Err(damaged(format!("{name} does not belong to it"))),
        None => Ok(()),
    }
}

fn listed(path: &Path) -> Result<Listed> {
    let mut hasher = blake3::Hasher::new();
    let file = File::open(path).map_err(|e| Error::io("read", path, &e))?;
    let bytes = std::io::copy(&mut &file, &mut hasher).map_err(|e| Error::io("read", path, &e))?;
    Ok(Listed { bytes, blake3: hasher.finalize().to_hex().to_string() })
}

/// Files of `folder` and of its folders, by relative name; the manifest itself is not among them.
fn files_below(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|e| Error::io("read", folder, &e))? {
        let entry = entry.map_err(|e| Error::io("read", folder, &e))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type().map_err(|e| Error::io("read", &entry.path(), &e))?;
        if kind.is_dir() {
            let inner = files_below(&entry.path())?;
            found.extend(inner.into_iter().map(|(inner, path)| (format!("{name}/{inner}"), path)));
        } else if name != FILE {
            found.push((name, entry.path()));
        }
    }
    Ok(found)
}
