//! Contrastive preference optimization (arXiv:2401.08417) and SimPO (arXiv:2405.14734). They have
//! no reference.

use super::dpo_loss::smoothed;
use super::dual::Dual;
use super::log_probs::{LogProbLoss, LogProbOutput, Scored};
use super::pairs::{PairLogProbs, RewardMetrics, pairs};
use super::{MetricSum, StepTotals};
use crate::error::Result;
use crate::recipe::ObjectiveSection;
use crate::recipe::enums::LossType;

/// A loss of the difference of two log-probabilities, and `cpo_alpha` times the mean cross-entropy
/// of the tokens of chosen answers.
#[derive(Debug)]
pub(super) struct Cpo {
    pub(super) keys: ObjectiveSection,
    pub(super) loss: LossType,
    /// The weight of the cross-entropy.
    pub(super) alpha: f64,
}

impl Cpo {
    /// Returns true if the log-probability of an answer is the mean over its tokens.
    fn is_mean(&self) -> bool {
        matches!(self.loss, LossType::Ipo | LossType::Simpo)
    }

    /// Returns the loss of a pair with these log-probabilities.
    fn pair_loss(&self, [chosen, rejected]: [Dual; 2]) -> Dual {
        let (beta, epsilon) = (self.keys.beta, self.keys.label_smoothing);
        let difference = chosen - rejected;
        match self.loss {
            LossType::Hinge => (-(difference * beta) + 1.0).at_least_zero(),
            LossType::Ipo => (difference - 0.5 / beta).square(),
            LossType::Simpo => smoothed(difference * beta - self.keys.simpo_gamma, [1.0 - epsilon, epsilon]),
            // The recipe accepts no other loss for this objective.
            _ => smoothed(difference * beta, [1.0 - epsilon, epsilon]),
        }
    }
}

impl LogProbLoss for Cpo {
    fn denominator(&self, totals: &StepTotals) -> f64 {
        totals.pairs
    }

    fn loss(&self, scored: &Scored<'_>) -> Result<LogProbOutput> {
        let batch = scored.batch;
        let (mut loss, mut slopes) = (0.0, vec![0.0; batch.len()]);
        let mut nll = MetricSum { name: "nll_loss", sum: 0.0, count: 0.0 };
        let mut rewards = RewardMetrics::default();
        // The mean over tokens of the step, as a part of a sum over its pairs.
        let each = self.alpha * scored.totals.pairs / scored.totals.chosen_targets.max(1.0);
        for pair in pairs(batch)? {
            let log_probs = PairLogProbs::of(scored, &pair);
            let compared = if self.is_mean() { log_probs.means() } else { log_probs.sums };
            let pair_loss = self.pair_loss(Dual::variables(compared));
            loss += pair_loss.value - each * log_probs.sums[0];
            for (side, sample) in pair.sides.map(|side| &batch.samples[side]).into_iter().enumerate() {
                let tokens = if self.is_mean() { log_probs.tokens[side].max(1.0) } else { 1.0 };
                let of_nll = if side == 0 { each } else { 0.0 };
                let slope = pair_loss.slopes[side] / tokens - of_nll;
                scored.answer(sample).for_each(|at| slopes[at] += slope);
            }
            nll.sum -= log_probs.sums[0];
            nll.count += log_probs.tokens[0];
            rewards.add(compared.map(|log_prob| self.keys.beta * log_prob), compared);
        }
        let mut metrics = rewards.sums();
        metrics.push(nll);
        Ok(LogProbOutput { loss, slopes, metrics })
    }
}

#[cfg(test)]
mod tests {
    use super::super::dual::tests::slopes_are_right;
    use super::*;

    #[test]
    fn each_loss_has_its_derivative() {
        let keys = ObjectiveSection { beta: 0.7, label_smoothing: 0.1, ..ObjectiveSection::default() };
        for loss in [LossType::Sigmoid, LossType::Hinge, LossType::Ipo, LossType::Simpo] {
            let cpo = Cpo { keys: keys.clone(), loss, alpha: 1.0 };
            for at in [[-3.0, -2.5], [-70.0, -30.0], [-2.0, -9.0]] {
                slopes_are_right(loss.as_str(), at, |pair| cpo.pair_loss(pair));
            }
        }
    }
}
