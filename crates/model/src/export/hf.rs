//! A Hugging Face model folder: weights, config.json, tokenizer.
//!
//! The weights come tensor by tensor from the caller and go through [`write_sharded`]; everything else is the source
//! model's, but the tokenizer where training added tokens. [`export`] is the caller whose weights are the
//! source's own.

use std::ops::Range;
use std::path::{Path, PathBuf};

use half::f16;

use crate::error::{Error, Result};
use crate::recipe::enums::Dtype;
use crate::weights::sidecar_files;
use crate::weights::sidecar_files::{ConfigChanges, TokenizerFiles};
use crate::weights::{
    AtomicDir, ModelFiles, StoredDtype, TensorSink, WriteEntry, Written, split, write_index_of,
    write_sharded, write_shards,
};

/// The size that transformers shards at, in bytes.
pub const SHARD_BYTES: u64 = 5_000_000_000;
/// Elements (or bytes that are only copied) of a tensor in memory at once.
const BLOCK: usize = 1 << 22;

/// Writes a model to `folder`, which is made if need be: `entries` as its weights, in that order, and the companions
/// of the model in `source`, with `tokenizer` in place of its own if there is one. `write` is called once for each entry to give its values to the sink. Weights go first,
/// config.json last, so a folder with one is complete.
///
/// # Errors
/// The user's: `folder` holds other weights, or `source` has no valid config.json. Storage: the disk is full or
/// fails. What `write` returns.
pub fn write_model(
    folder: &Path,
    source: &Path,
    tokenizer: Option<&TokenizerFiles>,
    entries: &[WriteEntry],
    shard_bytes: u64,
    write: impl FnMut(&WriteEntry, &mut TensorSink<'_>) -> Result<()>,
) -> Result<Vec<Written>> {
    std::fs::create_dir_all(folder).map_err(|error| Error::io("create", folder, &error))?;
    let written = write_sharded(folder, entries, shard_bytes, write)?;
    sidecar_files::copy(source, tokenizer, folder, ConfigChanges::for_weights(entries))?;
    Ok(written)
}

/// A model that several ranks write together, each some shards of it.
#[derive(Debug)]
pub struct ExportParts {
    shards: Vec<Vec<WriteEntry>>,
    /// The shards of each rank.
    of_rank: Vec<Range<usize>>,
    source: PathBuf,
    tokenizer: Option<TokenizerFiles>,
    /// True if embedding and head are two tables, though `source` ties them.
    untied: bool,
}

impl ExportParts {
    /// A model of the tensors in `shares`, by rank; what stands beside them is that of `source`, with `tokenizer` in
    /// place of its own if there is one. `untied`: embedding and head are two tables, though `source` ties them.
    pub fn new(
        shares: Vec<Vec<WriteEntry>>,
        source: PathBuf,
        tokenizer: Option<TokenizerFiles>,
        untied: bool,
    ) -> Self {
        let (mut shards, mut of_rank) = (Vec::new(), Vec::new());
        for share in shares {
            let start = shards.len();
            if !share.is_empty() {
                shards.extend(split(&share, SHARD_BYTES));
            }
            of_rank.push(start..shards.len());
        }
        ExportParts { shards, of_rank, source, tokenizer, untied }
    }

    /// Writes the tensors of a rank's share to the folder that all ranks write to, which is there; `write` as in [`write_model`].
    ///
    /// # Errors
    /// As [`write_model`].
    pub fn write(
        &self,
        rank: usize,
        folder: &Path,
        write: impl FnMut(&WriteEntry, &mut TensorSink<'_>) -> Result<()>,
    ) -> Result<Vec<Written>> {
        write_shards(folder, &self.shards, self.of_rank[rank].clone(), write)
    }

    /// Writes index, config.json and tokenizer beside the tensors of all ranks; returns the index.
    ///
    /// # Errors
    /// As [`write_model`].
    pub fn write_rest(&self, folder: &Path) -> Result<Vec<Written>> {
        let index = write_index_of(folder, &self.shards)?;
        let entries: Vec<WriteEntry> = self.shards.iter().flatten().cloned().collect();
        let changes = ConfigChanges::for_weights(&entries).untied(self.untied);
        sidecar_files::copy(&self.source, self.tokenizer.as_ref(), folder, changes)?;
        Ok(index.into_iter().collect())
    }
}

/// Writes the model of `files`, with everything that stands beside it, to the new folder `output`: shards of at most
/// `shard_bytes`, weights as `dtype`, quantized ones dequantized. The folder appears whole or not at all. Returns the size of the weights.
///
/// # Errors
/// The user's: `output` is not empty, a value does not fit `dtype`, or there is no valid config.json. Storage: the
/// disk is full or fails; nothing is left of `output` then.
pub fn export(files: &ModelFiles, output: &Path, dtype: Dtype, shard_bytes: u64) -> Result<u64> {
    let entries: Vec<WriteEntry> = files
        .tensors()
        .map(|(name, info)| WriteEntry {
            name: name.into(),
            dtype: info.dtype.stored_as(dtype),
            shape: info.shape.clone(),
        })
        .collect();
    let folder = AtomicDir::create(output)?;
    let written =
        write_sharded(folder.path(), &entries, shard_bytes, |entry, sink| copy_tensor(files, entry, sink))?;
    let changes = ConfigChanges::for_weights(&entries).untied(files.head_is_apart());
    sidecar_files::copy(files.folder(), None, folder.path(), changes)?;
    folder.commit()?;
    Ok(written.iter().map(|file| file.bytes).sum())
}

fn copy_tensor(files: &ModelFiles, entry: &WriteEntry, sink: &mut TensorSink<'_>) -> Result<()> {
    let info = files.require(&entry.name)?;
    if info.dtype == entry.dtype && files.quantized(&entry.name)?.is_none() {
        for block in files.bytes(&entry.name)?.chunks(BLOCK) {
            sink.write_bytes(block)?;
            files.discard(&entry.name);
        }
        return Ok(());
    }
    let mut values = vec![0f32; BLOCK.min(info.elements())];
    for start in (0..info.elements()).step_by(BLOCK) {
        let values = &mut values[..BLOCK.min(info.elements() - start)];
        files.read_part(&entry.name, start, values)?;
        if entry.dtype == StoredDtype::F16
            && let Some(value) = values.iter().find(|v| v.is_finite() && f16::from_f32(**v).is_infinite())
        {
            return Err(Error::user(format!("cannot store tensor `{}` as f16", entry.name))
                .because(format!("it holds {value}; the largest number of f16 is 65504"))
                .hint("write `--type bf16` or `--type f32`"));
        }
        sink.write_values(values)?;
        files.discard(&entry.name);
    }
    Ok(())
}
