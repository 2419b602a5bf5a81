//! GGUF files as the weights of a model.
//!
//! `header` parses the container, `file` opens a model of one or several files. `index` lists the
//! parameters under their Hugging Face names, and `blocks` decodes their values while they are
//! read; `rows` and `order` tell which rows of a tensor are those of a parameter. `encode` rounds
//! values to blocks, for exports and for new values of a file. `export::gguf` makes the list and
//! config.json from the metadata.

mod blocks;
mod encode;
mod file;
mod header;
mod index;
mod order;
mod parameter;
mod rows;
mod source;

pub(super) use blocks::BlockParts;
pub(crate) use encode::encode_blocks;
pub(crate) use file::GgufFile;
pub(crate) use header::{GgufTensor, GgufValue};
pub use index::GGUF_INDEX;
pub(crate) use index::GgufIndex;
pub(super) use index::open;
pub(crate) use parameter::GgufParameter;
pub(crate) use rows::{RowRun, rows_of};
