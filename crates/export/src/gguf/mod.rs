//! GGUF, the file format of llama.cpp and related programs: a model with its tokenizer and chat
//! template, or a LoRA adapter.
//!
//! The writer streams: it reads, changes, rounds and writes one block of rows at a time. Memory use
//! does not depend on the model's size. `destinations` has the names of tensors and the rows that
//! each holds, `tensors` the changes of values, `metadata`, `mixers` and `rope` the keys of a
//! `description`, `vocabulary` the tokenizer, `types` the type of each tensor, `lora` adapters.
//! `base` reads a file as a model to train on. All facts are from llama.cpp's sources, at the
//! version in llama-cpp-python 0.3.36.

mod base;
mod description;
mod destinations;
mod lora;
mod metadata;
mod mixers;
mod pretokenizer;
mod rope;
mod tensors;
mod types;
mod vocabulary;
mod writer;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

pub use base::describe_base;
pub use lora::write_adapter;
pub use types::GgufType;
pub use writer::OUTPUT;

use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::quant::BlockType;
use crate::weights::{ModelFiles, StoredDtype, encode_blocks, sidecar_files};
use types::Mixture;
use vocabulary::Vocabulary;
use writer::{MetadataValue, TensorEntry};

/// The result of an export.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exported {
    /// Size of the file.
    pub bytes: u64,
    /// Number of tensors of each type, by its name in ggml.
    pub types: BTreeMap<String, usize>,
    /// Number of tensors that fell back to another type because the mixture's blocks do not divide
    /// their rows.
    pub fallbacks: usize,
    /// The types of those tensors, by their names in ggml.
    pub fallback_types: BTreeSet<String>,
    /// The blocks that do not divide their rows, in elements.
    pub undivided_blocks: BTreeSet<usize>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl Exported {
    fn count(&mut self, kind: BlockType, wanted: BlockType) {
        *self.types.entry(kind.to_string()).or_default() += 1;
        if kind != wanted {
            self.fallbacks += 1;
            self.fallback_types.insert(kind.to_string());
            self.undivided_blocks.insert(wanted.elements());
        }
    }

    /// Returns the note on tensors that fell back to another type; `None` if none did.
    pub fn fallback_note(&self) -> Option<String> {
        let (all, types) = (self.types.values().sum::<usize>(), &self.fallback_types);
        let types = types.iter().map(String::as_str).collect::<Vec<_>>().join(" or ");
        let blocks = self.undivided_blocks.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ");
        let whose = if self.fallbacks == 1 { "its" } else { "their" };
        let got = format!("{} of {all} tensors got {types}", self.fallbacks);
        (self.fallbacks > 0).then(|| format!("{got}: {whose} rows are no multiple of {blocks}"))
    }
}

/// Writes the model `config` with the weights `files` and the tokenizer beside them to the new file
/// `output`. `name` is a display name.
///
/// # Errors
/// User: the weights are of another model, llama.cpp cannot compute it or does not have its
/// tokenizer, a value does not fit `kind`, or `output` exists. Storage: the disk is full or fails;
/// no file is left then.
pub fn write_model(
    config: &ModelConfig,
    files: &ModelFiles,
    name: &str,
    kind: GgufType,
    output: &Path,
) -> Result<Exported> {
    OUTPUT.refuse_taken(output)?;
    let planned = tensors::plan(config, files)?;
    let vocabulary = Vocabulary::read(files.folder(), config.vocab_size)?;
    let raw = sidecar_files::read_config(files.folder())?;
    let name = name_for(config, name, &vocabulary);
    let mut description = metadata::describe(config, &raw, &name, kind)?;
    for (key, values) in tensors::lists(config, files)? {
        description.metadata.set(key, MetadataValue::F32s(values));
    }
    description.metadata.append(vocabulary.metadata);
    let names = planned.iter().map(|tensor| tensor.destination.name.as_str());
    let mixture = Mixture::new(kind, config, names);
    let mut exported = Exported { notes: description.notes, ..Exported::default() };
    exported.notes.extend(vocabulary.notes);
    let mut entries = Vec::new();
    for (name, values) in &description.tensors {
        let entry = TensorEntry { name: (*name).into(), shape: vec![values.len()], kind: BlockType::F32 };
        exported.count(entry.kind, entry.kind);
        entries.push(entry);
    }
    for tensor in &planned {
        let (kind, wanted) = if tensor.is_mxfp4 {
            (BlockType::MXFP4, BlockType::MXFP4)
        } else {
            mixture.choose(&tensor.destination.name, &tensor.shape)
        };
        exported.count(kind, wanted);
        entries.push(TensorEntry {
            name: tensor.destination.name.clone(),
            shape: tensor.shape.clone(),
            kind,
        });
    }
    let (mut made, mut stored) = (description.tensors.iter(), planned.iter());
    exported.bytes = writer::write(output, &description.metadata, &entries, |entry, sink| {
        let row = entry.shape.last().copied().unwrap_or(1);
        if let Some((name, values)) = made.next() {
            return sink.write(&encode_blocks(name, values, row, entry.kind)?);
        }
        let tensor = stored.next().ok_or_else(|| Error::internal("an entry without a tensor"))?;
        tensors::read(files, tensor, |stored, values| {
            sink.write(&encode_blocks(stored, values, row, entry.kind)?)
        })
    })?;
    Ok(exported)
}

/// Returns the lossless type: the dtype of most bytes of the weights, or f32.
pub fn stored_type(files: &ModelFiles) -> GgufType {
    let bytes = |wanted: StoredDtype| -> usize {
        let of = files.tensors().filter(|(_, info)| info.dtype == wanted);
        of.map(|(_, info)| info.range.len()).sum()
    };
    let halves = [(StoredDtype::BF16, GgufType::BF16), (StoredDtype::F16, GgufType::F16)];
    let all: usize = files.tensors().map(|(_, info)| info.range.len()).sum();
    let most = halves.into_iter().find(|(dtype, _)| 2 * bytes(*dtype) > all);
    most.map_or(GgufType::F32, |(_, kind)| kind)
}

/// Returns the model's name, plus a substring if llama.cpp needs it to detect that special tokens
/// strip the white space after them.
fn name_for(config: &ModelConfig, name: &str, vocabulary: &Vocabulary) -> String {
    let (names, lower) = (config.family.gguf.stripping_names, name.to_lowercase());
    match names.first() {
        Some(part) if vocabulary.strips_right && !names.iter().any(|known| lower.contains(known)) => {
            format!("{name} ({part})")
        }
        _ => name.to_owned(),
    }
}
