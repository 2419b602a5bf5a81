//! Activation recomputation: the values of `train.recompute`, and the tensors that forward keeps of
//! each block under them.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Activation recomputation in the backward pass. Norms, rotated heads and activated values are
/// always recomputed: they are elementwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Recompute {
    /// Forward keeps the results of products and of attention: fastest.
    #[default]
    None,
    /// Forward keeps the results of products; backward recomputes attention.
    Selective,
    /// Forward keeps only the input of the first n blocks.
    First(NonZeroUsize),
    /// Forward keeps only the input of each block.
    Block,
    /// Forward keeps only the input of every n-th block; backward recomputes n blocks from it.
    Every(NonZeroUsize),
    /// The same with the square root of the number of blocks.
    EverySqrt,
}

/// The tensors that forward keeps of a block for its backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockStorage {
    /// All that backward reads.
    Results,
    /// The same without the results of attention.
    Products,
    /// The input of the block.
    Input,
    /// Nothing: the input is recomputed from that of an earlier block.
    Nothing,
}

/// The tensors that forward keeps of the blocks of a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredActivations(Vec<BlockStorage>);

impl Recompute {
    /// The values without a number, as in a recipe.
    pub const NAMES: &'static [&'static str] = &["none", "selective", "block", "every:sqrt"];
    /// The forms of the values with a number.
    pub const FORMS: &'static [&'static str] = &["first:N", "every:N"];

    /// Returns the tensors that forward keeps of the blocks of a stage. The backward of a stage
    /// with the head (`has_head`) follows its forward at once, so that the last blocks, which would
    /// be recomputed first, are kept instead.
    pub fn stored(self, blocks: usize, has_head: bool) -> StoredActivations {
        let every = |n: usize| {
            (0..blocks).map(move |i| if i % n == 0 { BlockStorage::Input } else { BlockStorage::Nothing })
        };
        let mut stored: Vec<BlockStorage> = match self {
            Recompute::None => vec![BlockStorage::Results; blocks],
            Recompute::Selective => vec![BlockStorage::Products; blocks],
            Recompute::First(n) => (0..blocks)
                .map(|i| if i < n.get() { BlockStorage::Input } else { BlockStorage::Results })
                .collect(),
            Recompute::Block => vec![BlockStorage::Input; blocks],
            Recompute::Every(n) => every(n.get()).collect(),
            Recompute::EverySqrt => every(((blocks as f64).sqrt().round() as usize).max(1)).collect(),
        };
        if has_head {
            let start = stored.iter().rposition(|stored| *stored != BlockStorage::Nothing).unwrap_or(0);
            stored[start..].fill(BlockStorage::Results);
        }
        StoredActivations(stored)
    }
}

impl StoredActivations {
    /// Returns the tensors that are kept of a block, by its number in the stage.
    pub fn of(&self, block: usize) -> BlockStorage {
        self.0[block]
    }

    /// Returns the number of blocks.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns the blocks that backward recomputes together with `block`, from the input of the
    /// first one; none if it recomputes no forward of `block`.
    pub fn group(&self, block: usize) -> Option<Range<usize>> {
        let start = (0..=block).rev().find(|i| self.0[*i] != BlockStorage::Nothing)?;
        let is_recomputed = self.0[start] == BlockStorage::Input;
        let more = self.0[start + 1..].iter().take_while(|stored| **stored == BlockStorage::Nothing).count();
        is_recomputed.then_some(start..start + 1 + more)
    }

    /// Returns true if the block is the last of a group. Its backward comes right after its second
    /// forward, which therefore computes no output.
    pub fn ends_group(&self, block: usize) -> bool {
        self.group(block).is_some_and(|group| block + 1 == group.end)
    }

    /// Returns how often a micro-batch uses the weights of a block: in forward, in backward, and in
    /// a second forward that is apart from its backward.
    pub fn uses(&self, block: usize) -> u64 {
        if self.group(block).is_some() && !self.ends_group(block) { 3 } else { 2 }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Recompute::None => f.write_str("none"),
            Recompute::Selective => f.write_str("selective"),
            Recompute::First(n) => write!(f, "first:{n}"),
            Recompute::Block => f.write_str("block"),
            Recompute::Every(n) => write!(f, "every:{n}"),
            Recompute::EverySqrt => f.write_str("every:sqrt"),
        }
    }
}

impl FromStr for Recompute {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let number = |prefix: &str| text.strip_prefix(prefix).and_then(|number| number.parse().ok());
        let accepted = || Self::NAMES.iter().chain(Self::FORMS).copied().collect::<Vec<_>>().join(", ");
        match text {
            "none" => Some(Recompute::None),
            "selective" => Some(Recompute::Selective),
            "block" => Some(Recompute::Block),
            "every:sqrt" => Some(Recompute::EverySqrt),
            _ => number("first:").map(Recompute::First).or_else(|| number("every:").map(Recompute::Every)),
        }
        .ok_or_else(|| {
            Error::user(format!("unknown choice `{text}`")).because(format!("accepted: {}", accepted()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use BlockStorage::{Input, Nothing, Products, Results};

    fn stored(text: &str, blocks: usize, has_head: bool) -> Vec<BlockStorage> {
        text.parse::<Recompute>().unwrap().stored(blocks, has_head).0
    }

    #[test]
    fn values_read_back() {
        for text in ["none", "selective", "first:3", "block", "every:2", "every:sqrt"] {
            assert_eq!(text.parse::<Recompute>().unwrap().to_string(), text);
        }
        for text in ["first:0", "every:", "every:-1", "every:2.5", "sqrt", "full", ""] {
            assert!(text.parse::<Recompute>().is_err(), "{text}");
        }
    }

    /// A stage without a head waits for its gradient, so that none of its blocks is kept.
    #[test]
    fn the_last_blocks_before_the_head_are_kept() {
        assert_eq!(stored("block", 3, true), [Input, Input, Results]);
        assert_eq!(stored("block", 3, false), [Input; 3]);
        assert_eq!(stored("first:2", 3, true), [Input, Input, Results]);
        assert_eq!(stored("first:9", 3, true), [Input, Input, Results]);
        assert_eq!(stored("selective", 2, true), [Products, Results]);
        assert_eq!(stored("every:2", 5, true), [Input, Nothing, Input, Nothing, Results]);
        assert_eq!(stored("every:2", 4, true), [Input, Nothing, Results, Results]);
        assert_eq!(stored("every:9", 3, true), [Results; 3]);
        assert_eq!(stored("every:9", 3, false), [Input, Nothing, Nothing]);
        assert_eq!(stored("every:sqrt", 9, true)[..6], stored("every:3", 9, true)[..6]);
        assert!(stored("block", 0, true).is_empty());
    }

    #[test]
    fn groups_are_recomputed_from_one_input() {
        let stored = "every:2".parse::<Recompute>().unwrap().stored(5, true);
        let groups: Vec<_> = (0..5).map(|block| stored.group(block)).collect();
        assert_eq!(groups, [Some(0..2), Some(0..2), Some(2..4), Some(2..4), None]);
        assert_eq!((0..5).map(|block| stored.uses(block)).collect::<Vec<_>>(), [3, 2, 3, 2, 2]);
        let stored = "block".parse::<Recompute>().unwrap().stored(2, true);
        assert_eq!((stored.group(0), stored.group(1), stored.ends_group(0)), (Some(0..1), None, true));
    }
}
