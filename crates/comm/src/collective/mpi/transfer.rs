//! Messages that a rank has started together, until all have finished.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::tags::MessageKind;
use super::transport::{MpiTransport, Request};
use crate::error::{Error, Result};
use crate::runtime::buffer::Buffer;

/// Maximum size of a message: counts are C ints in MPI 3, so longer ones are split.
const MESSAGE_BYTES: usize = 1 << 30;

/// Group, sender and kind of messages.
#[derive(Clone)]
pub(super) struct TransferPath {
    /// Number of the group.
    pub(super) group: u64,
    /// Ranks of the group in the world, by rank in the group.
    pub(super) ranks: Arc<[usize]>,
    /// This rank in the group.
    pub(super) rank: usize,
    pub(super) load: MessageKind,
}

/// Messages of one transfer, with the memory that MPI accesses until they finish. The memory of
/// unfinished messages is leaked, because MPI may still write it.
pub(super) struct Transfer {
    wire: Arc<MpiTransport>,
    route: TransferPath,
    requests: Vec<Request>,
    /// Peer of each request, as a rank of the group, and true for a receive.
    peers: Vec<(usize, bool)>,
    memory: Vec<Buffer>,
    scratch: Vec<u64>,
}

impl Transfer {
    /// Creates a transfer without messages; they will access `memory` and `scratch`.
    pub(super) fn new(
        wire: &Arc<MpiTransport>,
        route: TransferPath,
        memory: Vec<Buffer>,
        scratch: Vec<u64>,
    ) -> Self {
        Transfer { wire: Arc::clone(wire), route, requests: Vec::new(), peers: Vec::new(), memory, scratch }
    }

    /// Start address of the scratch.
    pub(super) fn scratch(&mut self) -> usize {
        self.scratch.as_mut_ptr() as usize
    }

    /// Starts to send from `address`, inside the memory of this transfer.
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

    /// Waits for all messages and returns the scratch.
    ///
    /// # Errors
    /// A rank failed or did not answer in time: `late` creates the error from the silent peers.
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

    /// Peers whose messages have not arrived, or that have not received theirs.
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
