//! A Hugging Face model folder: weights, config.json, tokenizer.
//!
//! The weights come tensor by tensor from the caller and go through [`write_sharded`]; everything else is the source
//! model's, since training changes neither architecture nor vocabulary.

use std::path::Path;

use crate::error::{Error, Result};
use crate::weights::companions::{self, ConfigChanges};
use crate::weights::{Entry, TensorSink, Written, write_sharded};

/// The size that transformers shards at, in bytes.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// Writes a model to `folder`, which is made if need be: `entries` as its weights, in that order, and the companions
/// of the model in `source`. `write` is called once for each entry to give its values to the sink. Weights go first,
/// config.json last, so a folder with one is complete.
///
/// # Errors
/// The user's: `folder` holds other weights, or `source` has no valid config.json. Storage: the disk is full or
/// fails. What `write` returns.
pub fn write_model(
    folder: &Path,
    source: &Path,
    entries: &[Entry],
    shard_bytes: u64,
    write: impl FnMut(&Entry, &mut TensorSink<'_>) -> Result<()>,
) -> Result<Vec<Written>> {
    std::fs::create_dir_all(folder).map_err(|error| Error::io("create", folder, &error))?;
    let written = write_sharded(folder, entries, shard_bytes, write)?;
    companions::copy(source, folder, ConfigChanges::for_weights(entries))?;
    Ok(written)
}
