//! Where optimizer steps come from: a sampler over a data set today, answers of the model itself
//! (rollouts) later.

use super::batch::{Batch, Step};
use super::sampler::{Cursor, Sampler};
use crate::error::Result;

/// The optimizer steps of a run, in order.
pub trait StepSource {
    /// Number of steps of the whole run.
    fn total_steps(&self) -> u64;

    /// Number of steps that were returned so far, those before a resume included.
    fn steps_done(&self) -> u64;

    /// Position in the data at which the next step begins.
    fn cursor(&self) -> Cursor;

    /// The next step; none at the end of the run.
    ///
    /// # Errors
    /// The source cannot make the step.
    fn next_step(&mut self) -> Result<Option<Step>>;

    /// Number of tokens of the largest micro-batch of the next step; none at the end of the run.
    fn widest_of_next_step(&mut self) -> Option<usize>;

    /// A micro-batch with as many tokens as any that can come; none where the source cannot know.
    fn longest_micro_batch(&self) -> Option<Batch>;
}

impl StepSource for Sampler<'_> {
    fn total_steps(&self) -> u64 {
        Sampler::total_steps(self)
    }

    fn steps_done(&self) -> u64 {
        Sampler::steps_done(self)
    }

    fn cursor(&self) -> Cursor {
        Sampler::cursor(self)
    }

    fn next_step(&mut self) -> Result<Option<Step>> {
        Ok(Sampler::next_step(self))
    }

    fn widest_of_next_step(&mut self) -> Option<usize> {
        Sampler::widest_of_next_step(self)
    }

    fn longest_micro_batch(&self) -> Option<Batch> {
        Some(Sampler::longest_micro_batch(self))
    }
}
