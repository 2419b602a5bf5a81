//! Model weights on disk: safetensors in and out, and the files that travel with them.
//!
//! [`ModelFiles`] opens a Hugging Face folder (one file, or shards and their index) as memory maps and gives
//! tensors by name, converted while they are read, dequantized where bitsandbytes quantized them; [`write_file`] and
//! [`write_sharded`] stream tensors back, one at a time, to the same layout; [`ScatteredWriter`] takes them in any order. [`companions`] copies config.json and the
//! tokenizer beside new weights, and [`Summary`] describes a folder from headers alone. What a name means, and which
//! shape it must have, is for `model` to say; PEFT names are `adapter`'s.
//!
//! Headers are parsed here and not by the `safetensors` crate: a weights file comes from a stranger, and each way
//! to be malformed gets an error that names file, tensor, the value found and the values accepted.

mod bitsandbytes;
pub mod companions;
mod dtype;
mod files;
mod grown;
mod header;
mod identity;
mod index;
mod load;
mod new_folder;
mod quantized;
mod scattered;
mod summary;
mod write;

pub use dtype::{Element, OutputDtype, StoredDtype};
pub use files::{ModelFiles, TensorInfo};
pub use grown::GrownTable;
pub use identity::{ModelIdentity, QUANTIZED_FROM};
pub use load::{Expected, load_tensor};
pub use new_folder::NewFolder;
pub use quantized::QuantizedTensor;
pub use scattered::{Planned, ScatteredWriter};
pub use summary::{Group, Summary, Tally, summary};
pub use write::{
    Entry, Metadata, TensorSink, Written, split, write_file, write_file_with, write_index, write_index_of,
    write_sharded, write_shards, write_text,
};

/// The weights of a model that is not sharded.
pub const MODEL_FILE: &str = "model.safetensors";
/// The map from tensors to shards of a model that is sharded.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// The embedding, in every family; a tied model may store it under [`LM_HEAD`] alone.
pub const EMBED_TOKENS: &str = "model.embed_tokens.weight";
/// The output head, in every family; a tied model usually does not store it.
pub const LM_HEAD: &str = "lm_head.weight";
