//! Description of a parameter: its name, its shape and the way it trains.

use candle_core::DType;

use super::placement::ParamRole;
use crate::model::Segment;
use crate::quant::{QuantFormat, RunDtype};

/// A parameter without a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamDesc {
    /// Name in the checkpoint; for adapters PEFT's without its prefix, such as
    /// `<module>.lora_A.weight`.
    pub name: String,
    /// Its shape, the outermost dimension first.
    pub shape: Vec<usize>,
    /// The segment that uses it.
    pub segment: Segment,
    /// Its training and its storage format.
    pub kind: ParamKind,
}

/// The way a parameter trains, and its format in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamKind {
    /// Frozen, and kept in `dtype`, or by default in the compute dtype.
    Frozen {
        /// The dtype, if it differs from the compute dtype.
        dtype: Option<DType>,
    },
    /// Frozen, and kept in a quantized format.
    Quantized(QuantFormat),
    /// A trainable weight of the model.
    Trainable(UpdateRule),
    /// A trainable matrix, vector or rows of an adapter: f32 for any dtype of the model.
    Adapter(UpdateRule),
    /// A trainable matrix of an adapter on a GPU with compute in bf16: tensor cores multiply it in
    /// bf16, and the optimizer updates separate f32 values.
    AdapterInBf16(UpdateRule),
}

/// The settings of the optimizer for a parameter, besides the run's constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UpdateRule {
    /// True if weight decay applies.
    pub decay: bool,
    /// The group that selects the learning rate.
    pub lr_group: LrGroup,
}

/// The learning rates of LoRA+, as PEFT's `create_loraplus_optimizer` groups parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LrGroup {
    /// The run's learning rate.
    Base,
    /// The run's learning rate times LoRA+'s ratio: LoRA's B, and all vectors.
    LoraPlus,
}

impl LrGroup {
    /// Returns the group of a parameter of `shape` that is not LoRA's B.
    pub fn of_shape(shape: &[usize]) -> Self {
        if shape.len() == 1 { LrGroup::LoraPlus } else { LrGroup::Base }
    }
}

impl ParamDesc {
    /// Returns the number of its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl ParamKind {
    /// Returns the rule of the optimizer for it, or `None` if it is frozen.
    pub(crate) fn update_rule(self) -> Option<UpdateRule> {
        match self {
            ParamKind::Frozen { .. } | ParamKind::Quantized(_) => None,
            ParamKind::Trainable(rule) | ParamKind::Adapter(rule) | ParamKind::AdapterInBf16(rule) => {
                Some(rule)
            }
        }
    }

    /// Returns whether it trains.
    pub fn trains(self) -> bool {
        self.update_rule().is_some()
    }

    /// Returns whether it belongs to an adapter.
    pub fn is_adapter(self) -> bool {
        self.role() == ParamRole::Adapter
    }

    /// Returns its role for placement.
    pub fn role(self) -> ParamRole {
        BucketKind::of(self).role()
    }
}

/// The kind of a bucket's contents: parameters of one segment and one kind are stored together, in
/// this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BucketKind {
    /// Frozen, in the compute dtype.
    Frozen,
    /// Frozen, each in another dtype.
    FrozenAs,
    /// Frozen and quantized.
    Quantized,
    /// Weights of the model that train.
    Trainable,
    /// Parameters of an adapter.
    Adapter,
    /// Parameters of an adapter with compute in bf16.
    AdapterInBf16,
}

impl BucketKind {
    pub(super) fn of(kind: ParamKind) -> Self {
        match kind {
            ParamKind::Frozen { dtype: None } => BucketKind::Frozen,
            ParamKind::Frozen { dtype: Some(_) } => BucketKind::FrozenAs,
            ParamKind::Quantized(_) => BucketKind::Quantized,
            ParamKind::Trainable(_) => BucketKind::Trainable,
            ParamKind::Adapter(_) => BucketKind::Adapter,
            ParamKind::AdapterInBf16(_) => BucketKind::AdapterInBf16,
        }
    }

    pub(super) fn role(self) -> ParamRole {
        match self {
            BucketKind::Adapter | BucketKind::AdapterInBf16 => ParamRole::Adapter,
            BucketKind::Trainable => ParamRole::Trainable,
            BucketKind::Frozen | BucketKind::FrozenAs | BucketKind::Quantized => ParamRole::Frozen,
        }
    }
}

/// The shared memory of runs of one kind, block after block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BufferKind {
    /// Memory of a bucket's values.
    Values(BucketKind),
    /// Memory of the runs of one type of quantized buckets.
    Quantized(RunDtype),
}
