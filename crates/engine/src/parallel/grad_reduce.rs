//! Gradients meet: what happens to a segment's gradients after its backward.
//!
//! A micro-batch's gradients are computed by themselves and then added, wherever more than one are summed or a rank
//! keeps a shard: so the sum is `((m0 + m1) + m2) + …` of whole gradients whoever computed them, and N ranks with one
//! micro-batch each give to the bit what one rank gives with N. Where there is nothing to add (one micro-batch a step, gradients kept
//! whole), and on a GPU that keeps gradients whole, backward adds to the kept memory itself.
//!
//! Where the optimizer updates bf16 weights without masters, a block's sum is rounded to bf16 once it is whole, and kept
//! so where a rank has one micro-batch a step; one rank's backward on the CPU writes it so at once. Embedding and head stay in f32: their backward adds up in the memory that
//! is kept, and f32 memory beside bf16 would be more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};

use super::bucket::Bucket;
use super::buffer_pool::BufferPool;
use super::gather::call;
use super::mesh::DeviceMesh;
use super::mesh_shape::MeshAxis;
use super::param::BucketKind;
use super::placement::Placement;
use crate::collective::{Collective, Reduction, Ticket};
use crate::error::{Error, Result};
use crate::model::Segment;
use crate::ops::elementwise::{add_into, sums_of_squares};
use crate::runtime::TensorMut;
use crate::runtime::copy::{copy_into, to_device, to_host_vec, zero};
use crate::runtime::cpu_tensor::memory;
use crate::runtime::param_storage::{STAGING_ELEMENTS, copy_across};

/// How gradients are summed.
#[derive(Debug, Clone, Copy)]
pub struct GradReduceOptions {
    /// More than one micro-batch a step adds up on a rank, each computed by itself first.
    pub accumulates: bool,
    /// The dtype in which ranks send gradients.
    pub dtype: DType,
    /// The dtype in which gradients of blocks are kept where the optimizer updates bf16 weights without f32 masters; bf16
    /// takes a step of one micro-batch on each rank. All others are f32.
    pub kept: DType,
}

/// Where backward writes gradients that are added up elsewhere.
#[derive(Debug)]
pub(super) struct GradBuffers {
    reducing: GradReduceOptions,
    device: Device,
    /// Of blocks, by kind of bucket: one block's backward runs at a time. Two where reductions go on beside it, for the
    /// even and for the odd blocks.
    blocks: Vec<BTreeMap<BucketKind, TensorMut>>,
    /// Of embedding and head, by bucket, from backward to reduction.
    outer: Mutex<BTreeMap<usize, TensorMut>>,
    pool: BufferPool,
    /// Reductions that go on beside backward, in the order in which they were started.
    pending: Mutex<VecDeque<PendingReduction>>,
    /// Whether what this rank has sent since it was asked to look holds a value that is not finite; none: it does not look.
    watched: Mutex<Option<bool>>,
}

/// A bucket's gradients on their way.
#[derive(Debug)]
struct PendingReduction {
    index: usize,
    segment: Segment,
    ranks: ReducingRanks,
    /// None when it is done.
    ticket: Option<Ticket>,
    /// Where this rank's sum appears, in the dtype in which it is sent.
    sum: Tensor,
    /// The bucket's fresh gradients, where they may not be written before the reduction is done.
    held: Option<TensorMut>,
    /// No micro-batch of the step comes after.
    last: bool,
}

/// Ranks that sum gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ReducingRanks {
    /// All that get different rows.
    Data,
    /// Those along an axis.
    Along(MeshAxis),
}

/// Whether all values of a tensor are finite.
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

    /// The groups that sum what is placed like this, the one that is called first.
    fn of(mesh: &DeviceMesh, placement: Placement) -> Vec<Self> {
        match placement {
            Placement::Replicated => vec![ReducingRanks::Data],
            Placement::Sharded { axis, .. } => {
                let replicas =
                    (mesh.size(MeshAxis::Data) > 1).then_some(ReducingRanks::Along(MeshAxis::Data));
                [ReducingRanks::Along(axis)].into_iter().chain(replicas).collect()
            }
        }
    }
}

impl GradBuffers {
    /// Memory for the blocks among `buckets`. All ranks call it.
    pub(super) fn new(
        buckets: &[Bucket],
        reducing: GradReduceOptions,
        device: &Device,
        mesh: &DeviceMesh,
    ) -> Result<Self> {
        // By kind: the length, and whether the next block needs memory of its own meanwhile.
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
        if open_lanes(buckets, mesh)? {
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
            watched: Mutex::default(),
        })
    }

    /// From now on looks at what this rank sends, or ends that; whether a value was not finite since it began to look.
    pub(super) fn watch(&self, looks: bool) -> bool {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *watched, looks.then_some(false)).unwrap_or(false)
    }

    pub(super) fn reducing(&self) -> GradReduceOptions {
        self.reducing
    }

    /// Whether reductions go on beside backward.
    fn overlaps(&self) -> bool {
        self.blocks.len() > 1
    }

    /// Where backward adds the gradients of bucket `index`: all of it; none when it is frozen. It is f32, or bf16 where
    /// there is nothing to add.
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
        let memory = self.pool.take(bucket.len, DType::F32, &self.device)?;
        let grad_buffers = memory.narrow(0, 0, bucket.len)?;
        zero(&grad_buffers)?;
        outer.insert(index, memory);
        Ok(Some(grad_buffers))
    }

    /// Adds what the backward of a micro-batch left for bucket `index` to what the rank keeps, over the ranks where
    /// that is due: at each micro-batch for shards, else at the `last` one. What goes on beside backward is added when it
    /// is [taken in](GradBuffers::wait_for_reductions).
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
            // Kept in bf16, it is the sum of the ranks that is rounded, of one micro-batch each.
            let adds = alone || !bucket.keeps_bf16_gradients();
            if let Some(fresh) = fresh.as_ref().filter(|_| adds) {
                add_from_anywhere(grad, fresh)?;
            }
            if !last || alone {
                fresh.map_or(Ok(()), |fresh| self.let_go(index, &fresh))?;
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

    /// Takes in the reductions that go on, in their order, so that the backward of `segment` may write its gradients; all
    /// for none. A GPU's computation waits for them, the host does not.
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

    /// Starts to sum `gradients`, a bucket's whole ones, over the ranks that get different rows: to where `placement` has
    /// them; in their own memory when they are sent as they are.
    fn start(
        &self,
        (mesh, placement): (&DeviceMesh, Placement),
        (index, bucket): (usize, &Bucket),
        gradients: &Tensor,
    ) -> Result<PendingReduction> {
        if let Some(found) = &mut *self.watched.lock().unwrap_or_else(PoisonError::into_inner) {
            *found |= !is_finite(gradients)?;
        }
        let call = call!("gradients of", bucket.segment);
        let sent = if self.reducing.dtype == DType::F32 {
            gradients.clone()
        } else {
            gradients.to_dtype(self.reducing.dtype)?
        };
        let sum = match placement {
            Placement::Replicated => sent.clone(),
            Placement::Sharded { .. } => sent.narrow(0, bucket.own.start, bucket.own.len())?,
        };
        let (full, shard) = (memory(&sent)?, memory(&sum)?);
        let groups = ReducingRanks::of(mesh, placement);
        let reduction = match placement {
            Placement::Replicated => Reduction::AllReduce(&full),
            Placement::Sharded { .. } => {
                let replicas = groups.get(1).map(|replicas| replicas.group(mesh));
                Reduction::ReduceScatter { full: &full, shard: &shard, replicas }
            }
        };
        let ranks = groups[0];
        let ticket = ranks.group(mesh).start_reduction(call, reduction)?;
        Ok(PendingReduction { index, segment: bucket.segment, ranks, ticket, sum, held: None, last: true })
    }

    /// Keeps the bucket's fresh gradients with the reduction that is made of them, or lets go of them.
    fn holding(
        &self,
        started: PendingReduction,
        fresh: TensorMut,
        bucket: &Bucket,
    ) -> Result<PendingReduction> {
        if is_held(bucket, self.reducing) {
            return Ok(PendingReduction { held: Some(fresh), ..started });
        }
        self.let_go(started.index, &fresh)?;
        Ok(started)
    }

    /// Brings the sum to the gradients that the rank keeps.
    fn finish(&self, mesh: &DeviceMesh, bucket: &Bucket, started: PendingReduction) -> Result<()> {
        let PendingReduction { index, ranks, ticket, sum, held, last, .. } = started;
        if let Some(ticket) = ticket {
            ranks.group(mesh).finish(ticket)?;
        }
        let Some(grad) = &bucket.grad else { return Ok(()) };
        if bucket.spec.gradients.is_sharded() {
            add_from_anywhere(grad, &sum)?;
        } else {
            // In place: this rank's run becomes the sum, the rest is not read again.
            let own = |flat: &TensorMut| flat.narrow(0, bucket.own.start, bucket.own.len());
            if self.reducing.dtype != DType::F32 {
                copy_into(&own(held.as_ref().unwrap_or(grad))?, &sum)?;
            }
            if let Some(here) = &held {
                let (to, summed) = (own(grad)?, own(here)?);
                if bucket.keeps_bf16_gradients() {
                    // To zeros.
                    add_from_anywhere(&to, &summed)?;
                } else {
                    copy_across(&summed, &to)?;
                }
            }
        }
        held.map_or(Ok(()), |held| self.let_go(index, &held))?;
        if last { bucket.round_gradients() } else { Ok(()) }
    }

    fn let_go(&self, index: usize, grad_buffers: &TensorMut) -> Result<()> {
        let mut outer = self.outer.lock().map_err(|_| Error::internal("a backward panicked"))?;
        match outer.remove(&index) {
            Some(memory) => {
                self.pool.give(memory);
                Ok(())
            }
            None => zero(grad_buffers),
        }
    }
}

/// Whether all groups that sum gradients of `buckets` do so beside computation. All ranks call it.
fn open_lanes(buckets: &[Bucket], mesh: &DeviceMesh) -> Result<bool> {
    if mesh.data_size() == 1 {
        return Ok(false);
    }
    let trainable = buckets.iter().filter(|bucket| bucket.grad.is_some());
    let groups: BTreeSet<ReducingRanks> =
        trainable.flat_map(|bucket| ReducingRanks::of(mesh, bucket.spec.update)).collect();
    let opened = groups.iter().map(|ranks| ranks.group(mesh).open_reduction_lane());
    // All are asked, on all ranks.
    let opened: Vec<bool> = opened.collect::<Result<_>>()?;
    Ok(!opened.is_empty() && opened.into_iter().all(|opened| opened))
}

/// Whether the fresh gradients of the two may lie in the same memory.
fn share_memory(one: Segment, other: Segment) -> bool {
    match (one, other) {
        (Segment::Block(one), Segment::Block(other)) => one % 2 == other % 2,
        (Segment::Block(_), _) | (_, Segment::Block(_)) => false,
        // Pieces of one pool.
        _ => true,
    }
}

/// Whether a bucket's fresh gradients are what is reduced, or where its sum is rounded to: not to be written meanwhile.
fn is_held(bucket: &Bucket, reducing: GradReduceOptions) -> bool {
    let sent = match bucket.spec.gradients {
        Placement::Sharded { .. } => reducing.dtype == DType::F32,
        Placement::Replicated => bucket.away || bucket.rounds_from_f32(),
    };
    sent && needs_own_buffer(bucket, reducing)
}

fn needs_own_buffer(bucket: &Bucket, reducing: GradReduceOptions) -> bool {
    let elsewhere = bucket.away || bucket.spec.gradients.is_sharded() || bucket.rounds_from_f32();
    bucket.grad.is_some() && (reducing.accumulates || elsewhere)
}

/// `kept += grad_buffers`, brought to where `kept` is.
fn add_from_anywhere(kept: &TensorMut, grad_buffers: &Tensor) -> Result<()> {
    if kept.device().same_device(grad_buffers.device()) {
        return add_into(kept, grad_buffers);
    }
    let len = kept.elem_count();
    (0..len).step_by(STAGING_ELEMENTS).try_for_each(|start| {
        let run = STAGING_ELEMENTS.min(len - start);
        let from = grad_buffers.narrow(0, start, run)?;
        add_into(&kept.narrow(0, start, run)?, &to_device(&from, kept.device())?)
    })
}

#[cfg(all(test, debug_assertions))]
mod tests;
