//! Sums over the ranks: on the compute stream, or in parallel with computation on a separate stream
//! and communicator. **Not yet run on a GPU**.
//!
//! One communicator runs its calls one after the other, so a reduction on that of the gathers would
//! wait for the next block's weights, and they for it. Each group that sums gradients has a second
//! communicator for them, split from its first in `open_reduction_stream`; all reductions of a rank
//! share one stream, so hsdp's two stages are in order. A reduction waits there for the earlier
//! computation, and computation waits for the reduction in `finish`: by marks, without a wait of
//! the host.

use std::ffi::c_void;
use std::sync::Arc;

use super::communicator::Communicator;
use super::device::{CommStream, GpuStreams};
use super::library::{SUM, data_type};
use super::{Nccl, check_places, locked};
use crate::collective::buffer_checks::{check_shard, check_sum};
use crate::collective::operation::backend;
use crate::collective::{Call, Collective, Op, Reduction, Ticket};
use crate::error::{Error, Result};
use crate::runtime::buffer::{Buffer, ElementType, MemoryKind};

impl<D: GpuStreams> Nccl<D> {
    /// The communicator for calls on `lane`.
    pub(super) fn communicator(&self, lane: CommStream) -> Result<&Communicator> {
        match lane {
            CommStream::Compute | CommStream::Gather => Ok(&*self.communicator),
            CommStream::Reduce => {
                let opened = self.reductions.get();
                Ok(&**opened
                    .ok_or_else(|| Error::internal("a reduction is started before its lane is open"))?)
            }
        }
    }

    /// Creates the communicator of started reductions, unless it exists.
    pub(super) fn open_reductions(&self) -> Result<()> {
        if self.reductions.get().is_some() {
            return Ok(());
        }
        if !locked(&self.state).gathers.is_empty() {
            return Err(Error::internal("a communicator is split while a gather is under way"));
        }
        let record = self.record(Op::Split, Call::single("reductions"));
        self.log_call(&record);
        // After it no call is pending on the communicator, which NCCL requires before a split.
        self.compare(&record)?;
        let member = &self.member;
        let made = self.communicator.split(0, self.rank).map_err(|error| member.abort_flag.raise(error))?;
        locked(&member.groups).push(Arc::clone(&made));
        self.reductions.get_or_init(|| made);
        Ok(())
    }

    /// Implements [`Collective::start_reduction`]; host memory uses the compute stream and is ready
    /// on return.
    pub(super) fn start_on_lane(&self, call: Call, reduction: Reduction<'_>) -> Result<Option<Ticket>> {
        let replicas = reduction.replicas().map(same_backend::<D>).transpose()?;
        let is_open = |end: &Self| end.reductions.get().is_some();
        let all_open = is_open(self) && replicas.is_none_or(is_open);
        if !all_open || reduction.full().memory_kind() == MemoryKind::Host {
            return self.reduce_on(CommStream::Compute, call, reduction).map(|_| None);
        }
        // Computation wrote the summed values.
        let device = &*self.member.device;
        device.follow(CommStream::Reduce, &device.mark(CommStream::Compute)?)?;
        let mark = self.reduce_on(CommStream::Reduce, call, reduction)?;
        let memory = [reduction.full(), reduction.sum()].map(Buffer::clone);
        Ok(Some(self.started(CommStream::Reduce, mark, memory.into())))
    }

    /// Puts a sum on `lane`; host memory is summed on return, without a mark.
    pub(super) fn reduce_on(
        &self,
        lane: CommStream,
        call: Call,
        reduction: Reduction<'_>,
    ) -> Result<Option<D::Mark>> {
        match reduction {
            Reduction::AllReduce(buffer) => self.all_reduce_on(lane, call, buffer),
            Reduction::ReduceScatter { full, shard, replicas } => {
                let mark = self.reduce_scatter_on(lane, call, full, shard)?;
                match replicas {
                    Some(replicas) => same_backend::<D>(replicas)?.all_reduce_on(lane, call, shard),
                    None => Ok(mark),
                }
            }
        }
    }

    fn all_reduce_on(&self, lane: CommStream, call: Call, buffer: &Buffer) -> Result<Option<D::Mark>> {
        check_sum(call, buffer)?;
        let record = self.record(Op::AllReduce, call).moving(buffer.element(), buffer.elements());
        self.log_call(&record);
        if buffer.element() == ElementType::F64 {
            self.compare(&record)?;
        }
        self.count(Op::AllReduce, buffer.bytes(), false);
        if buffer.memory_kind() == MemoryKind::Host {
            return self.all_reduce_staged(&record, buffer).map(|()| None);
        }
        let (at, element) = (buffer.address() as *mut c_void, data_type(buffer.element()));
        let mark = self.enqueue(lane, &record, |table, comm, stream| {
            // SAFETY: the memory is valid on the device by `Buffer`'s contract, and freed on the
            // compute stream at the earliest; memory of other streams is kept until `finish`.
            unsafe { (table.all_reduce)(at, at, buffer.elements(), element, SUM, comm, stream) }
        })?;
        Ok(Some(mark))
    }

    fn reduce_scatter_on(
        &self,
        lane: CommStream,
        call: Call,
        full: &Buffer,
        shard: &Buffer,
    ) -> Result<Option<D::Mark>> {
        check_sum(call, full)?;
        check_shard(call, shard, full, self.ranks.len())?;
        check_places(call, shard, full)?;
        let record = self.record(Op::ReduceScatter, call).moving(full.element(), full.elements());
        self.log_call(&record);
        self.count(Op::ReduceScatter, full.bytes(), false);
        if full.memory_kind() == MemoryKind::Host {
            return self.reduce_scatter_staged(&record, full, shard).map(|()| None);
        }
        let (from, to) = (full.address() as *const c_void, shard.address() as *mut c_void);
        let mark = self.enqueue(lane, &record, |table, comm, stream| {
            let element = data_type(full.element());
            // SAFETY: same as for all_reduce; the lengths were checked.
            unsafe { (table.reduce_scatter)(from, to, shard.elements(), element, SUM, comm, stream) }
        })?;
        Ok(Some(mark))
    }
}

/// Casts another group of the same rank to this backend's type.
fn same_backend<D: GpuStreams>(group: &dyn Collective) -> Result<&Nccl<D>> {
    backend(group).ok_or_else(|| Error::internal(format!("{group:?} is not a group over NCCL")))
}
