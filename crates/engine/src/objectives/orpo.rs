//! Odds-ratio preference optimization (arXiv:2403.07691): cross-entropy of the chosen rows with
//! their prompts, and the odds ratio of the answers. It has no reference.

use std::borrow::Cow;

use super::dual::Dual;
use super::log_probs::{LogProbLoss, LogProbOutput, Scored};
use super::pairs::{PairLogProbs, RewardMetrics, pairs};
use super::{MetricSum, StepTotals};
use crate::data::{Batch, Role};
use crate::error::Result;

/// The mean cross-entropy over all tokens of the chosen rows, minus `beta` times the mean over
/// pairs of the log-sigmoid of their log odds ratio.
#[derive(Debug)]
pub(super) struct Orpo {
    pub(super) beta: f64,
}

impl LogProbLoss for Orpo {
    fn denominator(&self, totals: &StepTotals) -> f64 {
        totals.pairs
    }

    /// The tokens of chosen prompts are scored, too.
    fn targets<'a>(&self, batch: &'a Batch) -> Cow<'a, [u32]> {
        let mut targets = batch.targets.clone();
        for sample in &batch.samples {
            if sample.role == Role::Chosen && sample.len > 0 {
                let last = sample.start + sample.len - 1;
                targets[sample.start..last].copy_from_slice(&batch.ids[sample.start + 1..=last]);
            }
        }
        Cow::Owned(targets)
    }

    fn loss(&self, scored: &Scored<'_>) -> Result<LogProbOutput> {
        let batch = scored.batch;
        let (mut loss, mut slopes) = (0.0, vec![0.0; batch.len()]);
        let (mut nll, mut tokens, mut ratios, mut odds, mut count) = (0.0, 0.0, 0.0, 0.0, 0.0);
        let mut rewards = RewardMetrics::default();
        // The mean over tokens of the step, as a part of a sum over its pairs.
        let each = scored.totals.pairs / scored.totals.chosen_tokens.max(1.0);
        for pair in pairs(batch)? {
            let log_probs = PairLogProbs::of(scored, &pair);
            let means = log_probs.means();
            let log_odds = log_odds(Dual::variables(means));
            let ratio = log_odds.log_sigmoid();
            loss -= self.beta * ratio.value;
            for side in 0..2 {
                let by_token = -self.beta * ratio.slopes[side] / log_probs.tokens[side].max(1.0);
                scored.answer(&batch.samples[pair.sides[side]]).for_each(|at| slopes[at] += by_token);
            }
            for at in scored.positions(&batch.samples[pair.sides[0]]) {
                nll -= scored.log_probs[at];
                tokens += 1.0;
                slopes[at] -= each;
            }
            ratios += ratio.value;
            odds += log_odds.value;
            count += 1.0;
            rewards.add(means.map(|mean| self.beta * mean), means);
        }
        let mut metrics = rewards.sums();
        metrics.push(MetricSum { name: "nll_loss", sum: nll, count: tokens });
        metrics.push(MetricSum { name: "log_odds_ratio", sum: ratios, count });
        metrics.push(MetricSum { name: "log_odds_chosen", sum: odds, count });
        Ok(LogProbOutput { loss: loss + each * nll, slopes, metrics })
    }
}

/// Returns the log odds ratio of two answers with these mean log-probabilities.
fn log_odds([chosen, rejected]: [Dual; 2]) -> Dual {
    (chosen - rejected) - (chosen.log_one_minus_exp() - rejected.log_one_minus_exp())
}

#[cfg(test)]
mod tests {
    use super::super::dual::tests::slopes_are_right;
    use super::*;

    #[test]
    fn the_log_odds_have_their_derivative() {
        for at in [[-6.5, -7.0], [-0.2, -3.0], [-0.2, -0.3]] {
            slopes_are_right("log odds", at, log_odds);
            slopes_are_right("log-sigmoid of log odds", at, |means| log_odds(means).log_sigmoid());
        }
    }
}
