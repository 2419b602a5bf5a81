//! Kahneman-Tversky optimization (arXiv:2402.01306): answers that are good or bad by themselves.

use super::dual::Dual;
use super::log_probs::{LogProbLoss, LogProbOutput, Scored, sample_sums};
use super::{MetricSum, StepTotals};
use crate::data::Role;
use crate::error::Result;
use crate::recipe::ObjectiveSection;

/// `w · (1 − σ(± β (r − z)))`, mean over the answers: r is the log-ratio of an answer to the
/// reference, and z the drift of the model, the mean log-ratio of mismatched answers of the step,
/// at least 0 and without a gradient. The loss `apo_zero_unpaired` has no z.
#[derive(Debug)]
pub(super) struct Kto {
    pub(super) keys: ObjectiveSection,
}

/// Metrics of the answers with one label.
#[derive(Debug, Clone, Copy, Default)]
struct LabelSums {
    rewards: f64,
    log_probs: f64,
    count: f64,
}

impl Kto {
    /// Returns the loss of an answer by its log-ratio, the first variable.
    fn answer_loss(&self, ratio: f64, is_good: bool, drift: f64) -> Dual {
        let [ratio, _] = Dual::variables([ratio, 0.0]);
        let advantage = (ratio - drift) * self.keys.beta;
        let (advantage, weight) = if is_good {
            (advantage, self.keys.desirable_weight)
        } else {
            (-advantage, self.keys.undesirable_weight)
        };
        (-advantage.sigmoid() + 1.0) * weight
    }
}

impl LogProbLoss for Kto {
    fn denominator(&self, totals: &StepTotals) -> f64 {
        totals.labelled
    }

    fn has_reference(&self) -> bool {
        true
    }

    fn is_precomputed(&self) -> bool {
        self.keys.precompute_ref_log_probs
    }

    fn needs_drift(&self) -> bool {
        self.keys.needs_mismatched()
    }

    fn loss(&self, scored: &Scored<'_>) -> Result<LogProbOutput> {
        let batch = scored.batch;
        let (mut loss, mut slopes) = (0.0, vec![0.0; batch.len()]);
        let policy = sample_sums(batch, &scored.log_probs, &vec![1.0; batch.len()]);
        let reference = scored.reference.unwrap_or_default();
        let drift = scored.totals.drift;
        // Good answers, then bad ones.
        let mut labels = [LabelSums::default(); 2];
        for ((sample, policy), reference) in batch.samples.iter().zip(policy).zip(reference) {
            let is_good = match sample.role {
                Role::Desirable => true,
                Role::Undesirable => false,
                _ => continue,
            };
            let answer_loss = self.answer_loss(policy - reference, is_good, drift);
            loss += answer_loss.value;
            scored.answer(sample).for_each(|at| slopes[at] += answer_loss.slopes[0]);
            let sums = &mut labels[usize::from(!is_good)];
            sums.rewards += self.keys.beta * (policy - reference);
            sums.log_probs += policy;
            sums.count += 1.0;
        }
        let [good, bad] = labels;
        let count = good.count + bad.count;
        let metrics = [
            ("rewards/chosen", good.rewards, good.count),
            ("rewards/rejected", bad.rewards, bad.count),
            ("logps/chosen", good.log_probs, good.count),
            ("logps/rejected", bad.log_probs, bad.count),
            ("kl", drift * count, count),
        ];
        let metrics = metrics.map(|(name, sum, count)| MetricSum { name, sum, count }).to_vec();
        Ok(LogProbOutput { loss, slopes, metrics })
    }

    /// The margin of a step that has both labels.
    fn derived(&self, metrics: &[MetricSum]) -> Option<MetricSum> {
        let mean = |name: &str| metrics.iter().find(|metric| metric.name == name)?.mean();
        let margin = mean("rewards/chosen")? - mean("rewards/rejected")?;
        Some(MetricSum { name: "rewards/margins", sum: margin, count: 1.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::super::dual::tests::slopes_are_right;
    use super::*;

    #[test]
    fn the_loss_of_an_answer_has_its_derivative() {
        let keys = ObjectiveSection {
            beta: 0.3,
            desirable_weight: 1.3,
            undesirable_weight: 0.7,
            ..ObjectiveSection::default()
        };
        let kto = Kto { keys };
        for ratio in [-4.0, 0.0, 2.5] {
            for is_good in [true, false] {
                slopes_are_right("kto", [ratio, 0.0], |[ratio, _]| {
                    kto.answer_loss(ratio.value, is_good, 0.8)
                });
            }
        }
        // Equal to the drift, an answer is worth half of its weight.
        assert_eq!(kto.answer_loss(0.8, true, 0.8).value, 0.65);
        assert_eq!(kto.answer_loss(0.8, false, 0.8).value, 0.35);
    }
}
