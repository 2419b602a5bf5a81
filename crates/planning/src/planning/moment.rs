//! Bytes that a step holds for a moment: values gathered or copied for one use, and gradients
//! before they are accumulated.

use std::collections::BTreeMap;

use crate::model::Segment;

/// Transient bytes of a segment.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MomentBytes {
    /// Values gathered or copied for one use.
    pub(super) gathered: u64,
    /// Gradients before accumulation.
    fresh: u64,
    /// Gradients in reduction while those of the next block are computed.
    reduced: u64,
}

impl MomentBytes {
    /// Returns the larger of its values and its gradients, which are not held together.
    pub(super) fn most(&self) -> u64 {
        self.gathered.max(self.fresh)
    }

    /// Counts gradients of `bytes` bytes. `elsewhere` is true if the device keeps only a shard of
    /// them, or none.
    pub(super) fn add_gradients(&mut self, bytes: u64, elsewhere: bool, accumulates: bool, over_nccl: bool) {
        if elsewhere || accumulates {
            self.fresh += bytes;
        }
        if elsewhere && over_nccl {
            self.reduced += bytes;
        }
    }
}

/// Sums the transient bytes: two blocks, or an end and a block, are gathered at once. One segment
/// has fresh gradients, and one block has gradients in reduction.
pub(super) fn for_a_moment(segments: &BTreeMap<Segment, MomentBytes>) -> u64 {
    let largest = |bytes: fn(&MomentBytes) -> u64, ends: bool| {
        let of_kind = segments.iter().filter(|(segment, _)| matches!(segment, Segment::Block(_)) != ends);
        of_kind.map(|(_, of_segment)| bytes(of_segment)).max().unwrap_or(0)
    };
    let gathered = 2 * largest(|bytes| bytes.gathered, false) + largest(|bytes| bytes.gathered, true);
    let fresh = largest(|bytes| bytes.fresh, false) + largest(|bytes| bytes.fresh, true);
    gathered + fresh + largest(|bytes| bytes.reduced, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table that is used at once is the larger of its values and its gradients.
    #[test]
    fn two_blocks_and_an_end_are_gathered_at_once() {
        let of = |gathered, fresh| MomentBytes { gathered, fresh, reduced: 0 };
        let ends = [(Segment::Embed, of(50, 70)), (Segment::Head, of(60, 5))];
        let blocks = [(Segment::Block(0), of(10, 3)), (Segment::Block(1), of(8, 4))];
        assert_eq!(for_a_moment(&ends.into_iter().chain(blocks).collect()), 2 * 10 + 60 + 4 + 70);
        assert_eq!((of(50, 70).most(), of(60, 5).most()), (70, 60));
    }
}
