//! What one parameter is: its name and shape, and whether and how it trains.

use candle_core::DType;

use super::placement::ParamRole;
use crate::model::Segment;
use crate::quant::{QuantFormat, RunDtype};

/// One parameter before it has a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamDesc {
    /// Name: the checkpoint's; for adapters PEFT's without its prefix, such as `<module>.lora_A.weight`.
    pub name: String,
    /// Its shape, the outermost dimension first.
    pub shape: Vec<usize>,
    /// The segment that uses it.
    pub segment: Segment,
    /// Whether it trains, and how it is kept.
    pub kind: ParamKind,
}

/// Whether a parameter trains, and how it is kept in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamKind {
    /// It does not change, and is kept in `dtype`, or else in the dtype that is computed with.
    Frozen {
        /// The dtype, where it is not the one that is computed with.
        dtype: Option<DType>,
    },
    /// It does not change, and is kept in a quantized format.
    Quantized(QuantFormat),
    /// It is a weight of the model, and trains.
    Trainable(UpdateRule),
    /// It is an adapter's matrix, vector or rows, and trains: f32 whatever the model's dtype is.
    Adapter(UpdateRule),
    /// It is an adapter's matrix and trains, on a GPU that computes in bf16: its products are those of the tensor cores,
    /// in bf16, and the optimizer updates f32 values beside it.
    AdapterInBf16(UpdateRule),
}

/// How the optimizer treats a parameter beside the run's constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UpdateRule {
    /// Weight decay applies.
    pub decay: bool,
    /// Which learning rate it gets.
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
    /// The group of a parameter of `shape` that is no B of LoRA's.
    pub fn of_shape(shape: &[usize]) -> Self {
        if shape.len() == 1 { LrGroup::LoraPlus } else { LrGroup::Base }
    }
}

impl ParamDesc {
    /// Number of its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl ParamKind {
    /// How the optimizer treats it; none when it is frozen.
    pub fn update_rule(self) -> Option<UpdateRule> {
        match self {
            ParamKind::Frozen { .. } | ParamKind::Quantized(_) => None,
            ParamKind::Trainable(rule) | ParamKind::Adapter(rule) | ParamKind::AdapterInBf16(rule) => {
                Some(rule)
            }
        }
    }

    /// Whether it trains.
    pub fn trains(self) -> bool {
        self.update_rule().is_some()
    }

    /// Whether it belongs to an adapter.
    pub fn is_adapter(self) -> bool {
        self.role() == ParamRole::Adapter
    }

    /// What it is as far as its placement goes.
    pub fn role(self) -> ParamRole {
        BucketKind::of(self).role()
    }
}

/// What a bucket holds: parameters of one segment and one of these kinds lie together, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BucketKind {
    /// Frozen, in the dtype that is computed with.
    Frozen,
    /// Frozen, in a dtype of their own.
    FrozenAs,
    /// Frozen and quantized.
    Quantized,
    /// Weights of the model that train.
    Trainable,
    /// Parameters of an adapter.
    Adapter,
    /// Those of them that are computed with in bf16.
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

/// The memory that runs of one sort share, block after block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BufferKind {
    /// Of a bucket's values.
    Values(BucketKind),
    /// Of the runs of one type of quantized buckets.
    Quantized(RunDtype),
}
