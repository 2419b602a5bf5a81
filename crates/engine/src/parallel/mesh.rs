//! The ranks of a run as a mesh with named axes, and the group of each rank along each axis.

use std::sync::Arc;

use super::local_range::LocalRange;
use super::mesh_shape::{MeshAxis, MeshShape};
use super::param::ParamDesc;
use super::placement::ShardingStrategy;
use crate::collective::{Collective, SingleRank, Traffic};
use crate::error::Result;

/// One rank's view of the mesh of all ranks (PyTorch's `DeviceMesh`): the size of each axis, the
/// rank's coordinates, and for each axis the group of ranks that differ from it along that axis
/// alone.
///
/// Ranks are numbered along the axes in the order of [`MeshAxis`]. The groups of the shard axis are
/// neighbouring ranks, so a group of as many ranks as a host has devices stays on that host.
#[derive(Debug, Clone)]
pub struct DeviceMesh {
    strategy: ShardingStrategy,
    shape: MeshShape,
    world: Arc<dyn Collective>,
    /// By axis, in the order of [`MeshAxis::ALL`]: the world, a part of it, or this rank alone.
    groups: [Arc<dyn Collective>; MeshAxis::ALL.len()],
}

impl DeviceMesh {
    /// Creates the mesh of `strategy` over the ranks of `world`. All ranks call it.
    ///
    /// # Errors
    /// The groups of hsdp do not divide the ranks; the strategy has another number of ranks; a peer
    /// failed.
    pub fn new(strategy: ShardingStrategy, world: Arc<dyn Collective>) -> Result<Self> {
        let shape = strategy.mesh_shape(world.size())?;
        Self::of_shape(strategy, shape, world)
    }

    fn of_shape(strategy: ShardingStrategy, shape: MeshShape, world: Arc<dyn Collective>) -> Result<Self> {
        shape.check(world.size())?;
        let mut groups = alone_along_all();
        for axis in MeshAxis::ALL.into_iter().rev() {
            if shape.size(axis) == world.size() {
                groups[axis as usize] = world.clone();
            } else if strategy.splits_ranks(shape, axis) {
                groups[axis as usize] = Arc::from(world.split(shape.line(world.rank(), axis))?);
            }
        }
        Ok(DeviceMesh { strategy, shape, world, groups })
    }

    /// Returns the mesh of one rank.
    pub fn alone() -> Self {
        DeviceMesh {
            strategy: ShardingStrategy::Single,
            shape: MeshShape::ONE,
            world: Arc::new(SingleRank),
            groups: alone_along_all(),
        }
    }

    /// Returns the sharding strategy of this mesh.
    pub fn strategy(&self) -> ShardingStrategy {
        self.strategy
    }

    /// Returns the group of all ranks.
    pub fn world(&self) -> &dyn Collective {
        &*self.world
    }

    /// Returns the number of ranks along `axis`.
    pub fn size(&self, axis: MeshAxis) -> usize {
        self.shape.size(axis)
    }

    /// Returns the coordinate of this rank along `axis`.
    pub(crate) fn coordinate(&self, axis: MeshAxis) -> usize {
        self.shape.coordinate(self.world.rank(), axis)
    }

    /// Returns the group of this rank and the ranks that differ from it along `axis` alone, in the
    /// order of their coordinates.
    pub fn group(&self, axis: MeshAxis) -> &dyn Collective {
        &*self.groups[axis as usize]
    }

    /// Returns the part of a parameter that this rank computes with.
    pub(super) fn local_range(&self, desc: &ParamDesc) -> Result<LocalRange> {
        desc.local_range(self.shape, self.world.rank())
    }

    /// Returns the number of ranks along each axis.
    pub(super) fn shape(&self) -> MeshShape {
        self.shape
    }

    /// Returns the number of ranks that get different rows: those along the data and shard axes.
    pub(crate) fn data_size(&self) -> usize {
        self.shape.data_size()
    }

    /// Returns the index of this rank among those that get different rows. It selects the rank's
    /// data.
    pub(crate) fn data_rank(&self) -> usize {
        self.shape.data_rank(self.world.rank())
    }

    /// Returns the index of `rank` of the world among those that get different rows.
    pub(crate) fn data_rank_of(&self, rank: usize) -> usize {
        self.shape.data_rank(rank)
    }

    /// Returns the group of the ranks that get different rows. It sums gradients that each of them
    /// holds whole. As long as the other axes have size 1, it has all ranks.
    pub(super) fn data_group(&self) -> &dyn Collective {
        &*self.world
    }

    /// Returns the bytes that this rank sent and the calls that it made, in all its groups.
    pub fn traffic(&self) -> Traffic {
        let mut sum = self.world.traffic();
        let parts = self.groups.iter().filter(|group| !Arc::ptr_eq(group, &self.world));
        parts.for_each(|group| sum.add(&group.traffic()));
        sum
    }
}

/// Returns the groups of a rank that is alone along each axis.
fn alone_along_all() -> [Arc<dyn Collective>; MeshAxis::ALL.len()] {
    MeshAxis::ALL.map(|_| -> Arc<dyn Collective> { Arc::new(SingleRank) })
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
        assert_eq!(error.causes(), ["the product of its axes is 1; the run has 2 ranks"]);
    }
}
