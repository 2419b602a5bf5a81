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
pub use encode::encode_blocks;
pub use file::GgufFile;
pub use header::{GgufTensor, GgufValue};
pub use index::GGUF_INDEX;
pub use index::GgufIndex;
pub(super) use index::open;
pub use parameter::GgufParameter;
pub use rows::{RowRun, rows_of};
