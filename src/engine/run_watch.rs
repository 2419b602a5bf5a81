//! What in the numbers of a run deserves a word although it goes on: a loss far above those before, a gradient that is
//! zero, trainable tensors that no gradient reaches. It only looks: no number of the run depends on it.

use std::collections::VecDeque;

use crate::report::StepReport;
use crate::sharding::{EntryIndex, ParamStore};

/// Losses that one is compared with, at most and at least.
const COMPARED: (usize, usize) = (64, 16);
/// A spike is so many standard deviations above the mean of the losses before it.
const DEVIATIONS: f64 = 6.0;
/// A spike is at least so many nats above their mean: where losses hardly differ, deviations say nothing.
const LEAST_RISE: f64 = 0.5;
/// Steps without a gradient before that is said.
const STILL_STEPS: u64 = 3;
/// Steps after which every tensor that trains must have had a gradient. The first of a warm-up has learning rate 0, and
/// the A of LoRA has a gradient only after its B has moved.
const REACHED_AFTER: u64 = 10;
/// Of a shorter run, the steps that it must have.
const REACHED_AT_END: u64 = 5;
/// Tensors that are named.
const NAMED: usize = 3;

/// What a run has shown so far.
pub(super) struct RunWatch {
    losses: VecDeque<f64>,
    /// The step whose spike was said last.
    spike: Option<u64>,
    /// Steps in a row whose gradient norm was 0.
    still: u64,
    /// Steps that had an update.
    updates: u64,
    /// Trainable tensors whose gradients were all zero so far, alike on all ranks.
    unreached: Vec<EntryIndex>,
}

impl RunWatch {
    /// At the beginning of a run whose trainable tensors are `entries`.
    pub(super) fn new(entries: Vec<EntryIndex>) -> Self {
        RunWatch { losses: VecDeque::new(), spike: None, still: 0, updates: 0, unreached: entries }
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
        let found = [self.spike(report), self.still(report), unreached];
        found.into_iter().flatten().collect()
    }

    /// What there is to say at the end of a run, of what was not said before.
    pub(super) fn at_end(&mut self, store: &ParamStore) -> Option<String> {
        let judged = (REACHED_AT_END..REACHED_AFTER).contains(&self.updates);
        judged.then(|| self.say_unreached(store)).flatten()
    }

    fn spike(&mut self, report: &StepReport) -> Option<String> {
        let (most, least) = COMPARED;
        let count = self.losses.len() as f64;
        let mean = self.losses.iter().sum::<f64>() / count;
        let deviation = (self.losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f64>() / count).sqrt();
        let is_high = report.loss > mean + (DEVIATIONS * deviation).max(LEAST_RISE);
        let compared = self.losses.len();
        self.losses.push_back(report.loss);
        if compared == most {
            self.losses.pop_front();
        }
        let is_new = self.spike.is_none_or(|step| report.step > step + most as u64);
        if compared < least || !is_high || !is_new {
            return None;
        }
        self.spike = Some(report.step);
        Some(format!(
            "step {}: the loss {:.4} is far above those of the {compared} steps before it (mean {mean:.4}, standard \
             deviation {deviation:.4}; gradient norm {:.3}): look at its rows, or lower `optimizer.learning_rate`",
            report.step, report.loss, report.grad_norm
        ))
    }

    fn still(&mut self, report: &StepReport) -> Option<String> {
        self.still = if report.grad_norm == 0.0 { self.still + 1 } else { 0 };
        (self.still == STILL_STEPS).then(|| {
            format!(
                "step {}: the gradient norm has been 0 for {STILL_STEPS} steps: nothing is learned any more; \
                 `finetune data` shows which tokens count in the loss",
                report.step
            )
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn report(step: u64, loss: f64, grad_norm: f64) -> StepReport {
        StepReport { step, loss, grad_norm, ..StepReport::default() }
    }

    fn spikes(losses: impl IntoIterator<Item = f64>) -> Vec<String> {
        let mut watch = RunWatch::new(Vec::new());
        let said =
            losses.into_iter().zip(1..).filter_map(|(loss, step)| watch.spike(&report(step, loss, 1.0)));
        said.collect()
    }

    /// Between 2 and 2.3, falling.
    fn quiet(count: usize) -> impl Iterator<Item = f64> {
        (0..count).map(|i| 2.0 + 0.2 / (1.0 + i as f64 / 50.0) + 0.1 * (i as f64 * 2.4).sin())
    }

    #[test]
    fn a_spike_is_said_once() {
        assert_eq!(spikes(quiet(300)), [""; 0]);
        let said = spikes(quiet(40).chain([5.0, 5.5]).chain(quiet(30)));
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with("step 41: the loss 5.0000 is far above those of the 40 steps before it"));
        // A second one, long after.
        assert_eq!(spikes(quiet(40).chain([5.0]).chain(quiet(100)).chain([5.0])).len(), 2);
    }

    #[test]
    fn neither_beginnings_nor_small_losses_are_spikes() {
        assert_eq!(spikes([2.0, 2.0, 9.0, 2.0]), [""; 0]);
        assert_eq!(spikes((0..40).map(|_| 0.001).chain([0.3])), [""; 0]);
    }

    #[test]
    fn a_gradient_of_zero_is_said_once() {
        let mut watch = RunWatch::new(Vec::new());
        let norms = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let said: Vec<String> = norms
            .into_iter()
            .zip(1..)
            .filter_map(|(norm, step)| watch.still(&report(step, 1.0, norm)))
            .collect();
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with("step 7: the gradient norm has been 0 for 3 steps"), "{said:?}");
    }
}
