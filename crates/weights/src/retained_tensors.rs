//! The tensors of a checkpoint that finetune does not use: towers for images and audio, and blocks
//! that predict further tokens.
//!
//! Models that finetune writes keep them byte for byte. If the checkpoint is of an image-text
//! model, its text tensors also keep their names of the files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use super::tensor_names::tower;
use super::{ClassNames, EMBED_TOKENS, LM_HEAD, Stack, TensorInfo, TensorSink, WriteEntry};
use crate::error::{Error, Result};
use crate::units;

/// Number of bytes in memory at once.
const BLOCK: usize = 1 << 22;

/// Tensors that a written model has as its base has them, and the names of the others there.
#[derive(Debug, Clone, Default)]
pub struct RetainedTensors {
    /// By their names in the files.
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    /// The names in the files of tensors with another name in finetune, by that name.
    pub(super) stored_names: BTreeMap<String, String>,
    /// True if the written model is the whole image-text model.
    pub(super) whole: bool,
    /// The names of the other tensors in written models; `None`: the usual ones.
    pub(super) class: Option<&'static ClassNames>,
}

impl RetainedTensors {
    /// Returns whether a written model is the whole image-text model, with the names of its files.
    pub fn is_whole(&self) -> bool {
        self.whole
    }

    /// Returns the same tensors, with names of another class for those of the model.
    #[must_use]
    pub fn named_by(self, class: &'static ClassNames) -> Self {
        RetainedTensors { class: Some(class), ..self }
    }

    /// Returns the number of tensors.
    pub fn count(&self) -> usize {
        self.tensors.len()
    }

    /// Returns the bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|info| info.range.len() as u64).sum()
    }

    /// Returns whether one of them belongs to the blocks that predict further tokens.
    pub(super) fn predict_further(&self) -> bool {
        self.tensors.keys().any(|name| is_further(name))
    }

    /// Returns their number, bytes and parts of the model, such as "2 tensors (96 B:
    /// vision_tower)".
    pub fn describe(&self) -> String {
        let towers: BTreeSet<String> = self.tensors.keys().map(|name| tower(name)).collect();
        let towers: Vec<String> = towers.into_iter().collect();
        let count = units::exact(self.count(), "tensor");
        format!("{count} ({}: {})", units::bytes(self.bytes()), towers.join(", "))
    }

    /// Returns the entries of all tensors, as the files have them.
    pub fn entries(&self) -> Vec<WriteEntry> {
        self.tensors.iter().map(entry).collect()
    }

    /// Returns the entries of the tensors in the file `path`.
    pub fn entries_of(&self, path: &Path) -> Vec<WriteEntry> {
        self.tensors.iter().filter(|(_, info)| &*info.file == path).map(entry).collect()
    }

    /// Returns the entry of a text tensor under its name in the files.
    #[must_use]
    pub fn named_as_stored(&self, entry: WriteEntry) -> WriteEntry {
        let stored = entry.stored_name();
        let own = || self.class.map(|class| class.stored(stored)).filter(|name| name != stored);
        let Some(name) = self.stored_name(stored).filter(|_| self.whole).or_else(own) else { return entry };
        let one = Stack { name: String::new(), shape: Vec::new(), transposed: false };
        let stack = entry.stack.as_deref().unwrap_or(&one);
        WriteEntry { stack: Some(Arc::new(Stack { name, ..stack.clone() })), ..entry }
    }

    /// Returns the name of a tensor in the files if it is another. A head that is not stored
    /// gets the name beside the embedding.
    fn stored_name(&self, name: &str) -> Option<String> {
        let beside = || self.stored_names.get(EMBED_TOKENS).filter(|_| name == LM_HEAD);
        self.stored_names.get(name).cloned().or_else(|| head_beside(beside()?))
    }

    /// Writes the tensor of `entry` if it is one of these. Returns false if it is not.
    ///
    /// # Errors
    /// The file cannot be read any more. Storage: the disk is full or fails.
    pub fn write(&self, entry: &WriteEntry, sink: &mut TensorSink<'_>) -> Result<bool> {
        let Some(info) = self.tensors.get(&entry.name) else { return Ok(false) };
        let failed = |error| Error::io("read weights", &info.file, &error);
        let file = File::open(&info.file).map_err(failed)?;
        let mut block = vec![0u8; BLOCK.min(info.range.len())];
        for start in info.range.clone().step_by(BLOCK) {
            let block = &mut block[..BLOCK.min(info.range.end - start)];
            file.read_exact_at(block, start as u64).map_err(failed)?;
            sink.write_bytes(block)?;
        }
        Ok(true)
    }
}

/// Returns whether a tensor belongs to the blocks that predict further tokens.
pub fn is_further(name: &str) -> bool {
    name.split('.').any(|part| part == "mtp" || part.starts_with("mtp_"))
}

fn entry((name, info): (&String, &TensorInfo)) -> WriteEntry {
    WriteEntry { name: name.clone(), dtype: info.dtype, shape: info.shape.clone(), stack: None }
}

/// Returns the name of the head beside the embedding `embed`, as transformers' classes have it.
fn head_beside(embed: &str) -> Option<String> {
    let front = embed.strip_suffix("embed_tokens.weight")?;
    let front = front.strip_suffix("model.").filter(|rest| rest.is_empty() || rest.ends_with('.'));
    Some(format!("{}{LM_HEAD}", front.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_is_beside_the_text_model() {
        for (embed, head) in [
            ("model.embed_tokens.weight", "lm_head.weight"),
            ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
            ("model.language_model.embed_tokens.weight", "lm_head.weight"),
            ("model.text_model.embed_tokens.weight", "lm_head.weight"),
        ] {
            assert_eq!(head_beside(embed).as_deref(), Some(head), "{embed}");
        }
    }
}
