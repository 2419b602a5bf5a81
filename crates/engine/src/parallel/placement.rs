//! Placement of tensors on ranks: the table of the sharding strategies.
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

/// The placement of a tensor on the ranks of a mesh, as in DTensor: split along at most one axis,
/// and replicated along all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Every rank has all of it: DTensor's `Replicate()`.
    Replicated,
    /// Each rank along `axis` has one of equal parts: DTensor's `Shard(dim)`.
    Sharded {
        /// The axis of the ranks that have the parts.
        axis: MeshAxis,
        /// The dimension that is split. A bucket is flat, so it has dimension 0 alone.
        dim: usize,
    },
}

impl Placement {
    /// A flat bucket, sharded over the ranks of the shard axis.
    pub(crate) const FLAT_SHARD: Placement = Placement::Sharded { axis: MeshAxis::Shard, dim: 0 };

    /// Returns whether a rank has only a part.
    pub fn is_sharded(self) -> bool {
        self != Placement::Replicated
    }

    /// Returns the axis that splits the tensor, or `None` if every rank has all of it.
    pub fn axis(self) -> Option<MeshAxis> {
        match self {
            Placement::Replicated => None,
            Placement::Sharded { axis, .. } => Some(axis),
        }
    }
}

/// The parts of a bucket that a rank keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardingSpec {
    /// Placement of the compute values.
    pub values: Placement,
    /// Placement of gradients after they are summed.
    pub gradients: Placement,
    /// Placement of masters, moments, and the values that the optimizer updates.
    pub update: Placement,
}

impl ShardingSpec {
    /// Returns the axis along which new values are gathered after an update, if each rank computes
    /// with all values and updates its part.
    pub(super) fn param_gather_axis(self) -> Option<MeshAxis> {
        match self.values {
            Placement::Replicated => self.update.axis(),
            Placement::Sharded { .. } => None,
        }
    }

    /// Refuses placements that flat buckets do not support.
    ///
    /// # Errors
    /// An internal error for a placement over another axis than the shard axis, or along
    /// another dimension than the one that a flat buffer has.
    pub(super) fn check_flat(self) -> Result<()> {
        let flat = [Placement::Replicated, Placement::FLAT_SHARD];
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
        let shard = self.shard_size(ranks);
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

    /// Returns the number of ranks, of `ranks` in all, that shard one copy.
    pub fn shard_size(self, ranks: usize) -> usize {
        match self {
            ShardingStrategy::Single | ShardingStrategy::Ddp => 1,
            ShardingStrategy::Zero1 | ShardingStrategy::Zero2 | ShardingStrategy::Fsdp => ranks,
            ShardingStrategy::Hsdp(size) => size,
        }
    }

    /// Returns the axis over which a bucket's sum is cut into equal runs. Buckets are padded to
    /// multiples of them.
    pub(super) fn sum_axis(self) -> MeshAxis {
        match self {
            ShardingStrategy::Single | ShardingStrategy::Ddp => MeshAxis::Data,
            _ => MeshAxis::Shard,
        }
    }

    /// Returns the parts of a bucket that a rank keeps.
    pub fn sharding_spec(self, content: ParamRole) -> ShardingSpec {
        use Placement::Replicated;
        const SHARDED: Placement = Placement::FLAT_SHARD;
        let [values, gradients, update] = match (self, content) {
            (
                ShardingStrategy::Fsdp | ShardingStrategy::Hsdp(_),
                ParamRole::Frozen | ParamRole::Trainable,
            ) => [SHARDED, SHARDED, SHARDED],
            (ShardingStrategy::Zero1, _) => [Replicated, Replicated, SHARDED],
            (ShardingStrategy::Zero2, _) => [Replicated, SHARDED, SHARDED],
            _ => [Replicated, Replicated, Replicated],
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
            let error = ShardingSpec { values: Placement::Sharded { axis, dim }, ..spec }.check_flat();
            let error = error.unwrap_err().to_string();
            assert!(error.contains(&format!("it is Sharded {{ axis: {axis:?}, dim: {dim} }}")), "{error}");
        }
    }
}
