//! Exports a Hugging Face model folder: weights, config.json, tokenizer.
//!
//! The caller supplies the weights tensor by tensor, and [`write_sharded`] writes them. All other
//! files are the source model's, except the tokenizer if training added tokens. [`export`] is the
//! caller that copies the source's weights.

use std::ops::Range;
use std::path::{Path, PathBuf};

use half::f16;

use crate::error::{Error, Result};
use crate::recipe::enums::Dtype;
use crate::weights::sidecar_files;
use crate::weights::sidecar_files::{ConfigChanges, TokenizerFiles};
use crate::weights::{
    AtomicDir, ModelFiles, RetainedTensors, StoredDtype, TensorInfo, TensorSink, WriteEntry, Written,
    output_dtype, split, write_index_of, write_sharded, write_shards,
};

/// The shard size of transformers, in bytes.
pub const SHARD_BYTES: u64 = 5_000_000_000;
/// Number of elements (or bytes, if only copied) of a tensor in memory at once.
const BLOCK: usize = 1 << 22;

/// Writes a model to `folder`, which it creates if needed: `entries` as its weights, in that order,
/// and the sidecar files of the model in `source`. A given `tokenizer` replaces its own. `write` is
/// called once for each entry and passes its values to the sink. Weights go first, config.json
/// last, so a folder that has one is complete.
///
/// # Errors
/// User: `folder` holds other weights, or `source` has no valid config.json. Storage: the disk is
/// full or fails. Errors of `write`.
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

/// A model that several ranks write together, with some shards each.
#[derive(Debug)]
pub struct ExportParts {
    shards: Vec<Vec<WriteEntry>>,
    /// The shards of each rank.
    of_rank: Vec<Range<usize>>,
    source: PathBuf,
    tokenizer: Option<TokenizerFiles>,
    /// True if embedding and head are two tables, though `source` ties them.
    untied: bool,
    /// The tensors of `source` that the model keeps.
    retained: RetainedTensors,
}

impl ExportParts {
    /// Plans a model of the tensors in `shares`, by rank. Its other files are those of `source`,
    /// and a given `tokenizer` replaces its own. `untied` means that embedding and head are two
    /// tables, though `source` ties them. Rank 0 writes the tensors that are `retained`.
    pub fn new(
        shares: Vec<Vec<WriteEntry>>,
        source: PathBuf,
        tokenizer: Option<TokenizerFiles>,
        untied: bool,
        retained: RetainedTensors,
    ) -> Self {
        let (mut shards, mut of_rank) = (Vec::new(), Vec::new());
        for (rank, share) in shares.into_iter().enumerate() {
            let start = shards.len();
            let mut share: Vec<WriteEntry> =
                share.into_iter().map(|entry| retained.named_as_stored(entry)).collect();
            if rank == 0 {
                share.extend(retained.entries());
            }
            if !share.is_empty() {
                shards.extend(split(&share, SHARD_BYTES));
            }
            of_rank.push(start..shards.len());
        }
        ExportParts { shards, of_rank, source, tokenizer, untied, retained }
    }

    /// Writes the tensors of a rank's share to the existing folder of all ranks; `write` as in
    /// [`write_model`].
    ///
    /// # Errors
    /// The same as for [`write_model`].
    pub fn write(
        &self,
        rank: usize,
        folder: &Path,
        mut write: impl FnMut(&WriteEntry, &mut TensorSink<'_>) -> Result<()>,
    ) -> Result<Vec<Written>> {
        write_shards(folder, &self.shards, self.of_rank[rank].clone(), |entry, sink| {
            if self.retained.write(entry, sink)? { Ok(()) } else { write(entry, sink) }
        })
    }

    /// Writes index, config.json and tokenizer beside the tensors of all ranks. Returns the index.
    ///
    /// # Errors
    /// The same as for [`write_model`].
    pub fn write_rest(&self, folder: &Path) -> Result<Vec<Written>> {
        let index = write_index_of(folder, &self.shards)?;
        let entries: Vec<WriteEntry> = self.shards.iter().flatten().cloned().collect();
        let changes = ConfigChanges::for_weights(&entries).untied(self.untied).with_retained(&self.retained);
        sidecar_files::copy(&self.source, self.tokenizer.as_ref(), folder, changes)?;
        Ok(index.into_iter().collect())
    }
}

/// Writes the model of `files`, with all other files of its folder, to the new folder `output`:
/// shards of at most `shard_bytes`, weights as `dtype`, quantized ones dequantized. The folder
/// appears completely or not at all. Returns the size of the weights in bytes.
///
/// # Errors
/// User: `output` is not empty, a value does not fit `dtype`, or config.json is missing or invalid.
/// Storage: the disk is full or fails; `output` is then removed.
pub fn export(files: &ModelFiles, output: &Path, dtype: Dtype, shard_bytes: u64) -> Result<u64> {
    let entry = |(name, info): (&str, &TensorInfo)| WriteEntry {
        name: name.into(),
        dtype: output_dtype(name, info.dtype, dtype),
        shape: info.shape.clone(),
        stack: info.stack.clone(),
    };
    let unused = files.retained();
    let entry = |tensor| unused.named_as_stored(entry(tensor));
    let mut entries: Vec<WriteEntry> = files.tensors().map(entry).collect();
    // The parts of a stack in their stored order.
    let start = |entry: &WriteEntry| files.info(&entry.name).map_or(0, |info| info.range.start);
    entries.sort_by_cached_key(|entry| (entry.stored_name().to_owned(), start(entry)));
    let changes = ConfigChanges::for_weights(&entries).untied(files.head_is_apart()).with_retained(unused);
    entries.extend(unused.entries());
    let folder = AtomicDir::create(output)?;
    let written = write_sharded(folder.path(), &entries, shard_bytes, |entry, sink| {
        if unused.write(entry, sink)? { Ok(()) } else { copy_tensor(files, entry, sink) }
    })?;
    sidecar_files::copy(files.folder(), None, folder.path(), changes)?;
    folder.commit()?;
    Ok(written.iter().map(|file| file.bytes).sum())
}

fn copy_tensor(files: &ModelFiles, entry: &WriteEntry, sink: &mut TensorSink<'_>) -> Result<()> {
    let info = files.require(&entry.name)?;
    if info.dtype == entry.dtype && files.stored_format(&entry.name).is_none() {
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
