//! The header entry of one tensor of a weights file.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::{Stack, StoredDtype};

/// The position, type and shape of a tensor, from the header alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The type of its elements on disk; of a quantized tensor, the type before quantization.
    pub dtype: StoredDtype,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// The file that holds it.
    pub file: Arc<Path>,
    /// Its bytes in that file; of a quantized tensor, its codes.
    pub range: Range<usize>,
    pub(super) shard: usize,
    /// The stored tensor that it is a part of, if any.
    pub stack: Option<Arc<Stack>>,
}

impl TensorInfo {
    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns whether its stack holds it column by column.
    pub(super) fn is_transposed(&self) -> bool {
        self.stack.as_ref().is_some_and(|stack| stack.transposed)
    }
}

/// A range of bytes of a file.
#[derive(Debug, Clone)]
pub(super) struct ShardRange {
    pub(super) shard: usize,
    pub(super) range: Range<usize>,
}

/// New bytes for a range of a file.
pub(super) struct Patch {
    pub(super) span: ShardRange,
    pub(super) bytes: Vec<u8>,
}
