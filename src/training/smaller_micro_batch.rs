//! Retry of `train.micro_batch_size = "auto"` after a device ran out of memory in spite of the
//! plan. The run continues in the same process with the next smaller micro-batch, from its newest
//! checkpoint or from the start. The rows of a step do not change, so the training does not either.
//!
//! Runs of several processes do not retry: each process would have to learn why another one failed,
//! and all would have to restart together.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::cli::TrainArgs;
use crate::collective::Phase;
use crate::error::{DeviceFault, Error};
use crate::planning::Plan;
use crate::report::Terminal;

/// Phases whose memory grows with the rows of a micro-batch.
const GROWING: [Phase; 3] = [Phase::Forward, Phase::Loss, Phase::Backward];

/// Set if a rank of this process ran out of memory in a phase where a smaller micro-batch needs
/// less.
#[derive(Debug, Default)]
pub(crate) struct OomRetry(AtomicBool);

impl OomRetry {
    /// Records the error with which a rank ended in `phase`.
    pub(crate) fn record(&self, error: &Error, phase: Phase) {
        if error.device_fault() == Some(DeviceFault::OutOfMemory) && GROWING.contains(&phase) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    /// Returns `args` with the next smaller micro-batch than that of `plan`, resuming from the
    /// newest checkpoint if one exists. None if that would not help after `error`, if a micro-batch
    /// is a single row, or if the user named the checkpoint to resume from.
    pub(crate) fn smaller(
        &self,
        args: &TrainArgs,
        plan: &Plan,
        error: &Error,
        terminal: &Terminal,
    ) -> Option<TrainArgs> {
        let train = &plan.recipe.train;
        let size = train.micro_batch_rows();
        let rows = size * train.accumulation();
        let next = (1..size).rev().find(|next| rows.is_multiple_of(*next))?;
        if !self.0.load(Ordering::SeqCst) || matches!(args.resume, Some(Some(_))) {
            return None;
        }
        terminal.warn(format!(
            "{}; micro-batches of {size} rows need too much memory: retrying with {next}",
            error.in_one_line()
        ));
        let mut args = args.clone();
        args.recipe.set.push(format!("train.micro_batch_size={next}"));
        // With a global batch it is derived.
        if plan.global_batch.is_none() {
            args.recipe.set.push(format!("train.gradient_accumulation_steps={}", rows / next));
        }
        args.resume = Some(None);
        Some(args)
    }
}
