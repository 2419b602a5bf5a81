//! Cross-entropy of the trained tokens.

use super::{Objective, ObjectiveInput, ObjectiveOutput};
use crate::error::Result;
use crate::model::HeadWeights;
use crate::ops::cross_entropy::LossTargets;

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
