//! Figures of a run from before it was resumed.

use std::path::Path;

use super::output_folder::{METRICS, lies_in};
use crate::checkpoint::SavedCheckpoint;
use crate::report::metrics::{self, EvalReport, MetricsEntry};

/// Figures in metrics.jsonl from before the run was resumed.
#[derive(Debug, Clone, Default)]
pub(crate) struct EarlierRun {
    /// Evaluation before the first step.
    pub(crate) before: Option<EvalReport>,
    /// Seconds of all earlier steps.
    pub(crate) secs: f64,
    /// Evaluation of the checkpoint that the run resumes from.
    pub(crate) at_checkpoint: Option<EvalReport>,
}

impl EarlierRun {
    /// Reads the figures up to the checkpoint `resumed`, if the folder `output` belongs to the same
    /// run.
    pub(crate) fn read(resumed: Option<&SavedCheckpoint>, output: &Path) -> Self {
        let Some(saved) = resumed.filter(|saved| lies_in(saved, output)) else { return Self::default() };
        let mut earlier = Self::default();
        // Without a readable log only these figures are missing.
        for entry in metrics::read(&output.join(METRICS)).unwrap_or_default() {
            match entry {
                MetricsEntry::Eval(report) if report.step == 0 => earlier.before = Some(report),
                MetricsEntry::Eval(report) if report.step == saved.state.step => {
                    earlier.at_checkpoint = Some(report);
                }
                MetricsEntry::Step(report) if report.step <= saved.state.step => {
                    let secs = report.all_parts();
                    earlier.secs += if secs.is_finite() { secs } else { 0.0 };
                }
                _ => {}
            }
        }
        earlier
    }
}
