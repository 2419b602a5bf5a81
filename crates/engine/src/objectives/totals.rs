//! Counts of a whole step, by which objectives divide.

use crate::data::{Batch, IGNORE, Role};

/// Counts over all micro-batches and ranks of a step, or of an evaluation. Results divided by them
/// do not depend on the split into micro-batches.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepTotals {
    /// Number of samples.
    pub samples: f64,
    /// Number of targets.
    pub targets: f64,
    /// Number of pairs: of chosen answers.
    pub pairs: f64,
    /// Number of targets in chosen answers.
    pub chosen_targets: f64,
    /// Number of tokens of chosen answers and their prompts that have a predecessor.
    pub chosen_tokens: f64,
    /// Number of answers with a label, good or bad.
    pub labelled: f64,
    /// Number of mismatched answers.
    pub mismatched: f64,
    /// The drift of the model from its reference: the mean log-ratio of the mismatched answers, at
    /// least 0. The trainer computes it before the losses if the objective needs it.
    pub drift: f64,
}

impl StepTotals {
    /// Counts in all of `batches`.
    pub fn of(batches: &[Batch]) -> Self {
        let mut totals = StepTotals::default();
        for batch in batches {
            for sample in &batch.samples {
                let targets = &batch.targets[sample.start..sample.start + sample.len];
                let targets = targets.iter().filter(|target| **target != IGNORE).count() as f64;
                totals.samples += 1.0;
                totals.targets += targets;
                match sample.role {
                    Role::Chosen => {
                        totals.pairs += 1.0;
                        totals.chosen_targets += targets;
                        totals.chosen_tokens += sample.len.saturating_sub(1) as f64;
                    }
                    Role::Desirable | Role::Undesirable => totals.labelled += 1.0,
                    Role::Mismatched => totals.mismatched += 1.0,
                    Role::Plain | Role::Rejected => {}
                }
            }
        }
        totals
    }
}
