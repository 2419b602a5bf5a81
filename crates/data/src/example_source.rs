//! Source of examples: rows in memory.
//!
//! The number of examples is exact, and not a hint. An epoch permutes the indices of all examples,
//! packing fills micro-batches by their lengths, and the number of steps, and with it the schedule
//! of the learning rate, follows from both. A source that reads its rows from files during the run
//! fits if it knows number and lengths beforehand, for example from an index. A stream of unknown
//! length has no permutation and no epoch. It implements [`StepSource`](super::StepSource)
//! instead: the recipe then sets its `total_steps` (`train.max_steps`), and its longest
//! micro-batch may be unknown.

use std::borrow::Cow;
use std::fmt::Debug;

use super::encode::Example;

/// Examples in a fixed order, of which steps are made.
pub trait ExampleSource: Debug + Sync {
    /// Number of examples.
    fn len(&self) -> usize;

    /// True if the source has no example.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of tokens of example `index`. Sampling and packing decide by it, without reading the
    /// example.
    fn length(&self, index: usize) -> usize;

    /// The group of example `index`; none: it stands alone. Members of a group are neighbours, and
    /// sampling and packing keep them in one micro-batch.
    fn group(&self, index: usize) -> Option<u32>;

    /// Example `index`, from memory or from a file.
    fn example(&self, index: usize) -> Cow<'_, Example>;

    /// BLAKE3 over ids, masks, groups and roles of all examples in order: equal digests train
    /// alike.
    fn digest(&self) -> blake3::Hash;
}
