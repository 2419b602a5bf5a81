//! Gradient reduction: adds and sums a segment's gradients after its backward.
//!
//! If several micro-batches are summed or a rank keeps a shard, the gradients of a micro-batch are
//! computed separately and then added. So the sum is `((m0 + m1) + m2) + …` of whole gradients on
//! any ranks, and N ranks with one micro-batch each match one rank with N bit for bit. If nothing
//! is added (one micro-batch a step, whole gradients), and on a GPU that keeps gradients whole,
//! backward adds to the kept memory itself.
//!
//! If the optimizer updates bf16 weights without masters, a block's complete sum is rounded to
//! bf16. It is also kept in bf16 if a rank has one micro-batch a step; on the CPU, the backward of
//! a single rank writes it so at once. Embedding and head stay in f32: their backward accumulates
//! in the kept memory, and f32 memory beside bf16 would be larger.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard};

use candle_core::{DType, Device, Tensor};

use super::bucket::Bucket;
use super::buffer_pool::BufferPool;
use super::gather::call;
use super::mesh::DeviceMesh;
use super::mesh_shape::{MeshAxis, MeshShape};
use super::param::BucketKind;
use super::placement::Placements;
use crate::collective::{Collective, Reduction, Ticket};
use crate::error::{Error, Result};
use crate::locks::locked;
use crate::model::Segment;
use crate::ops::elementwise::{add_into, sums_of_squares};
use crate::runtime::TensorMut;
use crate::runtime::copy::{converted, copy_into, to_host_vec, zero};
use crate::runtime::cpu_tensor::memory;
use crate::runtime::param_storage::{copy_across, for_each_run};

/// Options of the summation of gradients.
#[derive(Debug, Clone, Copy)]
pub struct GradReduceOptions {
    /// True if a rank adds up more than one micro-batch a step, each computed separately first.
    pub accumulates: bool,
    /// The dtype in which ranks send gradients.
    pub dtype: DType,
    /// The dtype of kept block gradients if the optimizer updates bf16 weights without f32 masters.
    /// bf16 requires a step of one micro-batch on each rank. All other gradients are f32.
    pub block_dtype: DType,
}

/// The buffers for gradients that backward does not add to the kept ones directly.
#[derive(Debug)]
pub(super) struct GradBuffers {
    reducing: GradReduceOptions,
    device: Device,
    /// Buffers of blocks by kind of bucket: one block's backward runs at a time. With overlapping
    /// reductions, two of them, for even and odd blocks.
    blocks: Vec<BTreeMap<BucketKind, TensorMut>>,
    /// Buffers of embedding and head by bucket, from backward to reduction.
    outer: Mutex<BTreeMap<usize, TensorMut>>,
    pool: BufferPool,
    /// Reductions that overlap with backward, in the order of their start.
    pending: Mutex<VecDeque<PendingReduction>>,
    /// True once this rank has sent a non-finite value since the check began; `None` if the check
    /// is off.
    has_nonfinite: Mutex<Option<bool>>,
}

/// A bucket's gradients during their reduction.
#[derive(Debug)]
struct PendingReduction {
    index: usize,
    segment: Segment,
    ranks: ReducingRanks,
    /// `None` if the reduction is done.
    ticket: Option<Ticket>,
    /// The memory for this rank's sum, in the dtype in which it is sent.
    sum: Tensor,
    /// The bucket's fresh gradients, if they must not be overwritten before the reduction is done.
    held: Option<TensorMut>,
    /// True for the last micro-batch of the step.
    last: bool,
}

/// The ranks that sum gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ReducingRanks {
    /// All ranks that get different rows.
    Data,
    /// The ranks along an axis.
    Along(MeshAxis),
}

/// Returns whether all values of a tensor are finite.
pub(super) fn is_finite(x: &Tensor) -> Result<bool> {
    let x = x.to_dtype(DType::F32)?.flatten_all()?;
    let squares = sums_of_squares(&[&x], x.device())?.read()?;
    Ok(squares.iter().all(|sum| sum.is_finite()) || to_host_vec::<f32>(&x)?.iter().all(|v| v.is_finite()))
}

impl ReducingRanks {
    fn group(self, mesh: &DeviceMesh) -> &dyn Collective {
        match self {
            ReducingRanks::Data => mesh.data_group(),
            ReducingRanks::Along(axis) => mesh.group(axis),
        }
    }

    /// Returns the groups that sum gradients of this placement, in calling order.
    pub(super) fn of(mesh: MeshShape, placements: Placements) -> Vec<Self> {
        match placements.axis() {
            None => vec![ReducingRanks::Data],
            Some(axis) => {
                let replicas =
                    (mesh.size(MeshAxis::Data) > 1).then_some(ReducingRanks::Along(MeshAxis::Data));
                [ReducingRanks::Along(axis)].into_iter().chain(replicas).collect()
            }
        }
    }
}

impl GradBuffers {
    /// Allocates memory for the blocks among `buckets`. All ranks call it.
    pub(super) fn new(
        buckets: &[Bucket],
        reducing: GradReduceOptions,
        device: &Device,
        mesh: &DeviceMesh,
    ) -> Result<Self> {
        // By kind: the length, and whether the next block needs separate memory meanwhile.
        let mut widest: BTreeMap<BucketKind, (usize, bool)> = BTreeMap::new();
        for bucket in buckets {
            if matches!(bucket.segment, Segment::Block(_)) && needs_own_buffer(bucket, reducing) {
                let (len, held) = widest.entry(bucket.kind).or_default();
                *len = bucket.len.max(*len);
                *held |= is_held(bucket, reducing);
            }
        }
        let zeros = |len: usize| TensorMut::zeros(len, DType::F32, device);
        let even = widest.iter().map(|(kind, (len, _))| Ok((*kind, zeros(*len)?)));
        let even: BTreeMap<BucketKind, TensorMut> = even.collect::<Result<_>>()?;
        let mut blocks = vec![even];
        let trainable = buckets.iter().filter(|bucket| bucket.grad.is_some());
        if open_lanes(trainable.map(|bucket| bucket.spec.update), mesh)? {
            let odd = |(kind, (len, held)): (&BucketKind, &(usize, bool))| {
                Ok((*kind, if *held { zeros(*len)? } else { blocks[0][kind].clone() }))
            };
            let odd = widest.iter().map(odd).collect::<Result<_>>()?;
            blocks.push(odd);
        }
        Ok(GradBuffers {
            reducing,
            device: device.clone(),
            blocks,
            outer: Mutex::default(),
            pool: BufferPool::default(),
            pending: Mutex::default(),
            has_nonfinite: Mutex::default(),
        })
    }

    /// Starts the check for non-finite values in sent gradients.
    pub(super) fn start_nonfinite_check(&self) {
        *locked(&self.has_nonfinite) = Some(false);
    }

    /// Stops the check. Returns whether it saw any.
    pub(super) fn stop_nonfinite_check(&self) -> bool {
        locked(&self.has_nonfinite).take().unwrap_or(false)
    }

    pub(super) fn reducing(&self) -> GradReduceOptions {
        self.reducing
    }

    /// Returns whether reductions overlap with backward.
    fn overlaps(&self) -> bool {
        self.blocks.len() > 1
    }

    /// Returns the buffer to which backward adds the whole gradients of bucket `index`, or `None`
    /// if it is frozen. The buffer is f32, or bf16 if nothing is added to it.
    pub(super) fn target(&self, index: usize, bucket: &Bucket) -> Result<Option<TensorMut>> {
        let Some(grad) = &bucket.grad else { return Ok(None) };
        if !needs_own_buffer(bucket, self.reducing) {
            return Ok(Some(grad.clone()));
        }
        if let Segment::Block(layer) = bucket.segment {
            let memory = self.blocks[layer % self.blocks.len()].get(&bucket.kind);
            let memory = memory.ok_or_else(|| Error::internal("no memory for gradients"))?;
            return Ok(Some(memory.narrow(0, 0, bucket.len)?));
        }
        let mut outer = self.outer.lock().map_err(|_| Error::internal("a backward panicked"))?;
        if let Some(memory) = outer.get(&index) {
            return Ok(Some(memory.narrow(0, 0, bucket.len)?));
        }
        let memory = if bucket.per_layer {
            TensorMut::zeros(bucket.len, DType::F32, &self.device)?
        } else {
            self.pool.take(bucket.len, DType::F32, &self.device)?
        };
        let grad_buffers = memory.narrow(0, 0, bucket.len)?;
        zero(&grad_buffers)?;
        outer.insert(index, memory);
        Ok(Some(grad_buffers))
    }

    /// Adds the gradients of a micro-batch's backward for bucket `index` to those that the rank
    /// keeps, and sums over ranks: at each micro-batch for shards, otherwise at the `last` one.
    /// Overlapping reductions are added in [`GradBuffers::wait_for_reductions`].
    pub(super) fn reduce(
        &self,
        mesh: &DeviceMesh,
        buckets: &[Bucket],
        index: usize,
        last: bool,
    ) -> Result<()> {
        let bucket = &buckets[index];
        let Some(grad) = &bucket.grad else { return Ok(()) };
        if !last && bucket.keeps_bf16_gradients() {
            return Err(Error::internal("micro-batches would be added up in bf16"));
        }
        let fresh = if needs_own_buffer(bucket, self.reducing) { self.target(index, bucket)? } else { None };
        let started = if bucket.spec.gradients.is_sharded() {
            let fresh = fresh.ok_or_else(|| Error::internal("gradients without memory"))?;
            let started = self.start((mesh, bucket.spec.gradients), (index, bucket), &fresh)?;
            self.holding(started, fresh, bucket)?
        } else {
            let alone = mesh.data_size() == 1;
            // In bf16 the sum of the ranks is rounded, with one micro-batch each.
            let adds = alone || !bucket.keeps_bf16_gradients();
            if let Some(fresh) = fresh.as_ref().filter(|_| adds) {
                add_from_anywhere(grad, fresh)?;
            }
            if !last || alone {
                fresh.map_or(Ok(()), |fresh| self.let_go((index, bucket), &fresh))?;
                return if last { bucket.round_gradients() } else { Ok(()) };
            }
            match fresh {
                None => self.start((mesh, bucket.spec.update), (index, bucket), grad)?,
                Some(fresh) => {
                    if bucket.away && adds {
                        copy_across(grad, &fresh)?;
                    }
                    let from = if is_held(bucket, self.reducing) { &fresh } else { grad };
                    let started = self.start((mesh, bucket.spec.update), (index, bucket), from)?;
                    self.holding(started, fresh, bucket)?
                }
            }
        };
        let started = PendingReduction { last, ..started };
        if !self.overlaps() {
            return self.finish(mesh, bucket, started);
        }
        self.pending()?.push_back(started);
        Ok(())
    }

    /// Waits for pending reductions, in their order, until the backward of `segment` may write its
    /// gradients; for all of them if `segment` is `None`. On a GPU the computation waits, not the
    /// host.
    pub(super) fn wait_for_reductions(
        &self,
        mesh: &DeviceMesh,
        buckets: &[Bucket],
        segment: Option<Segment>,
    ) -> Result<()> {
        let newest = self.pending()?.back().map(|newest| newest.segment);
        let goes_on = newest.filter(|newest| segment.is_some_and(|segment| !share_memory(segment, *newest)));
        loop {
            let mut pending = self.pending()?;
            let is_due = pending.front().is_some_and(|oldest| Some(oldest.segment) != goes_on);
            let Some(oldest) = (if is_due { pending.pop_front() } else { None }) else { return Ok(()) };
            drop(pending);
            self.finish(mesh, &buckets[oldest.index], oldest)?;
        }
    }

    fn pending(&self) -> Result<MutexGuard<'_, VecDeque<PendingReduction>>> {
        self.pending.lock().map_err(|_| Error::internal("a reduction panicked"))
    }

    /// Starts to sum `gradients`, a bucket's whole ones, over the ranks that get different rows.
    /// The sum has the given `placements`. Gradients that are sent without conversion are summed in
    /// their own memory.
    fn start(
        &self,
        (mesh, placements): (&DeviceMesh, Placements),
        (index, bucket): (usize, &Bucket),
        gradients: &Tensor,
    ) -> Result<PendingReduction> {
        if let Some(has_any) = &mut *locked(&self.has_nonfinite) {
            *has_any |= !is_finite(gradients)?;
        }
        let call = call!("gradients of", bucket.segment);
        let sent = if self.reducing.dtype == DType::F32 {
            gradients.clone()
        } else {
            converted(gradients, self.reducing.dtype)?
        };
        let sharded = placements.is_sharded();
        let sum = if sharded { sent.narrow(0, bucket.own.start, bucket.own.len())? } else { sent.clone() };
        let (full, shard) = (memory(&sent)?, memory(&sum)?);
        let groups = ReducingRanks::of(mesh.shape(), placements);
        let reduction = if sharded {
            let replicas = groups.get(1).map(|replicas| replicas.group(mesh));
            Reduction::ReduceScatter { full: &full, shard: &shard, replicas }
        } else {
            Reduction::AllReduce(&full)
        };
        let ranks = groups[0];
        let ticket = ranks.group(mesh).start_reduction(call, reduction)?;
        Ok(PendingReduction { index, segment: bucket.segment, ranks, ticket, sum, held: None, last: true })
    }

    /// Keeps the bucket's fresh gradients with their reduction, or releases them.
    fn holding(
        &self,
        started: PendingReduction,
        fresh: TensorMut,
        bucket: &Bucket,
    ) -> Result<PendingReduction> {
        if is_held(bucket, self.reducing) {
            return Ok(PendingReduction { held: Some(fresh), ..started });
        }
        self.let_go((started.index, bucket), &fresh)?;
        Ok(started)
    }

    /// Writes the sum to the gradients that the rank keeps.
    fn finish(&self, mesh: &DeviceMesh, bucket: &Bucket, started: PendingReduction) -> Result<()> {
        let PendingReduction { index, ranks, ticket, sum, held, last, .. } = started;
        if let Some(ticket) = ticket {
            ranks.group(mesh).finish(ticket)?;
        }
        let Some(grad) = &bucket.grad else { return Ok(()) };
        if bucket.spec.gradients.is_sharded() {
            add_from_anywhere(grad, &sum)?;
        } else {
            // In place: this rank's run becomes the sum, and the rest is not read again.
            let own = |flat: &TensorMut| flat.narrow(0, bucket.own.start, bucket.own.len());
            if self.reducing.dtype != DType::F32 {
                copy_into(&own(held.as_ref().unwrap_or(grad))?, &sum)?;
            }
            if let Some(here) = &held {
                let (to, summed) = (own(grad)?, own(here)?);
                if bucket.keeps_bf16_gradients() {
                    // The kept gradients are zeros.
                    add_from_anywhere(&to, &summed)?;
                } else {
                    copy_across(&summed, &to)?;
                }
            }
        }
        held.map_or(Ok(()), |held| self.let_go((index, bucket), &held))?;
        if last { bucket.round_gradients() } else { Ok(()) }
    }

    fn let_go(&self, (index, bucket): (usize, &Bucket), grad_buffers: &TensorMut) -> Result<()> {
        let mut outer = self.outer.lock().map_err(|_| Error::internal("a backward panicked"))?;
        match outer.remove(&index) {
            Some(_) if bucket.per_layer => Ok(()),
            Some(memory) => {
                self.pool.give(memory);
                Ok(())
            }
            None => zero(grad_buffers),
        }
    }
}

/// Returns whether all groups that sum gradients can overlap with computation. `updates` are the
/// placements of the updates of trained buckets. All ranks call it.
pub(super) fn open_lanes(updates: impl Iterator<Item = Placements>, mesh: &DeviceMesh) -> Result<bool> {
    if mesh.data_size() == 1 {
        return Ok(false);
    }
    let groups: BTreeSet<ReducingRanks> =
        updates.flat_map(|update| ReducingRanks::of(mesh.shape(), update)).collect();
    let opened = groups.iter().map(|ranks| ranks.group(mesh).open_reduction_stream());
    // Every rank must ask every group.
    let opened: Vec<bool> = opened.collect::<Result<_>>()?;
    Ok(!opened.is_empty() && opened.into_iter().all(|opened| opened))
}

/// Returns whether the fresh gradients of the two segments may share memory.
fn share_memory(one: Segment, other: Segment) -> bool {
    match (one, other) {
        (Segment::Block(one), Segment::Block(other)) => one % 2 == other % 2,
        (Segment::Block(_), _) | (_, Segment::Block(_)) => false,
        // Buffers of one pool.
        _ => true,
    }
}

/// Returns whether a bucket's fresh gradients are reduced in place, or its sum is rounded from
/// them, so that they must not be overwritten meanwhile.
fn is_held(bucket: &Bucket, reducing: GradReduceOptions) -> bool {
    let sent = if bucket.spec.gradients.is_sharded() {
        reducing.dtype == DType::F32
    } else {
        bucket.away || bucket.rounds_from_f32()
    };
    sent && needs_own_buffer(bucket, reducing)
}

fn needs_own_buffer(bucket: &Bucket, reducing: GradReduceOptions) -> bool {
    let elsewhere = bucket.away || bucket.spec.gradients.is_sharded() || bucket.rounds_from_f32();
    bucket.grad.is_some() && (reducing.accumulates || elsewhere)
}

/// Computes `sums += grad_buffers` on the device of `sums`, which is that of the gradients or the
/// host.
fn add_from_anywhere(sums: &TensorMut, grad_buffers: &Tensor) -> Result<()> {
    if sums.device().same_device(grad_buffers.device()) {
        return add_into(sums, grad_buffers);
    }
    for_each_run(grad_buffers, |start, run| add_into(&sums.narrow(0, start, run.elem_count())?, run))
}

#[cfg(all(test, debug_assertions))]
mod tests;
