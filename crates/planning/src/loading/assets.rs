//! Files inside the binary, for sources `builtin:NAME`. They are unpacked once into the user's
//! cache, so that all code that reads folders can use them.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::weights::write_text;

/// `(name, path below the name's folder, contents)`.
type Asset = (&'static str, &'static str, &'static [u8]);

macro_rules! assets {
    ($($name:literal: $from:literal [$($file:literal),*]),* $(,)?) => {
        /// All embedded files.
        const ASSETS: &[Asset] = &[$($(($name, $file, include_bytes!(concat!("../../../../", $from, "/", $file)))),*),*];
    };
}

assets! {
    "quickstart": "quickstart" [
        "config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json", "tokenizer.json",
        "tokenizer_config.json"
    ],
    "questions-train.jsonl": "datasets" ["questions-train.jsonl"],
    "questions-heldout.jsonl": "datasets" ["questions-heldout.jsonl"],
    "pairs-train.jsonl": "datasets" ["pairs-train.jsonl"],
    "labelled-train.jsonl": "datasets" ["labelled-train.jsonl"],
}

/// Unpacks `builtin:name`; returns the folder of a model, or the file of a data set.
///
/// # Errors
/// No such asset; the cache cannot be written.
pub(crate) fn unpack(name: &str) -> Result<PathBuf> {
    let files: Vec<&Asset> = ASSETS.iter().filter(|asset| asset.0 == name).collect();
    let [first, ..] = files.as_slice() else {
        let mut names: Vec<&str> = ASSETS.iter().map(|asset| asset.0).collect();
        names.dedup();
        return Err(Error::user(format!("this program contains no asset \"{name}\""))
            .because(format!("accepted: {}", names.join(", "))));
    };
    let folder = cache()?.join(digest());
    let target = if first.1 == name { folder.clone() } else { folder.join(name) };
    std::fs::create_dir_all(&target).map_err(|e| Error::io("create", &target, &e))?;
    for (_, file, contents) in &files {
        write_once(&target.join(file), contents)?;
    }
    Ok(if first.1 == name { folder.join(name) } else { target })
}

/// Writes a file unless it exists with the right size (the name of its folder is the digest of all
/// contents).
fn write_once(path: &Path, contents: &[u8]) -> Result<()> {
    if path.metadata().is_ok_and(|metadata| metadata.len() == contents.len() as u64) {
        return Ok(());
    }
    match std::str::from_utf8(contents) {
        Ok(text) => write_text(path, text).map(drop),
        Err(_) => {
            let temporary = path.with_extension(format!("tmp-{}", std::process::id()));
            std::fs::write(&temporary, contents).map_err(|e| Error::io("write", &temporary, &e))?;
            std::fs::rename(&temporary, path).map_err(|e| Error::io("write", path, &e))
        }
    }
}

/// Returns the folder for files that this program can create again.
pub(crate) fn cache() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .filter(|path| path.is_absolute())
        .unwrap_or_else(std::env::temp_dir);
    Ok(base.join("finetune"))
}

fn digest() -> String {
    let mut hasher = blake3::Hasher::new();
    for (name, file, contents) in ASSETS {
        hasher.update(name.as_bytes()).update(file.as_bytes()).update(contents);
    }
    format!("builtin-{}", &hasher.finalize().to_hex()[..16])
}
