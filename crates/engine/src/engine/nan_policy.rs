//! Steps that diverge, whose loss or gradient norm is NaN or infinite: what a run does about them, and when it has been
//! enough. None of them updates anything. All ranks see the same numbers, and so count and decide alike.
//!
//! A step that is skipped counts like any other in the schedule, in the data and in the optimizer's number of updates, so
//! that a checkpoint after it is like any other too. A roll-back is the same after the values of the checkpoint were put
//! back: training is repeatable to the bit, and the rows that led there would lead there again.

use crate::error::{Error, Result};
use crate::recipe::enums::OnNan;

/// What a run does about steps that diverge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NanPolicy {
    /// What happens at one.
    pub on_nan: OnNan,
    /// How often in a row that may be.
    pub limit: u64,
}

/// The steps of a run that diverged in a row.
pub(super) struct DivergedSteps {
    policy: NanPolicy,
    in_a_row: u64,
    /// A step since the last one has not diverged.
    moved: bool,
}

impl DivergedSteps {
    pub(super) fn new(policy: NanPolicy) -> Self {
        DivergedSteps { policy, in_a_row: 0, moved: false }
    }

    /// An update was made.
    pub(super) fn updated(&mut self) {
        self.moved = true;
        if self.policy.on_nan == OnNan::Skip {
            self.in_a_row = 0;
        }
    }

    /// A checkpoint was begun: roll-backs go to it from now on.
    pub(super) fn saved(&mut self) {
        if self.moved {
            self.in_a_row = 0;
        }
    }

    /// Counts a step that ended in `diverged`; how often it has been in a row, in words.
    ///
    /// # Errors
    /// That of the step, where the run ends at one or has reached its limit.
    pub(super) fn count(&mut self, diverged: &Error) -> Result<String> {
        let NanPolicy { on_nan, limit } = self.policy;
        let times = match (on_nan, limit) {
            (OnNan::Stop, _) => return Err(diverged.clone()),
            (OnNan::Skip, 1) => "step was skipped",
            (OnNan::Skip, _) => "steps in a row were skipped",
            (OnNan::Rollback, 1) => "time the run went back to this checkpoint",
            (OnNan::Rollback, _) => "times the run went back to this checkpoint",
        };
        if self.in_a_row >= limit {
            let before = format!("before it {limit} {times}: `train.nan_limit` is {limit}");
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
            assert!(ended.causes()[0].contains("2 steps in a row were skipped"), "{ended}");
            steps.updated();
        }
    }

    #[test]
    fn rolling_back_ends_at_the_limit_for_a_checkpoint() {
        let (mut steps, error) = (steps(OnNan::Rollback), Error::internal("diverged"));
        for _ in 0..3 {
            assert!(steps.count(&error).is_ok());
            // What is saved at once is where the run went back to.
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
