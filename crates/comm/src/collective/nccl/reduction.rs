//! Sums over the ranks: on the compute stream, or beside the computation on a stream and a communicator of their own.
//! **Not yet run on a GPU**.
//!
//! One communicator makes its calls one after the other, so a reduction on that of the gathers would wait for the next
//! block's weights, and they for it. Each group that sums gradients has a second communicator for them, split from its
//! first when the group is made ready; all reductions of a rank share one stream, so hsdp's two stages are in order. A
//! reduction waits there for what computation has put on its stream so far, and computation waits for the reduction when
//! it is finished: marks, no wait of the host.

use std::ffi::c_void;
use std::sync::Arc;

use super::communicator::Communicator;
use super::device::{CommStream, GpuStreams};
use super::library::{SUM, data_type};
use super::{Nccl, check_places, locked};
use crate::collective::buffer_checks::{check_shard, check_sum};
use crate::collective::call_record::CallKind;
use crate::collective::{Call, Collective, Op, Reduction, Ticket};
use crate::error::{Error, Result};
use crate::runtime::buffer::{Buffer, ElementType, MemoryKind};

impl<D: GpuStreams> Nccl<D> {
    /// The communicator whose calls go on `lane`.
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

    /// Makes the communicator of started reductions, unless it is there.
    pub(super) fn open_reductions(&self) -> Result<()> {
        if self.reductions.get().is_some() {
            return Ok(());
        }
        if !locked(&self.state).gathers.is_empty() {
            return Err(Error::internal("a communicator is split while a gather is under way"));
        }
        let record = self.record(CallKind::Split, Call::single("reductions"));
        self.note(&record);
        // After it nothing is under way on the communicator, which NCCL asks for before a split.
        self.compare(&record)?;
        let member = &self.member;
        let made = self.communicator.split(0, self.rank).map_err(|error| member.abort_flag.raise(error))?;
        locked(&member.groups).push(Arc::clone(&made));
        self.reductions.get_or_init(|| made);
        Ok(())
    }

    /// As [`Collective::start_reduction`]; memory of the host goes through the compute stream and is done on return.
    pub(super) fn start_on_lane(&self, call: Call, reduction: Reduction<'_>) -> Result<Option<Ticket>> {
        let replicas = match reduction {
            Reduction::ReduceScatter { replicas: Some(replicas), .. } => Some(same_backend(replicas)?),
            _ => None,
        };
        let is_open = |end: &Self| end.reductions.get().is_some();
        let all_open = is_open(self) && replicas.is_none_or(is_open);
        if !all_open || reduction.full().place() == MemoryKind::Host {
            return reduction.make(self, call).map(|()| None);
        }
        // What is summed was written by computation.
        let device = &*self.member.device;
        device.follow(CommStream::Reduce, &device.mark(CommStream::Compute)?)?;
        let mark = match reduction {
            Reduction::AllReduce(buffer) => self.all_reduce_on(CommStream::Reduce, call, buffer)?,
            Reduction::ReduceScatter { full, shard, .. } => {
                let mark = self.reduce_scatter_on(CommStream::Reduce, call, full, shard)?;
                match replicas {
                    Some(replicas) => replicas.all_reduce_on(CommStream::Reduce, call, shard)?,
                    None => mark,
                }
            }
        };
        Ok(Some(self.started(CommStream::Reduce, mark, [reduction.full(), reduction.sum()])))
    }

    /// Puts an all-reduce on `lane`; memory of the host is summed on return, and there is no mark.
    pub(super) fn all_reduce_on(
        &self,
        lane: CommStream,
        call: Call,
        buffer: &Buffer,
    ) -> Result<Option<D::Mark>> {
        check_sum(call, buffer)?;
        let record =
            self.record(CallKind::Op(Op::AllReduce), call).moving(buffer.element(), buffer.elements());
        self.note(&record);
        if buffer.element() == ElementType::F64 {
            self.compare(&record)?;
        }
        self.count(Op::AllReduce, buffer.bytes(), false);
        if buffer.place() == MemoryKind::Host {
            return self.all_reduce_staged(&record, buffer).map(|()| None);
        }
        let (at, element) = (buffer.address() as *mut c_void, data_type(buffer.element()));
        let mark = self.enqueue(lane, &record, |table, comm, stream| {
            // SAFETY: the memory is valid on the device by `Buffer`'s contract, freed on the compute stream at the
            // earliest; what another stream reads or writes is kept until `finish`.
            unsafe { (table.all_reduce)(at, at, buffer.elements(), element, SUM, comm, stream) }
        })?;
        Ok(Some(mark))
    }

    /// Puts a reduce-scatter on `lane`, as [`Nccl::all_reduce_on`].
    pub(super) fn reduce_scatter_on(
        &self,
        lane: CommStream,
        call: Call,
        full: &Buffer,
        shard: &Buffer,
    ) -> Result<Option<D::Mark>> {
        check_sum(call, full)?;
        check_shard(call, shard, full, self.ranks.len())?;
        check_places(call, shard, full)?;
        let record =
            self.record(CallKind::Op(Op::ReduceScatter), call).moving(full.element(), full.elements());
        self.note(&record);
        self.count(Op::ReduceScatter, full.bytes(), false);
        if full.place() == MemoryKind::Host {
            return self.reduce_scatter_staged(&record, full, shard).map(|()| None);
        }
        let (from, to) = (full.address() as *const c_void, shard.address() as *mut c_void);
        let mark = self.enqueue(lane, &record, |table, comm, stream| {
            let element = data_type(full.element());
            // SAFETY: as for all_reduce; the lengths were checked.
            unsafe { (table.reduce_scatter)(from, to, shard.elements(), element, SUM, comm, stream) }
        })?;
        Ok(Some(mark))
    }
}

/// Another group of the same rank.
fn same_backend<D: GpuStreams>(group: &dyn Collective) -> Result<&Nccl<D>> {
    let backend = group.as_backend().and_then(|backend| backend.downcast_ref::<Nccl<D>>());
    backend.ok_or_else(|| Error::internal(format!("{group:?} is not a group over NCCL")))
}
