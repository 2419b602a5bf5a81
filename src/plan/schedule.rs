//! The learning rate over the steps of a plan.

use super::Plan;
use crate::error::{Error, Result};
use crate::optim::Schedule;

impl Plan {
    /// The learning rate of each step.
    ///
    /// # Errors
    /// The recipe gives no learning rate.
    pub fn schedule(&self) -> Result<Schedule> {
        let scheduler = &self.recipe.scheduler;
        let learning_rate = self.recipe.optimizer.learning_rate.ok_or_else(|| {
            Error::user("no learning rate is given")
                .hint("write `[optimizer] learning_rate = 2e-4`, for example")
        })?;
        let share = scheduler.warmup_ratio.unwrap_or(0.0) * self.total_steps as f64;
        Ok(Schedule {
            kind: scheduler.kind,
            learning_rate,
            warmup_steps: scheduler.warmup_steps.unwrap_or(share.ceil() as u64),
            total_steps: self.total_steps,
            min_lr_ratio: scheduler.min_lr_ratio,
            num_cycles: scheduler.num_cycles as f64,
            power: scheduler.power,
            num_decay_steps: scheduler.num_decay_steps.unwrap_or(0),
        })
    }
}
