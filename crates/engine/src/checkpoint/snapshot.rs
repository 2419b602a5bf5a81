//! The snapshot of a run at a step: a rank's share of the trained tensors, to be written to files.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use half::bf16;

use crate::error::Result;
use crate::weights::{TensorSink, Written};

/// One trainable tensor at a step.
#[derive(Debug, Clone)]
pub struct SnapshotTensor {
    /// Name of the parameter.
    pub name: String,
    /// Shape of the parameter.
    pub shape: Vec<usize>,
    /// The values in row-major order.
    pub values: WeightValues,
    /// The optimizer state of the tensor; empty if only the weights are needed.
    pub state: Vec<SavedState>,
}

/// Values of a trainable tensor, as the optimizer updates them.
#[derive(Debug, Clone)]
pub enum WeightValues {
    /// Parameters in f32, or f32 masters.
    F32(Vec<f32>),
    /// Parameters in bf16 without masters.
    Bf16(Vec<bf16>),
}

impl WeightValues {
    /// Returns the values in f32.
    pub fn to_f32(&self) -> Cow<'_, [f32]> {
        match self {
            WeightValues::F32(values) => Cow::Borrowed(values),
            WeightValues::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
        }
    }

    /// Writes the values to a tensor of a file, rounded to its type.
    ///
    /// # Errors
    /// The same as for [`TensorSink::write_values`].
    pub fn write(&self, sink: &mut TensorSink<'_>) -> Result<()> {
        match self {
            WeightValues::F32(values) => sink.write_values(values),
            WeightValues::Bf16(values) => sink.write_values(values),
        }
    }
}

/// One tensor of the optimizer's state beside a parameter.
#[derive(Debug, Clone)]
pub struct SavedState {
    /// Its name, such as `exp_avg`.
    pub name: &'static str,
    /// Its values at the step.
    pub values: SavedValues,
}

/// Values of a state, in the form in which the optimizer keeps them.
#[derive(Debug, Clone)]
pub enum SavedValues {
    /// One f32 for each value.
    F32(Vec<f32>),
    /// Codes with one scale per block.
    Int8 {
        /// One per value.
        codes: Vec<u8>,
        /// One per block.
        absmax: Vec<f32>,
    },
}

/// The part of a folder that a rank writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotPart {
    /// The tensors of this rank.
    Tensors(usize),
    /// The files beside the tensors, after all tensors are written: an index, a configuration, a
    /// tokenizer.
    Rest,
}

/// Writes the weights of a snapshot into a folder, in the form of the run's result (an adapter, a
/// model). Returns the files written; for [`SnapshotPart::Rest`] it may omit some.
pub type WriteWeights =
    Arc<dyn Fn(&Path, &[SnapshotTensor], SnapshotPart) -> Result<Vec<Written>> + Send + Sync>;
