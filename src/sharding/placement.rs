//! Who keeps what: the table of the strategies.
//!
//! ```text
//!            values    gradients   update     sent per step and rank (r = (N-1)/N; P elements of b bytes; A micro-steps)
//! single     whole     whole       whole      –
//! ddp        whole     whole       whole      2 r P b_g           all-reduce after the last micro-step
//! zero1      whole     whole       shard      r P (b_g + b_p)     reduce-scatter after the last one, all-gather of values
//! zero2      whole     shard       shard      A r P b_g + r P b_p
//! fsdp       shard     shard       shard      A r P (2 b_p + b_g) (embedding and head: b_p + b_g, they are gathered once)
//! hsdp       as fsdp in groups of S; the gradients' shards are summed over the N/S groups: + A 2 (R-1)/R P/S b_g
//! ```
//!
//! Adapters are small: fsdp and hsdp keep them whole and sum their gradients once a step, as ddp does.

use std::sync::Arc;

use crate::collective::{Collective, SingleRank, Traffic};
use crate::error::{Error, Result};

/// How parameters, gradients and optimizer states are spread over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShardingStrategy {
    /// One rank.
    Single,
    /// Every rank holds everything.
    Ddp,
    /// Optimizer states are sharded.
    Zero1,
    /// Optimizer states and gradients are sharded.
    Zero2,
    /// Everything is sharded (ZeRO-3).
    Fsdp,
    /// Everything is sharded over groups of this many ranks, which hold the same.
    Hsdp(usize),
}

/// How much of a bucket a rank keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// All of it.
    Replicated,
    /// One of as many equal runs as ranks share a copy.
    Sharded,
}

/// What a rank keeps of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardingSpec {
    /// Values that are computed with.
    pub values: Placement,
    /// Gradients.
    pub gradients: Placement,
    /// Masters, moments, and the part that the optimizer updates.
    pub update: Placement,
}

/// What a bucket holds, as far as its placement goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamRole {
    /// Base weights under an adapter.
    Frozen,
    /// Weights of the model that train.
    Trainable,
    /// LoRA's and DoRA's.
    Adapter,
}

impl ShardingStrategy {
    /// What a rank keeps of a bucket.
    pub fn sharding_spec(self, content: ParamRole) -> ShardingSpec {
        use Placement::{Replicated, Sharded};
        let [values, gradients, update] = match (self, content) {
            (
                ShardingStrategy::Fsdp | ShardingStrategy::Hsdp(_),
                ParamRole::Frozen | ParamRole::Trainable,
            ) => [Sharded, Sharded, Sharded],
            (ShardingStrategy::Zero1, _) => [Replicated, Replicated, Sharded],
            (ShardingStrategy::Zero2, _) => [Replicated, Sharded, Sharded],
            _ => [Replicated, Replicated, Replicated],
        };
        ShardingSpec { values, gradients, update }
    }
}

/// A rank's ends: of all ranks, of those that share one copy of what is sharded, of those that hold the same shard.
#[derive(Debug, Clone)]
pub struct DeviceMesh {
    pub(super) kind: ShardingStrategy,
    world: Arc<dyn Collective>,
    groups: Option<MeshGroups>,
}

#[derive(Debug, Clone)]
struct MeshGroups {
    shards: Arc<dyn Collective>,
    replicas: Arc<dyn Collective>,
}

impl DeviceMesh {
    /// The groups that `kind` needs. All ranks call it.
    ///
    /// # Errors
    /// The groups of hsdp do not divide the ranks; a peer failed.
    pub fn new(kind: ShardingStrategy, world: Arc<dyn Collective>) -> Result<Self> {
        let ShardingStrategy::Hsdp(shard) = kind else { return Ok(DeviceMesh { kind, world, groups: None }) };
        let (rank, size) = (world.rank(), world.size());
        if shard == 0 || !size.is_multiple_of(shard) {
            return Err(Error::user(format!("cannot divide {size} ranks into groups of {shard}"))
                .because(format!("`parallel.shard_size` is {shard}; accepted: a divisor of {size}"))
                .hint("change `parallel.shard_size`, or the number of ranks"));
        }
        let shards = Arc::from(world.split(rank / shard)?);
        let replicas = Arc::from(world.split(rank % shard)?);
        Ok(DeviceMesh { kind, world, groups: Some(MeshGroups { shards, replicas }) })
    }

    /// One rank.
    pub fn alone() -> Self {
        DeviceMesh { kind: ShardingStrategy::Single, world: Arc::new(SingleRank), groups: None }
    }

    /// All ranks.
    pub fn world(&self) -> &dyn Collective {
        &*self.world
    }

    /// The ranks that share one copy.
    pub(super) fn shards(&self) -> &dyn Collective {
        self.groups.as_ref().map_or(&*self.world, |groups| &*groups.shards)
    }

    /// The ranks that hold the same shard; none when there is one copy.
    pub(super) fn replicas(&self) -> Option<&dyn Collective> {
        self.groups.as_ref().map(|groups| &*groups.replicas)
    }

    /// Bytes sent and calls made by this rank, in all its groups.
    pub fn traffic(&self) -> Traffic {
        let mut sum = self.world.traffic();
        for group in self.groups.iter().flat_map(|groups| [&groups.shards, &groups.replicas]) {
            sum.add(&group.traffic());
        }
        sum
    }
}
