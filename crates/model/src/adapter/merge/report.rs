//! merge.json: the sources of a merged model.
//!
//! Weights do not show that they already contain an adapter, and a second merge breaks the model
//! without any sign. So a merged folder records its adapters, including earlier merges of its base,
//! and a merge checks the record first.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::adapter::{SavedAdapter, WEIGHTS_FILE};
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::weights::{self, ModelFiles};

/// The name of the file.
pub const MERGE_FILE: &str = "merge.json";

/// The contents of merge.json for a merge.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MergeRecord {
    /// The base: its folder.
    pub base: String,
    /// A description of the base values to which the adapter was added.
    pub base_values: String,
    /// The adapter: its folder.
    pub adapter: String,
    /// The BLAKE3 digest of its adapter_model.safetensors, in hex.
    pub adapter_blake3: String,
    /// The dtype of most of the weights, as config.json names it.
    pub dtype: Option<String>,
    /// True if the weights are quantized to the format of the base.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub requantized: bool,
    /// The result of the comparison of the merged model with base and adapter.
    pub certificate: Option<Value>,
    /// The earlier merges of the base, first to last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<MergeRecord>,
}

impl MergeRecord {
    /// Reads the record of the model in `folder`. Returns `None` if it does not come from a merge.
    ///
    /// # Errors
    /// User: the file is not a record. Storage: it cannot be read.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(MERGE_FILE);
        if !path.exists() {
            return Ok(None);
        }
        let text = input_file::read("read", &path)?;
        let record = serde_json::from_slice(&text);
        record.map(Some).map_err(|error| {
            Error::user(format!("cannot read {}", path.display()))
                .because(error.to_string())
                .hint("remove the file if no adapter was ever merged into this model")
        })
    }

    /// Writes the record into `folder`.
    ///
    /// # Errors
    /// Storage: the disk is full or fails.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(|error| {
            Error::internal("cannot write a record of the merge").because(error.to_string())
        })?;
        weights::write_text(&folder.join(MERGE_FILE), &format!("{text}\n"))?;
        Ok(())
    }

    /// Returns this record after the earlier ones, first to last.
    fn chain(mut self) -> Vec<Self> {
        let mut chain = std::mem::take(&mut self.earlier);
        chain.push(self);
        chain
    }
}

/// Returns the earlier merges of the model `base`, and the digest of the adapter to be merged next.
///
/// # Errors
/// User: the adapter is among the earlier merges.
pub(super) fn merges_before(base: &ModelFiles, adapter: &SavedAdapter) -> Result<(Vec<MergeRecord>, String)> {
    let path = adapter.folder().join(WEIGHTS_FILE);
    let mut hasher = blake3::Hasher::new();
    let file = input_file::open("read", &path)?;
    hasher.update_reader(file).map_err(|error| Error::io("read", &path, &error))?;
    let digest = hasher.finalize().to_hex().to_string();
    // The record of a GGUF file is beside it.
    let source = base.source();
    let folder = if base.is_gguf() { source.parent().unwrap_or(source) } else { base.folder() };
    let chain = MergeRecord::read(folder)?.map(MergeRecord::chain).unwrap_or_default();
    match chain.iter().find(|record| record.adapter_blake3 == digest) {
        None => Ok((chain, digest)),
        Some(record) => Err(Error::user(format!(
            "cannot merge adapter {} into {}",
            adapter.folder().display(),
            source.display()
        ))
        .because(format!("the adapter is already merged: {MERGE_FILE} of the model names {}", record.adapter))
        .hint(format!("use the model as it is, or give its base as `--model`: {}", record.base))),
    }
}
