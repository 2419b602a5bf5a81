//! Counts of calls and sent bytes.

use super::Op;

/// Bytes that one rank has sent and calls that it has made, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    bytes: [u64; Op::ALL.len()],
    calls: [u64; Op::ALL.len()],
}

impl Traffic {
    /// Counts a call on `bytes` bytes of full (not sharded) data among `size` ranks, as a ring
    /// sends it. A reduce or a gather sends `(size-1)/size` of the data, an all-reduce does both. A
    /// broadcast sends the data once from each rank except the last of the chain (counted at its
    /// root), a message once (counted at its sender).
    pub fn count(&mut self, op: Op, bytes: usize, size: usize, is_root: bool) {
        let part = (bytes / size.max(1)) as u64 * (size as u64 - 1);
        let sent = match op {
            Op::AllReduce => 2 * part,
            Op::ReduceScatter | Op::AllGather => part,
            Op::Broadcast if is_root => bytes as u64 * (size as u64 - 1),
            Op::Send => bytes as u64,
            Op::Broadcast | Op::Barrier | Op::Recv => 0,
            // Backends count the sums that they consist of, and no split.
            Op::ReduceScatterAcross | Op::Reduction | Op::Split => 0,
        };
        self.bytes[op as usize] += sent;
        self.calls[op as usize] += 1;
    }

    /// Adds the counts of another communicator of the same rank.
    pub fn add(&mut self, other: &Traffic) {
        self.bytes.iter_mut().zip(other.bytes).for_each(|(sum, n)| *sum += n);
        self.calls.iter_mut().zip(other.calls).for_each(|(sum, n)| *sum += n);
    }

    /// Counts since `before`.
    pub fn since(&self, before: &Traffic) -> Traffic {
        let mut rest = *self;
        rest.bytes.iter_mut().zip(before.bytes).for_each(|(n, then)| *n -= then);
        rest.calls.iter_mut().zip(before.calls).for_each(|(n, then)| *n -= then);
        rest
    }

    /// Bytes sent by calls of this kind.
    pub fn bytes(&self, op: Op) -> u64 {
        self.bytes[op as usize]
    }

    /// Number of calls of this kind.
    pub fn calls(&self, op: Op) -> u64 {
        self.calls[op as usize]
    }

    /// Total number of sent bytes.
    pub fn total_bytes(&self) -> u64 {
        self.bytes.iter().sum()
    }
}
