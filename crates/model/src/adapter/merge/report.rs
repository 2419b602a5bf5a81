//! merge.json: what a merged model was made of.
//!
//! Weights do not tell that an adapter is in them already, and adding it twice gives a broken model without a sign of
//! it. So a merged folder says which adapters it has, its own base's merges included, and a merge looks there first.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::adapter::{SavedAdapter, WEIGHTS_FILE};
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::weights;

/// The name of the file.
pub const MERGE_FILE: &str = "merge.json";

/// A merge, as merge.json has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MergeRecord {
    /// The base: its folder.
    pub base: String,
    /// What of the base the adapter was added to, in words.
    pub base_values: String,
    /// The adapter: its folder.
    pub adapter: String,
    /// The BLAKE3 digest of its adapter_model.safetensors, in hex.
    pub adapter_blake3: String,
    /// The dtype of most of the weights, as config.json names it.
    pub dtype: Option<String>,
    /// What was found when the merged model was compared with base and adapter.
    pub certificate: Option<Value>,
    /// The merges that the base had been through, first to last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<MergeRecord>,
}

impl MergeRecord {
    /// The record of the model in `folder`; none if it does not come from a merge.
    ///
    /// # Errors
    /// The user's: the file is not a record. Storage: it cannot be read.
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

    /// Writes it into `folder`.
    ///
    /// # Errors
    /// Storage: the disk is full or fails.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(|error| {
            Error::internal("cannot write a record of the merge").because(error.to_string())
        })?;
        weights::write_text(&folder.join(MERGE_FILE), &format!("{text}\n"))?;
        Ok(())
    }

    /// It and those before it, first to last.
    fn chain(mut self) -> Vec<Self> {
        let mut chain = std::mem::take(&mut self.earlier);
        chain.push(self);
        chain
    }
}

/// The merges that the model in `base` has been through, and the digest of the adapter that shall be the next.
///
/// # Errors
/// The user's: the adapter is among them.
pub(super) fn merges_before(base: &Path, adapter: &SavedAdapter) -> Result<(Vec<MergeRecord>, String)> {
    let path = adapter.folder().join(WEIGHTS_FILE);
    let mut hasher = blake3::Hasher::new();
    let file = input_file::open("read", &path)?;
    hasher.update_reader(file).map_err(|error| Error::io("read", &path, &error))?;
    let digest = hasher.finalize().to_hex().to_string();
    let chain = MergeRecord::read(base)?.map(MergeRecord::chain).unwrap_or_default();
    match chain.iter().find(|record| record.adapter_blake3 == digest) {
        None => Ok((chain, digest)),
        Some(record) => Err(Error::user(format!(
            "cannot merge adapter {} into {}",
            adapter.folder().display(),
            base.display()
        ))
        .because(format!("it has been merged into it already: {MERGE_FILE} there names {}", record.adapter))
        .hint(format!("use the model as it is, or give its base as `--model`: {}", record.base))),
    }
}
