//! A GGUF model: one file, or the parts of a split one.

use std::collections::BTreeMap;
use std::path::Path;

use super::header::{self, GgufTensor, GgufValue};
use crate::error::{Error, Result};
use crate::gguf_names::parts_of;
use crate::shard::Shard;

/// The open files of a GGUF model.
#[derive(Debug)]
pub struct GgufFile {
    pub(super) shards: Vec<Shard>,
    keys: BTreeMap<String, GgufValue>,
    /// The tensors by name, with the position of their file.
    tensors: BTreeMap<String, (usize, GgufTensor)>,
    /// The keys of the first file with numbers or lists of f32, as tensors with a row for each
    /// number.
    lists: BTreeMap<String, GgufTensor>,
}

impl GgufFile {
    /// Opens the file `path`; if it is a part of a split model, all parts.
    ///
    /// # Errors
    /// User: a part is missing, malformed or truncated, or two have a tensor of the same name.
    pub fn open(path: &Path) -> Result<Self> {
        let (mut shards, mut keys, mut tensors) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        let mut lists = BTreeMap::new();
        for part in parts_of(path) {
            let mut shard = Shard::map(&part)?;
            let header = header::parse(shard.whole(), &part)?;
            shard.data_bytes = header.tensors.iter().map(|tensor| tensor.range.len() as u64).sum();
            for tensor in header.tensors {
                let name = tensor.name.clone();
                if tensors.insert(name.clone(), (shards.len(), tensor)).is_some() {
                    return Err(Error::user(format!("cannot read weights {}", part.display()))
                        .because(format!("another part of the model has tensor `{name}` too")));
                }
            }
            // The first part has the keys of the model.
            if shards.is_empty() {
                keys = header.keys;
                lists = header.lists.into_iter().map(|list| (list.name.clone(), list)).collect();
            }
            shards.push(shard);
        }
        Ok(GgufFile { shards, keys, tensors, lists })
    }

    /// Returns its first file.
    pub fn path(&self) -> &Path {
        self.shards.first().map_or(Path::new(""), |shard| &shard.path)
    }

    /// Returns the value of a key.
    pub fn key(&self, key: &str) -> Option<&GgufValue> {
        self.keys.get(key)
    }

    /// Returns all keys.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.keys.keys().map(String::as_str)
    }

    /// Returns a tensor.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.tensors.get(name).map(|(_, tensor)| tensor)
    }

    /// Returns whether it has a tensor, a number or a list of numbers of this name.
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// Returns the length of a list of numbers in f32; `None` for one number and for other keys.
    pub fn list_len(&self, key: &str) -> Option<usize> {
        let is_list = matches!(self.key(key), Some(GgufValue::List(_)));
        self.lists.get(key).filter(|_| is_list)?.shape.first().copied()
    }

    /// Returns whether a key is one number in f32.
    pub fn is_number(&self, key: &str) -> bool {
        self.lists.contains_key(key) && self.list_len(key).is_none()
    }

    /// Returns all tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = &GgufTensor> {
        self.tensors.values().map(|(_, tensor)| tensor)
    }

    /// Returns a tensor, a number or a list of numbers with the position of its file.
    pub(super) fn find(&self, name: &str) -> Option<(usize, &GgufTensor)> {
        let tensor = self.tensors.get(name).map(|(shard, tensor)| (*shard, tensor));
        tensor.or_else(|| self.lists.get(name).map(|list| (0, list)))
    }

    /// Returns the values of a small tensor.
    pub fn values(&self, name: &str) -> Option<Vec<f32>> {
        let (shard, tensor) = self.find(name)?;
        let mut values = vec![0.0; tensor.shape.iter().product()];
        tensor.kind.dequantize(self.shards.get(shard)?.bytes(&tensor.range)?, &mut values);
        Some(values)
    }

    /// Returns the error for a model that finetune cannot use.
    pub fn refused(&self, cause: impl Into<String>) -> Error {
        Error::user(format!("cannot use the model of {}", self.path().display()))
            .because(cause.into())
            .hint("give the Hugging Face model that the GGUF file was made from")
    }
}
