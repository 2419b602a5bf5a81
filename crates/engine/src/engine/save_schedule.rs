//! The moments at which a run saves a checkpoint.

use std::time::Duration;

use crate::recipe::StepInterval;
use crate::runtime::clock;

/// The moments of a run's checkpoints: steps, which all ranks count alike, and for "auto" the time since the last one, which
/// the first rank measures for all.
pub(super) struct SaveSchedule {
    save: StepInterval,
    /// The moment of the last checkpoint, or of the run's begin, on this rank's clock.
    last: Duration,
    /// The step of the last checkpoint.
    step: Option<u64>,
}

impl SaveSchedule {
    /// The schedule at the begin of a run.
    pub(super) fn new(save: StepInterval) -> Self {
        SaveSchedule { save, last: clock::now(), step: None }
    }

    /// Notes that a checkpoint of step `step` was begun.
    pub(super) fn saved(&mut self, step: u64) {
        self.last = clock::now();
        self.step = Some(step);
    }

    /// Returns whether the last checkpoint is of step `step`.
    pub(super) fn has_saved(&self, step: u64) -> bool {
        self.step == Some(step)
    }

    /// Returns whether so much time has passed on this rank since the last checkpoint that another one is due.
    pub(super) fn is_late(&self) -> bool {
        self.save == StepInterval::Auto && clock::since(self.last) >= Duration::from_secs(StepInterval::SECS)
    }

    /// Returns whether a checkpoint is due after step `step`, which ends an epoch or not.
    pub(super) fn is_due(&self, step: u64, ends_epoch: bool) -> bool {
        self.save.is_due(step, ends_epoch)
    }

    /// Returns whether a checkpoint is due at the end of the run, after its result.
    pub(super) fn is_due_at_end(&self) -> bool {
        self.save.is_due_at_end()
    }
}
