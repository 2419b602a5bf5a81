//! Policy for steps that diverge, whose loss or gradient norm is NaN or infinite: the action of a
//! run, and its limit. Such a step updates nothing. All ranks see the same numbers, so they count
//! and decide alike.
//!
//! A skipped step counts like any other in the schedule, in the data and in the optimizer's number
//! of updates. So a checkpoint after it is like any other. A rollback restores the values of a
//! checkpoint and skips the steps since. Training is repeatable to the bit, so the same rows would
//! diverge again.

use crate::error::{Error, Result};
use crate::recipe::enums::OnNan;

/// Policy of a run for steps that diverge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NanPolicy {
    /// Action after such a step.
    pub on_nan: OnNan,
    /// Maximum number of skipped steps in a row, or of rollbacks to one checkpoint.
    pub limit: u64,
}

/// Counter of the steps of a run that diverged in a row.
pub(super) struct DivergedSteps {
    policy: NanPolicy,
    in_a_row: u64,
    /// True if a step since the last divergence did not diverge.
    moved: bool,
}

impl DivergedSteps {
    pub(super) fn new(policy: NanPolicy) -> Self {
        DivergedSteps { policy, in_a_row: 0, moved: false }
    }

    /// Records an update.
    pub(super) fn updated(&mut self) {
        self.moved = true;
        if self.policy.on_nan == OnNan::Skip {
            self.in_a_row = 0;
        }
    }

    /// Records the start of a checkpoint, to which later rollbacks go.
    pub(super) fn saved(&mut self) {
        if self.moved {
            self.in_a_row = 0;
        }
    }

    /// Counts a step that ended in `diverged`, and returns the count in a row as text.
    ///
    /// # Errors
    /// The step's error, if the policy is to stop or the limit is reached.
    pub(super) fn count(&mut self, diverged: &Error) -> Result<String> {
        let NanPolicy { on_nan, limit } = self.policy;
        let times = match (on_nan, limit) {
            (OnNan::Stop, _) => return Err(diverged.clone()),
            (OnNan::Skip, 1) => "skipped step",
            (OnNan::Skip, _) => "skipped steps in a row",
            (OnNan::Rollback, 1) => "rollback to this checkpoint",
            (OnNan::Rollback, _) => "rollbacks to this checkpoint",
        };
        if self.in_a_row >= limit {
            let before = format!("{limit} {times} before this step: `train.nan_limit` is {limit}");
            return Err(diverged.clone().because(before));
        }
        self.in_a_row += 1;
        self.moved = false;
        Ok(format!("{} of {limit} in a row, `train.nan_limit`", self.in_a_row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(on_nan: OnNan) -> DivergedSteps {
        DivergedSteps::new(NanPolicy { on_nan, limit: 2 })
    }

    #[test]
    fn skipping_ends_at_the_limit_in_a_row() {
        let (mut steps, error) = (steps(OnNan::Skip), Error::internal("diverged"));
        for _ in 0..3 {
            assert!(steps.count(&error).is_ok());
            steps.saved();
            assert!(steps.count(&error).is_ok());
            let ended = steps.count(&error).expect_err("the limit");
            assert!(ended.causes()[0].contains("2 skipped steps in a row"), "{ended}");
            steps.updated();
        }
    }

    #[test]
    fn rolling_back_ends_at_the_limit_for_a_checkpoint() {
        let (mut steps, error) = (steps(OnNan::Rollback), Error::internal("diverged"));
        for _ in 0..3 {
            assert!(steps.count(&error).is_ok());
            // A checkpoint saved before an update is no progress.
            steps.saved();
            steps.updated();
            assert!(steps.count(&error).is_ok());
            assert!(steps.count(&error).is_err());
            steps.updated();
            assert!(steps.count(&error).is_err(), "another step is no other checkpoint");
            steps.updated();
            steps.saved();
        }
    }

    #[test]
    fn a_run_that_stops_returns_the_error_of_the_step() {
        let error = Error::internal("diverged").because("NaN");
        assert_eq!(steps(OnNan::Stop).count(&error).expect_err("it stops").to_string(), error.to_string());
    }
}
