//! Objectives, one a file: each computes a loss and its gradient from the hidden states after the
//! last block. `objective.kind` of the recipe chooses one.

mod cpo;
mod cross_entropy;
mod dpo;
mod dpo_loss;
mod dual;
mod evaluation;
mod expert_load;
mod kto;
mod log_probs;
mod metric_sum;
mod orpo;
mod pairs;
mod totals;

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::Tensor;

pub use cross_entropy::CrossEntropy;
pub use evaluation::Evaluation;
pub use expert_load::ExpertLoad;
pub use metric_sum::MetricSum;
pub use totals::StepTotals;

use self::cpo::Cpo;
use self::dpo::Dpo;
use self::kto::Kto;
use self::log_probs::ByLogProbs;
use self::orpo::Orpo;
use crate::data::Batch;
use crate::error::Result;
use crate::model::{HeadWeights, ModelConfig};
use crate::ops::cross_entropy::{LossSum, TokenScore};
use crate::recipe::ObjectiveSection;
use crate::recipe::enums::{LossType, ObjectiveKind};
use crate::runtime::rng::RngStream;

/// A loss over the hidden states of a micro-batch.
///
/// The engine does the rest: it passes the returned gradient to the blocks and the embedding, and
/// sums losses and metrics over the micro-batches and ranks of a step. A rank without a micro-batch
/// of its own runs one [without targets](Batch::without_targets), whose loss, gradient and metrics
/// must be zero.
pub trait Objective: Debug + Send + Sync {
    /// Returns the divisor of the summed loss of a step: by default the number of targets.
    fn denominator(&self, totals: &StepTotals) -> f64 {
        totals.targets
    }

    /// Returns the work and memory of a micro-batch beside the forward and backward of the model
    /// and its head. The planner counts them.
    fn cost(&self) -> ObjectiveCost {
        ObjectiveCost::default()
    }

    /// Returns true if the objective compares the model with a reference: then
    /// [`ObjectiveInput::reference`] has the log-probabilities of the samples under it.
    fn has_reference(&self) -> bool {
        false
    }

    /// Returns true if the objective needs [`StepTotals::drift`], which the mismatched answers of a
    /// step give. They have no other part in the loss.
    fn needs_drift(&self) -> bool {
        false
    }

    /// Returns a metric that follows from the sums of a step or an evaluation, if there is one.
    fn derived(&self, _metrics: &[MetricSum]) -> Option<MetricSum> {
        None
    }

    /// Returns the log-probability of each sample of a micro-batch, given the scores of its
    /// targets, as the objective compares it with that of a reference.
    fn sample_log_probs(&self, batch: &Batch, _scores: &[TokenScore]) -> Vec<f64> {
        vec![0.0; batch.samples.len()]
    }

    /// Returns the sums of a micro-batch for an evaluation; the divisor is left to the caller.
    ///
    /// # Errors
    /// A tensor operation failed.
    fn evaluate(&self, head: &HeadWeights, input: ObjectiveInput<'_>) -> Result<Evaluation>;

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
    /// Further passes over the output layer without a backward.
    pub head_forwards: usize,
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
    /// Counts of the whole step, over all micro-batches and ranks.
    pub totals: StepTotals,
    /// The log-probability of each sample under the reference, if the objective has one.
    pub reference: Option<&'a [f64]>,
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
        ObjectiveKind::Dpo => Arc::new(ByLogProbs(Dpo { keys: section.clone() })),
        ObjectiveKind::Orpo => Arc::new(ByLogProbs(Orpo { beta: section.beta })),
        ObjectiveKind::Cpo => {
            let loss = section.losses().first().copied().unwrap_or(LossType::Sigmoid);
            Arc::new(ByLogProbs(Cpo { keys: section.clone(), loss, alpha: section.cpo_alpha }))
        }
        ObjectiveKind::Simpo => {
            Arc::new(ByLogProbs(Cpo { keys: section.clone(), loss: LossType::Simpo, alpha: 0.0 }))
        }
        ObjectiveKind::Kto => Arc::new(ByLogProbs(Kto { keys: section.clone() })),
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
        MetricSum::add_all(&mut self.metrics, other.metrics)
    }

    /// Reads the loss from the device, and reduces all sums over the ranks with `sum`, which gets
    /// the loss first.
    pub(crate) fn reduce(self, sum: impl FnOnce(&mut [f64]) -> Result<()>) -> Result<StepSums> {
        let LossSums { loss, mut metrics, mut experts } = self;
        let mut values = vec![loss.read()?];
        values.extend(MetricSum::values(&metrics));
        let of_experts = values.len();
        values.extend(experts.values());
        sum(&mut values)?;
        MetricSum::set_all(&mut metrics, &values[1..of_experts]);
        experts.set(&values[of_experts..]);
        Ok(StepSums { loss: values[0], metrics, experts })
    }
}
