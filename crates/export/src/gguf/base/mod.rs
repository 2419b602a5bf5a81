//! A GGUF file as a base model: config.json, the tokenizer and the list of parameters that its
//! metadata describe. It reads the declarations of the export in reverse.
//!
//! [`describe_base`] writes these files to a folder, which then opens like any model
//! ([`crate::weights::ModelFiles::open`]); the weights stay in the GGUF file.

mod config;
mod keys;
mod mixers;
mod parameters;
mod rope;
mod tokenizer;

use std::path::Path;

use serde_json::{Map, Value};

use self::config::Described;
use self::tokenizer::TokenizerParts;
use crate::error::{Error, Result};
use crate::weights::sidecar_files::{CONFIG_FILE, TOKENIZER_CONFIG};
use crate::weights::{GGUF_INDEX, GgufFile, write_text};

/// Writes the files that describe the model of the GGUF file `path` to `folder`, which it creates.
/// Files with the same contents stay.
///
/// # Errors
/// User: the file is malformed, or describes a model or a tokenizer that finetune does not have;
/// nothing is written then. Storage: the folder cannot be written.
pub fn describe_base(path: &Path, folder: &Path) -> Result<()> {
    let file = GgufFile::open(path)?;
    let Described { config, further_blocks, mut json } = config::read(&file)?;
    let index = parameters::index(&file, &config, further_blocks)?;
    let TokenizerParts { files: tokenizer, generation } = tokenizer::read(&file, &json, config.family)?;
    for key in ["bos_token_id", "eos_token_id"] {
        json.extend(generation.get(key).map(|id| (key.to_owned(), id.clone())));
    }
    let index = serde_json::to_string(&index).map_err(|error| Error::internal(error.to_string()))?;
    std::fs::create_dir_all(folder).map_err(|error| Error::io("create", folder, &error))?;
    let pretty = |json: Map<String, Value>| format!("{:#}\n", Value::Object(json));
    // config.json is the last: a folder that has one is complete.
    for (name, text) in [
        (GGUF_INDEX, index),
        ("tokenizer.json", tokenizer.json),
        (TOKENIZER_CONFIG, pretty(tokenizer.config)),
        ("generation_config.json", pretty(generation)),
        (CONFIG_FILE, pretty(json)),
    ] {
        let path = folder.join(name);
        if std::fs::read(&path).ok().as_deref() != Some(text.as_bytes()) {
            write_text(&path, &text)?;
        }
    }
    Ok(())
}
