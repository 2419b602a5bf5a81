//! Objectives, one a file: each makes a loss and its gradient of the hidden states after the last
//! block. `objective.kind` of the recipe chooses one.

mod cross_entropy;

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::Tensor;

pub use cross_entropy::CrossEntropy;

use crate::data::{Batch, Step};
use crate::error::{Error, Result};
use crate::model::{HeadWeights, ModelConfig};
use crate::ops::cross_entropy::LossSum;
use crate::recipe::ObjectiveSection;
use crate::recipe::enums::ObjectiveKind;
use crate::runtime::rng::RngStream;

/// A loss over the hidden states of a micro-batch.
///
/// The engine does the rest: the blocks and the embedding get the gradient that this returns, and losses and metrics are
/// summed over the micro-batches and ranks of a step. A rank without a micro-batch of its own runs one
/// [without targets](Batch::without_targets), whose loss, gradient and metrics must be zero.
pub trait Objective: Debug + Send + Sync {
    /// Divisor of the summed loss of a step: the number of targets, unless the objective counts otherwise.
    fn denominator(&self, step: &Step) -> f64 {
        step.valid as f64
    }

    /// Work and memory of a micro-batch beside the forward and backward of the model and its head.
    /// The planner counts them.
    fn cost(&self) -> ObjectiveCost {
        ObjectiveCost::default()
    }

    /// The loss of a micro-batch and the gradient of its hidden states. Gradients of the head's own parameters are
    /// added where `head` says.
    ///
    /// # Errors
    /// A tensor operation failed.
    fn loss_and_grad(&self, head: &HeadWeights, input: ObjectiveInput<'_>) -> Result<ObjectiveOutput>;
}

/// Work and memory that an objective adds to those of cross-entropy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ObjectiveCost {
    /// Forward passes over the model without a backward, such as one of a reference model.
    pub extra_forwards: usize,
    /// Bytes that a micro-batch holds for each of its tokens.
    pub bytes_per_token: usize,
}

/// A micro-batch as an objective sees it.
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
    /// Random numbers for dropout on the head's adapter, and the micro-batch's first token; none: nothing is dropped.
    pub dropout: Option<(RngStream, u64)>,
}

/// The loss of a micro-batch, its gradient and metrics.
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

/// The objective that a recipe asks for.
pub fn objective(section: &ObjectiveSection) -> Arc<dyn Objective> {
    match section.kind {
        ObjectiveKind::CrossEntropy => Arc::new(CrossEntropy),
    }
}

impl LossSums {
    /// Adds those of another micro-batch of the same objective.
    ///
    /// # Errors
    /// Its metrics have other names: an internal error.
    pub(crate) fn add(&mut self, other: LossSums) -> Result<()> {
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

    /// The loss, read from the device, and the metrics, after `sum` has added those of all ranks; the loss comes first.
    pub(crate) fn reduce(self, sum: impl FnOnce(&mut [f64]) -> Result<()>) -> Result<(f64, Vec<MetricSum>)> {
        let mut metrics = self.metrics;
        let mut values = vec![self.loss.read()?];
        values.extend(metrics.iter().map(|metric| metric.sum));
        sum(&mut values)?;
        metrics.iter_mut().zip(&values[1..]).for_each(|(metric, value)| metric.sum = *value);
        Ok((values[0], metrics))
    }
}
