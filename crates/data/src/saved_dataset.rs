//! Folders that `Dataset.save_to_disk` of Hugging Face datasets writes: Arrow files, and
//! state.json, which lists them.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::input_file;
use crate::error::{Error, Result};

/// The list of files in a folder of a saved data set.
const STATE: &str = "state.json";

/// The files of rows in `folder`, in their order, if it holds a saved data set.
///
/// # Errors
/// Fails if the list cannot be read, or names something that is no file of the folder.
pub(super) fn files(folder: &Path) -> Result<Option<Vec<PathBuf>>> {
    let path = folder.join(STATE);
    if !path.is_file() {
        return Ok(None);
    }
    let text = input_file::read("read the saved data set", &path)?;
    let state: Value = match serde_json::from_slice(&text) {
        Ok(state) => state,
        Err(_) => return Ok(None),
    };
    let Some(Value::Array(files)) = state.get("_data_files") else { return Ok(None) };
    let cannot = |why: String| {
        Error::user(format!("cannot read the saved data set {}", folder.display())).because(why)
    };
    let is_list = |key: &str| state.get(key).and_then(Value::as_array).is_some_and(|list| !list.is_empty());
    if is_list("_indices_data_files") {
        return Err(cannot("an old version of datasets saved it with a list of the rows to take".to_owned()).hint(format!(
            "save it again in Python: load_from_disk(\"{0}\").flatten_indices().save_to_disk(\"{0}-flat\")",
            folder.display()
        )));
    }
    let mut paths = Vec::new();
    for file in files {
        let name = file.get("filename").and_then(Value::as_str).unwrap_or_default();
        let file = folder.join(name);
        if name.is_empty() || Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(cannot(format!("{STATE} names the file {name:?}, which is no name of a file in it")));
        }
        if !file.exists() {
            return Err(
                cannot(format!("{STATE} names {name}, which does not exist")).hint("copy the whole folder")
            );
        }
        paths.push(file);
    }
    Ok(Some(paths))
}

/// Returns whether a file of this name is a cache of datasets, with rows computed from others.
pub(super) fn is_cached(name: &str) -> bool {
    name.starts_with("cache-") && name.ends_with(".arrow")
}
