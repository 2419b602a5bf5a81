//! `train.micro_batch_size = "auto"` where a device ran out of memory in spite of the plan: the run goes on in the same process with
//! the next smaller micro-batch, from its newest checkpoint or anew. The rows of a step stay, and so does what is trained.
//!
//! Several processes do not: each would have to learn that another one failed for this reason, and all would begin again at once.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::cli::TrainArgs;
use crate::collective::Phase;
use crate::error::{DeviceFault, Error};
use crate::planning::Plan;
use crate::report::Terminal;

/// Phases whose memory grows with the rows of a micro-batch.
const GROWING: [Phase; 3] = [Phase::Forward, Phase::Loss, Phase::Backward];

/// Whether a rank of this process ran out of memory where a smaller micro-batch needs less.
#[derive(Debug, Default)]
pub(crate) struct OomRetry(AtomicBool);

impl OomRetry {
    /// Notes how a rank ended in `phase`.
    pub(crate) fn note(&self, error: &Error, phase: Phase) {
        if error.device_fault() == Some(DeviceFault::OutOfMemory) && GROWING.contains(&phase) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    /// What `args` asked for with the next smaller micro-batch than that of `plan`, going on from the newest checkpoint if there is one. None where
    /// that would not help after `error`, where a micro-batch is a single row, and where the user named the checkpoint to
    /// begin from.
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
            "{}; micro-batches of {size} rows need too much: a smaller one is taken",
            error.in_one_line()
        ));
        let mut args = args.clone();
        args.set.push(format!("train.micro_batch_size={next}"));
        // From a global batch it follows.
        if plan.global_batch.is_none() {
            args.set.push(format!("train.gradient_accumulation_steps={}", rows / next));
        }
        args.resume = Some(None);
        Some(args)
    }
}
