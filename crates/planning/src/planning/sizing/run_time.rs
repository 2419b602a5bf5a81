//! The time of a whole run beside its steps, and the files that it keeps.

use serde::Serialize;

use super::SizingRequest;
use super::step_time::{StepTime, Workload};
use crate::planning::{PlannedStep, StoredAs, WrittenBytes};
use crate::recipe::{Recipe, StepInterval};

/// Write speed of a disk as a part of its read speed (an assumption).
const WRITES: f64 = 0.5;

/// The time of a whole run, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RunTime {
    /// The number of optimizer steps.
    pub steps: u64,
    /// Tokens of all steps.
    pub tokens: f64,
    /// Time of all steps.
    pub stepping: f64,
    /// Reading and distributing the weights.
    pub loading: f64,
    /// Evaluating held-out rows.
    pub evaluating: f64,
    /// Saving checkpoints, as far as steps wait for it, and the final output.
    pub saving: f64,
    /// The sum of these times.
    pub total: f64,
}

impl SizingRequest<'_> {
    /// Returns the time of all steps and of the other parts of a run; none if the speed or the
    /// number of steps is unknown.
    pub(super) fn run_time(&self, time: &StepTime, step: &PlannedStep, load: Workload) -> Option<RunTime> {
        let ((hardware, _), steps) = (self.timed?, self.steps?);
        let stepping = time.total * steps as f64;
        let disk = hardware.device.disk_gbps * 1e9;
        let loading = self.stored_bytes() as f64 / disk;
        let of_rank = load.tokens * load.micro_batches as f64;
        let held_out = self.held_out_tokens as f64 / self.world.all as f64;
        let evaluating = self.evaluations(steps) as f64 * held_out * time.forward / of_rank;
        let saved = self.saved_bytes(self.recipe, step);
        let writing = |bytes: u64| bytes as f64 / (disk * WRITES);
        let saving =
            self.waits([steps as f64, time.total], writing(saved.checkpoint)) + writing(saved.result);
        let tokens = of_rank * (steps as f64 * self.world.all as f64);
        let total = stepping + loading + evaluating + saving;
        Some(RunTime { steps, tokens, stepping, loading, evaluating, saving, total })
    }

    /// Returns the bytes of the base as stored. If only a config exists, uses its dtype.
    fn stored_bytes(&self) -> u64 {
        let base = self.inputs.base;
        match &base.files {
            Some(files) => files.file_bytes().map(|(_, bytes)| bytes).sum(),
            None => {
                let dtypes = base.stored_dtypes();
                let parameters = crate::model::parameters(&base.config).into_iter();
                parameters
                    .map(|spec| {
                        let elements: usize = spec.shape.iter().product();
                        (elements * dtypes[&spec.name].size_bytes()) as u64
                    })
                    .sum()
            }
        }
    }

    /// Returns the bytes that a run of `recipe` writes.
    fn saved_bytes(&self, recipe: &Recipe, step: &PlannedStep) -> WrittenBytes {
        let has_adapter = recipe.adapter.is_some() || self.inputs.adapter_setup.is_some();
        let base = self.inputs.base;
        let dtypes = if has_adapter { Default::default() } else { base.stored_dtypes() };
        let unused = if has_adapter { 0 } else { base.retained.bytes() };
        let given = recipe.checkpoint.output_dtype;
        WrittenBytes::of(&step.descs, recipe, &StoredAs { given, dtypes, retained_bytes: unused })
    }

    /// Returns the bytes on disk after the run of `recipe`: its newest checkpoints, as many as it
    /// keeps, and the final output.
    pub(super) fn kept_on_disk(&self, recipe: &Recipe, step: &PlannedStep) -> u64 {
        let saved = self.saved_bytes(recipe, step);
        let epoch = self.steps_of_epoch.unwrap_or(u64::MAX);
        let (saves, most) = recipe.checkpoints([0, self.steps.unwrap_or(u64::MAX)], epoch);
        let checkpoints = saves.min(most);
        checkpoints.saturating_mul(saved.checkpoint).saturating_add(saved.result)
    }

    /// Returns the seconds that `steps` steps of `step` seconds wait for checkpoints, each of which
    /// takes `secs` to write. Asynchronous saves count only the rest when the next save is due or
    /// the run ends. The run waits for the last one.
    fn waits(&self, [steps, step]: [f64; 2], secs: f64) -> f64 {
        let settings = &self.recipe.checkpoint;
        let epoch = self.steps_of_epoch.map_or(steps, |epoch| epoch as f64);
        let (every, at_end) = match settings.save_steps {
            StepInterval::Never => return 0.0,
            StepInterval::Every(every) => (every.max(1) as f64, false),
            StepInterval::Epoch => (epoch, true),
            StepInterval::Auto => (epoch.min((StepInterval::SECS as f64 / step).ceil()), true),
        };
        let every = every.max(1.0);
        let on_the_way = if at_end { (steps / every).ceil() - 1.0 } else { (steps / every).floor() };
        let last = if at_end { secs } else { 0.0 };
        if on_the_way < 1.0 || !settings.async_save {
            return on_the_way.max(0.0) * secs + last;
        }
        let left = |steps: f64| (secs - steps * step).max(0.0);
        (on_the_way - 1.0) * left(every) + left(steps - on_the_way * every) + last
    }

    /// Returns the number of evaluations: before the first step, at each interval, and after the
    /// last.
    fn evaluations(&self, steps: u64) -> u64 {
        let epoch = self.steps_of_epoch.unwrap_or(u64::MAX);
        let between = self.recipe.eval.interval().count_between([0, steps], epoch);
        1 + between + u64::from(self.recipe.eval.at_end)
    }
}
