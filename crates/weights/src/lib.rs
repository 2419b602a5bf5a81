//! Model weights on disk: safetensors in and out, and the files that travel with them.
//!
//! [`ModelFiles`] opens a Hugging Face folder (one file, or shards and their index) as memory maps.
//! It gives tensors by name, converted during reading, and dequantized if the checkpoint is
//! quantized in a format of `readers`. A folder may list the tensors of a GGUF file instead
//! (`gguf`). [`write_file`] and [`write_sharded`] stream tensors back,
//! one at a time, to the same layout; `RandomAccessWriter` accepts them in any order.
//! [`sidecar_files`] copies config.json and the tokenizer to new weights. [`Summary`] describes a
//! folder from headers alone, which [`RangeReader`] can read remotely. `model` defines the meaning
//! of names and the required shapes; `adapter` defines PEFT names.
//!
//! Headers are parsed here and not by the `safetensors` crate. A weights file is untrusted input,
//! and each malformation gets an error with file, tensor, the value found and the values accepted.

mod atomic_dir;
mod class_names;
mod digest;
mod files;
mod gguf;
mod header;
mod identity;
mod index;
mod no_weights;
mod output_file;
mod packed;
mod packing;
mod patched_files;
mod quantized;
mod random_access_writer;
pub mod readers;
mod resized_embedding;
mod retained_tensors;
mod shard;
pub mod sidecar_files;
mod stack;
mod stored_parts;
mod summary;
mod tensor_info;
mod tensor_names;
pub mod text_config;
mod transpose;
mod unfinished;
mod unstack;
mod write;

use finetune_core::{error, gguf_names, locks, recipe, threads, tokenizer_names, units};
use finetune_runtime::{quant, runtime, stored_dtype};

pub use atomic_dir::AtomicDir;
pub use class_names::ClassNames;
pub use digest::DigestTask;
pub use files::ModelFiles;
pub use finetune_runtime::stored_dtype::{StoredDtype, StoredElement};
pub use gguf::GGUF_INDEX;
pub use gguf::{GgufFile, GgufIndex, GgufParameter, GgufTensor, GgufValue, RowRun, encode_blocks, rows_of};
pub use identity::QUANTIZED_FROM;
pub use identity::{ConfigDifference, ModelIdentity};
pub use output_file::{OutputFile, OutputKind};
pub use patched_files::PatchedFiles;
pub use quantized::QuantizedTensor;
pub use random_access_writer::{PlannedFile, RandomAccessWriter};
pub use resized_embedding::ResizedEmbedding;
pub use retained_tensors::RetainedTensors;
pub use retained_tensors::is_further;
pub use shard::{RangeReader, RemoteRange};
pub use stack::{Stack, StackPart, StackParts};
pub use summary::{Summary, Tally, TensorGroup, summary, summary_of};
pub use tensor_info::TensorInfo;
pub use tensor_names::NameRules;
pub use tensor_names::output_dtype;
pub use unfinished::{
    discard_unfinished, is_alive, is_there, names_in, sweep, sync_folder, sync_tree, temporary,
};
pub use write::{Metadata, TensorSink, WriteEntry, Written, split, write_file, write_sharded, write_text};
pub use write::{
    miswritten, shard_names, split_groups, write_file_with, write_index, write_index_of, write_shards,
};

/// The weights of a model that is not sharded.
pub const MODEL_FILE: &str = "model.safetensors";
/// The map from tensors to shards of a sharded model.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// The embedding, in every family; a tied model may store it under [`LM_HEAD`] alone.
pub const EMBED_TOKENS: &str = "model.embed_tokens.weight";
/// The output head, in every family; a tied model usually does not store it.
pub const LM_HEAD: &str = "lm_head.weight";
/// The table of per-layer inputs, in every family that has one.
pub const EMBED_PER_LAYER: &str = "model.embed_tokens_per_layer.weight";
/// The key of config.json that counts instead of `tie_word_embeddings` in LFM2's files.
pub const TIE_EMBEDDING: &str = "tie_embedding";
/// The module of [`EMBED_TOKENS`].
pub const EMBED_TOKENS_MODULE: &str = "model.embed_tokens";
/// The module of [`EMBED_PER_LAYER`].
pub const EMBED_PER_LAYER_MODULE: &str = "model.embed_tokens_per_layer";
/// The module of [`LM_HEAD`].
pub const LM_HEAD_MODULE: &str = "lm_head";

/// The ends of the names of buffers in old checkpoints: rotary frequencies, and the masks of
/// GPT-NeoX.
const OLD_BUFFERS: [&str; 3] = ["rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"];

/// Returns whether a tensor is a buffer which old checkpoints contain and no loader reads.
pub fn is_old_buffer(name: &str) -> bool {
    OLD_BUFFERS.iter().any(|end| name.ends_with(end))
}
