//! Cross-entropy of the trained tokens.

use super::{Evaluation, Objective, ObjectiveInput, ObjectiveOutput};
use crate::error::Result;
use crate::model::{AdapterSwitch, HeadWeights};
use crate::ops::cross_entropy::{IGNORE, LossTargets};

/// `−log p(target)`, summed over the positions with a target; no metrics of its own.
#[derive(Debug, Clone, Copy, Default)]
pub struct CrossEntropy;

impl Objective for CrossEntropy {
    fn loss_and_grad(&self, head: &HeadWeights, input: ObjectiveInput<'_>) -> Result<ObjectiveOutput> {
        let ObjectiveInput { config, hidden, batch, scale, dropout, .. } = input;
        let targets = LossTargets::unweighted(&batch.targets);
        let (loss, dx) = head.loss_and_grad(config, hidden, targets, scale, dropout)?;
        Ok(ObjectiveOutput { loss, dx, metrics: Vec::new() })
    }

    fn evaluate(&self, head: &HeadWeights, input: ObjectiveInput<'_>) -> Result<Evaluation> {
        let ObjectiveInput { config, hidden, batch, dropout, .. } = input;
        let mut scores = head.score(config, hidden, &batch.targets, AdapterSwitch::On, dropout)?.into_iter();
        let mut sums = Evaluation::default();
        for sample in &batch.samples {
            let targets = &batch.targets[sample.start..sample.start + sample.len];
            let count = targets.iter().filter(|&&target| target != IGNORE).count();
            let mut exact = count > 0;
            for score in scores.by_ref().take(count) {
                sums.loss_sum += f64::from(score.loss);
                sums.correct += u64::from(score.correct);
                exact &= score.correct;
            }
            sums.tokens += count as u64;
            sums.rows += u64::from(count > 0);
            sums.exact += u64::from(exact);
        }
        Ok(sums)
    }
}
