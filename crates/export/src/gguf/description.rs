//! The description of a model that `metadata` and `rope` fill, and the error for a model that GGUF
//! cannot describe.

use super::writer::{GgufMetadata, MetadataValue};
use crate::error::{Error, Result};

/// A model as keys, tensors besides its parameters, and notes for the user.
#[derive(Debug, Default)]
pub(super) struct ModelDescription {
    pub(super) metadata: GgufMetadata,
    /// Computed one-dimensional tensors: factors of the rotary frequencies.
    pub(super) tensors: Vec<(&'static str, Vec<f32>)>,
    pub(super) notes: Vec<String>,
}

/// Returns the error for a model that cannot be a GGUF file, with a hint.
pub(super) fn refused(cause: String) -> Error {
    Error::user("cannot export this model as GGUF")
        .because(cause)
        .hint("write `--format hf` for programs that read Hugging Face folders")
}

/// Returns a size of the model as a value of `key`.
///
/// # Errors
/// User: the size does not fit into 32 bits.
pub(super) fn count(key: &str, number: usize) -> Result<MetadataValue> {
    u32::try_from(number)
        .map(MetadataValue::U32)
        .map_err(|_| refused(format!("its {key} is {number}; accepted: up to {}", u32::MAX)))
}
