//! One call as 64 bytes that ranks compare: the same call on every rank gives the same bytes except
//! for the phase.
//!
//! MPI's ranks send a record before each call. NCCL's ranks gather their last one, with a hash of
//! all earlier ones, at barriers and sums of scalars. A record contains the call's words, not their
//! hash, because errors name the call.

use std::collections::BTreeMap;
use std::fmt;

use super::{Call, Op, Phase};
use crate::error::{Error, ErrorCategory};
use crate::runtime::buffer::ElementType;

/// Size of a record in bytes.
pub(super) const RECORD_BYTES: usize = 64;

/// Maximum bytes of [`Call::what`] in a record; its full length is compared as well.
const WHAT_BYTES: usize = 32;

const ELEMENTS: [ElementType; 4] = [ElementType::U8, ElementType::Bf16, ElementType::F32, ElementType::F64];

/// A call that a rank makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CallRecord {
    /// Number of earlier calls in this group; for a message, of earlier messages in the same
    /// direction.
    pub(super) sequence: u64,
    pub(super) op: Op,
    /// Element type of the memory, if the call has any.
    pub(super) element: Option<ElementType>,
    /// Elements of the full (not sharded) data; for a split over MPI, the lowest group number that
    /// is free on the rank.
    pub(super) elements: u64,
    /// Root of a broadcast, color of a split, or peer of a message.
    pub(super) number: u32,
    /// Beginning of [`Call::what`].
    what: String,
    what_bytes: u8,
    index: u64,
    phase: Option<Phase>,
}

impl CallRecord {
    pub(super) fn new(sequence: u64, op: Op, call: Call, phase: Option<Phase>) -> Self {
        let end = (0..=WHAT_BYTES.min(call.what.len())).rev().find(|end| call.what.is_char_boundary(*end));
        CallRecord {
            sequence,
            op,
            element: None,
            elements: 0,
            number: 0,
            what: call.what[..end.unwrap_or(0)].to_owned(),
            what_bytes: call.what.len().min(255) as u8,
            index: call.index as u64,
            phase,
        }
    }

    /// Adds the data that it moves: `elements` of the full data.
    pub(super) fn moving(mut self, element: ElementType, elements: usize) -> Self {
        self.element = Some(element);
        self.elements = elements as u64;
        self
    }

    pub(super) fn number(mut self, number: usize) -> Self {
        self.number = u32::try_from(number).unwrap_or(u32::MAX);
        self
    }

    /// Bytes that are equal on every rank: without the phase, which is informative, the numbers of
    /// a split, and the side of a message.
    pub(super) fn key(&self) -> [u8; RECORD_BYTES] {
        let (op, number, elements) = match self.op {
            Op::Split => (self.op, 0, 0),
            Op::Send | Op::Recv => (Op::Send, 0, self.elements),
            _ => (self.op, self.number, self.elements),
        };
        CallRecord { phase: None, op, number, elements, ..self.clone() }.encode()
    }

    /// True if `other` is the other side of this call of a message.
    pub(super) fn is_answered_by(&self, other: &CallRecord) -> bool {
        self.op != other.op && self.key() == other.key()
    }

    pub(super) fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.elements.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.index.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.number.to_le_bytes());
        let code = |index: Option<usize>| index.map_or(u8::MAX, |index| index as u8);
        bytes[28] = code(Op::ALL.iter().position(|op| *op == self.op));
        bytes[29] = code(ELEMENTS.iter().position(|element| Some(*element) == self.element));
        bytes[30] = code(Phase::ALL.iter().position(|phase| Some(*phase) == self.phase));
        bytes[31] = self.what_bytes;
        bytes[32..32 + self.what.len()].copy_from_slice(self.what.as_bytes());
        bytes
    }

    /// Decodes a record of [`CallRecord::encode`]; `None` for bytes that no rank of this program
    /// sends.
    pub(super) fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<Self> {
        let long = |at: usize| bytes[at..].first_chunk().map(|word| u64::from_le_bytes(*word));
        let what = &bytes[32..];
        let end = what.iter().position(|byte| *byte == 0).unwrap_or(what.len());
        Some(CallRecord {
            sequence: long(0)?,
            elements: long(8)?,
            index: long(16)?,
            number: u32::from_le_bytes(*bytes[24..].first_chunk()?),
            op: *Op::ALL.get(usize::from(bytes[28]))?,
            element: ELEMENTS.get(usize::from(bytes[29])).copied(),
            phase: Phase::ALL.get(usize::from(bytes[30])).copied(),
            what_bytes: bytes[31],
            what: std::str::from_utf8(&what[..end]).ok()?.to_owned(),
        })
    }
}

/// Number of messages that a rank has exchanged with each other rank of a group.
#[derive(Debug, Default)]
pub(super) struct MessageCounts {
    sends: BTreeMap<usize, u64>,
    receives: BTreeMap<usize, u64>,
}

impl MessageCounts {
    /// Counts a message, for which this rank calls `op`; returns the number of earlier ones in its
    /// direction.
    pub(super) fn next(&mut self, op: Op, peer: usize) -> u64 {
        let counts = if op == Op::Send { &mut self.sends } else { &mut self.receives };
        let count = counts.entry(peer).or_default();
        *count += 1;
        *count - 1
    }
}

impl fmt::Display for CallRecord {
    /// Text of the call: `call 17: all-gather of weights of block 3 (4096 x F32), in phase
    /// backward`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "call {}: {} of ", self.sequence, self.op)?;
        super::named(f, &self.what, usize::try_from(self.index).unwrap_or(usize::MAX))?;
        match (self.element, self.op) {
            (Some(element), Op::Broadcast | Op::Recv) => {
                write!(f, " ({} x {element:?} from rank {})", self.elements, self.number)?;
            }
            (Some(element), Op::Send) => {
                write!(f, " ({} x {element:?} to rank {})", self.elements, self.number)?;
            }
            (Some(element), _) => write!(f, " ({} x {element:?})", self.elements)?,
            (None, _) => {}
        }
        match self.phase {
            Some(phase) => write!(f, ", in phase {}", phase.name()),
            None => Ok(()),
        }
    }
}

/// Phase and last call of a rank at its failure, for the errors of its peers and its own process.
#[derive(Debug, Clone, Default)]
pub(super) struct RankStatus {
    pub(super) phase: Option<Phase>,
    /// Last call over all its groups.
    pub(super) last: Option<CallRecord>,
}

impl RankStatus {
    /// Text of the failure: `rank 2 failed in phase save`
    fn what(&self, rank: usize) -> String {
        let phase = self.phase.map_or(String::new(), |phase| format!(" in phase {}", phase.name()));
        format!("rank {rank} failed{phase}")
    }

    fn last_call(&self, rank: usize) -> String {
        match &self.last {
            Some(record) => format!("rank {rank}: its last call was {record}"),
            None => format!("rank {rank}: it had made no call"),
        }
    }

    /// Error for the peers of `rank`.
    pub(super) fn news(&self, rank: usize, why: &str) -> Error {
        Error::new(ErrorCategory::Transient, self.what(rank)).because(why).because(self.last_call(rank))
    }

    /// The rank's own error, of its category, with its phase and last call.
    pub(super) fn around(&self, rank: usize, error: Error) -> Error {
        error.during(self.what(rank)).because(self.last_call(rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> CallRecord {
        let call = Call { what: "weights of block", index: 3 };
        CallRecord::new(17, Op::AllGather, call, Some(Phase::Backward)).moving(ElementType::F32, 4096)
    }

    #[test]
    fn bytes_and_back() {
        let back = CallRecord::decode(&record().encode()).unwrap();
        assert_eq!(back, record());
        assert_eq!(
            back.to_string(),
            "call 17: all-gather of weights of block 3 (4096 x F32), in phase backward"
        );
        let split = CallRecord::new(0, Op::Split, Call { what: "ranks", index: 0 }, None).number(2);
        assert_eq!(CallRecord::decode(&split.encode()).unwrap(), split);
        assert_eq!(CallRecord::decode(&[0xff; RECORD_BYTES]), None);
    }

    #[test]
    fn long_names_are_cut_between_characters_and_compared_by_length() {
        let call = |what| Call { what, index: 0 };
        let cut = CallRecord::new(0, Op::Barrier, call("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaé tail"), None);
        assert_eq!(cut.what, "a".repeat(31));
        let other = CallRecord::new(0, Op::Barrier, call("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaé"), None);
        assert_eq!(cut.what, other.what);
        assert_ne!(cut.key(), other.key());
        assert_eq!(CallRecord::decode(&cut.encode()).unwrap(), cut);
    }

    #[test]
    fn every_part_of_a_call_counts_but_not_the_phase() {
        let own = record();
        let call = Call { what: "weights of block", index: 3 };
        let at = |sequence, op, call| CallRecord::new(sequence, op, call, None);
        let gather = Op::AllGather;
        assert_eq!(own.key(), at(17, gather, call).moving(ElementType::F32, 4096).key());
        for other in [
            at(18, gather, call).moving(ElementType::F32, 4096),
            at(17, Op::AllReduce, call).moving(ElementType::F32, 4096),
            at(17, gather, Call { what: "weights of block", index: 4 }).moving(ElementType::F32, 4096),
            at(17, gather, Call { what: "gradients of block", index: 3 }).moving(ElementType::F32, 4096),
            at(17, gather, call).moving(ElementType::Bf16, 4096),
            at(17, gather, call).moving(ElementType::F32, 4095),
        ] {
            assert_ne!(own.key(), other.key(), "{other}");
        }
        let mut colors = [0, 1].map(|color| at(0, Op::Split, call).number(color));
        colors[1].elements = 3;
        assert_eq!(colors[0].key(), colors[1].key());
        let roots = [0, 1].map(|root| at(0, Op::Broadcast, call).number(root));
        assert_ne!(roots[0].key(), roots[1].key());
    }

    #[test]
    fn a_send_is_answered_by_its_recv_alone() {
        let call = Call { what: "activations of block", index: 3 };
        let side = |op, peer, elements| {
            let record = CallRecord::new(2, op, call, None).number(peer);
            record.moving(ElementType::Bf16, elements)
        };
        let [send, recv] = [side(Op::Send, 1, 8), side(Op::Recv, 0, 8)];
        assert!(send.is_answered_by(&recv) && recv.is_answered_by(&send));
        assert!(!send.is_answered_by(&side(Op::Send, 0, 8)) && !send.is_answered_by(&side(Op::Recv, 0, 9)));
        for (record, text) in [(send, "send"), (recv, "recv")] {
            assert_eq!(CallRecord::decode(&record.encode()).unwrap(), record);
            let to = if text == "send" { "to rank 1" } else { "from rank 0" };
            assert_eq!(
                record.to_string(),
                format!("call 2: {text} of activations of block 3 (8 x Bf16 {to})")
            );
        }
        let mut counts = MessageCounts::default();
        let mut next = |op, peer| counts.next(op, peer);
        assert_eq!(
            [next(Op::Send, 1), next(Op::Send, 1), next(Op::Recv, 1), next(Op::Send, 2)],
            [0, 1, 0, 0]
        );
    }
}
