//! Messages between two ranks of a group, on the compute stream.
//!
//! The other ranks do not take part, so these messages are not in the hash that all compare, and
//! NCCL itself waits forever for a message of another length. So the two first exchange and compare
//! their records: a wait of the host for all work on the stream, and a round trip. The sender is
//! first, so no two calls must run at once.

use std::ffi::c_void;

use super::device::{CommStream, GpuStreams};
use super::library::data_type;
use super::staged::{StagingPlan, pieces, read, write};
use super::{Nccl, locked};
use crate::collective::buffer_checks::check_peer;
use crate::collective::call_record::{CallRecord, RECORD_BYTES};
use crate::collective::{Call, Op};
use crate::error::{Error, ErrorCategory, Result};
use crate::runtime::buffer::{Buffer, ElementType, MemoryKind};

impl<D: GpuStreams> Nccl<D> {
    /// Performs this rank's side, `op`, of a message with `peer`.
    pub(super) fn message(&self, op: Op, call: Call, peer: usize, buffer: &Buffer) -> Result<()> {
        check_peer(call, peer, self.rank, self.ranks.len())?;
        let phase = locked(&self.member.place).phase;
        let sequence = locked(&self.state).messages.next(op, peer);
        let record = CallRecord::new(sequence, op, call, phase).number(peer);
        let record = record.moving(buffer.element(), buffer.elements());
        locked(&self.member.place).last = Some(record.clone());
        self.meet(op, peer, &record)?;
        self.count(op, buffer.bytes(), op == Op::Send);
        if buffer.place() == MemoryKind::Host {
            return self.message_staged(op, peer, &record, buffer);
        }
        let (at, element) = (buffer.address() as *mut c_void, data_type(buffer.element()));
        self.enqueue(CommStream::Compute, &record, |table, comm, stream| {
            // SAFETY: the memory is valid on the device by `Buffer`'s contract, and freed on the
            // compute stream at the earliest; the peer is a rank of this group.
            unsafe {
                if op == Op::Send {
                    (table.send)(at, buffer.elements(), element, peer as i32, comm, stream)
                } else {
                    (table.recv)(at, buffer.elements(), element, peer as i32, comm, stream)
                }
            }
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
        let bytes = data_type(ElementType::U8);
        if op == Op::Send {
            return self.pass(
                record,
                StagingPlan { put: 0..len, fetch: len..len },
                |host| fill(&mut host[..len]),
                |table, comm, stream, at| {
                    // SAFETY: the scratch holds the bytes, and lives until the pass has ended.
                    unsafe { (table.send)(at as *const c_void, len, bytes, peer as i32, comm, stream) }
                },
                |_| {},
            );
        }
        self.pass(
            record,
            StagingPlan { put: 0..0, fetch: 0..len },
            |_| {},
            |table, comm, stream, at| {
                // SAFETY: as above.
                unsafe { (table.recv)(at as *mut c_void, len, bytes, peer as i32, comm, stream) }
            },
            |host| take(&host[..len]),
        )
    }
}
