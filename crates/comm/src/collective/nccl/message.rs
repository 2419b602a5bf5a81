//! Messages between two ranks of a group, on the compute stream.
//!
//! The other ranks do not take part, so these messages are not in the hash that all compare, and
//! NCCL itself waits forever for a message of another length. So the two first exchange and compare
//! their records: a wait of the host for all work on the stream, and a round trip. The sender is
//! first, so no two calls must run at once.
//!
//! Each call of NCCL is in a group, because a non-blocking communicator may return success for a
//! message outside of a group before the message is on its stream. A mark would then be before the
//! message, and computation would read old values.

use std::ffi::{c_int, c_void};

use super::device::{CommStream, GpuStreams};
use super::library::{NcclFunctions, NcclStatus, RawComm, RawStream, data_type};
use super::staged::{StagingPlan, pieces, read, write};
use super::{Nccl, locked};
use crate::collective::buffer_checks::check_peer;
use crate::collective::call_record::{CallRecord, RECORD_BYTES};
use crate::collective::{Call, Op};
use crate::error::{Error, ErrorCategory, Result};
use crate::runtime::buffer::{Buffer, ElementType, MemoryKind};

/// This rank's side of a message with `peer`.
#[derive(Clone, Copy)]
struct MessageSide {
    op: Op,
    peer: usize,
    elements: usize,
    element: c_int,
}

impl MessageSide {
    /// Puts the message on `stream`, from or to device memory at `at`.
    ///
    /// # Safety
    /// The memory is valid until the message has been sent or received, and the peer is a rank of
    /// the communicator.
    unsafe fn put(self, table: &NcclFunctions, comm: RawComm, stream: RawStream, at: usize) -> NcclStatus {
        let MessageSide { op, peer, elements, element } = self;
        let peer = peer as c_int;
        // SAFETY: the caller keeps the memory and gives a valid peer.
        grouped(table, || unsafe {
            if op == Op::Send {
                (table.send)(at as *const c_void, elements, element, peer, comm, stream)
            } else {
                (table.recv)(at as *mut c_void, elements, element, peer, comm, stream)
            }
        })
    }
}

/// Makes `call` in its own group, which ends also if the call fails.
pub(super) fn grouped(table: &NcclFunctions, call: impl FnOnce() -> NcclStatus) -> NcclStatus {
    // SAFETY: a group belongs to its thread, and this one ends below.
    let begun = unsafe { (table.group_start)() };
    if begun != NcclStatus::SUCCESS {
        return begun;
    }
    let put = call();
    // SAFETY: the group of this thread that began above.
    let ended = unsafe { (table.group_end)() };
    match put {
        NcclStatus::SUCCESS | NcclStatus::IN_PROGRESS => ended,
        failed => failed,
    }
}

impl<D: GpuStreams> Nccl<D> {
    /// Performs this rank's side, `op`, of a message with `peer`.
    pub(super) fn message(&self, op: Op, call: Call, peer: usize, buffer: &Buffer) -> Result<()> {
        check_peer(call, peer, self.rank, self.ranks.len())?;
        let phase = locked(&self.member.status).phase;
        let sequence = locked(&self.state).messages.next(op, peer);
        let record = CallRecord::new(sequence, op, call, phase).number(peer);
        let record = record.moving(buffer.element(), buffer.elements());
        locked(&self.member.status).last = Some(record.clone());
        self.meet(op, peer, &record)?;
        self.count(op, buffer.bytes(), op == Op::Send);
        if buffer.memory_kind() == MemoryKind::Host {
            return self.message_staged(op, peer, &record, buffer);
        }
        let element = data_type(buffer.element());
        let side = MessageSide { op, peer, elements: buffer.elements(), element };
        self.enqueue(CommStream::Compute, &record, |table, comm, stream| {
            // SAFETY: the memory is valid on the device by `Buffer`'s contract, and freed on the
            // compute stream at the earliest; the peer is a rank of this group.
            unsafe { side.put(table, comm, stream, buffer.address()) }
        })?;
        Ok(())
    }

    /// Exchanges records with `peer`, which must make the other side of the call.
    fn meet(&self, op: Op, peer: usize, record: &CallRecord) -> Result<()> {
        let mut theirs = [0; RECORD_BYTES];
        let mut sides = [Op::Send, Op::Recv];
        if op == Op::Recv {
            sides.reverse();
        }
        for side in sides {
            let own = |host: &mut [u8]| host.copy_from_slice(&record.encode());
            self.pass_message(side, peer, record, RECORD_BYTES, own, |host| theirs.copy_from_slice(host))?;
        }
        let other = match CallRecord::decode(&theirs) {
            Some(other) if record.is_answered_by(&other) => return Ok(()),
            Some(other) => other.to_string(),
            None => "a message that this version does not know".to_owned(),
        };
        let error = Error::new(ErrorCategory::Transient, "ranks do not make the same call")
            .because(format!("rank {} makes {record}", self.ranks[self.rank]))
            .because(format!("rank {} makes {other}", self.ranks[peer]));
        let error = self.member.abort_flag.keep(error);
        // An abort now would drop the answer to a slower peer, which has it after this exchange.
        let _ = self.pass_message(op, peer, record, 8, |host| host.fill(0), |_| {});
        Err(self.member.abort_flag.raise(error))
    }

    /// Sends host memory as a message, piece by piece through scratch on the GPU.
    fn message_staged(&self, op: Op, peer: usize, record: &CallRecord, buffer: &Buffer) -> Result<()> {
        for range in pieces(buffer) {
            let fill = |host: &mut [u8]| read(buffer, range.start, host);
            let take = |host: &[u8]| write(buffer, range.start, host);
            self.pass_message(op, peer, record, range.len(), fill, take)?;
        }
        Ok(())
    }

    /// Sends or receives `len` bytes, which `fill` writes or `take` reads.
    fn pass_message(
        &self,
        op: Op,
        peer: usize,
        record: &CallRecord,
        len: usize,
        fill: impl FnOnce(&mut [u8]),
        take: impl FnOnce(&[u8]),
    ) -> Result<()> {
        let side = MessageSide { op, peer, elements: len, element: data_type(ElementType::U8) };
        let sends = op == Op::Send;
        let plan = if sends {
            StagingPlan { put: 0..len, fetch: len..len }
        } else {
            StagingPlan { put: 0..0, fetch: 0..len }
        };
        self.pass(
            record,
            plan,
            |host| {
                if sends {
                    fill(&mut host[..len]);
                }
            },
            // SAFETY: the scratch holds the bytes, and lives until the pass has ended.
            |table, comm, stream, at| unsafe { side.put(table, comm, stream, at) },
            |host| {
                if !sends {
                    take(&host[..len]);
                }
            },
        )
    }
}
