//! Messages between two ranks of a group. The messages in one direction are the calls of a separate
//! group of the two, with their own numbers. So they are matched, waited for and ended by failures
//! like all calls, independent of the order of the group's calls.

use super::InProcess;
use super::partition::{check_aligned, copy};
use super::pending_calls::{CallFingerprint, CallId, CallState, Payload, WaitCondition};
use super::shared::ReadGuard;
use crate::collective::buffer_checks::check_peer;
use crate::collective::{Call, Op};
use crate::error::{Error, Result};
use crate::runtime::buffer::Buffer;

/// Members of the group of two.
const SENDER: usize = 0;
const RECEIVER: usize = 1;

impl InProcess {
    /// Lets member `to` read `buffer`, and returns afterwards.
    pub(super) fn send_to(&self, call: Call, to: usize, buffer: &Buffer) -> Result<()> {
        let posted = Payload::Memory(buffer.clone());
        let call_id = self.post_message(Op::Send, call, to, buffer, posted)?;
        self.shared().reach(call_id, SENDER, CallState::Copied);
        self.all(call_id, CallState::Copied)?.leave(call_id);
        Ok(())
    }

    /// Copies the message of member `from` to `buffer`.
    pub(super) fn receive_from(&self, call: Call, from: usize, buffer: &Buffer) -> Result<()> {
        let call_id = self.post_message(Op::Recv, call, from, buffer, Payload::Nothing)?;
        let mut state = self.wait(call_id, WaitCondition::Post(SENDER))?;
        let Payload::Memory(theirs) = state.entry(call_id).payloads[SENDER].clone() else {
            return Err(Error::internal(format!("{call} was sent without memory")));
        };
        let reading = ReadGuard::start(self.shared(), state)?;
        // SAFETY: as long as the sender's memory, which stays until this rank has reached Copied.
        unsafe { copy(theirs.address(), buffer.address(), buffer.bytes()) };
        drop(reading);
        self.shared().reach(call_id, RECEIVER, CallState::Copied);
        self.shared().lock().leave(call_id);
        Ok(())
    }

    /// Posts this rank's side of a message with `peer`.
    fn post_message(
        &self,
        op: Op,
        call: Call,
        peer: usize,
        buffer: &Buffer,
        payload: Payload,
    ) -> Result<CallId> {
        check_aligned(call, buffer)?;
        check_peer(call, peer, self.member, self.size)?;
        let data = Some((buffer.element(), buffer.elements()));
        let print = CallFingerprint { op, call, data, root: Some(peer) };
        let pair = if op == Op::Send { (self.member, peer) } else { (peer, self.member) };
        self.shared().post_message((self.rank_handle.rank, self.group), pair, print, payload)
    }
}
