//! Log of a rank's calls: their number, a hash of all, and the names of the latest. Ranks with the
//! same calls have the same hash; ranks with different calls find the first difference in their
//! tails.

use std::collections::VecDeque;

use crate::collective::call_record::{CallRecord, RECORD_BYTES};

/// Number of calls that are stored by name: a step of a model of a hundred blocks.
const TAIL: usize = 256;

/// Size of an entry: the record of a call, and the hash after it.
const ENTRY_BYTES: usize = 8 + RECORD_BYTES;

/// Log of a rank's calls; see the module.
#[derive(Default)]
pub(super) struct CallLog {
    hash: u64,
    calls: u64,
    tail: VecDeque<[u8; ENTRY_BYTES]>,
}

impl CallLog {
    /// Number of calls so far.
    pub(super) fn calls(&self) -> u64 {
        self.calls
    }

    pub(super) fn add(&mut self, record: &CallRecord) {
        // FNV-1a (http://www.isthe.com/chongo/tech/comp/fnv): it detects errors, not attacks.
        for byte in record.key() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self.hash ^= 0xcbf2_9ce4_8422_2325;
        self.calls += 1;
        let mut entry = [0; ENTRY_BYTES];
        entry[..8].copy_from_slice(&self.hash.to_le_bytes());
        entry[8..].copy_from_slice(&record.encode());
        if self.tail.len() == TAIL {
            self.tail.pop_front();
        }
        self.tail.push_back(entry);
    }

    /// Hash of all calls, with the record of the last one.
    pub(super) fn digest(&self) -> [u8; ENTRY_BYTES] {
        self.tail.back().copied().unwrap_or([0; ENTRY_BYTES])
    }

    /// Latest entries, in a fixed number of bytes, padded with zeros.
    pub(super) fn tail(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.tail.iter().flatten().copied().collect();
        bytes.resize(TAIL * ENTRY_BYTES, 0);
        bytes
    }
}

fn record(entry: &[u8; ENTRY_BYTES]) -> Option<CallRecord> {
    entry.last_chunk().and_then(CallRecord::decode)
}

/// Records of all ranks' digests if all made the same calls as `own`.
pub(super) fn agreeing(digests: &[u8], own: usize) -> Option<Vec<CallRecord>> {
    let digests = digests.as_chunks::<ENTRY_BYTES>().0;
    let same = digests.iter().all(|digest| digest[..8] == digests[own][..8]);
    if same { digests.iter().map(record).collect() } else { None }
}

/// Calls of `own` and of the first rank that differs from it, at the first difference.
pub(super) fn first_difference(tails: &[u8], ranks: usize, own: usize) -> Vec<(usize, String)> {
    let entries = |rank: usize| {
        let tail = &tails[rank * TAIL * ENTRY_BYTES..(rank + 1) * TAIL * ENTRY_BYTES];
        tail.as_chunks::<ENTRY_BYTES>().0.iter().filter(|entry| **entry != [0; ENTRY_BYTES])
    };
    let last = |rank: usize| entries(rank).next_back().map(|entry| &entry[..8]);
    let Some(other) = (0..ranks).find(|rank| last(*rank) != last(own)) else {
        return Vec::new();
    };
    let at = |rank: usize, sequence: u64| {
        let mut records = entries(rank).filter_map(|entry| Some((&entry[..8], record(entry)?)));
        records.find(|(_, record)| record.sequence == sequence)
    };
    for sequence in entries(own).filter_map(record).map(|record| record.sequence) {
        if let (Some((hash, mine)), Some((other_hash, theirs))) = (at(own, sequence), at(other, sequence))
            && hash != other_hash
        {
            return vec![(own, mine.to_string()), (other, theirs.to_string())];
        }
    }
    // The difference is before the tails, or one rank made more calls: report the last call of
    // each.
    let latest =
        |rank: usize| entries(rank).next_back().and_then(record).map(|record| (rank, record.to_string()));
    [own, other].into_iter().filter_map(latest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::{Call, Op};
    use crate::runtime::buffer::ElementType;

    fn call_log(elements: &[usize]) -> CallLog {
        let mut call_log = CallLog::default();
        for elements in elements {
            let call = Call { what: "block", index: 0 };
            let record = CallRecord::new(call_log.calls(), Op::AllReduce, call, None);
            call_log.add(&record.moving(ElementType::F32, *elements));
        }
        call_log
    }

    #[test]
    fn same_calls_agree_and_the_first_difference_is_named() {
        let (one, same, other) = (call_log(&[1, 2, 3]), call_log(&[1, 2, 3]), call_log(&[1, 5, 3]));
        let digests = [one.digest(), same.digest()].concat();
        assert_eq!(agreeing(&digests, 0).unwrap().len(), 2);
        assert!(agreeing(&[one.digest(), other.digest()].concat(), 0).is_none());

        let tails = [one.tail(), same.tail(), other.tail()].concat();
        let named = |own| first_difference(&tails, 3, own);
        let (two, five) =
            ("call 1: all-reduce of block 0 (2 x F32)", "call 1: all-reduce of block 0 (5 x F32)");
        assert_eq!(named(0), [(0, two.to_owned()), (2, five.to_owned())]);
        assert_eq!(named(2), [(2, five.to_owned()), (0, two.to_owned())]);
    }

    #[test]
    fn a_swap_is_a_difference_and_so_is_a_missing_call() {
        assert_ne!(call_log(&[1, 2]).digest(), call_log(&[2, 1]).digest());
        let tails = [call_log(&[1, 2]).tail(), call_log(&[1]).tail()].concat();
        let named = first_difference(&tails, 2, 0);
        assert!(named[0].1.starts_with("call 1") && named[1].1.starts_with("call 0"), "{named:?}");
    }

    #[test]
    fn a_long_run_keeps_the_tail_only() {
        let elements: Vec<usize> = (0..TAIL + 10).collect();
        let call_log = call_log(&elements);
        assert_eq!(call_log.tail.len(), TAIL);
        let tails = [call_log.tail(), call_log.tail()].concat();
        assert!(first_difference(&tails, 2, 0).is_empty());
    }
}
