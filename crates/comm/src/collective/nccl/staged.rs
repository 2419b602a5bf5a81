//! Collectives over host memory: piece by piece through scratch on the GPU, ready on return.
//!
//! NCCL accesses only GPU memory. Data on the host is small (sums of losses and norms) or rare
//! (moments that a checkpoint gathers), so a copy each way, and a wait for it, cost little. All
//! ranks have data of the same size, so all cut it into the same pieces. Earlier work on the
//! compute stream runs first.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::slice::{from_raw_parts, from_raw_parts_mut};

use super::device::{CommStream, GpuStreams};
use super::library::{NcclFunctions, NcclStatus, RawComm, RawStream, SUM, data_type};
use super::{Nccl, locked};
use crate::collective::call_record::CallRecord;
use crate::error::Result;
use crate::runtime::buffer::{Buffer, ElementType};

/// Bytes per rank of one piece.
const PIECE_BYTES: usize = 4 << 20;

/// Ranges of the scratch to copy to the GPU before a call, and back after it.
pub(super) struct StagingPlan {
    pub(super) put: Range<usize>,
    pub(super) fetch: Range<usize>,
}

impl<D: GpuStreams> Nccl<D> {
    /// Makes one call over scratch: `fill` writes the host's side, `take` reads it. Returns after
    /// all has finished.
    pub(super) fn pass(
        &self,
        record: &CallRecord,
        pass: StagingPlan,
        fill: impl FnOnce(&mut [u8]),
        call: impl FnOnce(&NcclFunctions, RawComm, RawStream, usize) -> NcclStatus,
        take: impl FnOnce(&[u8]),
    ) -> Result<()> {
        let device = &*self.member.device;
        let need = pass.put.end.max(pass.fetch.end);
        let reusable = locked(&self.state).scratch.take().filter(|(bytes, _)| *bytes >= need);
        let (bytes, mut scratch) = match reusable {
            Some(reused) => reused,
            None => (need, device.scratch(need)?),
        };
        let at = device.address(&scratch);
        let run = || {
            fill(&mut device.host(&mut scratch)?[..need]);
            device.put(&mut scratch, pass.put)?;
            self.enqueue(CommStream::Compute, record, |table, comm, stream| call(table, comm, stream, at))?;
            device.fetch(&mut scratch, pass.fetch)?;
            self.wait(&device.mark(CommStream::Compute)?)?;
            take(&device.host(&mut scratch)?[..need]);
            Ok(())
        };
        let done = run();
        match done {
            Ok(()) => locked(&self.state).scratch = Some((bytes, scratch)),
            // A copy may still be running there.
            Err(_) => std::mem::forget(scratch),
        }
        done
    }

    /// Gathers the `own` of all ranks, which have the same length, in order.
    pub(super) fn exchange(&self, record: &CallRecord, own: &[u8]) -> Result<Vec<u8>> {
        let (len, ranks) = (own.len(), self.ranks.len());
        let mut all = Vec::new();
        self.pass(
            record,
            StagingPlan { put: 0..len, fetch: len..len * (ranks + 1) },
            |host| host[..len].copy_from_slice(own),
            |table, comm, stream, at| {
                let (from, to) = (at as *const c_void, (at + len) as *mut c_void);
                // SAFETY: the scratch holds all parts, and lives until the pass has ended.
                unsafe { (table.all_gather)(from, to, len, data_type(ElementType::U8), comm, stream) }
            },
            |host| all = host[len..].to_vec(),
        )?;
        Ok(all)
    }

    pub(super) fn all_reduce_staged(&self, record: &CallRecord, buffer: &Buffer) -> Result<()> {
        for range in pieces(buffer) {
            let (len, width) = (range.len(), buffer.element().bytes());
            self.pass(
                record,
                StagingPlan { put: 0..len, fetch: 0..len },
                |host| read(buffer, range.start, &mut host[..len]),
                |table, comm, stream, at| {
                    let (at, element) = (at as *mut c_void, data_type(buffer.element()));
                    // SAFETY: same as for `exchange`.
                    unsafe { (table.all_reduce)(at, at, len / width, element, SUM, comm, stream) }
                },
                |host| write(buffer, range.start, &host[..len]),
            )?;
        }
        Ok(())
    }

    pub(super) fn reduce_scatter_staged(
        &self,
        record: &CallRecord,
        full: &Buffer,
        shard: &Buffer,
    ) -> Result<()> {
        let ranks = self.ranks.len();
        for range in pieces(shard) {
            let (len, width) = (range.len(), shard.element().bytes());
            let own = self.rank * len..(self.rank + 1) * len;
            self.pass(
                record,
                StagingPlan { put: 0..len * ranks, fetch: own.clone() },
                |host| {
                    for (rank, part) in host[..len * ranks].chunks_exact_mut(len).enumerate() {
                        read(full, rank * shard.bytes() + range.start, part);
                    }
                },
                |table, comm, stream, at| {
                    let (from, to) = (at as *const c_void, (at + own.start) as *mut c_void);
                    let element = data_type(shard.element());
                    // SAFETY: same as for `exchange`; in place, as NCCL allows.
                    unsafe { (table.reduce_scatter)(from, to, len / width, element, SUM, comm, stream) }
                },
                |host| write(shard, range.start, &host[own.clone()]),
            )?;
        }
        Ok(())
    }

    pub(super) fn all_gather_staged(&self, record: &CallRecord, shard: &Buffer, full: &Buffer) -> Result<()> {
        let ranks = self.ranks.len();
        for range in pieces(shard) {
            let (len, width) = (range.len(), shard.element().bytes());
            let own = self.rank * len..(self.rank + 1) * len;
            self.pass(
                record,
                StagingPlan { put: own.clone(), fetch: 0..len * ranks },
                |host| read(shard, range.start, &mut host[own.clone()]),
                |table, comm, stream, at| {
                    let (from, to) = ((at + own.start) as *const c_void, at as *mut c_void);
                    let element = data_type(shard.element());
                    // SAFETY: same as for `exchange`; in place, as NCCL allows.
                    unsafe { (table.all_gather)(from, to, len / width, element, comm, stream) }
                },
                |host| {
                    for (rank, part) in host[..len * ranks].chunks_exact(len).enumerate() {
                        write(full, rank * shard.bytes() + range.start, part);
                    }
                },
            )?;
        }
        Ok(())
    }

    pub(super) fn broadcast_staged(&self, record: &CallRecord, root: usize, buffer: &Buffer) -> Result<()> {
        let is_root = self.rank == root;
        for range in pieces(buffer) {
            let (len, width) = (range.len(), buffer.element().bytes());
            let (put, fetch) = if is_root { (0..len, len..len) } else { (0..0, 0..len) };
            self.pass(
                record,
                StagingPlan { put, fetch },
                |host| {
                    if is_root {
                        read(buffer, range.start, &mut host[..len]);
                    }
                },
                |table, comm, stream, at| {
                    let (at, element) = (at as *mut c_void, data_type(buffer.element()));
                    // SAFETY: same as for `exchange`; the root is a rank of this group.
                    unsafe { (table.broadcast)(at, at, len / width, element, root as i32, comm, stream) }
                },
                |host| {
                    if !is_root {
                        write(buffer, range.start, &host[..len]);
                    }
                },
            )?;
        }
        Ok(())
    }
}

/// Byte ranges of the pieces of memory.
pub(super) fn pieces(memory: &Buffer) -> impl Iterator<Item = Range<usize>> + use<> {
    let bytes = memory.bytes();
    (0..bytes).step_by(PIECE_BYTES).map(move |at| at..(at + PIECE_BYTES).min(bytes))
}

/// Copies from `memory`, from byte `at`.
pub(super) fn read(memory: &Buffer, at: usize, to: &mut [u8]) {
    debug_assert!(at + to.len() <= memory.bytes());
    // SAFETY: host memory of that length, which no other code writes during a collective.
    to.copy_from_slice(unsafe {
        from_raw_parts(with_exposed_provenance::<u8>(memory.address() + at), to.len())
    });
}

/// Copies to `memory`, from byte `at`.
pub(super) fn write(memory: &Buffer, at: usize, from: &[u8]) {
    debug_assert!(at + from.len() <= memory.bytes());
    // SAFETY: same as for `read`; no other code reads it either.
    unsafe {
        from_raw_parts_mut(with_exposed_provenance_mut::<u8>(memory.address() + at), from.len())
            .copy_from_slice(from);
    }
}
