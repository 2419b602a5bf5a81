//! What ranks post for one another: the call and its fingerprint, how far each rank has come in it, its memory.

use std::fmt;
use std::time::Duration;

use crate::collective::{Call, Op};
use crate::runtime::buffer::{Buffer, ElementType};
use crate::runtime::clock;

/// What a rank calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallAction {
    /// One of the counted calls.
    Op(Op),
    /// A call of `Collective::reduce_scatter_across`.
    Across,
    /// A call of `Collective::split`.
    Split,
}

/// What all ranks of a group must say alike in their call of one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CallFingerprint {
    pub(super) action: CallAction,
    pub(super) call: Call,
    /// What is moved, and how many of them in full (not sharded).
    pub(super) data: Option<(ElementType, usize)>,
    /// The root of a broadcast; of a sum across groups, the place in the other group; of a message, the other rank.
    pub(super) root: Option<usize>,
}

impl CallFingerprint {
    /// Whether a rank that says this and one that says `other` make the same call: alike, or the two sides of a message.
    pub(super) fn matches(&self, other: &CallFingerprint) -> bool {
        match (self.action, other.action) {
            (CallAction::Op(Op::Send), CallAction::Op(Op::Recv))
            | (CallAction::Op(Op::Recv), CallAction::Op(Op::Send)) => {
                (self.call, self.data) == (other.call, other.data)
            }
            _ => self == other,
        }
    }
}

impl fmt::Display for CallFingerprint {
    /// `all_reduce of gradients of block 3 (4096 f32)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.action {
            CallAction::Op(Op::AllReduce) => "all_reduce",
            CallAction::Op(Op::ReduceScatter) => "reduce_scatter",
            CallAction::Op(Op::AllGather) => "all_gather",
            CallAction::Op(Op::Broadcast) => "broadcast",
            CallAction::Op(Op::Barrier) => "barrier",
            CallAction::Op(Op::Send) => "send",
            CallAction::Op(Op::Recv) => "recv",
            CallAction::Across => "reduce_scatter_across",
            CallAction::Split => "split",
        };
        write!(f, "{name} of {}", self.call)?;
        if let Some((element, elements)) = self.data {
            let element = match element {
                ElementType::U8 => "u8",
                ElementType::Bf16 => "bf16",
                ElementType::F32 => "f32",
                ElementType::F64 => "f64",
            };
            write!(f, " ({elements} {element})")?;
        }
        match (self.action, self.root) {
            (CallAction::Op(Op::Broadcast | Op::Recv), Some(root)) => write!(f, " from rank {root}"),
            (CallAction::Op(Op::Send), Some(peer)) => write!(f, " to rank {peer}"),
            (_, Some(place)) => write!(f, " as place {place} across"),
            (_, None) => Ok(()),
        }
    }
}

/// Which call: of which group, and how many that group had before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CallId {
    pub(super) group: usize,
    pub(super) number: u64,
}

/// How far a rank has come in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CallState {
    Absent,
    /// Its post can be read; what the post names does not change.
    Posted,
    /// It has read its peers' parts for its sum and written the sum.
    Summed,
    /// It has read all that it will read.
    Copied,
}

/// What a rank waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitCondition {
    /// All members have come at least so far.
    All(CallState),
    /// This member has posted.
    Post(usize),
}

/// What a post carries besides its fingerprint.
#[derive(Debug, Clone)]
pub(super) enum Payload {
    Nothing,
    /// Memory of the rank that peers read; the post keeps it allocated.
    Memory(Buffer),
    /// `full` of each rank of the poster's group beside its rank in the world, and the poster's own shard.
    Across(Vec<(usize, Buffer)>, Buffer),
    /// Of a split.
    Color(usize),
}

/// A call that some members have posted and not all have left.
#[derive(Debug)]
pub(super) struct PendingCall {
    /// The first poster's member and fingerprint, which all others' must equal.
    pub(super) first: (usize, CallFingerprint),
    pub(super) payloads: Vec<Payload>,
    pub(super) reached: Vec<CallState>,
    /// When each member came there, on a planted clock.
    moments: Vec<Duration>,
    /// Members that need it no more.
    pub(super) leavers: usize,
    /// Of a split: each member's new group and place there.
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

    /// Notes that `member`, whose thread calls this, has come to `stage`.
    pub(super) fn reach(&mut self, member: usize, stage: CallState) {
        self.reached[member] = stage;
        self.moments[member] = clock::planted_time();
    }

    /// Moves the planted clock of a thread that has waited for `condition` on to when that was met.
    pub(super) fn end_wait(&self, condition: WaitCondition) {
        let latest = match condition {
            WaitCondition::All(_) => self.moments.iter().max(),
            WaitCondition::Post(member) => self.moments.get(member),
        };
        latest.copied().into_iter().for_each(clock::wait_until);
    }

    /// Members that keep `condition` from being met.
    pub(super) fn missing(&self, condition: WaitCondition) -> impl Iterator<Item = usize> {
        self.reached.iter().enumerate().filter_map(move |(member, reached)| {
            let late = match condition {
                WaitCondition::All(stage) => *reached < stage,
                WaitCondition::Post(one) => one == member && *reached < CallState::Posted,
            };
            late.then_some(member)
        })
    }

    /// The memories that the members posted, in their order.
    pub(super) fn memories(&self) -> Vec<Buffer> {
        let memory = |payload: &Payload| match payload {
            Payload::Memory(memory) => Some(memory.clone()),
            _ => None,
        };
        self.payloads.iter().filter_map(memory).collect()
    }
}
