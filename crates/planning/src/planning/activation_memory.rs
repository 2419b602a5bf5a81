//! The bytes of activations that live during the backward of each block, under any recomputing.

use std::num::NonZeroUsize;

use crate::error::Result;
use crate::model::SavedBytes;
use crate::recipe::enums::{BlockStorage, Recompute, StoredActivations};

/// The activations of the blocks of a model in a micro-batch.
pub(super) struct ActivationMemory<'a> {
    saved: &'a [SavedBytes],
    stored: StoredActivations,
}

impl<'a> ActivationMemory<'a> {
    /// Describes blocks that save these bytes for their backward.
    pub(super) fn new(saved: &'a [SavedBytes], recompute: Recompute) -> Self {
        ActivationMemory { saved, stored: recompute.stored(saved.len(), true) }
    }

    /// Returns the tensors that are kept of each block.
    pub(super) fn blocks(&self) -> &StoredActivations {
        &self.stored
    }

    /// Returns the bytes that live during the backward of block `layer`: everything that forward
    /// has kept of the blocks before it, and all that its backward reads. If it is recomputed with
    /// other blocks, all blocks of its group up to it are whole.
    fn live(&self, layer: usize) -> usize {
        let first = self.stored.group(layer).map_or(layer, |group| group.start);
        let of_block = |(block, bytes): (usize, &SavedBytes)| match self.stored.of(block) {
            _ if block >= first => bytes.input + bytes.rest,
            BlockStorage::Results => bytes.input + bytes.rest,
            BlockStorage::Products => bytes.input + bytes.rest - bytes.attended,
            BlockStorage::Input => bytes.input,
            BlockStorage::Nothing => 0,
        };
        self.saved.iter().enumerate().take(layer + 1).map(of_block).sum()
    }

    /// Returns the most bytes that live at once.
    pub(super) fn peak(&self) -> usize {
        (0..self.saved.len()).map(|layer| self.live(layer)).max().unwrap_or(0)
    }

    /// Returns the bytes of the peak that do not live during the backward of block `layer`.
    pub(super) fn freed(&self, layer: usize) -> usize {
        self.peak() - self.live(layer)
    }
}

/// Returns the value of `train.recompute` that takes the least time among those that fit: no
/// recomputing, the first n blocks for the smallest n, all blocks, or the shortest runs of blocks.
/// Returns all blocks if none fits.
///
/// # Errors
/// Those of `fits`.
pub(super) fn least_recompute(layers: usize, fits: impl Fn(Recompute) -> Result<bool>) -> Result<Recompute> {
    if fits(Recompute::None)? {
        return Ok(Recompute::None);
    }
    // The last block is never recomputed.
    let all = layers.saturating_sub(1);
    if fits(Recompute::Block)? {
        let (mut few, mut enough) = (0, all);
        while few + 1 < enough {
            let some = few.midpoint(enough);
            let does = NonZeroUsize::new(some).map_or(Ok(false), |n| fits(Recompute::First(n)))?;
            *(if does { &mut enough } else { &mut few }) = some;
        }
        let first = NonZeroUsize::new(enough).filter(|n| n.get() < all);
        return Ok(first.map_or(Recompute::Block, Recompute::First));
    }
    // Longer runs need more memory again: a block keeps more than its input.
    let longest = layers.isqrt();
    for n in (2..=longest).filter_map(NonZeroUsize::new) {
        if fits(Recompute::Every(n))? {
            return Ok(Recompute::Every(n));
        }
    }
    Ok(Recompute::Block)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs of 2, of 10 more bytes 4 attended.
    fn peak(blocks: usize, text: &str) -> Result<usize> {
        let saved = vec![SavedBytes { input: 2, rest: 10, attended: 4 }; blocks];
        Ok(ActivationMemory::new(&saved, text.parse()?).peak())
    }

    #[test]
    fn peaks_are_at_the_start_of_backward_or_of_a_group() -> Result<()> {
        assert_eq!(peak(6, "none")?, 6 * 12);
        assert_eq!(peak(6, "selective")?, 5 * 8 + 12);
        assert_eq!(peak(6, "first:2")?, 2 * 2 + 4 * 12);
        assert_eq!(peak(6, "block")?, 5 * 2 + 12);
        assert_eq!(peak(6, "every:2")?, 2 * 2 + 2 * 12);
        // The last group has one block; that before it is whole when its backward begins.
        assert_eq!(peak(7, "every:2")?, 2 * 2 + 2 * 12);
        assert_eq!(peak(9, "every:sqrt")?, 2 * 2 + 3 * 12);
        let saved = vec![SavedBytes { input: 2, rest: 10, attended: 4 }; 3];
        let stored = ActivationMemory::new(&saved, Recompute::None);
        assert_eq!([0, 1, 2].map(|layer| stored.freed(layer)), [24, 12, 0]);
        Ok(())
    }

    /// As few blocks are recomputed as the memory demands.
    #[test]
    fn the_fastest_recomputing_that_fits_is_chosen() -> Result<()> {
        let chosen = |bytes: usize| {
            let chosen = least_recompute(16, |recompute| Ok(peak(16, &recompute.to_string())? <= bytes));
            chosen.map(|recompute| recompute.to_string())
        };
        for (bytes, recompute) in [
            (192, "none"),
            (191, "first:1"),
            (182, "first:1"),
            (181, "first:2"),
            (52, "first:14"),
            (51, "block"),
            (42, "block"),
            (41, "every:2"),
            (38, "every:2"),
            (10, "block"),
        ] {
            assert_eq!(chosen(bytes)?, recompute, "{bytes} bytes");
        }
        assert_eq!(least_recompute(1, |_| Ok(false))?, Recompute::Block);
        Ok(())
    }
}
