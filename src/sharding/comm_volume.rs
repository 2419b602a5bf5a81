//! What a step sends, from the placement alone: what plans and benchmarks hold the counted bytes against.

use super::grad_reduce::GradReduceOptions;
use super::mesh_shape::MeshAxis;
use super::param_store::ParamStore;
use super::placement::Placement;
use crate::model::Segment;

/// Bytes that a rank passes on of `bytes` in one round of a ring of `n`.
fn round(bytes: usize, n: usize) -> u64 {
    (bytes / n) as u64 * (n as u64 - 1)
}

impl ParamStore {
    /// Bytes that this rank sends in a step of `turns` micro-batches a rank, the step's scalars included.
    pub fn sent_by_formula(&self, turns: u64) -> u64 {
        let mesh = self.mesh();
        let (world, shards, copies) =
            (mesh.data_size(), mesh.size(MeshAxis::Shard), mesh.size(MeshAxis::Data));
        let GradReduceOptions { dtype, .. } = self.reducing();
        let mut sent = 0;
        // Blocks are gathered for forward and for backward, embedding and head are used once.
        for (segment, bytes) in self.gathered_bytes() {
            let uses = if matches!(segment, Segment::Block(_)) { 2 } else { 1 };
            sent += turns * uses * round(bytes, shards);
        }
        let mut sharded = false;
        for bucket in self.trainable() {
            let gradient = bucket.len * dtype.size_in_bytes();
            sent += match (bucket.spec.gradients, bucket.spec.update) {
                (Placement::Replicated, Placement::Replicated) => 2 * round(gradient, world),
                (Placement::Replicated, Placement::Sharded { .. }) => round(gradient, shards),
                (Placement::Sharded { .. }, _) => {
                    turns * (round(gradient, shards) + 2 * round(gradient / shards, copies))
                }
            };
            sharded |= bucket.spec.update.is_sharded();
            if bucket.spec.spread_axis().is_some() {
                sent += round(bucket.len * bucket.value.dtype().size_in_bytes(), shards);
            }
        }
        // The sum of losses, and of squares of gradients.
        sent + 2 * round(8, world) + if sharded { 2 * round(8, shards) } else { 0 }
    }
}
