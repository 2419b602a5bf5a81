//! The times at which a run saves a checkpoint.

use std::time::Duration;

use crate::recipe::StepInterval;
use crate::runtime::clock;

/// The save schedule of a run: steps, which all ranks count alike. For "auto" the first rank also
/// measures the time since the last checkpoint for all ranks.
pub(super) struct SaveSchedule {
    save: StepInterval,
    /// The time of the last checkpoint, or of the start of the run, on this rank's clock.
    last: Duration,
    /// The step of the last checkpoint.
    step: Option<u64>,
}

impl SaveSchedule {
    /// Returns the schedule at the start of a run.
    pub(super) fn new(save: StepInterval) -> Self {
        SaveSchedule { save, last: clock::now(), step: None }
    }

    /// Records that the save of a checkpoint of step `step` has started.
    pub(super) fn saved(&mut self, step: u64) {
        self.last = clock::now();
        self.step = Some(step);
    }

    /// Returns whether the last checkpoint is of step `step`.
    pub(super) fn has_saved(&self, step: u64) -> bool {
        self.step == Some(step)
    }

    /// Returns whether another checkpoint is due by the time since the last one on this rank.
    pub(super) fn is_late(&self) -> bool {
        self.save == StepInterval::Auto && clock::since(self.last) >= Duration::from_secs(StepInterval::SECS)
    }
}
