//! The pairs of a micro-batch, and the metrics that all objectives over pairs have. Names of
//! metrics are TRL's.

use super::MetricSum;
use super::log_probs::Scored;
use crate::data::{Batch, IGNORE, Role, Sample};
use crate::error::{Error, Result};

/// Two answers to one prompt, as indices of samples.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pair {
    /// The better answer, then the other.
    pub(super) sides: [usize; 2],
}

/// Returns the pairs of a micro-batch, in order.
pub(super) fn pairs(batch: &Batch) -> Result<Vec<Pair>> {
    let mut pairs = Vec::new();
    for (at, sample) in batch.samples.iter().enumerate() {
        if sample.role == Role::Chosen {
            if batch.samples.get(at + 1).map(|next| next.role) != Some(Role::Rejected) {
                return Err(Error::internal("a chosen answer has no rejected one after it"));
            }
            pairs.push(Pair { sides: [at, at + 1] });
        }
    }
    Ok(pairs)
}

/// Returns the number of targets of a sample.
pub(super) fn num_targets(batch: &Batch, sample: &Sample) -> usize {
    let targets = &batch.targets[sample.start..sample.start + sample.len];
    targets.iter().filter(|target| **target != IGNORE).count()
}

/// The log-probabilities of the two answers of a pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct PairLogProbs {
    /// The sum over the tokens of each answer.
    pub(super) sums: [f64; 2],
    /// The number of tokens of each answer.
    pub(super) tokens: [f64; 2],
}

impl PairLogProbs {
    pub(super) fn of(scored: &Scored<'_>, pair: &Pair) -> Self {
        let sample = |side: usize| &scored.batch.samples[pair.sides[side]];
        PairLogProbs {
            sums: [0, 1].map(|side| scored.sum_of(sample(side), &scored.log_probs)),
            tokens: [0, 1].map(|side| scored.answer(sample(side)).count() as f64),
        }
    }

    /// Returns the means over the tokens.
    pub(super) fn means(self) -> [f64; 2] {
        [0, 1].map(|side| self.sums[side] / self.tokens[side].max(1.0))
    }
}

/// The metrics of rewards, summed over pairs.
#[derive(Debug, Default)]
pub(super) struct RewardMetrics {
    rewards: [f64; 2],
    log_probs: [f64; 2],
    hits: f64,
    pairs: f64,
}

impl RewardMetrics {
    /// Adds a pair by the rewards and the log-probabilities of its two answers.
    pub(super) fn add(&mut self, rewards: [f64; 2], log_probs: [f64; 2]) {
        for side in 0..2 {
            self.rewards[side] += rewards[side];
            self.log_probs[side] += log_probs[side];
        }
        self.hits += f64::from(u8::from(rewards[0] > rewards[1]));
        self.pairs += 1.0;
    }

    /// Returns the sums by name.
    pub(super) fn sums(&self) -> Vec<MetricSum> {
        let [chosen, rejected] = self.rewards;
        [
            ("rewards/chosen", chosen),
            ("rewards/rejected", rejected),
            ("rewards/accuracies", self.hits),
            ("rewards/margins", chosen - rejected),
            ("logps/chosen", self.log_probs[0]),
            ("logps/rejected", self.log_probs[1]),
        ]
        .map(|(name, sum)| MetricSum { name, sum, count: self.pairs })
        .to_vec()
    }
}

/// Returns the share of the chosen answers' tokens that have the largest logit.
pub(super) fn chosen_accuracy(scored: &Scored<'_>, pairs: &[Pair]) -> MetricSum {
    let chosen = pairs.iter().map(|pair| &scored.batch.samples[pair.sides[0]]);
    let at: Vec<usize> = chosen.flat_map(|sample| scored.answer(sample)).collect();
    let hits = at.iter().filter(|at| scored.hits[**at]).count() as f64;
    let count = at.len() as f64;
    MetricSum { name: "mean_token_accuracy", sum: hits, count }
}
