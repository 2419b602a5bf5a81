//! Gradients meet: what happens to a segment's gradients after its backward.
//!
//! A micro-batch's gradients are computed by themselves and then added, wherever more than one are summed or a rank
//! keeps a shard: so the sum is `((m0 + m1) + m2) + …` of whole gradients whoever computed them, and N ranks with one
//! micro-batch each give to the bit what one rank gives with N. Where there is nothing to add (one micro-batch a step, gradients kept
//! whole), backward writes to the kept memory itself.

use std::collections::BTreeMap;
use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};

use super::bucket::Bucket;
use super::buffer_pool::BufferPool;
use super::gather::call;
use super::mesh::DeviceMesh;
use super::mesh_shape::MeshAxis;
use super::param::BucketKind;
use super::placement::Placement;
use crate::collective::Call;
use crate::error::{Error, Result};
use crate::model::Segment;
use crate::ops::elementwise::add_into;
use crate::runtime::TensorMut;
use crate::runtime::copy::{copy_into, to_device, zero};
use crate::runtime::cpu_tensor::memory;
use crate::runtime::param_storage::{STAGING_ELEMENTS, copy_across};

/// How gradients are summed.
#[derive(Debug, Clone, Copy)]
pub struct GradReduceOptions {
    /// More than one micro-batch a step adds up on a rank.
    pub accumulates: bool,
    /// The dtype in which ranks send gradients.
    pub dtype: DType,
}

/// Where backward writes gradients that are added up elsewhere.
#[derive(Debug)]
pub(super) struct GradBuffers {
    reducing: GradReduceOptions,
    device: Device,
    /// Of blocks, by kind of bucket: one block's backward runs at a time.
    blocks: BTreeMap<BucketKind, TensorMut>,
    /// Of embedding and head, by bucket, from backward to reduction.
    outer: Mutex<BTreeMap<usize, TensorMut>>,
    pool: BufferPool,
}

impl GradBuffers {
    /// Memory for the blocks among `buckets`.
    pub(super) fn new(buckets: &[Bucket], reducing: GradReduceOptions, device: &Device) -> Result<Self> {
        let mut widest: BTreeMap<BucketKind, usize> = BTreeMap::new();
        for bucket in buckets {
            if matches!(bucket.segment, Segment::Block(_)) && needs_own_buffer(bucket, reducing) {
                let len = widest.entry(bucket.kind).or_default();
                *len = bucket.len.max(*len);
            }
        }
        let grad_buffers = |(kind, len)| Ok((kind, TensorMut::zeros(len, DType::F32, device)?));
        let blocks = widest.into_iter().map(grad_buffers).collect::<Result<_>>()?;
        Ok(GradBuffers {
            reducing,
            device: device.clone(),
            blocks,
            outer: Mutex::default(),
            pool: BufferPool::default(),
        })
    }

    pub(super) fn reducing(&self) -> GradReduceOptions {
        self.reducing
    }

    /// Where backward adds the gradients of bucket `index`: all of it, f32; none when it is frozen.
    pub(super) fn target(&self, index: usize, bucket: &Bucket) -> Result<Option<TensorMut>> {
        let Some(grad) = &bucket.grad else { return Ok(None) };
        if !needs_own_buffer(bucket, self.reducing) {
            return Ok(Some(grad.clone()));
        }
        if let Segment::Block(_) = bucket.segment {
            let memory =
                self.blocks.get(&bucket.kind).ok_or_else(|| Error::internal("no memory for gradients"))?;
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
    /// that is due: at each micro-batch for shards, else at the `last` one.
    pub(super) fn reduce(
        &self,
        mesh: &DeviceMesh,
        (index, bucket): (usize, &Bucket),
        last: bool,
    ) -> Result<()> {
        let Some(grad) = &bucket.grad else { return Ok(()) };
        let call = call!("gradients of", bucket.segment);
        let grad_buffers =
            if needs_own_buffer(bucket, self.reducing) { self.target(index, bucket)? } else { None };
        if let Placement::Sharded { axis, .. } = bucket.spec.gradients {
            let grad_buffers = grad_buffers.ok_or_else(|| Error::internal("gradients without memory"))?;
            let own = self.reduce_scatter((mesh, axis), call, &grad_buffers, bucket)?;
            add_from_anywhere(grad, &own)?;
            return self.let_go(index, &grad_buffers);
        }
        if let Some(grad_buffers) = &grad_buffers {
            add_from_anywhere(grad, grad_buffers)?;
        }
        if last && mesh.data_size() > 1 {
            match grad_buffers.as_ref().filter(|_| bucket.away) {
                None => self.sum(mesh, call, grad, bucket)?,
                Some(here) => {
                    copy_across(grad, here)?;
                    self.sum(mesh, call, here, bucket)?;
                    let own = |flat: &TensorMut| flat.narrow(0, bucket.own.start, bucket.own.len());
                    let summed = own(here)?;
                    copy_across(&summed, &own(grad)?)?;
                }
            }
        }
        grad_buffers.map_or(Ok(()), |grad_buffers| self.let_go(index, &grad_buffers))
    }

    /// Sums `grad`, a bucket's whole gradients, over the ranks: at least the run that this rank updates.
    fn sum(&self, mesh: &DeviceMesh, call: Call, grad: &TensorMut, bucket: &Bucket) -> Result<()> {
        match bucket.spec.update {
            Placement::Replicated => self.all_reduce(mesh, call, grad),
            // In place: this rank's run of `grad` becomes the sum, the rest is not read again.
            Placement::Sharded { axis, .. } => {
                let sum = self.reduce_scatter((mesh, axis), call, grad, bucket)?;
                match self.reducing.dtype {
                    DType::F32 => Ok(()),
                    _ => copy_into(&grad.narrow(0, bucket.own.start, bucket.own.len())?, &sum),
                }
            }
        }
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

    /// This rank's run of the sum of `gathered` over the ranks that get different rows, of which those along `axis`
    /// share the sum out; in `gathered`'s own memory when it is sent as it is.
    fn reduce_scatter(
        &self,
        (mesh, axis): (&DeviceMesh, MeshAxis),
        call: Call,
        gathered: &Tensor,
        bucket: &Bucket,
    ) -> Result<Tensor> {
        let gathered = if self.reducing.dtype == DType::F32 {
            gathered.clone()
        } else {
            gathered.to_dtype(self.reducing.dtype)?
        };
        let own = gathered.narrow(0, bucket.own.start, bucket.own.len())?;
        let (whole, part) = (memory(&gathered)?, memory(&own)?);
        let shards = mesh.group(axis);
        match mesh.size(MeshAxis::Data) {
            1 => shards.reduce_scatter(call, &whole, &part)?,
            _ => shards.reduce_scatter_across(call, mesh.group(MeshAxis::Data), &whole, &part)?,
        }
        Ok(own)
    }

    fn all_reduce(&self, mesh: &DeviceMesh, call: Call, grad: &TensorMut) -> Result<()> {
        if self.reducing.dtype == DType::F32 {
            return mesh.data_group().all_reduce(call, &memory(grad)?);
        }
        let sent = grad.to_dtype(self.reducing.dtype)?;
        mesh.data_group().all_reduce(call, &memory(&sent)?)?;
        copy_into(grad, &sent)
    }
}

fn needs_own_buffer(bucket: &Bucket, reducing: GradReduceOptions) -> bool {
    let elsewhere = bucket.away || bucket.spec.gradients.is_sharded();
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
