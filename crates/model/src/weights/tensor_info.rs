//! What the header of a weights file says of one tensor.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::StoredDtype;

/// Where a tensor is and what it is, from the header alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The type of its elements on disk; of a quantized tensor, the type it was quantized from.
    pub dtype: StoredDtype,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// The file that holds it.
    pub file: Arc<Path>,
    /// Its bytes in that file; of a quantized tensor, its codes.
    pub range: Range<usize>,
    pub(super) shard: usize,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}
