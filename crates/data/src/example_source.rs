//! Where examples come from: rows in memory today, rows that are read while the run goes on later.

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

    /// BLAKE3 over ids, masks and groups of all examples in order: equal digests train alike.
    fn digest(&self) -> blake3::Hash;
}
