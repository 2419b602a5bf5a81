//! Messages that a rank has started together, until all are done.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::tags::MessageKind;
use super::transport::{MpiTransport, Request};
use crate::error::{Error, Result};
use crate::runtime::buffer::Buffer;

/// Counts are C ints in MPI 3: longer messages go in pieces.
const MESSAGE_BYTES: usize = 1 << 30;

/// Between whom messages go, and as what.
#[derive(Clone)]
pub(super) struct TransferPath {
    /// The group's number.
    pub(super) group: u64,
    /// The ranks of the group by their rank in the world.
    pub(super) ranks: Arc<[usize]>,
    /// This rank in the group.
    pub(super) rank: usize,
    pub(super) load: MessageKind,
}

/// Messages that belong together, with the memory that MPI reads and writes until they are done. Memory of messages that
/// never were is leaked: MPI may still write it.
pub(super) struct Transfer {
    wire: Arc<MpiTransport>,
    route: TransferPath,
    requests: Vec<Request>,
    /// The peer of each request, ranks of the group, and whether it is a receive.
    peers: Vec<(usize, bool)>,
    memory: Vec<Buffer>,
    scratch: Vec<u64>,
}

impl Transfer {
    /// Nothing started yet; `memory` and `scratch` are what the messages will read and write.
    pub(super) fn new(
        wire: &Arc<MpiTransport>,
        route: TransferPath,
        memory: Vec<Buffer>,
        scratch: Vec<u64>,
    ) -> Self {
        Transfer { wire: Arc::clone(wire), route, requests: Vec::new(), peers: Vec::new(), memory, scratch }
    }

    /// Where the scratch begins.
    pub(super) fn scratch(&mut self) -> usize {
        self.scratch.as_mut_ptr() as usize
    }

    /// Starts to send what is at `address`, inside the memory of this transfer.
    pub(super) fn send(&mut self, address: usize, bytes: usize, peer: usize) -> Result<()> {
        self.start(address, bytes, peer, false)
    }

    /// Starts to receive to `address`, inside the memory of this transfer.
    pub(super) fn receive(&mut self, address: usize, bytes: usize, peer: usize) -> Result<()> {
        self.start(address, bytes, peer, true)
    }

    fn start(&mut self, address: usize, bytes: usize, peer: usize, receive: bool) -> Result<()> {
        let TransferPath { group, load, .. } = self.route;
        let (own, other) = (self.route.ranks[self.route.rank], self.route.ranks[peer]);
        let (wire, process) = (&self.wire, self.wire.tags.process(other));
        for at in (0..bytes).step_by(MESSAGE_BYTES) {
            let piece = MESSAGE_BYTES.min(bytes - at);
            let request = if receive {
                wire.receive(address + at, piece, process, wire.tags.tag(group, load, other, own))
            } else {
                wire.send(address + at, piece, process, wire.tags.tag(group, load, own, other))
            };
            self.requests.push(request.map_err(|error| wire.fail(error))?);
            self.peers.push((peer, receive));
        }
        Ok(())
    }

    /// Waits for all messages and gives the scratch back.
    ///
    /// # Errors
    /// A rank failed or did not answer in time: `late` makes the error from the silent peers.
    pub(super) fn finish(mut self, late: impl FnOnce(&[usize], Duration) -> Error) -> Result<Vec<u64>> {
        let begin = Instant::now();
        let mut rounds = 0_u32;
        loop {
            if self.wire.done(&mut self.requests).map_err(|error| self.wire.fail(error))? {
                self.requests.clear();
                return Ok(std::mem::take(&mut self.scratch));
            }
            rounds = rounds.saturating_add(1);
            if rounds.is_multiple_of(64) {
                self.wire.healthy()?;
                if begin.elapsed() > self.wire.deadline {
                    let silent = self.silent();
                    return Err(self.wire.fail(late(&silent, self.wire.deadline)));
                }
            }
            // Ranks may outnumber cores: a peer that waits for this core must get it.
            if rounds < 4096 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// The peers whose messages have not come, or who have not taken theirs.
    fn silent(&mut self) -> Vec<usize> {
        let mut silent = Vec::new();
        for (request, (peer, receive)) in self.requests.iter_mut().zip(&self.peers) {
            let done = self.wire.done(std::slice::from_mut(request)).unwrap_or(false);
            if !done && *receive && !silent.contains(peer) {
                silent.push(*peer);
            }
        }
        silent
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if !self.requests.is_empty() {
            self.wire.abandon();
            std::mem::forget(std::mem::take(&mut self.memory));
            std::mem::forget(std::mem::take(&mut self.scratch));
        }
    }
}
