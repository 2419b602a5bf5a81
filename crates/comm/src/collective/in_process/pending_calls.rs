//! Posts of ranks: the call and its fingerprint, each rank's progress in it, and its memory.

use std::fmt;
use std::time::Duration;

use crate::collective::{Call, Op};
use crate::runtime::buffer::{Buffer, ElementType};
use crate::runtime::clock;

/// Properties of a call that must be equal on all ranks of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CallFingerprint {
    pub(super) op: Op,
    pub(super) call: Call,
    /// Element type and number of elements of the full (not sharded) data.
    pub(super) data: Option<(ElementType, usize)>,
    /// Root of a broadcast, place in the other group of a sum across groups, or peer of a message.
    pub(super) root: Option<usize>,
}

impl CallFingerprint {
    /// True if this call and `other` match: they are equal, or the two sides of a message.
    pub(super) fn matches(&self, other: &CallFingerprint) -> bool {
        match (self.op, other.op) {
            (Op::Send, Op::Recv) | (Op::Recv, Op::Send) => (self.call, self.data) == (other.call, other.data),
            _ => self == other,
        }
    }
}

impl fmt::Display for CallFingerprint {
    /// Text of the call: `all_reduce of gradients of block 3 (4096 f32)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.op.name().replace('-', "_"), self.call)?;
        if let Some((element, elements)) = self.data {
            let element = match element {
                ElementType::U8 => "u8",
                ElementType::Bf16 => "bf16",
                ElementType::F32 => "f32",
                ElementType::F64 => "f64",
            };
            write!(f, " ({elements} {element})")?;
        }
        match (self.op, self.root) {
            (Op::Broadcast | Op::Recv, Some(root)) => write!(f, " from rank {root}"),
            (Op::Send, Some(peer)) => write!(f, " to rank {peer}"),
            (_, Some(index)) => write!(f, " as place {index} across"),
            (_, None) => Ok(()),
        }
    }
}

/// Identity of a call: its group, and the number of that group's earlier calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CallId {
    pub(super) group: usize,
    pub(super) number: u64,
}

/// Progress of a rank in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CallState {
    Absent,
    /// Its post can be read, and the posted memory does not change.
    Posted,
    /// It has read its peers' parts for its sum and written the sum.
    Summed,
    /// It has finished reading.
    Copied,
}

/// Condition of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitCondition {
    /// All members have reached at least this state.
    All(CallState),
    /// This member has posted.
    Post(usize),
}

/// Data of a post besides its fingerprint.
#[derive(Debug, Clone)]
pub(super) enum Payload {
    Nothing,
    /// Memory of the rank for its peers to read; the post keeps it allocated.
    Memory(Buffer),
    /// `full` of each rank of the poster's group with its rank in the world, and the poster's own
    /// shard.
    Across(Vec<(usize, Buffer)>, Buffer),
    /// Color of a split.
    Color(usize),
}

/// A call that some members have posted and not all have left.
#[derive(Debug)]
pub(super) struct PendingCall {
    /// Member and fingerprint of the first poster, which all others must equal.
    pub(super) first: (usize, CallFingerprint),
    pub(super) payloads: Vec<Payload>,
    pub(super) reached: Vec<CallState>,
    /// Time at which each member reached its state, on a planted clock.
    moments: Vec<Duration>,
    /// Number of members that have left it.
    pub(super) leavers: usize,
    /// New group of each member of a split, and its place there.
    pub(super) places: Vec<(usize, usize)>,
}

impl PendingCall {
    pub(super) fn new(size: usize, member: usize, print: CallFingerprint) -> Self {
        PendingCall {
            first: (member, print),
            payloads: vec![Payload::Nothing; size],
            reached: vec![CallState::Absent; size],
            moments: vec![Duration::ZERO; size],
            leavers: 0,
            places: Vec::new(),
        }
    }

    /// Records that `member`, the calling thread, has reached `stage`.
    pub(super) fn reach(&mut self, member: usize, stage: CallState) {
        self.reached[member] = stage;
        self.moments[member] = clock::planted_time();
    }

    /// Advances the planted clock of a thread that has waited for `condition` to the time at which
    /// it was met.
    pub(super) fn end_wait(&self, condition: WaitCondition) {
        let latest = match condition {
            WaitCondition::All(_) => self.moments.iter().max(),
            WaitCondition::Post(member) => self.moments.get(member),
        };
        latest.copied().into_iter().for_each(clock::wait_until);
    }

    /// Members that have not yet met `condition`.
    pub(super) fn missing(&self, condition: WaitCondition) -> impl Iterator<Item = usize> {
        self.reached.iter().enumerate().filter_map(move |(member, reached)| {
            let late = match condition {
                WaitCondition::All(stage) => *reached < stage,
                WaitCondition::Post(one) => one == member && *reached < CallState::Posted,
            };
            late.then_some(member)
        })
    }

    /// Posted memory of the members, in their order.
    pub(super) fn memories(&self) -> Vec<Buffer> {
        let memory = |payload: &Payload| match payload {
            Payload::Memory(memory) => Some(memory.clone()),
            _ => None,
        };
        self.payloads.iter().filter_map(memory).collect()
    }
}
