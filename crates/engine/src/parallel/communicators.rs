//! The number of communicators that a rank opens. Over NCCL each of them holds memory of the GPU.

use std::collections::BTreeSet;

use super::grad_reduce::ReducingRanks;
use super::mesh_shape::{MeshAxis, MeshShape};
use super::placement::{ParamRole, ShardingStrategy};

/// Returns the number of communicators of a rank on `mesh` if reductions overlap with computation:
/// one of all ranks, one for each smaller group, and a second one for each group that sums
/// gradients of the trained roles. A single rank has none.
pub fn communicator_count(
    strategy: ShardingStrategy,
    mesh: MeshShape,
    trained: impl Iterator<Item = ParamRole>,
) -> usize {
    if mesh.ranks() == 1 {
        return 0;
    }
    let smaller = MeshAxis::ALL.into_iter().filter(|axis| strategy.splits_ranks(mesh, *axis)).count();
    let reducing = trained.flat_map(|role| ReducingRanks::of(mesh, strategy.sharding_spec(role).update));
    // A group of all ranks is the same one along any axis.
    let axis = |ranks| match ranks {
        ReducingRanks::Along(axis) if mesh.size(axis) != mesh.ranks() => Some(axis),
        ReducingRanks::Data | ReducingRanks::Along(_) => None,
    };
    1 + smaller + reducing.map(axis).collect::<BTreeSet<_>>().len()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::{Arc, OnceLock};

    use super::*;
    use crate::collective::in_process::{InProcessWorld, run_ranks};
    use crate::collective::{Call, Collective, Operation, Ticket};
    use crate::error::Result;
    use crate::parallel::DeviceMesh;
    use crate::parallel::grad_reduce::open_lanes;

    /// Counts communicators as NCCL opens them.
    #[derive(Debug)]
    struct Counted {
        inner: Arc<dyn Collective>,
        opened: Arc<AtomicUsize>,
        has_lane: AtomicBool,
    }

    impl Counted {
        fn new(inner: Arc<dyn Collective>, opened: &Arc<AtomicUsize>) -> Self {
            opened.fetch_add(1, Ordering::Relaxed);
            Counted { inner, opened: Arc::clone(opened), has_lane: AtomicBool::new(false) }
        }
    }

    impl Collective for Counted {
        fn inner(&self) -> Option<&dyn Collective> {
            Some(&*self.inner)
        }

        fn call(&self, call: Call, operation: Operation<'_>) -> Result<Option<Ticket>> {
            self.inner.call(call, operation)
        }

        fn open_reduction_stream(&self) -> Result<bool> {
            if !self.has_lane.swap(true, Ordering::Relaxed) {
                self.opened.fetch_add(1, Ordering::Relaxed);
            }
            Ok(true)
        }

        fn split(&self, color: usize) -> Result<Box<dyn Collective>> {
            Ok(Box::new(Counted::new(Arc::from(self.inner.split(color)?), &self.opened)))
        }
    }

    #[test]
    fn as_many_are_counted_as_a_run_opens() -> Result<()> {
        use ParamRole::{Adapter, Trainable};
        use ShardingStrategy::{Ddp, Fsdp, Hsdp, Single, Zero1, Zero2};
        let both = [Trainable, Adapter];
        for (strategy, trained, wanted) in [
            (Ddp, &both[..], 2),
            (Zero1, &both, 2),
            (Zero2, &both, 2),
            (Fsdp, &both, 2),
            (Hsdp(2), &[Trainable], 5),
            (Hsdp(2), &[Adapter], 4),
            (Hsdp(2), &both, 6),
            (Hsdp(1), &both, 4),
            (Hsdp(4), &both, 2),
        ] {
            let counted = OnceLock::new();
            run_ranks(InProcessWorld::new(4).communicators(), |end| {
                let opened = Arc::default();
                let world: Arc<dyn Collective> = Arc::new(Counted::new(Arc::new(end), &opened));
                let mesh = DeviceMesh::new(strategy, world)?;
                open_lanes(trained.iter().map(|role| strategy.sharding_spec(*role).update), &mesh)?;
                counted.get_or_init(|| opened.load(Ordering::Relaxed));
                Ok(())
            })?;
            let planned = communicator_count(strategy, strategy.mesh_shape(4)?, trained.iter().copied());
            assert_eq!((Some(&planned), planned), (counted.get(), wanted), "{strategy:?} {trained:?}");
        }
        assert_eq!(communicator_count(Single, MeshShape::ONE, both.into_iter()), 0);
        Ok(())
    }
}
