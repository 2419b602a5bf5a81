//! The reference that a preference objective compares the model with.
//!
//! The reference is the model as training starts. With an adapter that leaves its base alone, this
//! is the model with the adapter switched off, which a forward computes for each micro-batch.
//! Otherwise the log-probabilities of all samples under it are computed before the first step, and
//! kept with the run.

use std::borrow::Cow;

use super::Engine;
use crate::data::{Batch, Role, Sample};
use crate::error::{Error, Result};
use crate::model::AdapterSwitch;
use crate::objectives::{Objective, StepTotals};
use crate::runtime::thread_pool;

/// The reference of an objective.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Reference {
    /// The model with its adapter switched off.
    #[default]
    AdapterOff,
    /// Log-probabilities that were computed before the first step.
    Precomputed(ReferenceLogProbs),
}

/// The log-probability of each example under the reference, by its index in the data set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReferenceLogProbs {
    /// Those of the examples for training.
    pub train: Vec<f64>,
    /// Those of the held-out examples.
    pub held_out: Vec<f64>,
}

/// The data set of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DataUse {
    Training,
    Evaluation,
}

impl ReferenceLogProbs {
    /// Returns the log-probability of each sample of a micro-batch.
    pub(super) fn of(&self, batch: &Batch, data: DataUse) -> Result<Vec<f64>> {
        let stored = match data {
            DataUse::Training => &self.train,
            DataUse::Evaluation => &self.held_out,
        };
        let missing = || Error::internal("a sample has no precomputed log-probability of the reference");
        let value = |sample: &Sample| stored.get(sample.example as usize).copied().ok_or_else(missing);
        batch.samples.iter().map(value).collect()
    }
}

impl Engine {
    /// Returns `totals` with the drift of the model from its reference, if the objective needs it:
    /// by a forward over the mismatched answers of `batches`, this rank's micro-batches. All ranks
    /// call it together, with equally many. `reference` returns the log-probability of each sample
    /// under the reference.
    pub(super) fn with_drift(
        &self,
        totals: StepTotals,
        objective: &dyn Objective,
        batches: &[Cow<'_, Batch>],
        reference: impl Fn(&Batch) -> Result<Option<Vec<f64>>>,
    ) -> Result<StepTotals> {
        if !objective.needs_drift() {
            return Ok(totals);
        }
        let mut ratios = 0.0;
        for batch in batches {
            // A rank without a micro-batch of its own computes with its peers.
            let part = batch.only(|role| role == Role::Mismatched).unwrap_or_else(|| batch.without_targets());
            let policy = self.sample_log_probs(objective, &part, AdapterSwitch::On)?;
            let answers = part.samples.iter().zip(policy.iter().zip(reference(&part)?.unwrap_or_default()));
            ratios += answers
                .filter(|(sample, _)| sample.role == Role::Mismatched)
                .map(|(_, (policy, reference))| policy - reference)
                .sum::<f64>();
        }
        let mut sum = [ratios];
        self.store.sum("drift from the reference", &mut sum)?;
        Ok(StepTotals { drift: (sum[0] / totals.mismatched.max(1.0)).max(0.0), ..totals })
    }

    /// Returns the log-probability of each sample of a micro-batch, as `objective` compares it.
    ///
    /// # Errors
    /// Those of [`Engine::score`].
    pub fn sample_log_probs(
        &self,
        objective: &dyn Objective,
        batch: &Batch,
        adapter: AdapterSwitch,
    ) -> Result<Vec<f64>> {
        let scores = thread_pool::run_in_pool(&self.device, || self.score(batch, adapter))?;
        Ok(objective.sample_log_probs(batch, &scores))
    }
}

/// Returns the part of a micro-batch that has a loss: all but the mismatched answers.
pub(super) fn part_with_loss<'b>(objective: &dyn Objective, batch: &'b Batch) -> Cow<'b, Batch> {
    if !objective.needs_drift() {
        return Cow::Borrowed(batch);
    }
    let part = batch.only(|role| role != Role::Mismatched);
    Cow::Owned(part.unwrap_or_else(|| batch.without_targets()))
}
