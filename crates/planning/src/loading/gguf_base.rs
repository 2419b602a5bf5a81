//! GGUF files as models: the files that describe one are made in the user's cache, and the weights
//! stay in the GGUF file.

use std::path::{Path, PathBuf};

use super::assets;
use crate::error::{Error, Result};
use crate::export::gguf;
use crate::gguf_names::{EXTENSION, gguf_models};
use crate::weights::{GGUF_INDEX, INDEX_FILE, MODEL_FILE};

/// Returns the folder that describes the GGUF model `path`, which is such a file or a folder with
/// one; `None` for any other path.
///
/// # Errors
/// The user's: the folder holds several models, or the file holds none that finetune computes. The
/// cache cannot be written.
pub fn described(path: &Path) -> Result<Option<PathBuf>> {
    let Some(file) = file_of(path)? else { return Ok(None) };
    let folder = folder_of(&file)?;
    gguf::describe_base(&file, &folder)?;
    Ok(Some(folder))
}

/// Removes the files that describe the GGUF model `path`, if it is one.
pub fn forget(path: &Path) {
    if let Ok(Some(file)) = file_of(path)
        && let Ok(folder) = folder_of(&file)
        && let Some(of_file) = folder.parent()
    {
        // Without them, the next use describes the model again.
        drop(std::fs::remove_dir_all(of_file));
    }
}

/// Returns the folder in the cache for the files that describe the model of `file`.
fn folder_of(file: &Path) -> Result<PathBuf> {
    let whole = file.canonicalize().map_err(|error| Error::io("read weights", file, &error))?;
    let digest = blake3::hash(whole.as_os_str().as_encoded_bytes()).to_hex();
    let name = file.file_name().unwrap_or_default();
    // The last part of the path is the name of the model.
    Ok(assets::cache()?.join("gguf").join(&digest[..16]).join(name))
}

/// Returns the GGUF file that `path` names.
fn file_of(path: &Path) -> Result<Option<PathBuf>> {
    if path.is_file() {
        let is_gguf = path.extension().is_some_and(|extension| extension == EXTENSION);
        return Ok(is_gguf.then(|| path.to_owned()));
    }
    let has = |name: &str| path.join(name).exists();
    let Ok(entries) = path.read_dir() else { return Ok(None) };
    if has(MODEL_FILE) || has(INDEX_FILE) || has(GGUF_INDEX) || has("adapter_config.json") {
        return Ok(None);
    }
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    match gguf_models(names.iter().map(String::as_str))[..] {
        [] => Ok(None),
        [one] => Ok(Some(path.join(one))),
        [first, ..] => {
            let all = gguf_models(names.iter().map(String::as_str)).join(", ");
            Err(Error::user(format!("{} holds several GGUF models", path.display()))
                .because(format!("found {all}"))
                .hint(format!("give one of them: `--model {}`", path.join(first).display())))
        }
    }
}
