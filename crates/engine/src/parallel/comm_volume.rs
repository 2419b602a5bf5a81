//! The bytes that a step sends, computed from the placement alone. Plans and benchmarks compare the
//! counted bytes with them.

use candle_core::DType;

use super::grad_reduce::GradReduceOptions;
use super::mesh_shape::{MeshAxis, MeshShape};
use super::param_store::ParamStore;
use super::placement::ShardingSpec;
use crate::model::Segment;
use crate::recipe::enums::StoredActivations;

/// Trainable parameters with the same placement.
#[derive(Debug, Clone, Copy)]
pub struct TrainedRun {
    /// Placement of the parameters.
    pub spec: ShardingSpec,
    /// Number of elements of their local shapes.
    pub elements: usize,
    /// Bytes of a compute value.
    pub value_bytes: usize,
}

/// The bytes that a rank sends in a step, by purpose.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SentBytes {
    /// Bytes of values gathered for one use, in all micro-batches.
    pub gathers: u64,
    /// Bytes of gradients sent for summation.
    pub gradients: u64,
    /// The part of `gradients` that is summed over all ranks at once: every rank keeps the whole.
    pub whole: u64,
    /// The part of `gradients` that copies of the model sum over their shards (HSDP).
    pub between: u64,
    /// Bytes of new values after the update.
    pub updates: u64,
    /// Bytes of the sums of losses and of squared gradients.
    pub scalars: u64,
    /// Number of calls of all ranks together.
    pub calls: u64,
}

impl SentBytes {
    /// Returns the bytes of all purposes.
    pub fn total(&self) -> u64 {
        self.gathers + self.gradients + self.updates + self.scalars
    }

    /// Computes the bytes of a step of `turns` micro-batches per rank on this `mesh`. `stored`
    /// decides how often blocks are used, `gathered` has the bytes to gather by segment, `trained`
    /// the trainable parameters, whose gradients are sent in `dtype`.
    pub fn of_step(
        mesh: MeshShape,
        turns: u64,
        stored: &StoredActivations,
        gathered: impl Iterator<Item = (Segment, usize)>,
        trained: impl Iterator<Item = TrainedRun>,
        dtype: DType,
    ) -> Self {
        let (shards, copies) = (mesh.size(MeshAxis::Shard), mesh.size(MeshAxis::Data));
        let world = shards * copies;
        let mut sent = SentBytes { calls: 2, ..SentBytes::default() };
        // Blocks are gathered for each use, embedding and head are used once.
        for (segment, bytes) in gathered {
            let uses = if let Segment::Block(layer) = segment { stored.uses(layer) } else { 1 };
            sent.gathers += turns * uses * round(bytes, shards);
            sent.calls += turns * uses;
        }
        let mut sharded = false;
        for TrainedRun { spec, elements, value_bytes } in trained {
            let gradient = elements * dtype.size_in_bytes();
            let (mut whole, mut between) = (0, 0);
            let within = match (spec.gradients.is_sharded(), spec.update.is_sharded()) {
                (false, false) => {
                    whole = 2 * round(gradient, world);
                    0
                }
                (false, true) => round(gradient, shards),
                (true, _) => {
                    between = turns * 2 * round(gradient / shards, copies);
                    turns * round(gradient, shards)
                }
            };
            sent.gradients += within + whole + between;
            (sent.whole, sent.between) = (sent.whole + whole, sent.between + between);
            sent.calls += if spec.gradients.is_sharded() { turns } else { 1 };
            sharded |= spec.update.is_sharded();
            if spec.param_gather_axis().is_some() {
                sent.updates += round(elements * value_bytes, shards);
                sent.calls += 1;
            }
        }
        sent.scalars = 2 * round(8, world) + if sharded { 2 * round(8, shards) } else { 0 };
        sent
    }
}

/// Returns the bytes that a rank forwards of `bytes` in one round of a ring of `n`.
fn round(bytes: usize, n: usize) -> u64 {
    (bytes / n) as u64 * (n as u64 - 1)
}

impl ParamStore {
    /// Returns the bytes that this rank sends in a step of `turns` micro-batches per rank, the
    /// step's scalars included. `stored` decides how often blocks are gathered.
    pub fn sent_by_formula(&self, turns: u64, stored: &StoredActivations) -> u64 {
        let GradReduceOptions { dtype, .. } = self.reducing();
        let trained = self.trainable().map(|bucket| TrainedRun {
            spec: bucket.spec,
            elements: bucket.len,
            value_bytes: bucket.value.dtype().size_in_bytes(),
        });
        SentBytes::of_step(self.mesh().shape(), turns, stored, self.gathered_bytes(), trained, dtype).total()
    }
}
