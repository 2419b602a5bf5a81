//! Model weights on disk: safetensors in and out, and the files that travel with them.
//!
//! [`ModelFiles`] opens a Hugging Face folder (one file, or shards and their index) as memory maps and gives
//! tensors by name, converted while they are read, dequantized where bitsandbytes quantized them; [`write_file`] and
//! [`write_sharded`] stream tensors back, one at a time, to the same layout; [`RandomAccessWriter`] takes them in any order. [`companions`] copies config.json and the
//! tokenizer beside new weights, and [`Summary`] describes a folder from headers alone, which
//! [`RangeReader`] can read where they are. What a name means, and which
//! shape it must have, is for `model` to say; PEFT names are `adapter`'s.
//!
//! Headers are parsed here and not by the `safetensors` crate: a weights file comes from a stranger, and each way
//! to be malformed gets an error that names file, tensor, the value found and the values accepted.

mod atomic_dir;
mod bitsandbytes;
mod digest;
mod files;
mod header;
mod identity;
mod index;
mod load;
mod output_file;
mod quantized;
mod random_access_writer;
mod resized_embedding;
mod shard;
pub mod sidecar_files;
mod summary;
mod tensor_info;
mod tensor_names;
pub mod text_config;
mod unfinished;
mod write;

pub use crate::stored_dtype::{StoredDtype, StoredElement};
pub use atomic_dir::AtomicDir;
pub use digest::DigestTask;
pub use files::ModelFiles;
pub use identity::{ConfigDifference, ModelIdentity, QUANTIZED_FROM};
pub use load::{Expected, load_tensor};
pub use output_file::{OutputFile, OutputKind};
pub use quantized::QuantizedTensor;
pub use random_access_writer::{PlannedFile, RandomAccessWriter};
pub use resized_embedding::ResizedEmbedding;
pub use shard::{RangeReader, RemoteRange};
pub use summary::{Summary, Tally, TensorGroup, summary, summary_of};
pub use tensor_info::TensorInfo;
pub use tensor_names::NameRules;
pub use unfinished::{
    discard_unfinished, is_alive, is_there, names_in, sweep, sync_folder, sync_tree, temporary,
};
pub use write::{
    Metadata, TensorSink, WriteEntry, Written, split, write_file, write_file_with, write_index,
    write_index_of, write_sharded, write_shards, write_text,
};

/// The weights of a model that is not sharded.
pub const MODEL_FILE: &str = "model.safetensors";
/// The map from tensors to shards of a model that is sharded.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// The embedding, in every family; a tied model may store it under [`LM_HEAD`] alone.
pub const EMBED_TOKENS: &str = "model.embed_tokens.weight";
/// The output head, in every family; a tied model usually does not store it.
pub const LM_HEAD: &str = "lm_head.weight";
/// The module of [`EMBED_TOKENS`].
pub const EMBED_TOKENS_MODULE: &str = "model.embed_tokens";
/// The module of [`LM_HEAD`].
pub const LM_HEAD_MODULE: &str = "lm_head";

/// Whether a tensor is a buffer of rotary frequencies, which old checkpoints carry and nobody reads.
pub fn is_rotary_buffer(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq")
}
