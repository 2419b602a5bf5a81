//! What is saved of a run at a step: a rank's share of the trained tensors, and how they become files.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use half::bf16;

use crate::error::Result;
use crate::weights::{TensorSink, Written};

/// One trainable tensor as it was at a step.
#[derive(Debug, Clone)]
pub struct SnapshotTensor {
    /// Name of the parameter.
    pub name: String,
    /// Shape of the parameter.
    pub shape: Vec<usize>,
    /// The values in row-major order.
    pub values: WeightValues,
    /// What the optimizer keeps beside it; nothing where only the weights are wanted.
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
    /// The values in f32.
    pub fn to_f32(&self) -> Cow<'_, [f32]> {
        match self {
            WeightValues::F32(values) => Cow::Borrowed(values),
            WeightValues::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
        }
    }

    /// Gives them to a tensor of a file, rounded to its type.
    ///
    /// # Errors
    /// As [`TensorSink::write_values`].
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
    /// Its values as they were at the step.
    pub values: SavedValues,
}

/// Values of a state as the optimizer keeps them.
#[derive(Debug, Clone)]
pub enum SavedValues {
    /// One f32 for each value.
    F32(Vec<f32>),
    /// As codes with one scale per block.
    Int8 {
        /// One per value.
        codes: Vec<u8>,
        /// One per block.
        absmax: Vec<f32>,
    },
}

/// Who writes what of a folder that ranks fill together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotPart {
    /// The tensors of this rank.
    Tensors(usize),
    /// What stands beside the tensors, when all of them are there: an index, a configuration, a tokenizer.
    Rest,
}

/// Writes the weights of a snapshot into a folder, in the form that the run leaves (an adapter, a model). Returns what
/// it wrote; of [`SnapshotPart::Rest`] that may be a part.
pub type WriteWeights =
    Arc<dyn Fn(&Path, &[SnapshotTensor], SnapshotPart) -> Result<Vec<Written>> + Send + Sync>;
