//! Messages between two ranks of a group: they exchange their records, and then one sends the data.
//! Records use the same path as those of other calls, so a rank that makes another call is
//! detected.

use std::iter::once;

use super::MpiCommunicator;
use super::tags::MessageKind;
use crate::collective::buffer_checks::{check_host, check_peer};
use crate::collective::call_record::CallRecord;
use crate::collective::{Call, Op};
use crate::error::Result;
use crate::runtime::buffer::Buffer;

impl MpiCommunicator {
    /// Performs this rank's side, `op`, of a message with `peer`.
    pub(super) fn message(&self, op: Op, call: Call, peer: usize, buffer: &Buffer) -> Result<()> {
        check_host(call, buffer)?;
        check_peer(call, peer, self.rank, self.ranks.len())?;
        let phase = self.member.at().status.phase;
        let sequence = self.state().messages.next(op, peer);
        let record = CallRecord::new(sequence, op, call, phase).number(peer);
        let record = record.moving(buffer.element(), buffer.elements());
        let records = self.exchange(&record, || once(peer))?;
        // The ranks that take no part learn of the failure only from this rank.
        self.judged(&record, peer, &records[peer], |other| record.is_answered_by(other))
            .inspect_err(|error| self.wire().raise(error))?;
        let mut transfer = self.transfer(MessageKind::Data, vec![buffer.clone()], Vec::new());
        if op == Op::Send {
            transfer.send(buffer.address(), buffer.bytes(), peer)?;
        } else {
            transfer.receive(buffer.address(), buffer.bytes(), peer)?;
        }
        transfer.finish(|silent, waited| self.late(&record, silent, waited))?;
        self.count(op, buffer.bytes(), op == Op::Send);
        Ok(())
    }
}
