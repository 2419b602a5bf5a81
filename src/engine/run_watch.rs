//! What in the numbers of a run deserves a word although it goes on: a loss far above those before, a gradient that is
//! zero, trainable tensors that no gradient reaches. It only looks: no number of the run depends on it.

use crate::report::StepReport;
use crate::report::alerts::rules::{LossSpikes, StillGradients};
use crate::sharding::{EntryIndex, ParamStore};

/// Steps after which every tensor that trains must have had a gradient. The first of a warm-up has learning rate 0, and
/// the A of LoRA has a gradient only after its B has moved.
const REACHED_AFTER: u64 = 10;
/// Of a shorter run, the steps that it must have.
const REACHED_AT_END: u64 = 5;
/// Tensors that are named.
const NAMED: usize = 3;

/// What a run has shown so far.
pub(super) struct RunWatch {
    spikes: LossSpikes,
    still: StillGradients,
    /// Steps that had an update.
    updates: u64,
    /// Trainable tensors whose gradients were all zero so far, alike on all ranks.
    unreached: Vec<EntryIndex>,
}

impl RunWatch {
    /// At the beginning of a run whose trainable tensors are `entries`.
    pub(super) fn new(entries: Vec<EntryIndex>) -> Self {
        let (spikes, still) = (LossSpikes::default(), StillGradients::default());
        RunWatch { spikes, still, updates: 0, unreached: entries }
    }

    /// The tensors whose gradients are to be looked at after a step.
    pub(super) fn unreached(&self) -> &[EntryIndex] {
        &self.unreached
    }

    /// Leaves out the tensors that are `reached`, one answer for each of [`RunWatch::unreached`].
    pub(super) fn reach(&mut self, reached: &[bool]) {
        let mut reached = reached.iter();
        self.unreached.retain(|_| !reached.next().copied().unwrap_or(true));
    }

    /// What there is to say after a step that updated something.
    pub(super) fn after_step(&mut self, report: &StepReport, store: &ParamStore) -> Vec<String> {
        self.updates += 1;
        let unreached = (self.updates == REACHED_AFTER).then(|| self.say_unreached(store)).flatten();
        let found = [self.spikes.after(report), self.still.after(report)];
        found.into_iter().flatten().map(|found| found.message).chain(unreached).collect()
    }

    /// What there is to say at the end of a run, of what was not said before.
    pub(super) fn at_end(&mut self, store: &ParamStore) -> Option<String> {
        let judged = (REACHED_AT_END..REACHED_AFTER).contains(&self.updates);
        judged.then(|| self.say_unreached(store)).flatten()
    }

    /// Names the tensors that no gradient has reached, once.
    fn say_unreached(&mut self, store: &ParamStore) -> Option<String> {
        let (all, found) = (store.trainable_entries().len(), std::mem::take(&mut self.unreached));
        // Where none has, the norm is 0, which is said.
        if found.is_empty() || found.len() == all {
            return None;
        }
        let names: Vec<&str> = found.iter().take(NAMED).filter_map(|at| store.trainable_name(*at)).collect();
        let others = found.len() - names.len();
        let others = if others > 0 { format!(" and {others} more") } else { String::new() };
        Some(format!(
            "{} of {all} trainable tensors had no gradient in {} steps, and learn nothing: {}{others}",
            found.len(),
            self.updates,
            names.join(", ")
        ))
    }
}
