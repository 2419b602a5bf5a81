//! Placement of tensors on ranks, as lists with one entry for each axis of the mesh. They exist at
//! two levels:
//!
//! 1. A parameter ([`super::ParamDesc`]) is placed over the axes that split the model itself, such
//!    as the tensor axis. Its list decides the local shape, with which a rank computes. Loading,
//!    buckets, checkpoints and the planner derive sizes and ranges from it. No strategy splits the
//!    model yet: each list is [`Placements::REPLICATED`], and the mesh refuses those axes.
//! 2. A bucket, the flat buffer of a segment's local tensors, is placed over the shard axis (ZeRO,
//!    FSDP). [`ShardingSpec`] has a list each for values, gradients and updates. It decides the run
//!    of the buffer that a rank keeps between uses, and never the shape of a computation.
//!
//! The strategies differ at the second level:
//!
//! ```text
//!         ranks along   values   gradients  update   sent per step and rank
//!         data   shard
//! single  1      1      whole    whole      whole    –
//! ddp     N      1      whole    whole      whole    2 r P b_g
//! zero1   1      N      whole    whole      shard    r P (b_g + b_p)
//! zero2   1      N      whole    shard      shard    A r P b_g + r P b_p
//! fsdp    1      N      shard    shard      shard    A r P (2 b_p + b_g)
//! hsdp    R=N/S  S      shard    shard      shard    that of fsdp + A 2 (R-1)/R P/S b_g
//! ```
//!
//! r = (N-1)/N; P elements of b bytes; A micro-steps. ddp and zero1 reduce after the last
//! micro-step; zero1 then all-gathers values. fsdp gathers embedding and head once, so they cost
//! b_p + b_g. hsdp is fsdp over the shard axis, and sums the gradients' shards over the data axis.
//!
//! Adapters are small: fsdp and hsdp keep them whole and sum their gradients once a step, as ddp
//! does.

use std::ops::Range;

use super::mesh_shape::{MeshAxis, MeshShape};
use crate::error::{Error, Result};

/// The distribution of parameters, gradients and optimizer states over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardingStrategy {
    /// One rank that holds everything.
    Single,
    /// Every rank holds everything.
    Ddp,
    /// Optimizer states are sharded.
    Zero1,
    /// Optimizer states and gradients are sharded.
    Zero2,
    /// Everything is sharded (ZeRO-3).
    Fsdp,
    /// Everything is sharded over groups of this many ranks; the groups are replicas.
    Hsdp(usize),
}

/// The placement of a tensor along one axis of the mesh, as in DTensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placement {
    /// All ranks along the axis have the same: DTensor's `Replicate()`.
    Replicate,
    /// Each rank along the axis has one of equal parts: DTensor's `Shard(dim)`.
    Shard {
        /// The dimension of the tensor that is split.
        dim: usize,
    },
}

/// The placement of a tensor on a mesh, as in DTensor: for each axis, in the order of
/// [`MeshAxis::ALL`], `Replicate` or `Shard { dim }`. Several axes may split one dimension: the
/// slowest first, and the next its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placements([Placement; MeshAxis::ALL.len()]);

/// A flat bucket that the ranks along the shard axis split.
const SHARDED: Placements = Placements::REPLICATED.shard(MeshAxis::Shard, 0);

impl Placements {
    /// Every rank has the whole tensor.
    pub const REPLICATED: Placements = Placements([Placement::Replicate; MeshAxis::ALL.len()]);

    /// Returns the same list, with dimension `dim` also split along `axis`.
    #[must_use]
    pub const fn shard(mut self, axis: MeshAxis, dim: usize) -> Self {
        self.0[axis as usize] = Placement::Shard { dim };
        self
    }

    /// Returns whether some axis splits the tensor.
    pub fn is_sharded(self) -> bool {
        self != Placements::REPLICATED
    }

    /// Returns the slowest axis that splits the tensor, or `None` if every rank has all of it.
    pub(super) fn axis(self) -> Option<MeshAxis> {
        MeshAxis::ALL.into_iter().find(|axis| self.0[*axis as usize] != Placement::Replicate)
    }

    /// Returns the axes that split dimension `dim`, the slowest first.
    fn axes(self, dim: usize) -> impl Iterator<Item = MeshAxis> {
        let splits = move |axis: &MeshAxis| self.0[*axis as usize] == Placement::Shard { dim };
        MeshAxis::ALL.into_iter().filter(splits)
    }

    /// Returns the number of equal parts of dimension `dim` on `mesh`.
    pub fn parts(self, dim: usize, mesh: MeshShape) -> usize {
        self.axes(dim).map(|axis| mesh.size(axis)).product()
    }

    /// Returns the range of dimension `dim`, of `len` elements, that `rank` has. The number of
    /// parts divides `len`.
    pub(super) fn range(self, dim: usize, len: usize, mesh: MeshShape, rank: usize) -> Range<usize> {
        let part = self.axes(dim).fold(0, |at, axis| at * mesh.size(axis) + mesh.coordinate(rank, axis));
        let each = len / self.parts(dim, mesh);
        part * each..(part + 1) * each
    }
}

/// The parts of a bucket that a rank keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardingSpec {
    /// Placement of the compute values.
    pub values: Placements,
    /// Placement of gradients after they are summed.
    pub gradients: Placements,
    /// Placement of masters, moments, and the values that the optimizer updates.
    pub update: Placements,
}

impl ShardingSpec {
    /// Returns the axis along which new values are gathered after an update, if each rank computes
    /// with all values and updates its part.
    pub(super) fn param_gather_axis(self) -> Option<MeshAxis> {
        if self.values.is_sharded() { None } else { self.update.axis() }
    }

    /// Refuses placements that flat buckets do not support.
    ///
    /// # Errors
    /// An internal error for a placement over another axis than the shard axis, or along
    /// another dimension than the one that a flat buffer has.
    pub(super) fn check_flat(self) -> Result<()> {
        let flat = [Placements::REPLICATED, SHARDED];
        match [self.values, self.gradients, self.update].into_iter().find(|one| !flat.contains(one)) {
            Some(other) => Err(Error::internal("cannot place a bucket")
                .because(format!("it is {other:?}; a flat bucket is {:?} or {:?}", flat[0], flat[1]))),
            None => Ok(()),
        }
    }
}

/// The role of a bucket's contents for placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamRole {
    /// Base weights under an adapter.
    Frozen,
    /// Weights of the model that train.
    Trainable,
    /// Parameters of LoRA and DoRA.
    Adapter,
}

impl ShardingStrategy {
    /// Returns the shape of the mesh for `ranks` ranks: the number of ranks along each axis.
    ///
    /// # Errors
    /// The groups of hsdp do not divide the ranks.
    pub fn mesh_shape(self, ranks: usize) -> Result<MeshShape> {
        let shard = match self {
            ShardingStrategy::Single | ShardingStrategy::Ddp => 1,
            ShardingStrategy::Zero1 | ShardingStrategy::Zero2 | ShardingStrategy::Fsdp => ranks,
            ShardingStrategy::Hsdp(size) => size,
        };
        if shard == 0 || !ranks.is_multiple_of(shard) {
            return Err(Error::user(format!("cannot divide {ranks} ranks into groups of {shard}"))
                .because(format!("`parallel.shard_size` is {shard}; accepted: a divisor of {ranks}"))
                .hint("change `parallel.shard_size`, or the number of ranks"));
        }
        let shape = MeshShape::ONE.with(MeshAxis::Shard, shard);
        Ok(match self {
            ShardingStrategy::Single => shape,
            _ => shape.with(MeshAxis::Data, ranks / shard),
        })
    }

    /// Returns the axis over which a bucket's sum is cut into equal runs. Buckets are padded to
    /// multiples of them.
    pub(super) fn sum_axis(self) -> MeshAxis {
        match self {
            ShardingStrategy::Single | ShardingStrategy::Ddp => MeshAxis::Data,
            _ => MeshAxis::Shard,
        }
    }

    /// Returns whether the ranks along `axis` are a group of their own: a part of all ranks that
    /// sums or shards. A group may have one rank, whose backend copies the shard into the whole.
    pub(super) fn splits_ranks(self, mesh: MeshShape, axis: MeshAxis) -> bool {
        let size = mesh.size(axis);
        size != mesh.ranks() && (size > 1 || axis == self.sum_axis())
    }

    /// Returns the parts of a bucket that a rank keeps.
    pub fn sharding_spec(self, content: ParamRole) -> ShardingSpec {
        const WHOLE: Placements = Placements::REPLICATED;
        let [values, gradients, update] = match (self, content) {
            (
                ShardingStrategy::Fsdp | ShardingStrategy::Hsdp(_),
                ParamRole::Frozen | ParamRole::Trainable,
            ) => [SHARDED, SHARDED, SHARDED],
            (ShardingStrategy::Zero1, _) => [WHOLE, WHOLE, SHARDED],
            (ShardingStrategy::Zero2, _) => [WHOLE, SHARDED, SHARDED],
            _ => [WHOLE, WHOLE, WHOLE],
        };
        ShardingSpec { values, gradients, update }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strategies_are_rows_over_the_axes() {
        for (strategy, ranks, data, shard) in [
            (ShardingStrategy::Single, 1, 1, 1),
            (ShardingStrategy::Ddp, 6, 6, 1),
            (ShardingStrategy::Zero1, 6, 1, 6),
            (ShardingStrategy::Zero2, 6, 1, 6),
            (ShardingStrategy::Fsdp, 6, 1, 6),
            (ShardingStrategy::Hsdp(3), 6, 2, 3),
            (ShardingStrategy::Hsdp(1), 6, 6, 1),
            (ShardingStrategy::Hsdp(6), 6, 1, 6),
        ] {
            let wanted = MeshShape::ONE.with(MeshAxis::Data, data).with(MeshAxis::Shard, shard);
            assert_eq!(strategy.mesh_shape(ranks).unwrap(), wanted, "{strategy:?}");
            assert_eq!(wanted.data_size(), ranks, "{strategy:?}: every rank gets rows of its own");
        }
        for size in [0, 4] {
            let error = ShardingStrategy::Hsdp(size).mesh_shape(6).unwrap_err();
            assert_eq!(error.what(), format!("cannot divide 6 ranks into groups of {size}"));
        }
    }

    #[test]
    fn buckets_are_cut_along_their_one_dimension_over_the_shard_axis() {
        let strategies = [ShardingStrategy::Single, ShardingStrategy::Zero2, ShardingStrategy::Hsdp(2)];
        for role in [ParamRole::Frozen, ParamRole::Trainable, ParamRole::Adapter] {
            strategies.iter().for_each(|one| one.sharding_spec(role).check_flat().unwrap());
        }
        let spec = ShardingStrategy::Fsdp.sharding_spec(ParamRole::Trainable);
        for (axis, dim) in [(MeshAxis::Shard, 1), (MeshAxis::Tensor, 0)] {
            let values = Placements::REPLICATED.shard(axis, dim);
            let error = ShardingSpec { values, ..spec }.check_flat().unwrap_err().to_string();
            assert!(error.contains(&format!("it is {values:?}; a flat bucket is")), "{error}");
        }
    }

    #[test]
    fn axes_that_split_one_dimension_cut_the_parts_of_the_slower_ones() {
        let mesh = MeshShape::ONE.with(MeshAxis::Shard, 3).with(MeshAxis::Tensor, 2);
        let both = SHARDED.shard(MeshAxis::Tensor, 0);
        assert_eq!([both.parts(0, mesh), both.parts(1, mesh)], [6, 1]);
        let ranges = |list: Placements| (0..6).map(|rank| list.range(0, 12, mesh, rank)).collect::<Vec<_>>();
        assert_eq!(ranges(both), [0..2, 2..4, 4..6, 6..8, 8..10, 10..12]);
        assert_eq!(ranges(SHARDED), [0..4, 0..4, 4..8, 4..8, 8..12, 8..12]);
        assert!(ranges(Placements::REPLICATED).iter().all(|range| *range == (0..12)));
    }
}
