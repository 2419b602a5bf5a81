//! Copies of a model's weights files in which some tensors have new values, in the formats in which
//! they are stored.
//!
//! Names, types, shapes and places of all tensors stay. So only the bytes of changed tensors are
//! written over the copy, and readers of the base read the copy too. The files are those of a
//! Hugging Face folder, or GGUF files.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use half::f16;
use serde_json::{Map, Value};

use super::shard::Shard;
use super::stored_parts::StoredParts;
use super::tensor_info::{Patch, ShardRange};
use super::transpose::transposed;
use super::write::write_failed;
use super::{
    INDEX_FILE, ModelFiles, QUANTIZED_FROM, StoredDtype, StoredElement as _, TensorInfo, Written,
    sidecar_files,
};
use crate::error::{Error, Result};
use crate::quant;

/// Bytes that are copied at once.
const BLOCK: usize = 1 << 22;

/// Copies of all weights files of a model.
pub struct PatchedFiles<'a> {
    base: &'a ModelFiles,
    folder: PathBuf,
    files: Vec<PatchedFile>,
}

struct PatchedFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl<'a> PatchedFiles<'a> {
    /// Copies the files into the existing `folder`, under their names. Headers of safetensors lose
    /// the record of the model from which the base was quantized: changed weights are not of that
    /// model.
    ///
    /// # Errors
    /// Storage: the disk is full or fails.
    pub fn copy(base: &'a ModelFiles, folder: &Path) -> Result<Self> {
        let copies = base.shards().iter().map(|shard| PatchedFile::copy(base, shard, folder));
        Ok(PatchedFiles { base, folder: folder.to_owned(), files: copies.collect::<Result<_>>()? })
    }

    /// Replaces the values of the base's tensor `name`, which has as many: quantized again if it is
    /// quantized, otherwise rounded to its type.
    ///
    /// # Errors
    /// User: a value is no finite number, or the format cannot hold it. Storage: the disk fails.
    pub fn replace(&mut self, name: &str, values: &[f32]) -> Result<()> {
        let info = self.base.require(name)?;
        if let Some(at) = quant::first_not_finite(values) {
            return Err(Error::user(format!("cannot quantize the merged `{name}`"))
                .because(format!("its value {at} is {}; accepted: finite numbers", values[at]))
                .hint("merge an earlier checkpoint: the training of the adapter diverged"));
        }
        let codes = ShardRange { shard: info.shard, range: info.range.clone() };
        let bytes = |span: &ShardRange| self.base.stored(name, span.shard, &span.range);
        let patches = match self.base.parts(name) {
            None => vec![Patch { span: codes, bytes: plain(name, info, values)? }],
            Some(StoredParts::Packed(parts)) => {
                let encoded = parts.tensor(bytes(&codes)?, bytes)?.encode(values);
                let scales = Patch { span: parts.scales.clone(), bytes: encoded.scales };
                vec![Patch { span: codes, bytes: encoded.codes }, scales]
            }
            Some(StoredParts::Quantized(parts)) => parts.requantized(name, codes, values)?,
            Some(StoredParts::Blocks(parts)) => parts.requantized(name, values, bytes)?,
        };
        self.base.check_lengths()?;
        patches.into_iter().try_for_each(|Patch { span, bytes }| {
            let target = &self.files[span.shard];
            let wrong = bytes.len() != span.range.len();
            let written = if wrong {
                Err(io::Error::other(format!("{} bytes for {}", bytes.len(), span.range.len())))
            } else {
                target.file.write_all_at(&bytes, span.range.start as u64)
            };
            written.map_err(|error| target.failed(&error))
        })
    }

    /// Copies the index, if the base has one. Returns the files with their sizes and digests.
    ///
    /// # Errors
    /// Storage: the disk is full or fails.
    pub fn finish(self) -> Result<Vec<Written>> {
        let mut paths: Vec<PathBuf> = self.files.into_iter().map(|file| file.path).collect();
        if self.base.is_indexed() {
            let (from, to) = (self.base.folder().join(INDEX_FILE), self.folder.join(INDEX_FILE));
            sidecar_files::copy_file(&from, &to)?;
            paths.push(to);
        }
        paths.into_iter().map(written).collect()
    }
}

impl PatchedFile {
    fn copy(base: &ModelFiles, shard: &Shard, folder: &Path) -> Result<Self> {
        let path = folder.join(shard.path.file_name().unwrap_or_default());
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(|error| Error::io("write", &path, &error))?;
        let whole = shard.whole();
        let mut copy = PatchedFile { path, file, bytes: whole.len() as u64 };
        let header = if base.is_gguf() { Vec::new() } else { without_original(whole)? };
        copy.put(&header)?;
        for start in (header.len()..whole.len()).step_by(BLOCK) {
            let range = start..whole.len().min(start + BLOCK);
            copy.put(&whole[range.clone()])?;
            shard.discard(&range);
        }
        base.check_lengths()?;
        Ok(copy)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &io::Error) -> Error {
        write_failed(&self.path, self.bytes, "--output", error)
    }
}

/// Returns the header of a file, at its length, without the record of the original model.
fn without_original(whole: &[u8]) -> Result<Vec<u8>> {
    let malformed = |cause: &dyn std::fmt::Display| {
        Error::internal("cannot copy the header of a weights file").because(cause.to_string())
    };
    let (length, rest) = whole.split_first_chunk::<8>().ok_or_else(|| malformed(&"it is cut short"))?;
    let json = usize::try_from(u64::from_le_bytes(*length)).ok().and_then(|length| rest.get(..length));
    let json = json.ok_or_else(|| malformed(&"it is cut short"))?;
    let mut tensors: Map<String, Value> = serde_json::from_slice(json).map_err(|error| malformed(&error))?;
    let metadata = tensors.get_mut("__metadata__").and_then(Value::as_object_mut);
    let mut text = match metadata.and_then(|texts| texts.shift_remove(QUANTIZED_FROM)) {
        None => json.to_vec(),
        Some(_) => Value::Object(tensors).to_string().into_bytes(),
    };
    if text.len() > json.len() {
        return Err(malformed(&"it became longer"));
    }
    text.resize(json.len(), b' ');
    Ok([&length[..], &text].concat())
}

/// Returns the bytes of a tensor that is stored as numbers.
fn plain(name: &str, info: &TensorInfo, values: &[f32]) -> Result<Vec<u8>> {
    if info.dtype == StoredDtype::F16
        && let Some(value) = values.iter().find(|value| f16::from_f32(**value).is_infinite())
    {
        return Err(Error::user(format!("cannot store the merged `{name}` as F16"))
            .because(format!("it holds {value}; the largest number of F16 is 65504"))
            .hint("merge without `--requantize`"));
    }
    let mut bytes = Vec::with_capacity(values.len() * info.dtype.size_bytes());
    if values.len() != info.elements() || !f32::encode(values, info.dtype, &mut bytes) {
        let (count, dtype) = (values.len(), info.dtype);
        return Err(Error::internal(format!("cannot write {count} values as `{name}` of {dtype}")));
    }
    match info.shape.as_slice() {
        &[rows, columns] if info.is_transposed() => {
            Ok(transposed(&bytes, [rows, columns], info.dtype.size_bytes()))
        }
        _ => Ok(bytes),
    }
}

fn written(path: PathBuf) -> Result<Written> {
    let failed = |error: &io::Error| Error::io("read", &path, error);
    let mut hasher = blake3::Hasher::new();
    let file = File::open(&path).map_err(|error| failed(&error))?;
    let bytes = file.metadata().map_err(|error| failed(&error))?.len();
    hasher.update_reader(file).map_err(|error| failed(&error))?;
    Ok(Written { bytes, digest: hasher.finalize(), path })
}
