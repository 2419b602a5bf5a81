//! Direct preference optimization (arXiv:2305.18290) with all losses of TRL 1.16.

use super::StepTotals;
use super::dpo_loss::{LogRatios, pair_loss};
use super::dual::Dual;
use super::log_probs::{LogProbLoss, LogProbOutput, Scored, sample_sums};
use super::pairs::{Pair, RewardMetrics, chosen_accuracy, num_targets, pairs};
use crate::data::{Batch, IGNORE};
use crate::error::Result;
use crate::recipe::ObjectiveSection;
use crate::recipe::enums::LossType;

/// A weighted sum of losses over pairs, each the mean over the pairs of the step; `sft` is the mean
/// over the tokens of their chosen answers.
#[derive(Debug)]
pub(super) struct Dpo {
    pub(super) keys: ObjectiveSection,
}

/// The pairs of a micro-batch, with the log-probabilities of their answers.
struct Pairs {
    pairs: Vec<Pair>,
    /// Those of the policy, for each pair and side.
    policy: Vec<[f64; 2]>,
    /// Those of the reference.
    reference: Vec<[f64; 2]>,
    /// The number of tokens.
    tokens: Vec<[f64; 2]>,
}

impl Pairs {
    fn ratios(&self, at: usize) -> [f64; 2] {
        [0, 1].map(|side| self.policy[at][side] - self.reference[at][side])
    }

    /// Returns each loss of one kind, with its derivatives: the first by the log-probability of an
    /// answer of the pair `from[0]`, the second by one of the pair `from[1]`.
    fn losses(&self, keys: &ObjectiveSection, loss: LossType) -> Vec<SortedLoss> {
        let all = 0..self.pairs.len();
        let difference = |sides: &[[f64; 2]], at: usize| sides[at][0] - sides[at][1];
        match loss {
            LossType::Aot => {
                let policy = sorted(all.clone().map(|at| difference(&self.policy, at)));
                let reference = sorted(all.map(|at| difference(&self.reference, at)));
                let loss_of = |(own, other): (&Ranked, &Ranked)| {
                    let ratios = LogRatios { ratios: [own.value, other.value], tokens: [1.0; 2] };
                    // The reference has no gradient, so one difference moves both answers.
                    let Dual { value, slopes: [slope, _] } = pair_loss(keys, loss, ratios);
                    SortedLoss { value, slopes: [slope, -slope], from: [own.index; 2] }
                };
                policy.iter().zip(&reference).map(loss_of).collect()
            }
            LossType::AotUnpaired => {
                let chosen = sorted(all.clone().map(|at| self.ratios(at)[0]));
                let rejected = sorted(all.map(|at| self.ratios(at)[1]));
                let loss_of = |(chosen, rejected): (&Ranked, &Ranked)| {
                    let ratios = LogRatios { ratios: [chosen.value, rejected.value], tokens: [1.0; 2] };
                    let Dual { value, slopes } = pair_loss(keys, loss, ratios);
                    SortedLoss { value, slopes, from: [chosen.index, rejected.index] }
                };
                chosen.iter().zip(&rejected).map(loss_of).collect()
            }
            _ => all
                .map(|at| {
                    let ratios = LogRatios { ratios: self.ratios(at), tokens: self.tokens[at] };
                    let Dual { value, slopes } = pair_loss(keys, loss, ratios);
                    SortedLoss { value, slopes, from: [at; 2] }
                })
                .collect(),
        }
    }
}

/// One loss, whose two answers may be of different pairs.
struct SortedLoss {
    value: f64,
    slopes: [f64; 2],
    from: [usize; 2],
}

/// A value and its index before sorting.
struct Ranked {
    value: f64,
    index: usize,
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<Ranked> {
    let mut ranked: Vec<Ranked> = values.enumerate().map(|(index, value)| Ranked { value, index }).collect();
    ranked.sort_by(|a, b| a.value.total_cmp(&b.value));
    ranked
}

impl LogProbLoss for Dpo {
    fn denominator(&self, totals: &StepTotals) -> f64 {
        totals.pairs
    }

    /// With `ld_alpha`, the tokens of an answer beyond the length of the shorter one count less.
    fn weights(&self, batch: &Batch) -> Vec<f64> {
        let mut weights = vec![1.0; batch.len()];
        let (Some(alpha), Ok(pairs)) = (self.keys.ld_alpha, pairs(batch)) else { return weights };
        for pair in pairs {
            let sides = pair.sides.map(|side| &batch.samples[side]);
            let shared = sides.iter().map(|sample| num_targets(batch, sample)).min().unwrap_or(0);
            for sample in sides {
                let positions = sample.start..sample.start + sample.len;
                let tail = positions.filter(|at| batch.targets[*at] != IGNORE).skip(shared);
                tail.for_each(|at| weights[at] = alpha);
            }
        }
        weights
    }

    fn has_reference(&self) -> bool {
        true
    }

    fn is_precomputed(&self) -> bool {
        self.keys.precompute_ref_log_probs
    }

    fn needs_alignments(&self) -> bool {
        self.keys.use_weighting
    }

    fn loss(&self, scored: &Scored<'_>) -> Result<LogProbOutput> {
        let weights = self.weights(scored.batch);
        let pairs = self.pairs(scored, &weights)?;
        let factors = self.factors(scored, &pairs);
        let (mut loss, mut slopes) = (0.0, vec![0.0; scored.batch.len()]);
        // The derivatives by the log-probabilities of each pair's answers.
        let mut by_answer = vec![[0.0; 2]; pairs.pairs.len()];
        for (kind, weight) in self.keys.losses().into_iter().zip(self.keys.weights()) {
            if kind == LossType::Sft {
                // The mean over tokens of the step, as a part of a sum over its pairs.
                let each = weight * scored.totals.pairs / scored.totals.chosen_targets.max(1.0);
                for (pair, factor) in pairs.pairs.iter().zip(&factors) {
                    let chosen = &scored.batch.samples[pair.sides[0]];
                    loss -= factor * each * scored.sum_of(chosen, &scored.log_probs);
                    scored.answer(chosen).for_each(|at| slopes[at] -= factor * each);
                }
                continue;
            }
            for (part, factor) in pairs.losses(&self.keys, kind).into_iter().zip(&factors) {
                loss += weight * factor * part.value;
                for side in 0..2 {
                    by_answer[part.from[side]][side] += weight * factor * part.slopes[side];
                }
            }
        }
        let mut rewards = RewardMetrics::default();
        for (at, pair) in pairs.pairs.iter().enumerate() {
            rewards.add(pairs.ratios(at).map(|ratio| self.keys.beta * ratio), pairs.policy[at]);
            for (side, slope) in pair.sides.into_iter().zip(by_answer[at]) {
                let sample = &scored.batch.samples[side];
                scored.answer(sample).for_each(|at| slopes[at] += slope * weights[at]);
            }
        }
        let mut metrics = rewards.sums();
        metrics.push(chosen_accuracy(scored, &pairs.pairs));
        Ok(LogProbOutput { loss, slopes, metrics })
    }
}

impl Dpo {
    fn pairs(&self, scored: &Scored<'_>, weights: &[f64]) -> Result<Pairs> {
        let (batch, pairs) = (scored.batch, pairs(scored.batch)?);
        let policy = sample_sums(batch, &scored.log_probs, weights);
        let reference = scored.reference.unwrap_or_default();
        let of_sides =
            |values: &[f64]| pairs.iter().map(|pair| pair.sides.map(|side| values[side])).collect();
        let tokens = pairs
            .iter()
            .map(|pair| pair.sides.map(|side| scored.answer(&batch.samples[side]).count() as f64));
        Ok(Pairs {
            policy: of_sides(&policy),
            reference: of_sides(reference),
            tokens: tokens.collect(),
            pairs,
        })
    }

    /// Returns the factor of each pair's losses: with `use_weighting` the product of the geometric
    /// means of the model's own probabilities of both answers, relative to the expected ones; else
    /// 1. It has no gradient.
    fn factors(&self, scored: &Scored<'_>, pairs: &Pairs) -> Vec<f64> {
        let Some(alignments) = &scored.alignments else { return vec![1.0; pairs.pairs.len()] };
        let mean = |pair: &Pair, side: usize, tokens: &[f64; 2]| {
            scored.sum_of(&scored.batch.samples[pair.sides[side]], alignments) / tokens[side].max(1.0)
        };
        let factor =
            |(pair, tokens): (&Pair, &[f64; 2])| (mean(pair, 0, tokens) + mean(pair, 1, tokens)).exp();
        pairs.pairs.iter().zip(&pairs.tokens).map(factor).collect()
    }
}
