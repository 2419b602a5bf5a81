//! Objectives, one a file: each computes a loss and its gradient from the hidden states after the
//! last block. `objective.kind` of the recipe chooses one.

mod cross_entropy;
mod expert_load;

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::Tensor;

pub use cross_entropy::CrossEntropy;
pub use expert_load::ExpertLoad;

use crate::data::{Batch, Step};
use crate::error::{Error, Result};
use crate::model::{HeadWeights, ModelConfig};
use crate::ops::cross_entropy::LossSum;
use crate::recipe::ObjectiveSection;
use crate::recipe::enums::ObjectiveKind;
use crate::runtime::rng::RngStream;

/// A loss over the hidden states of a micro-batch.
///
/// The engine does the rest: it passes the returned gradient to the blocks and the embedding, and
/// sums losses and metrics over the micro-batches and ranks of a step. A rank without a micro-batch
/// of its own runs one [without targets](Batch::without_targets), whose loss, gradient and metrics
/// must be zero.
pub trait Objective: Debug + Send + Sync {
    /// Returns the divisor of the summed loss of a step: by default the number of targets.
    fn denominator(&self, step: &Step) -> f64 {
        step.valid as f64
    }

    /// Returns the work and memory of a micro-batch beside the forward and backward of the model
    /// and its head. The planner counts them.
    fn cost(&self) -> ObjectiveCost {
        ObjectiveCost::default()
    }

    /// Returns the loss of a micro-batch and the gradient of its hidden states. Adds the gradients
    /// of the head's own parameters to the buffers of `head`.
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

/// The input of an objective: one micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct ObjectiveInput<'a> {
    /// The model's shape.
    pub config: &'a ModelConfig,
    /// The hidden states after the last block: `[N, D]`, in the dtype of activations.
    pub hidden: &'a Tensor,
    /// Targets and sample boundaries of the N positions.
    pub batch: &'a Batch,
    /// Factor of the loss before its gradient: one over the step's
    /// [denominator](Objective::denominator).
    pub scale: f64,
    /// Random numbers for dropout on the head's adapter, and the micro-batch's first token; `None`
    /// disables dropout.
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

/// A metric of an objective, summed over micro-batches and ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MetricSum {
    /// The metric's name in reports.
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
    /// The load of the model's experts.
    pub experts: ExpertLoad,
}

/// The sums of a step over its micro-batches and ranks.
#[derive(Debug)]
pub(crate) struct StepSums {
    /// The summed loss, not yet scaled.
    pub(crate) loss: f64,
    /// The objective's own sums.
    pub(crate) metrics: Vec<MetricSum>,
    /// The load of the model's experts.
    pub(crate) experts: ExpertLoad,
}

/// Returns the objective of a recipe.
pub fn objective(section: &ObjectiveSection) -> Arc<dyn Objective> {
    match section.kind {
        ObjectiveKind::CrossEntropy => Arc::new(CrossEntropy),
        // Replaced by the branch pref-loss.
        _ => Arc::new(CrossEntropy),
    }
}

impl LossSums {
    /// Adds the sums of another micro-batch of the same objective.
    ///
    /// # Errors
    /// The metrics of `other` have other names: an internal error.
    pub(crate) fn add(&mut self, other: LossSums) -> Result<()> {
        self.loss.add(other.loss);
        self.experts.add(other.experts);
        if self.metrics.is_empty() {
            self.metrics = other.metrics;
            return Ok(());
        }
        let names = |metrics: &[MetricSum]| metrics.iter().map(|metric| metric.name).collect::<Vec<_>>();
        let (mine, theirs) = (names(&self.metrics), names(&other.metrics));
        if mine != theirs {
            return Err(Error::internal("an objective's metrics change between micro-batches")
                .because(format!("{mine:?}, then {theirs:?}")));
        }
        self.metrics.iter_mut().zip(other.metrics).for_each(|(mine, other)| mine.sum += other.sum);
        Ok(())
    }

    /// Reads the loss from the device, and reduces all sums over the ranks with `sum`, which gets
    /// the loss first.
    pub(crate) fn reduce(self, sum: impl FnOnce(&mut [f64]) -> Result<()>) -> Result<StepSums> {
        let LossSums { loss, mut metrics, mut experts } = self;
        let mut values = vec![loss.read()?];
        values.extend(metrics.iter().map(|metric| metric.sum));
        let of_experts = values.len();
        values.extend(experts.values());
        sum(&mut values)?;
        metrics.iter_mut().zip(&values[1..]).for_each(|(metric, value)| metric.sum = *value);
        experts.set(&values[of_experts..]);
        Ok(StepSums { loss: values[0], metrics, experts })
    }
}
