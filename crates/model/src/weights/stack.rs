//! Tensors that hold the matrices of several layers one after the other, as some checkpoints store
//! the experts of a block.
//!
//! finetune has a parameter for each layer. Reading takes each layer's part of the stored tensor
//! ([`super::ModelFiles::unstack`]); writing gives consecutive parts the name and shape of the
//! stack.

use super::{StoredDtype, WriteEntry};
use crate::error::{Error, Result};

/// A stored tensor of several parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its shape in the checkpoint.
    pub shape: Vec<usize>,
}

/// A tensor as a header has it: one entry, or all parts of a stack.
pub(super) struct HeaderEntry<'a> {
    pub(super) name: &'a str,
    pub(super) dtype: StoredDtype,
    pub(super) shape: &'a [usize],
    pub(super) bytes: u64,
}

/// Returns the tensors that a header has for `entries`.
///
/// # Errors
/// Internal: the parts of a stack are not consecutive, or are not all of it.
pub(super) fn stored<'a>(entries: &[&'a WriteEntry]) -> Result<Vec<HeaderEntry<'a>>> {
    let of_group = |group: &[&'a WriteEntry]| {
        let bytes = group.iter().map(|entry| entry.bytes()).sum();
        let first = group[0];
        let Some(stack) = &first.stack else {
            return Ok(HeaderEntry { name: &first.name, dtype: first.dtype, shape: &first.shape, bytes });
        };
        let whole = WriteEntry { shape: stack.shape.clone(), ..first.clone() }.bytes();
        if whole != bytes {
            return Err(Error::internal(format!("cannot write tensor `{}`", stack.name))
                .because(format!("{bytes} of its {whole} bytes come one after the other")));
        }
        Ok(HeaderEntry { name: &stack.name, dtype: first.dtype, shape: &stack.shape, bytes })
    };
    entries.chunk_by(|one, next| are_of_one_stack(one, next)).map(of_group).collect()
}

/// Returns whether two entries are parts of one stack.
pub(super) fn are_of_one_stack(one: &WriteEntry, other: &WriteEntry) -> bool {
    one.stack.is_some() && one.stack == other.stack
}
