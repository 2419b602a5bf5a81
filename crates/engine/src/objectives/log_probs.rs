//! Objectives that are functions of the log-probabilities of tokens.
//!
//! The log-probabilities come from a first pass over the output layer, in chunks. The derivative of
//! the loss by each of them is the weight of that token in a second pass, whose gradient is that of
//! a weighted cross-entropy: no pass stores all logits.

use std::borrow::Cow;
use std::fmt::Debug;

use super::{Evaluation, MetricSum, Objective, ObjectiveCost, ObjectiveInput, ObjectiveOutput, StepTotals};
use crate::data::{Batch, IGNORE, Sample};
use crate::error::{Error, Result};
use crate::model::{AdapterSwitch, HeadWeights};
use crate::ops::cross_entropy::{LossTargets, TokenScore};

/// A loss as a function of the log-probabilities of a micro-batch's tokens.
pub(super) trait LogProbLoss: Debug + Send + Sync {
    /// Returns the divisor of the summed loss of a step.
    fn denominator(&self, totals: &StepTotals) -> f64;

    /// Returns the tokens to score: by default the targets of the batch.
    fn targets<'a>(&self, batch: &'a Batch) -> Cow<'a, [u32]> {
        Cow::Borrowed(&batch.targets)
    }

    /// Returns the weight of each position in the log-probability of its sample, `[N]`.
    fn weights(&self, batch: &Batch) -> Vec<f64> {
        vec![1.0; batch.len()]
    }

    /// Returns true if the loss compares the model with a reference.
    fn has_reference(&self) -> bool {
        false
    }

    /// Returns true if the log-probabilities of the reference are computed before the first step.
    fn is_precomputed(&self) -> bool {
        false
    }

    /// Returns true if the loss needs [`StepTotals::drift`].
    fn needs_drift(&self) -> bool {
        false
    }

    /// Returns a metric that follows from the sums of a step.
    fn derived(&self, _metrics: &[MetricSum]) -> Option<MetricSum> {
        None
    }

    /// Returns true if the loss needs [`Scored::alignments`].
    fn needs_alignments(&self) -> bool {
        false
    }

    /// Returns the loss of a micro-batch. One [without targets](Batch::without_targets) has a loss
    /// and metrics of zero.
    ///
    /// # Errors
    /// The samples do not have the roles that the loss needs: an internal error.
    fn loss(&self, scored: &Scored<'_>) -> Result<LogProbOutput>;
}

/// A micro-batch with the log-probabilities of its tokens.
#[derive(Debug)]
pub(super) struct Scored<'a> {
    pub(super) batch: &'a Batch,
    /// The scored tokens, `[N]`, or [`IGNORE`].
    pub(super) targets: &'a [u32],
    /// The log-probability of each scored token, `[N]`; 0 for the others.
    pub(super) log_probs: Vec<f64>,
    /// True for each scored token that has the largest logit, `[N]`.
    pub(super) hits: Vec<bool>,
    /// The log-probability of each scored token minus the logarithm of the sum of the squared
    /// probabilities of all tokens there, `[N]`, if the loss needs it.
    pub(super) alignments: Option<Vec<f64>>,
    /// The log-probability of each sample under the reference.
    pub(super) reference: Option<&'a [f64]>,
    /// Counts of the whole step.
    pub(super) totals: StepTotals,
}

/// A loss, its derivatives and metrics.
#[derive(Debug)]
pub(super) struct LogProbOutput {
    /// The summed loss.
    pub(super) loss: f64,
    /// The derivative of the loss by the log-probability of each position, `[N]`.
    pub(super) slopes: Vec<f64>,
    pub(super) metrics: Vec<MetricSum>,
}

impl<'a> Scored<'a> {
    fn new(
        loss: &impl LogProbLoss,
        targets: &'a [u32],
        head: &HeadWeights,
        input: ObjectiveInput<'a>,
    ) -> Result<Self> {
        let ObjectiveInput { config, hidden, batch, dropout, reference, totals, .. } = input;
        let scores = head.score(config, hidden, targets, AdapterSwitch::On, dropout)?;
        let alignments = if loss.needs_alignments() {
            let squares = head.log_square_sums(config, hidden, targets, dropout)?;
            let aligned =
                scores.iter().zip(squares).map(|(score, sum)| -f64::from(score.loss) - f64::from(sum));
            Some(at_targets(targets, aligned, 0.0))
        } else {
            None
        };
        if loss.has_reference() && reference.map(<[f64]>::len) != Some(batch.samples.len()) {
            return Err(Error::internal("a loss got no log-probabilities of its reference"));
        }
        Ok(Scored {
            batch,
            targets,
            log_probs: at_targets(targets, scores.iter().map(|score| -f64::from(score.loss)), 0.0),
            hits: at_targets(targets, scores.iter().map(|score| score.correct), false),
            alignments,
            reference,
            totals,
        })
    }

    /// Iterates over all scored positions of a sample.
    pub(super) fn positions(&self, sample: &Sample) -> impl Iterator<Item = usize> + '_ {
        let positions = sample.start..sample.start + sample.len;
        positions.filter(|at| self.targets[*at] != IGNORE)
    }

    /// Iterates over the scored positions of a sample's answer: those with a target of the batch.
    pub(super) fn answer(&self, sample: &Sample) -> impl Iterator<Item = usize> + use<'a> {
        let (targets, positions) = (&self.batch.targets, sample.start..sample.start + sample.len);
        positions.filter(|at| targets[*at] != IGNORE)
    }

    /// Returns the sum of `values: [N]` over the answer of a sample.
    pub(super) fn sum_of(&self, sample: &Sample, values: &[f64]) -> f64 {
        self.answer(sample).map(|at| values[at]).sum()
    }
}

/// Returns `values`, one for each target in order, at the positions of the targets, `[N]`.
fn at_targets<T: Clone>(targets: &[u32], mut values: impl Iterator<Item = T>, other: T) -> Vec<T> {
    let value = |target: &u32| if *target == IGNORE { None } else { values.next() };
    targets.iter().map(value).map(|value| value.unwrap_or_else(|| other.clone())).collect()
}

/// Returns the log-probability of each sample: the weighted sum over its targets.
pub(super) fn sample_sums(batch: &Batch, log_probs: &[f64], weights: &[f64]) -> Vec<f64> {
    let sum = |sample: &Sample| {
        let positions = sample.start..sample.start + sample.len;
        positions.filter(|at| batch.targets[*at] != IGNORE).map(|at| weights[at] * log_probs[at]).sum()
    };
    batch.samples.iter().map(sum).collect()
}

/// An objective by a [`LogProbLoss`].
#[derive(Debug)]
pub(super) struct ByLogProbs<L>(pub(super) L);

impl<L: LogProbLoss> Objective for ByLogProbs<L> {
    fn denominator(&self, totals: &StepTotals) -> f64 {
        self.0.denominator(totals)
    }

    fn cost(&self) -> ObjectiveCost {
        // A score, an f64 and two f32 for each position.
        let bytes_per_token = 2 * size_of::<f64>() + 2 * size_of::<f32>();
        ObjectiveCost {
            extra_forwards: usize::from(self.0.has_reference() && !self.0.is_precomputed()),
            head_forwards: 1 + usize::from(self.0.needs_alignments()),
            bytes_per_token,
        }
    }

    fn has_reference(&self) -> bool {
        self.0.has_reference()
    }

    fn needs_drift(&self) -> bool {
        self.0.needs_drift()
    }

    fn derived(&self, metrics: &[MetricSum]) -> Option<MetricSum> {
        self.0.derived(metrics)
    }

    fn sample_log_probs(&self, batch: &Batch, scores: &[TokenScore]) -> Vec<f64> {
        let log_probs = at_targets(&batch.targets, scores.iter().map(|score| -f64::from(score.loss)), 0.0);
        sample_sums(batch, &log_probs, &self.0.weights(batch))
    }

    fn loss_and_grad(&self, head: &HeadWeights, input: ObjectiveInput<'_>) -> Result<ObjectiveOutput> {
        let ObjectiveInput { config, hidden, batch, scale, dropout, .. } = input;
        let targets = self.0.targets(batch);
        let output = self.0.loss(&Scored::new(&self.0, &targets, head, input)?)?;
        // A cross-entropy is a negative log-probability.
        let coefficients: Vec<f32> = output.slopes.iter().map(|slope| -*slope as f32).collect();
        let weighted = LossTargets { ids: &targets, coefficients: Some(&coefficients) };
        let (_, dx) = head.loss_and_grad(config, hidden, weighted, scale, dropout)?;
        Ok(ObjectiveOutput { loss: output.loss.into(), dx, metrics: output.metrics })
    }

    fn evaluate(&self, head: &HeadWeights, input: ObjectiveInput<'_>) -> Result<Evaluation> {
        let targets = self.0.targets(input.batch);
        let output = self.0.loss(&Scored::new(&self.0, &targets, head, input)?)?;
        let tokens = input.batch.valid();
        Ok(Evaluation { loss_sum: output.loss, tokens, metrics: output.metrics, ..Evaluation::default() })
    }
}
