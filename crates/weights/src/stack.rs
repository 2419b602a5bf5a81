//! Tensors that hold the matrices of several layers one after the other, as some checkpoints store
//! the experts of a block.
//!
//! finetune has a parameter for each layer. Reading takes each layer's part of the stored tensor
//! ([`super::ModelFiles::unstack`]); writing gives consecutive parts the name and shape of the
//! stack.

use std::sync::Arc;

/// A stored tensor of several parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Its name in the checkpoint.
    pub name: String,
    /// Its shape in the checkpoint; empty if it is a single tensor under another name.
    pub shape: Vec<usize>,
    /// True if it holds the transpose of each part, a matrix.
    pub transposed: bool,
}

/// A stored tensor and the parts that it holds one after the other.
#[derive(Debug)]
pub struct StackParts {
    /// The stored tensor.
    pub stack: Arc<Stack>,
    /// The parts, in their order.
    pub parts: Vec<StackPart>,
}

/// A part of a stored tensor: a parameter.
#[derive(Debug)]
pub struct StackPart {
    /// The name of the parameter.
    pub name: String,
    /// The shape of the parameter.
    pub shape: Vec<usize>,
}
