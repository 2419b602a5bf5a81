//! The rules that detect trouble in the numbers of a run, one type per rule.
//!
//! They only observe: no number of a run depends on them. Each reports an incident once, and the
//! next one only after the first was over for a while. So a night of trouble is one message and not
//! a thousand.

use std::collections::VecDeque;
use std::time::Duration;

use crate::median::median;
use crate::metrics::StepReport;
use crate::units;

/// Most and fewest losses that a new one is compared with.
const COMPARED: (usize, usize) = (64, 16);
/// Standard deviations of a spike above the mean of the losses before it.
const DEVIATIONS: f64 = 6.0;
/// Nats of a spike above their mean, at least: if losses hardly differ, deviations mean little.
const LEAST_RISE: f64 = 0.5;
/// Steps without a gradient before an alert.
const STILL_STEPS: u64 = 3;
/// Steps over which waiting is counted, and steps without trouble that end an incident.
const WINDOW: usize = 20;
/// The share of the time that a device may wait without an alert.
const IDLE_SHARE: f64 = 0.5;
/// The shortest meaningful window: overhead dominates steps of milliseconds.
const LEAST_WINDOW_SECS: f64 = 1.0;
/// The share of a file system that must be free, and the bytes that suffice on any.
const FREE_SHARE: f64 = 0.02;
const FREE_ENOUGH: u64 = 5 << 30;
/// The length of a stall in median steps.
const STALL_STEPS: f64 = 10.0;
/// The factor for the stall limit before the first steps, in an evaluation and while saving.
const ASIDE: u32 = 10;
/// Most and fewest steps for a median.
const MEDIAN_OF: (usize, usize) = (64, 3);

/// The finding of a rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// The number that is out of bounds; none without one, as for NaN.
    pub value: Option<f64>,
    /// The trouble and the remedy, for people.
    pub message: String,
}

/// Reports an incident once, until it was over for some checks.
#[derive(Debug, Default)]
struct Cooldown<const OVER_AFTER: usize> {
    quiet: usize,
    is_open: bool,
}

impl<const OVER_AFTER: usize> Cooldown<OVER_AFTER> {
    /// Returns whether this check is the first that sees the trouble.
    fn is_news(&mut self, is_trouble: bool) -> bool {
        if is_trouble {
            self.quiet = 0;
            return !std::mem::replace(&mut self.is_open, true);
        }
        self.quiet += 1;
        self.is_open &= self.quiet < OVER_AFTER;
        false
    }
}

/// Detects a loss far above those before it.
#[derive(Debug, Default)]
pub struct LossSpikes {
    losses: VecDeque<f64>,
    latch: Cooldown<{ COMPARED.0 }>,
}

impl LossSpikes {
    /// Returns a finding for a step if it begins an incident.
    pub fn after(&mut self, report: &StepReport) -> Option<Finding> {
        let (most, least) = COMPARED;
        let compared = self.losses.len();
        let count = compared as f64;
        let mean = self.losses.iter().sum::<f64>() / count;
        let deviation = (self.losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f64>() / count).sqrt();
        let is_high = report.loss > mean + (DEVIATIONS * deviation).max(LEAST_RISE);
        self.losses.push_back(report.loss);
        if compared == most {
            self.losses.pop_front();
        }
        self.latch.is_news(compared >= least && is_high).then(|| Finding {
            value: Some(report.loss),
            message: format!(
                "step {}: the loss {:.4} is far above those of the {compared} steps before it (mean {mean:.4}, \
                 standard deviation {deviation:.4}; gradient norm {:.3}): look at its rows, or lower \
                 `optimizer.learning_rate`",
                report.step, report.loss, report.grad_norm
            ),
        })
    }
}

/// Detects a gradient that is zero step after step.
#[derive(Debug, Default)]
pub struct StillGradients {
    in_a_row: u64,
    latch: Cooldown<WINDOW>,
}

impl StillGradients {
    /// Returns a finding for a step if it begins an incident.
    pub fn after(&mut self, report: &StepReport) -> Option<Finding> {
        self.in_a_row = if report.grad_norm == 0.0 { self.in_a_row + 1 } else { 0 };
        self.latch.is_news(self.in_a_row >= STILL_STEPS).then(|| Finding {
            value: Some(report.grad_norm),
            message: format!(
                "step {}: the gradient norm has been 0 for {STILL_STEPS} steps: the model no longer learns; \
                 `finetune data` shows which tokens count in the loss",
                report.step
            ),
        })
    }
}

/// Detects a device that waits for rows, other ranks or storage for most of the time.
#[derive(Debug, Default)]
pub(super) struct WaitingDevice {
    steps: VecDeque<StepReport>,
    latch: Cooldown<WINDOW>,
}

impl WaitingDevice {
    /// Returns a finding for a step if it begins an incident.
    pub(super) fn after(&mut self, report: &StepReport) -> Option<Finding> {
        self.steps.push_back(StepReport { rank_secs: Vec::new(), ..report.clone() });
        if self.steps.len() > WINDOW {
            self.steps.pop_front();
        }
        let sum = |secs: fn(&StepReport) -> f64| self.steps.iter().map(secs).sum::<f64>();
        let parts = [
            ("for rows", sum(|step| step.data_secs)),
            ("for other ranks", sum(|step| step.exposed_secs)),
            ("for checkpoints", sum(|step| step.save_secs)),
            ("between steps", sum(|step| step.other_secs)),
        ];
        let (all, waited) = (sum(StepReport::all_parts), parts.iter().map(|(_, secs)| secs).sum::<f64>());
        let share = waited / all;
        let is_known = self.steps.len() == WINDOW && all >= LEAST_WINDOW_SECS;
        let is_trouble = is_known && share > IDLE_SHARE;
        self.latch.is_news(is_trouble).then(|| {
            let texts: Vec<String> =
                parts.iter().map(|(what, secs)| format!("{:.0} % {what}", 100.0 * secs / all)).collect();
            let message = format!(
                "step {}: the device has waited for {:.0} % of the last {WINDOW} steps: {}",
                report.step,
                100.0 * share,
                texts.join(", ")
            );
            Finding { value: Some(share), message }
        })
    }
}

/// The space of the file system that a run writes to, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputSpace {
    /// Total size in bytes.
    pub total: u64,
    /// Free space in bytes.
    pub free: u64,
}

/// Detects a disk that is about to be full.
#[derive(Debug)]
pub(super) struct ShortDisk {
    next_bytes: u64,
    latch: Cooldown<WINDOW>,
}

impl ShortDisk {
    /// Creates the rule for a next checkpoint of `next_bytes` bytes.
    pub(super) fn new(next_bytes: u64) -> Self {
        ShortDisk { next_bytes, latch: Cooldown::default() }
    }

    /// Returns a finding for the space at `step` if it begins an incident.
    pub(super) fn look(&mut self, step: u64, space: OutputSpace) -> Option<Finding> {
        let reserve = ((space.total as f64 * FREE_SHARE) as u64).min(FREE_ENOUGH);
        let least = reserve.max(self.next_bytes);
        self.latch.is_news(space.free < least).then(|| Finding {
            value: Some(space.free as f64),
            message: format!(
                "step {step}: {} free of {} on the disk of the output; the next checkpoint takes {}: free some space, or the \
                 run ends when the disk is full",
                units::bytes(space.free),
                units::bytes(space.total),
                units::bytes(self.next_bytes)
            ),
        })
    }
}

/// Detects a step that does not end. It has no clock: the caller gives the passed time.
#[derive(Debug)]
pub(super) struct StallWatch {
    least: Duration,
    step: u64,
    secs: VecDeque<f64>,
    waited: Duration,
    is_paused: bool,
    latch: Cooldown<WINDOW>,
}

impl StallWatch {
    /// Creates the rule; a stall is at least as long as `least`.
    pub(super) fn new(least: Duration) -> Self {
        let (secs, latch) = (VecDeque::new(), Cooldown::default());
        StallWatch { least, step: 0, secs, waited: Duration::ZERO, is_paused: false, latch }
    }

    /// Records that step `step` ended, `secs` seconds after the one before; without `secs`, other
    /// activity.
    pub(super) fn moved(&mut self, step: u64, secs: Option<f64>) {
        (self.step, self.waited, self.is_paused) = (step, Duration::ZERO, false);
        if let Some(secs) = secs {
            self.secs.push_back(secs);
            if self.secs.len() > MEDIAN_OF.0 {
                self.secs.pop_front();
            }
            self.latch.is_news(false);
        }
    }

    /// Records the start of other work than a step, which may take long.
    pub(super) fn pause(&mut self) {
        (self.waited, self.is_paused) = (Duration::ZERO, true);
    }

    /// Returns the last step that ended.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// Returns a finding if, after `passed` more time without activity, a stall begins.
    pub(super) fn tick(&mut self, passed: Duration) -> Option<Finding> {
        self.waited += passed;
        let (median, limit) = (self.median(), self.limit());
        if self.waited <= limit || !self.latch.is_news(true) {
            return None;
        }
        let waited = self.waited.as_secs_f64();
        let usual = median
            .map_or_else(String::new, |secs| format!(", and a step usually takes {}", units::duration(secs)));
        let message = format!(
            "no step has ended for {} after step {}{usual}: a rank, a disk or a server may hang",
            units::duration(waited),
            self.step
        );
        Some(Finding { value: Some(waited), message })
    }

    /// Returns the median of the last steps, in seconds; none if too few have ended.
    fn median(&self) -> Option<f64> {
        (self.secs.len() >= MEDIAN_OF.1).then(|| median(self.secs.iter().copied())).flatten()
    }

    fn limit(&self) -> Duration {
        let median = self.median();
        let steps =
            Duration::try_from_secs_f64(STALL_STEPS * median.unwrap_or_default()).unwrap_or(Duration::MAX);
        let limit = steps.max(self.least);
        if self.is_paused || median.is_none() { limit.saturating_mul(ASIDE) } else { limit }
    }
}

#[cfg(test)]
mod tests;
