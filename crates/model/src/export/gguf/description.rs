//! What `metadata` and `rope` put together: a model's description, and the refusal of what cannot be described.

use super::writer::{GgufMetadata, MetadataValue};
use crate::error::{Error, Result};

/// A model as keys, tensors that it has besides its parameters, and what a person should know of the file.
#[derive(Debug, Default)]
pub(super) struct ModelDescription {
    pub(super) metadata: GgufMetadata,
    /// Made tensors of one dimension: factors of the rotary frequencies.
    pub(super) tensors: Vec<(&'static str, Vec<f32>)>,
    pub(super) notes: Vec<String>,
}

/// Why a model cannot be a GGUF file, with the way out.
pub(super) fn refused(cause: String) -> Error {
    Error::user("cannot export this model as GGUF")
        .because(cause)
        .hint("write `--format hf` for programs that read Hugging Face folders")
}

/// A number of the model as a value of `key`.
///
/// # Errors
/// The user's: it is larger than a GGUF file can say.
pub(super) fn count(key: &str, number: usize) -> Result<MetadataValue> {
    u32::try_from(number)
        .map(MetadataValue::U32)
        .map_err(|_| refused(format!("its {key} is {number}; accepted: up to {}", u32::MAX)))
}
