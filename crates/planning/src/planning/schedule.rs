//! The learning rate over the steps of a plan.

use super::Plan;
use crate::error::{Error, Result};
use crate::optim::Schedule;

impl Plan {
    /// Returns the schedule of learning rates over the steps.
    ///
    /// # Errors
    /// The recipe sets no learning rate.
    pub fn schedule(&self) -> Result<Schedule> {
        let scheduler = &self.recipe.scheduler;
        let learning_rate = self.recipe.optimizer.learning_rate.ok_or_else(|| {
            Error::user("no learning rate is given")
                .hint("write `[optimizer] learning_rate = 2e-4`, for example")
        })?;
        Ok(Schedule {
            kind: scheduler.kind,
            learning_rate,
            warmup_steps: scheduler
                .warmup_steps
                .unwrap_or_else(|| share_of_steps(scheduler.warmup_ratio.unwrap_or(0.0), self.total_steps)),
            total_steps: self.total_steps,
            min_lr_ratio: scheduler.min_lr_ratio,
            num_cycles: scheduler.num_cycles as f64,
            power: scheduler.power,
            num_decay_steps: scheduler.num_decay_steps.unwrap_or(0),
        })
    }
}

/// Divisor of the longest warm-up that a ratio gives: one step in so many.
const LONGEST_SHARE: u64 = 10;

/// Returns the steps that are `ratio` of `total`, rounded down and at most a tenth of them.
pub(super) fn share_of_steps(ratio: f64, total: u64) -> u64 {
    // A small tolerance, so that 0.29 x 100 gives 29 and not 28.
    let steps = (ratio * total as f64 + 1e-9) as u64;
    steps.min(total / LONGEST_SHARE)
}

#[cfg(test)]
mod tests {
    use super::share_of_steps;

    #[test]
    fn a_share_of_the_steps_is_rounded_down_to_a_tenth_at_most() {
        for (ratio, total, steps) in [
            (0.03, 1, 0),
            (0.03, 33, 0),
            (0.03, 34, 1),
            (0.03, 100, 3),
            (0.05, 90, 4),
            (0.5, 100, 10),
            (1.0, 9, 0),
        ] {
            assert_eq!(share_of_steps(ratio, total), steps, "{ratio} of {total}");
        }
    }
}
