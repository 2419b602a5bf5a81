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
use super::gather::call;
use super::placement::{Extent, Ranks};
use super::spare::Spare;
use crate::collective::Call;
use crate::error::{Error, Result};
use crate::model::Segment;
use crate::ops::access::memory;
use crate::ops::home::{STAGED, carry};
use crate::ops::reduce::{add_into, copy_into, zero};

/// How gradients are summed.
#[derive(Debug, Clone, Copy)]
pub struct Reducing {
    /// More than one micro-batch a step adds up on a rank.
    pub accumulates: bool,
    /// The dtype in which ranks send gradients.
    pub dtype: DType,
}

/// Where backward writes gradients that are added up elsewhere.
#[derive(Debug)]
pub(super) struct Fresh {
    reducing: Reducing,
    device: Device,
    /// Of blocks, by kind of bucket: one block's backward runs at a time.
    blocks: BTreeMap<u8, Tensor>,
    /// Of embedding and head, by bucket, from backward to reduction.
    ends: Mutex<BTreeMap<usize, Tensor>>,
    spare: Spare,
}

impl Fresh {
    /// Memory for the blocks among `buckets`, which come with their kinds.
    pub(super) fn new(buckets: &[(u8, &Bucket)], reducing: Reducing, device: &Device) -> Result<Self> {
        let mut widest: BTreeMap<u8, usize> = BTreeMap::new();
        for (kind, bucket) in buckets {
            if matches!(bucket.segment, Segment::Block(_)) && needs_fresh(bucket, reducing) {
                let len = widest.entry(*kind).or_default();
                *len = bucket.len.max(*len);
            }
        }
        let fresh = |(kind, len)| Ok((kind, Tensor::zeros(len, DType::F32, device)?));
        let blocks = widest.into_iter().map(fresh).collect::<Result<_>>()?;
        Ok(Fresh {
            reducing,
            device: device.clone(),
            blocks,
            ends: Mutex::default(),
            spare: Spare::default(),
        })
    }

    pub(super) fn reducing(&self) -> Reducing {
        self.reducing
    }

    /// Where backward adds the gradients of bucket `index`: all of it, f32; none when it is frozen.
    pub(super) fn target(&self, index: usize, kind: u8, bucket: &Bucket) -> Result<Option<Tensor>> {
        let Some(grad) = &bucket.grad else { return Ok(None) };
        if !needs_fresh(bucket, self.reducing) {
            return Ok(Some(grad.clone()));
        }
        if let Segment::Block(_) = bucket.segment {
            let memory = self.blocks.get(&kind).ok_or_else(|| Error::internal("no memory for gradients"))?;
            return Ok(Some(memory.narrow(0, 0, bucket.len)?));
        }
        let mut ends = self.ends.lock().map_err(|_| Error::internal("a backward panicked"))?;
        if let Some(memory) = ends.get(&index) {
            return Ok(Some(memory.narrow(0, 0, bucket.len)?));
        }
        let memory = self.spare.take(bucket.len, DType::F32, &self.device)?;
        let fresh = memory.narrow(0, 0, bucket.len)?;
        zero(&fresh)?;
        ends.insert(index, memory);
        Ok(Some(fresh))
    }

    /// Adds what the backward of a micro-batch left for bucket `index` to what the rank keeps, over the ranks where
    /// that is due: at each micro-batch for shards, else at the `last` one.
    pub(super) fn reduce(
        &self,
        ranks: &Ranks,
        (index, kind, bucket): (usize, u8, &Bucket),
        last: bool,
    ) -> Result<()> {
        let Some(grad) = &bucket.grad else { return Ok(()) };
        let call = call!("gradients of", bucket.segment);
        let fresh = if needs_fresh(bucket, self.reducing) { self.target(index, kind, bucket)? } else { None };
        if bucket.keep.gradients == Extent::Shard {
            let fresh = fresh.ok_or_else(|| Error::internal("gradients without memory"))?;
            add_from_anywhere(grad, &self.reduce_scatter(ranks, call, &fresh, bucket)?)?;
            return self.let_go(index, &fresh);
        }
        if let Some(fresh) = &fresh {
            add_from_anywhere(grad, fresh)?;
        }
        if last && ranks.world().size() > 1 {
            match fresh.as_ref().filter(|_| bucket.away) {
                None => self.sum(ranks, call, grad, bucket)?,
                Some(here) => {
                    carry(grad, here)?;
                    self.sum(ranks, call, here, bucket)?;
                    let own = |flat: &Tensor| flat.narrow(0, bucket.own.start, bucket.own.len());
                    carry(&own(here)?, &own(grad)?)?;
                }
            }
        }
        fresh.map_or(Ok(()), |fresh| self.let_go(index, &fresh))
    }

    /// Sums `grad`, a bucket's whole gradients, over the ranks: at least the run that this rank updates.
    fn sum(&self, ranks: &Ranks, call: Call, grad: &Tensor, bucket: &Bucket) -> Result<()> {
        match bucket.keep.update {
            Extent::Whole => self.all_reduce(ranks, call, grad),
            // In place: this rank's run of `grad` becomes the sum, the rest is not read again.
            Extent::Shard => {
                let sum = self.reduce_scatter(ranks, call, grad, bucket)?;
                match self.reducing.dtype {
                    DType::F32 => Ok(()),
                    _ => copy_into(&grad.narrow(0, bucket.own.start, bucket.own.len())?, &sum),
                }
            }
        }
    }

    fn let_go(&self, index: usize, fresh: &Tensor) -> Result<()> {
        let mut ends = self.ends.lock().map_err(|_| Error::internal("a backward panicked"))?;
        match ends.remove(&index) {
            Some(memory) => {
                self.spare.give(memory);
                Ok(())
            }
            None => zero(fresh),
        }
    }

    /// This rank's run of the sum of `full`, in `full`'s own memory when it is sent as it is.
    fn reduce_scatter(&self, ranks: &Ranks, call: Call, full: &Tensor, bucket: &Bucket) -> Result<Tensor> {
        let full = if self.reducing.dtype == DType::F32 {
            full.clone()
        } else {
            full.to_dtype(self.reducing.dtype)?
        };
        let own = full.narrow(0, bucket.own.start, bucket.own.len())?;
        let (whole, part) = (memory(&full)?, memory(&own)?);
        match ranks.replicas() {
            None => ranks.shards().reduce_scatter(call, &whole, &part)?,
            Some(replicas) => ranks.shards().reduce_scatter_across(call, replicas, &whole, &part)?,
        }
        Ok(own)
    }

    fn all_reduce(&self, ranks: &Ranks, call: Call, grad: &Tensor) -> Result<()> {
        if self.reducing.dtype == DType::F32 {
            return ranks.world().all_reduce(call, &memory(grad)?);
        }
        let sent = grad.to_dtype(self.reducing.dtype)?;
        ranks.world().all_reduce(call, &memory(&sent)?)?;
        copy_into(grad, &sent)
    }
}

fn needs_fresh(bucket: &Bucket, reducing: Reducing) -> bool {
    let elsewhere = bucket.away || bucket.keep.gradients == Extent::Shard;
    bucket.grad.is_some() && (reducing.accumulates || elsewhere)
}

/// `kept += fresh`, brought to where `kept` is.
fn add_from_anywhere(kept: &Tensor, fresh: &Tensor) -> Result<()> {
    if kept.device().same_device(fresh.device()) {
        return add_into(kept, fresh);
    }
    let len = kept.elem_count();
    (0..len).step_by(STAGED).try_for_each(|start| {
        let run = |flat: &Tensor| flat.narrow(0, start, STAGED.min(len - start));
        add_into(&run(kept)?, &run(fresh)?.to_device(kept.device())?)
    })
}
