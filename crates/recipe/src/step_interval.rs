//! Intervals of checkpoints and evaluations.

use std::path::Path;

use toml::Value;

use super::value::{Setting, ValueRefusal};

/// Interval in steps: the value of `checkpoint.save_steps` and of `eval.steps`. `eval.at_end` alone
/// decides the evaluation at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StepInterval {
    /// Checkpoints: after each epoch or [`StepInterval::SECS`] seconds, whichever is first, and at
    /// the end. Evaluations: see [`EvalSection::interval`](super::EvalSection::interval).
    #[default]
    Auto,
    /// After each epoch; also a checkpoint at the end.
    Epoch,
    /// Never, not even a checkpoint at the end.
    Never,
    /// After this many optimizer steps.
    Every(u64),
}

impl StepInterval {
    /// Seconds without a checkpoint after which [`StepInterval::Auto`] saves one.
    pub const SECS: u64 = 30 * 60;

    /// Returns true if it is due after step `step`; `ends_epoch`: the step is the last of its
    /// epoch.
    pub fn is_due(self, step: u64, ends_epoch: bool) -> bool {
        match self {
            StepInterval::Auto | StepInterval::Epoch => ends_epoch,
            StepInterval::Never => false,
            StepInterval::Every(steps) => step.is_multiple_of(steps.max(1)),
        }
    }

    /// Returns true if a checkpoint is due at the end of a run, independent of its last step.
    pub fn is_due_at_end(self) -> bool {
        matches!(self, StepInterval::Auto | StepInterval::Epoch)
    }

    /// Number of times that it is due after the first `done` and before the last of `total` steps,
    /// with `epoch` steps per epoch. A slow run saves more checkpoints with [`StepInterval::Auto`].
    pub fn count_between(self, [done, total]: [u64; 2], epoch: u64) -> u64 {
        let every = match self {
            StepInterval::Never => return 0,
            StepInterval::Every(steps) => steps.max(1),
            StepInterval::Auto | StepInterval::Epoch => epoch.max(1),
        };
        (total.saturating_sub(1) / every).saturating_sub(done / every)
    }

    /// Number of checkpoints of such a run, including the one at the end.
    pub fn count(self, [done, total]: [u64; 2], epoch: u64) -> u64 {
        let is_due_last =
            self.is_due_at_end() || matches!(self, StepInterval::Every(_)) && self.is_due(total, false);
        self.count_between([done, total], epoch) + u64::from(is_due_last && done < total)
    }
}

impl Setting for StepInterval {
    fn accepted() -> String {
        let names: Vec<String> = Self::choices().iter().map(|name| format!("{name:?}")).collect();
        format!("{}, {}", names.join(", "), u64::accepted())
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        match value.as_str() {
            Some("auto") => Ok(StepInterval::Auto),
            Some("epoch") => Ok(StepInterval::Epoch),
            Some("never") => Ok(StepInterval::Never),
            _ => u64::read(value, folder).map(StepInterval::Every),
        }
    }

    fn write(&self) -> Option<Value> {
        let text = |name: &str| Some(Value::String(name.to_owned()));
        match self {
            StepInterval::Auto => text("auto"),
            StepInterval::Epoch => text("epoch"),
            StepInterval::Never => text("never"),
            StepInterval::Every(steps) => steps.write(),
        }
    }

    fn numbers(&self) -> Vec<f64> {
        match self {
            StepInterval::Every(steps) => steps.numbers(),
            _ => Vec::new(),
        }
    }

    fn choices() -> Vec<&'static str> {
        vec!["auto", "epoch", "never"]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_numbers_read_back() {
        for value in [StepInterval::Auto, StepInterval::Epoch, StepInterval::Never, StepInterval::Every(7)] {
            let written = value.write().unwrap();
            assert_eq!(StepInterval::read(&written, Path::new(".")).unwrap(), value);
        }
        assert!(StepInterval::read(&Value::String("often".into()), Path::new(".")).is_err());
    }

    #[test]
    fn checkpoints_are_counted_as_they_are_due() {
        for save in [StepInterval::Auto, StepInterval::Epoch, StepInterval::Never, StepInterval::Every(3)] {
            for (epoch, total) in [(4, 12), (4, 10), (4, 3), (1, 5), (5, 5)] {
                for done in 0..=total {
                    let due = |step: &u64| {
                        let step = *step;
                        let is_last = step == total;
                        save.is_due(step, step.is_multiple_of(epoch)) || is_last && save.is_due_at_end()
                    };
                    let wanted = (done + 1..=total).filter(due).count() as u64;
                    assert_eq!(save.count([done, total], epoch), wanted, "{save:?} {epoch} {total} {done}");
                }
            }
        }
    }
}
