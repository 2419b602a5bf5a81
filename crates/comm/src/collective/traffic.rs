//! Counting what is sent.

/// The kinds of collective calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Sum, to all.
    AllReduce,
    /// Sum, a part to each.
    ReduceScatter,
    /// Parts of all, to all.
    AllGather,
    /// One rank's, to all.
    Broadcast,
    /// A meeting without data.
    Barrier,
    /// One rank's, to one other: its side.
    Send,
    /// One rank's, to one other: the other's side.
    Recv,
}

/// How many kinds of calls there are.
const OPS: usize = 7;

/// Bytes that one rank sent and calls that it made, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    bytes: [u64; OPS],
    calls: [u64; OPS],
}

impl Traffic {
    /// Counts a call on `bytes` bytes of full (not sharded) data among `size` ranks, as a ring sends it: a reduce or a gather
    /// passes on `(size-1)/size` of the data, an all-reduce does both, a broadcast passes the data on once except at the
    /// last rank of the chain (counted at its root), a message once (counted where it is sent).
    pub fn count(&mut self, op: Op, bytes: usize, size: usize, is_root: bool) {
        let part = (bytes / size.max(1)) as u64 * (size as u64 - 1);
        let sent = match op {
            Op::AllReduce => 2 * part,
            Op::ReduceScatter | Op::AllGather => part,
            Op::Broadcast if is_root => bytes as u64 * (size as u64 - 1),
            Op::Send => bytes as u64,
            Op::Broadcast | Op::Barrier | Op::Recv => 0,
        };
        self.bytes[op as usize] += sent;
        self.calls[op as usize] += 1;
    }

    /// Adds what another end of the same rank counted.
    pub fn add(&mut self, other: &Traffic) {
        for (sum, n) in self.bytes.iter_mut().zip(other.bytes) {
            *sum += n;
        }
        for (sum, n) in self.calls.iter_mut().zip(other.calls) {
            *sum += n;
        }
    }

    /// What was counted after `before`.
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

    /// Calls of this kind that were made.
    pub fn calls(&self, op: Op) -> u64 {
        self.calls[op as usize]
    }

    /// Bytes sent in all.
    pub fn total_bytes(&self) -> u64 {
        self.bytes.iter().sum()
    }
}
