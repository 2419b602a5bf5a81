//! Description of a parameter: its name, its shape and the way it trains.

use candle_core::DType;

use super::local_range::LocalRange;
use super::mesh_shape::MeshShape;
use super::placement::{ParamRole, Placements};
use crate::error::{Error, Result};
use crate::model::{ModelConfig, Segment, per_layer_modules};
use crate::quant::{QuantFormat, RunDtype};
use crate::weights::EMBED_PER_LAYER_MODULE;

/// A parameter without a value: the one declaration of its shape and placement.
///
/// The global shape is that of the whole tensor, as files have it. The local shape is that of the
/// part with which a rank of a mesh computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamDesc {
    /// Name in the checkpoint; for adapters PEFT's without its prefix, such as
    /// `<module>.lora_A.weight`.
    pub name: String,
    /// The segment that uses it.
    pub segment: Segment,
    /// Its training and its storage format.
    pub kind: ParamKind,
    shape: Vec<usize>,
    placements: Placements,
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
    /// Values beside the weights that no optimizer updates (torch's buffers): f32 in every run.
    Buffer {
        /// True if outputs and checkpoints have it, since all weights train.
        saved: bool,
    },
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

/// Returns whether something trains behind the per-layer inputs of a model with the parameters
/// `descs`: the embedding, their table, or their projection and its norm.
pub fn per_layer_inputs_train<'d>(
    config: &ModelConfig,
    descs: impl IntoIterator<Item = &'d ParamDesc>,
) -> bool {
    let modules = per_layer_modules(config);
    let is_part = |name: &str| {
        modules
            .iter()
            .any(|module| name.strip_prefix(module.as_str()).is_some_and(|end| end.starts_with('.')))
    };
    let is_behind = |desc: &ParamDesc| desc.segment == Segment::Embed || is_part(&desc.name);
    !modules.is_empty() && descs.into_iter().any(|desc| desc.kind.trains() && is_behind(desc))
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
    /// Describes a parameter of the global shape `shape`, the outermost dimension first. The
    /// `placements` are those over the axes that split the model, not over the shard axis.
    pub fn new(
        name: String,
        shape: Vec<usize>,
        placements: Placements,
        segment: Segment,
        kind: ParamKind,
    ) -> Self {
        ParamDesc { name, segment, kind, shape, placements }
    }

    /// Returns whether it is the table of per-layer inputs, or trains it.
    pub fn is_of_per_layer_table(&self) -> bool {
        self.name.strip_prefix(EMBED_PER_LAYER_MODULE).is_some_and(|end| end.starts_with('.'))
    }

    /// Returns the shape of the whole tensor.
    pub fn global_shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the number of elements of the whole tensor.
    pub fn global_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the local length of each dimension.
    fn local_dims(&self, mesh: MeshShape) -> impl Iterator<Item = Result<usize>> {
        self.shape.iter().enumerate().map(move |(dim, len)| {
            let parts = self.placements.parts(dim, mesh);
            if !len.is_multiple_of(parts) {
                return Err(Error::user(format!("cannot split `{}` over {parts} ranks", self.name)).because(
                    format!("its dimension {dim} has {len} elements; accepted: a number that divides {len}"),
                ));
            }
            Ok(len / parts)
        })
    }

    /// Returns the shape of the part that each rank of `mesh` computes with.
    ///
    /// # Errors
    /// The user's: the number of ranks that split a dimension does not divide it.
    pub fn local_shape(&self, mesh: MeshShape) -> Result<Vec<usize>> {
        self.local_dims(mesh).collect()
    }

    /// Returns the number of elements of the part that each rank of `mesh` computes with.
    ///
    /// # Errors
    /// Those of [`ParamDesc::local_shape`].
    pub fn local_elements(&self, mesh: MeshShape) -> Result<usize> {
        self.local_dims(mesh).product()
    }

    /// Returns the part of the whole tensor that `rank` of `mesh` computes with.
    ///
    /// # Errors
    /// Those of [`ParamDesc::local_shape`].
    pub fn local_range(&self, mesh: MeshShape, rank: usize) -> Result<LocalRange> {
        self.local_shape(mesh)?;
        let dims = self.shape.iter().enumerate();
        let ranges = dims.map(|(dim, len)| self.placements.range(dim, *len, mesh, rank)).collect();
        Ok(LocalRange::new(self.shape.clone(), ranges))
    }
}

impl ParamKind {
    /// Returns the rule of the optimizer for it, or `None` if it is frozen.
    pub(crate) fn update_rule(self) -> Option<UpdateRule> {
        match self {
            ParamKind::Frozen { .. } | ParamKind::Quantized(_) | ParamKind::Buffer { .. } => None,
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

/// The key of a bucket, in the order of buckets: parameters with one key are stored together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BucketKey {
    pub(super) segment: Segment,
    pub(super) kind: BucketKind,
    /// True for the table of per-layer inputs: a tied head uses the rest of the embedding alone.
    pub(super) per_layer: bool,
}

impl BucketKey {
    pub(super) fn of(desc: &ParamDesc) -> Self {
        BucketKey {
            segment: desc.segment,
            kind: BucketKind::of(desc.kind),
            per_layer: desc.is_of_per_layer_table(),
        }
    }
}

/// The kind of a bucket's contents, in the order of buckets of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BucketKind {
    /// Frozen, in the compute dtype.
    Frozen,
    /// Frozen, each in another dtype.
    FrozenAs,
    /// Frozen and quantized.
    Quantized,
    /// Values that no optimizer updates, in f32.
    Buffer,
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
            ParamKind::Buffer { .. } => BucketKind::Buffer,
            ParamKind::Trainable(_) => BucketKind::Trainable,
            ParamKind::Adapter(_) => BucketKind::Adapter,
            ParamKind::AdapterInBf16(_) => BucketKind::AdapterInBf16,
        }
    }

    pub(super) fn role(self) -> ParamRole {
        match self {
            BucketKind::Adapter | BucketKind::AdapterInBf16 => ParamRole::Adapter,
            BucketKind::Trainable => ParamRole::Trainable,
            BucketKind::Frozen | BucketKind::FrozenAs | BucketKind::Quantized | BucketKind::Buffer => {
                ParamRole::Frozen
            }
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

#[cfg(test)]
mod tests {
    use super::super::mesh_shape::MeshAxis;
    use super::*;

    fn desc(shape: [usize; 2], placements: Placements) -> ParamDesc {
        let kind = ParamKind::Frozen { dtype: None };
        ParamDesc::new("q_proj.weight".into(), shape.into(), placements, Segment::Block(0), kind)
    }

    #[test]
    fn a_mesh_splits_the_dimension_that_the_placement_names() -> Result<()> {
        let mesh = MeshShape::ONE.with(MeshAxis::Data, 3).with(MeshAxis::Tensor, 2);
        let split = |dim| desc([8, 6], Placements::REPLICATED.shard(MeshAxis::Tensor, dim));
        for (param, shape) in
            [(split(0), [4, 6]), (split(1), [8, 3]), (desc([8, 6], Placements::REPLICATED), [8, 6])]
        {
            assert_eq!(param.global_shape(), [8, 6]);
            assert_eq!(param.local_shape(mesh)?, shape);
            assert_eq!(param.local_elements(mesh)?, shape.iter().product::<usize>());
            assert_eq!(param.local_shape(MeshShape::ONE)?, [8, 6], "one rank has the whole");
            for rank in 0..mesh.ranks() {
                assert_eq!(param.local_range(mesh, rank)?.shape(), shape);
            }
        }
        let [first, second] = [split(0).local_range(mesh, 2)?, split(0).local_range(mesh, 5)?];
        let whole: Vec<usize> = (0..48).collect();
        assert_eq!(first.take(&whole, 0..24), whole[..24]);
        assert_eq!(second.take(&whole, 0..24), whole[24..]);
        Ok(())
    }

    #[test]
    fn a_dimension_that_the_ranks_do_not_divide_is_refused() {
        let mesh = MeshShape::ONE.with(MeshAxis::Tensor, 2);
        let param = desc([7, 4], Placements::REPLICATED.shard(MeshAxis::Tensor, 0));
        for error in [param.local_elements(mesh).unwrap_err(), param.local_range(mesh, 0).unwrap_err()] {
            assert_eq!(error.what(), "cannot split `q_proj.weight` over 2 ranks");
            assert_eq!(error.causes(), ["its dimension 0 has 7 elements; accepted: a number that divides 7"]);
        }
    }
}
