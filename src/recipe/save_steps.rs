//! When a run saves checkpoints.

use std::path::Path;

use toml::Value;

use super::value::{Setting, ValueRefusal};

/// When a run saves checkpoints: the value of `checkpoint.save_steps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SaveSteps {
    /// After each epoch or [`SaveSteps::SECS`] seconds, whichever comes first, and at the end.
    #[default]
    Auto,
    /// After each epoch, and at the end.
    Epoch,
    /// No checkpoint, not even at the end.
    Never,
    /// After each so many optimizer steps.
    Every(u64),
}

impl SaveSteps {
    /// Seconds without a checkpoint after which [`SaveSteps::Auto`] saves one.
    pub const SECS: u64 = 30 * 60;

    /// Returns whether a checkpoint is due after step `step`, which is the last of its epoch or not.
    pub fn is_due(self, step: u64, ends_epoch: bool) -> bool {
        match self {
            SaveSteps::Auto | SaveSteps::Epoch => ends_epoch,
            SaveSteps::Never => false,
            SaveSteps::Every(steps) => step.is_multiple_of(steps.max(1)),
        }
    }

    /// Returns whether a checkpoint is due at the end of a run, whatever its last step.
    pub fn is_due_at_end(self) -> bool {
        matches!(self, SaveSteps::Auto | SaveSteps::Epoch)
    }

    /// The checkpoints that a run of `total` steps, `epoch` of them an epoch, saves after its first `done` steps. A slow
    /// run saves more of them with [`SaveSteps::Auto`].
    pub fn count(self, [done, total]: [u64; 2], epoch: u64) -> u64 {
        let until = |step: u64, every: u64| step / every.max(1);
        let done = done.min(total);
        match self {
            SaveSteps::Never => 0,
            SaveSteps::Every(steps) => until(total, steps) - until(done, steps),
            SaveSteps::Auto | SaveSteps::Epoch if done == total => 0,
            SaveSteps::Auto | SaveSteps::Epoch => until(total - 1, epoch) - until(done, epoch) + 1,
        }
    }
}

impl Setting for SaveSteps {
    fn accepted() -> String {
        let names: Vec<String> = Self::choices().iter().map(|name| format!("{name:?}")).collect();
        format!("{}, {}", names.join(", "), u64::accepted())
    }

    fn read(value: &Value, folder: &Path) -> Result<Self, ValueRefusal> {
        match value.as_str() {
            Some("auto") => Ok(SaveSteps::Auto),
            Some("epoch") => Ok(SaveSteps::Epoch),
            Some("never") => Ok(SaveSteps::Never),
            _ => u64::read(value, folder).map(SaveSteps::Every),
        }
    }

    fn write(&self) -> Option<Value> {
        let text = |name: &str| Some(Value::String(name.to_owned()));
        match self {
            SaveSteps::Auto => text("auto"),
            SaveSteps::Epoch => text("epoch"),
            SaveSteps::Never => text("never"),
            SaveSteps::Every(steps) => steps.write(),
        }
    }

    fn numbers(&self) -> Vec<f64> {
        match self {
            SaveSteps::Every(steps) => steps.numbers(),
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
        for value in [SaveSteps::Auto, SaveSteps::Epoch, SaveSteps::Never, SaveSteps::Every(7)] {
            let written = value.write().unwrap();
            assert_eq!(SaveSteps::read(&written, Path::new(".")).unwrap(), value);
        }
        assert!(SaveSteps::read(&Value::String("often".into()), Path::new(".")).is_err());
    }

    #[test]
    fn checkpoints_are_counted_as_they_are_due() {
        for save in [SaveSteps::Auto, SaveSteps::Epoch, SaveSteps::Never, SaveSteps::Every(3)] {
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
