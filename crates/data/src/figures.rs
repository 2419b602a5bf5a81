//! Figures of the examples of a data set: lengths, repeated examples, ends of answers.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde::Serialize;

use super::{Dataset, Example, Tokenizer};
/// Number of answer ends that the report names.
const NAMED_ENDS: usize = 3;

/// Percentiles of the lengths of examples, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Percentiles {
    /// Half of the examples are as long or shorter.
    pub p50: usize,
    /// Nine of ten are as long or shorter.
    pub p90: usize,
    /// 99 of 100 are as long or shorter.
    pub p99: usize,
    /// Length of the longest example.
    pub max: usize,
}

impl Percentiles {
    /// Nearest-rank percentiles of `lengths` (Hyndman and Fan, type 1): each is one of them; zero
    /// without lengths.
    fn of(mut lengths: Vec<usize>) -> Self {
        lengths.sort_unstable();
        let rank = |percent: usize| (lengths.len() * percent).div_ceil(100).max(1) - 1;
        let at = |percent: usize| lengths.get(rank(percent)).copied().unwrap_or(0);
        Percentiles { p50: at(50), p90: at(90), p99: at(99), max: at(100) }
    }
}

impl fmt::Display for Percentiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Percentiles { p50, p90, p99, max } = self;
        write!(f, "half up to {p50}, 90 % up to {p90}, 99 % up to {p99}, the longest {max}")
    }
}

/// A token that trained parts of examples end with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TrainedEnd {
    /// Its name in the vocabulary.
    pub token: String,
    /// The number of trained parts that end with it.
    pub count: usize,
}

/// The figures of a data set's examples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExampleFigures {
    /// Tokens per example.
    pub tokens: Percentiles,
    /// Trained tokens per example.
    pub trained_tokens: Percentiles,
    /// Number of examples with the same tokens as an earlier one.
    pub repeated: usize,
    /// The tokens that trained parts end with, the most frequent first.
    pub ends: Vec<TrainedEnd>,
}

impl ExampleFigures {
    /// Computes the figures of `dataset`, which `tokenizer` encoded.
    pub fn of(dataset: &Dataset, tokenizer: &Tokenizer) -> Self {
        let examples = dataset.examples();
        let lengths =
            |length: &dyn Fn(&Example) -> usize| Percentiles::of(examples.iter().map(length).collect());
        let mut seen: HashMap<&[u32], usize> = HashMap::new();
        let mut ends: BTreeMap<u32, usize> = BTreeMap::new();
        for example in examples {
            *seen.entry(&example.ids).or_default() += 1;
            trained_ends(example).for_each(|id| *ends.entry(id).or_default() += 1);
        }
        let mut ends: Vec<(u32, usize)> = ends.into_iter().collect();
        ends.sort_by_key(|(id, count)| (usize::MAX - count, *id));
        let end = |(id, count)| {
            let token = tokenizer.token(id).unwrap_or_else(|| format!("token {id}"));
            TrainedEnd { token, count }
        };
        ExampleFigures {
            tokens: lengths(&|example| example.ids.len()),
            trained_tokens: lengths(&Example::num_trained),
            repeated: seen.values().map(|count| count - 1).sum(),
            ends: ends.into_iter().map(end).collect(),
        }
    }
}

/// The last token of each trained part of an example.
fn trained_ends(example: &Example) -> impl Iterator<Item = u32> {
    let is_trained = |at: usize| at > 0 && example.trained.get(at).copied().unwrap_or(false);
    (0..example.ids.len()).filter(move |at| is_trained(*at) && !is_trained(at + 1)).map(|at| example.ids[at])
}

impl fmt::Display for ExampleFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "tokens of an example: {}", self.tokens)?;
        write!(f, "trained ones: {}", self.trained_tokens)?;
        let named: Vec<String> =
            self.ends.iter().take(NAMED_ENDS).map(|end| format!("{:?} ({})", end.token, end.count)).collect();
        if !named.is_empty() {
            write!(f, "\ntrained parts end with {}", named.join(", "))?;
        }
        let others: usize = self.ends.iter().skip(NAMED_ENDS).map(|end| end.count).sum();
        if others > 0 {
            write!(f, " and others ({others})")?;
        }
        match self.repeated {
            0 => Ok(()),
            1 => write!(f, "\none example has the same tokens as an earlier one"),
            repeated => write!(f, "\n{repeated} examples have the same tokens as an earlier one"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_lengths_that_there_are() {
        let of = |lengths: Vec<usize>| {
            let Percentiles { p50, p90, p99, max } = Percentiles::of(lengths);
            [p50, p90, p99, max]
        };
        assert_eq!(of((1..=100).rev().collect()), [50, 90, 99, 100]);
        assert_eq!(of(vec![7, 3, 5]), [5, 7, 7, 7]);
        assert_eq!(of(vec![4]), [4; 4]);
        assert_eq!(of(Vec::new()), [0; 4]);
    }
}
