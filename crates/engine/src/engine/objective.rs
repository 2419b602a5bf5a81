//! What a step minimizes, as an argument of the step: from the hidden states after the last block to a loss and its
//! gradient. Cross-entropy is the one that the recipes offer.

use std::fmt::Debug;

use candle_core::Tensor;

use crate::data::{Batch, Step};
use crate::error::{Error, Result};
use crate::model::{HeadWeights, ModelConfig};
use crate::ops::cross_entropy::{LossSum, LossTargets};
use crate::runtime::rng::RngStream;

/// A loss over the hidden states of a micro-batch.
///
/// The engine does the rest: the blocks and the embedding get the gradient that this returns, and losses and metrics are
/// summed over the micro-batches and ranks of a step. A rank without a micro-batch of its own runs one
/// [without targets](Batch::without_targets), whose loss, gradient and metrics must be zero.
pub trait Objective: Debug + Send + Sync {
    /// What the summed loss of a step is divided by: the number of targets, unless the objective counts otherwise.
    fn denominator(&self, step: &Step) -> f64 {
        step.valid as f64
    }

    /// The loss of a micro-batch and the gradient of its hidden states. Gradients of the head's own parameters are
    /// added where `head` says.
    ///
    /// # Errors
    /// A tensor operation failed.
    fn loss_and_grad(&self, head: &HeadWeights, input: ObjectiveInput<'_>) -> Result<ObjectiveOutput>;
}

/// What an objective sees of a micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct ObjectiveInput<'a> {
    /// The model's shape.
    pub config: &'a ModelConfig,
    /// The hidden states after the last block: `[N, D]`, in the dtype of activations.
    pub hidden: &'a Tensor,
    /// Targets and sample boundaries of the N positions.
    pub batch: &'a Batch,
    /// Gradients are those of the loss times this: one over the step's [denominator](Objective::denominator).
    pub scale: f64,
    /// Where dropout on the head's adapter draws from, and the micro-batch's first token; none: nothing is dropped.
    pub dropout: Option<(RngStream, u64)>,
}

/// What an objective makes of a micro-batch.
#[derive(Debug)]
pub struct ObjectiveOutput {
    /// The summed loss, not yet scaled.
    pub loss: LossSum,
    /// The gradient of the hidden states for `scale` times the loss: `[N, D]`, in their dtype.
    pub dx: Tensor,
    /// Sums beside the loss: the same names in the same order for every micro-batch.
    pub metrics: Vec<MetricSum>,
}

/// A number of an objective's own, summed over what was seen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MetricSum {
    /// The name under which it is reported.
    pub name: &'static str,
    /// The sum so far.
    pub sum: f64,
}

/// The loss and the metrics of micro-batches, summed.
#[derive(Debug, Default)]
pub struct LossSums {
    /// The summed loss, not yet scaled.
    pub loss: LossSum,
    /// The objective's own sums.
    pub metrics: Vec<MetricSum>,
}

impl LossSums {
    /// Adds those of another micro-batch of the same objective.
    ///
    /// # Errors
    /// Its metrics have other names: a fault of the objective.
    pub(super) fn add(&mut self, other: LossSums) -> Result<()> {
        self.loss.add(other.loss);
        if self.metrics.is_empty() {
            self.metrics = other.metrics;
            return Ok(());
        }
        let names = |metrics: &[MetricSum]| metrics.iter().map(|metric| metric.name).collect::<Vec<_>>();
        let (mine, found) = (names(&self.metrics), names(&other.metrics));
        if mine != found {
            return Err(Error::internal("an objective's metrics change between micro-batches")
                .because(format!("{mine:?}, then {found:?}")));
        }
        self.metrics.iter_mut().zip(other.metrics).for_each(|(mine, other)| mine.sum += other.sum);
        Ok(())
    }

    /// The loss, once the device has computed it, and the metrics, of what `sum` makes of all sums, the loss first.
    pub(super) fn reduce(self, sum: impl FnOnce(&mut [f64]) -> Result<()>) -> Result<(f64, Vec<MetricSum>)> {
        let mut metrics = self.metrics;
        let mut values = vec![self.loss.read()?];
        values.extend(metrics.iter().map(|metric| metric.sum));
        sum(&mut values)?;
        metrics.iter_mut().zip(&values[1..]).for_each(|(metric, value)| metric.sum = *value);
        Ok((values[0], metrics))
    }
}

/// `−log p(target)`, summed over the positions with a target; no metrics of its own.
#[derive(Debug, Clone, Copy, Default)]
pub struct CrossEntropy;

impl Objective for CrossEntropy {
    fn loss_and_grad(&self, head: &HeadWeights, input: ObjectiveInput<'_>) -> Result<ObjectiveOutput> {
        let ObjectiveInput { config, hidden, batch, scale, dropout } = input;
        let targets = LossTargets::unweighted(&batch.targets);
        let (loss, dx) = head.loss_and_grad(config, hidden, targets, scale, dropout)?;
        Ok(ObjectiveOutput { loss, dx, metrics: Vec::new() })
    }
}
