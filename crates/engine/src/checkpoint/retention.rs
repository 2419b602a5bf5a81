//! The checkpoints that a run keeps.

use super::TrainingState;

/// The checkpoints that a run keeps beside its best one.
#[derive(Debug, Clone, Copy)]
pub struct Retention {
    /// The number of newest sound checkpoints.
    pub last: usize,
    /// Those of steps that are a multiple of this number.
    pub every: Option<u64>,
}

impl Retention {
    /// Returns true if the run that has just saved `state` keeps the checkpoint of `step` however
    /// old it is.
    pub(super) fn keeps(self, step: u64, state: &TrainingState) -> bool {
        state.is_best(step) || self.every.is_some_and(|every| step.is_multiple_of(every))
    }
}
