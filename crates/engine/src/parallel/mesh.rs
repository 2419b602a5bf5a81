//! The ranks of a run as a mesh with named axes, and the group of each rank along each axis.

use std::sync::Arc;

use super::mesh_shape::{MeshAxis, MeshShape};
use super::placement::ShardingStrategy;
use crate::collective::{Collective, SingleRank, Traffic};
use crate::error::Result;

/// One rank's place in the mesh of all ranks: how many there are along each axis, where this one is, and its end of the
/// group of ranks that differ from it along that axis alone (PyTorch's `DeviceMesh`).
///
/// Ranks are numbered along the axes in the order of [`MeshAxis`]: the groups of the shard axis are neighbouring ranks,
/// so that with as many of them as a host has devices a group stays on its host.
#[derive(Debug, Clone)]
pub struct DeviceMesh {
    strategy: ShardingStrategy,
    shape: MeshShape,
    world: Arc<dyn Collective>,
    /// By axis, in the order of [`MeshAxis::ALL`].
    groups: [AxisGroup; MeshAxis::ALL.len()],
}

/// A rank's end of the ranks along an axis.
#[derive(Debug, Clone)]
enum AxisGroup {
    /// No others are on it.
    Alone,
    /// All ranks are on it.
    World,
    /// Some ranks are on it.
    Split(Arc<dyn Collective>),
}

/// The end of a rank that has nobody beside it along an axis.
static ALONE: SingleRank = SingleRank;

impl DeviceMesh {
    /// The mesh that `strategy` makes of the ranks of `world`. All ranks call it.
    ///
    /// # Errors
    /// The groups of hsdp do not divide the ranks; the strategy has another number of ranks; a peer failed.
    pub fn new(strategy: ShardingStrategy, world: Arc<dyn Collective>) -> Result<Self> {
        let shape = strategy.mesh_shape(world.size())?;
        Self::of_shape(strategy, shape, world)
    }

    fn of_shape(strategy: ShardingStrategy, shape: MeshShape, world: Arc<dyn Collective>) -> Result<Self> {
        shape.check(world.size())?;
        let mut groups = [const { AxisGroup::Alone }; MeshAxis::ALL.len()];
        for axis in MeshAxis::ALL.into_iter().rev() {
            let size = shape.size(axis);
            groups[axis as usize] = if size == world.size() {
                AxisGroup::World
            } else if size > 1 || axis == strategy.sum_axis() {
                // A group of one too: its backend copies the shard into the whole.
                AxisGroup::Split(Arc::from(world.split(shape.line(world.rank(), axis))?))
            } else {
                AxisGroup::Alone
            };
        }
        Ok(DeviceMesh { strategy, shape, world, groups })
    }

    /// The mesh of one rank.
    pub fn alone() -> Self {
        DeviceMesh {
            strategy: ShardingStrategy::Single,
            shape: MeshShape::ONE,
            world: Arc::new(SingleRank),
            groups: [const { AxisGroup::World }; MeshAxis::ALL.len()],
        }
    }

    /// Who keeps what on this mesh.
    pub fn strategy(&self) -> ShardingStrategy {
        self.strategy
    }

    /// The group of all ranks.
    pub fn world(&self) -> &dyn Collective {
        &*self.world
    }

    /// Ranks along `axis`.
    pub fn size(&self, axis: MeshAxis) -> usize {
        self.shape.size(axis)
    }

    /// Where this rank is along `axis`.
    pub fn coordinate(&self, axis: MeshAxis) -> usize {
        self.shape.coordinate(self.world.rank(), axis)
    }

    /// The ranks that differ from this one along `axis` alone, in the order of their coordinates, and this rank.
    pub fn group(&self, axis: MeshAxis) -> &dyn Collective {
        match &self.groups[axis as usize] {
            AxisGroup::Alone => &ALONE,
            AxisGroup::World => &*self.world,
            AxisGroup::Split(group) => &**group,
        }
    }

    /// How many ranks there are along each axis.
    pub(super) fn shape(&self) -> MeshShape {
        self.shape
    }

    /// Ranks that get different rows: those along the data and shard axes.
    pub fn data_size(&self) -> usize {
        self.shape.data_size()
    }

    /// The place of this rank among those that get different rows: the rank at which data is dealt.
    pub fn data_rank(&self) -> usize {
        self.shape.data_rank(self.world.rank())
    }

    /// The place of `rank` of the world among those that get different rows.
    pub fn data_rank_of(&self, rank: usize) -> usize {
        self.shape.data_rank(rank)
    }

    /// The group of the ranks that get different rows, over which the gradients of what each of them holds whole are
    /// summed. As long as the other axes have size 1 these are all ranks.
    pub(super) fn data_group(&self) -> &dyn Collective {
        &*self.world
    }

    /// Bytes sent and calls made by this rank, in all its groups.
    pub fn traffic(&self) -> Traffic {
        let mut sum = self.world.traffic();
        for group in &self.groups {
            if let AxisGroup::Split(group) = group {
                sum.add(&group.traffic());
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::in_process::{InProcessWorld, run_ranks};
    use crate::collective::{Call, Op};
    use crate::runtime::cpu_tensor::memory;
    use candle_core::{Device, Tensor};

    #[test]
    fn each_axis_has_the_group_that_differs_along_it() {
        let sums = run_ranks(InProcessWorld::new(6).communicators(), |end| {
            let mesh = DeviceMesh::new(ShardingStrategy::Hsdp(3), Arc::new(end))?;
            let mut sums = Vec::new();
            for axis in MeshAxis::ALL {
                let group = mesh.group(axis);
                assert_eq!(
                    (group.rank(), group.size()),
                    (mesh.coordinate(axis), mesh.size(axis)),
                    "{axis:?}"
                );
                let sum = Tensor::new(&[10f64.powi(mesh.world().rank() as i32)], &Device::Cpu)?;
                group.all_reduce(Call::single("ranks of an axis"), &memory(&sum)?)?;
                sums.push(sum.to_vec1::<f64>()?[0]);
            }
            assert_eq!((mesh.data_rank(), mesh.data_size()), (mesh.world().rank(), 6));
            assert_eq!(mesh.traffic().calls(Op::AllReduce), 2, "an axis of one rank sends nothing");
            Ok(sums)
        });
        for (rank, sums) in sums.unwrap().into_iter().enumerate() {
            let own = 10f64.powi(rank as i32);
            let data = 10f64.powi(rank as i32 % 3) + 10f64.powi(rank as i32 % 3 + 3);
            let shard = if rank < 3 { 111.0 } else { 111_000.0 };
            assert_eq!(sums, [own, data, shard, own, own]);
        }
    }

    #[test]
    fn other_shapes_are_refused() {
        let of = |strategy, shape, ranks| {
            let mut ends = InProcessWorld::new(ranks).communicators();
            DeviceMesh::of_shape(strategy, shape, Arc::new(ends.remove(0))).unwrap_err()
        };
        let error = of(ShardingStrategy::Ddp, MeshShape::ONE.with(MeshAxis::Tensor, 2), 2);
        assert!(error.causes()[0].starts_with("its tensor axis has 2 ranks"), "{error}");
        let shape = ShardingStrategy::Single.mesh_shape(2).unwrap();
        let error = of(ShardingStrategy::Single, shape, 2);
        assert_eq!(error.causes(), ["its axes hold 1 in all, and there are 2 ranks"]);
    }
}
