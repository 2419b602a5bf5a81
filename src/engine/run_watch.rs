//! What in the numbers of a run deserves a word although it goes on: a loss far above those before, a gradient that is
//! zero, trainable tensors that no gradient reaches, a rank that the others wait for. It only looks: no number of the run
//! depends on it.

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
/// Steps that ranks are compared over, and in how many of them one must have been slow. A rank that slows down is so named
/// after 12 steps, or 16 from the start, and one long row, or a machine that does something else for a moment, is not.
const RANK_STEPS: (usize, usize) = (16, 12);
/// A rank is slow that computes longer than the median of the others by this part. Even ranks differ by some hundredths;
/// the loss of a seventh of all other ranks' time is worth a look.
const SLOW_RANK: f64 = 0.15;
/// A slow rank costs at least so many seconds a step: steps of a few milliseconds differ by what the system does.
const LEAST_SLOW_SECS: f64 = 0.005;

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
    ranks: RankWatch,
}

/// Which rank the others wait for.
#[derive(Default)]
struct RankWatch {
    /// Each rank's seconds of the last steps.
    recent: VecDeque<Vec<f64>>,
    /// The rank that was named last.
    named: Option<usize>,
}

impl RankWatch {
    /// What there is to say after a step in which each rank computed for `secs`.
    fn after_step(&mut self, step: u64, secs: &[f64]) -> Option<String> {
        let (window, least) = RANK_STEPS;
        if secs.len() < 2 {
            return None;
        }
        self.recent.push_back(secs.to_vec());
        if self.recent.len() > window {
            self.recent.pop_front();
        }
        if self.recent.len() < window {
            return None;
        }
        let slow: Vec<usize> = self.recent.iter().filter_map(|secs| slow_rank(secs)).collect();
        let times = |rank: usize| slow.iter().filter(|one| **one == rank).count();
        let rank = slow.iter().copied().find(|rank| times(*rank) >= least)?;
        if self.named == Some(rank) {
            return None;
        }
        let times = times(rank);
        self.named = Some(rank);
        let own = median(self.recent.iter().map(|secs| secs[rank]));
        let others = median(self.recent.iter().map(|secs| median_of_others(secs, rank)));
        Some(format!(
            "step {step}: rank {rank} is the slowest, and the others wait for it: it computes for {own:.3} s a step, {:.0} % \
             longer than the median of the others ({others:.3} s), in {times} of the last {window} steps; look at its machine: \
             other work, heat, a slower device, fewer threads",
            100.0 * (own - others) / others.max(LEAST_SLOW_SECS)
        ))
    }
}

/// The rank that computed much longer than the others, if there is one.
fn slow_rank(secs: &[f64]) -> Option<usize> {
    let rank = (0..secs.len()).max_by(|a, b| secs[*a].total_cmp(&secs[*b]))?;
    let others = median_of_others(secs, rank);
    (secs[rank] - others > (SLOW_RANK * others).max(LEAST_SLOW_SECS)).then_some(rank)
}

fn median_of_others(secs: &[f64], rank: usize) -> f64 {
    median(secs.iter().enumerate().filter(|(other, _)| *other != rank).map(|(_, secs)| *secs))
}

/// The middle value, of an even number the mean of both; of none 0.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    let upper = sorted.get(sorted.len() / 2).copied().unwrap_or_default();
    let lower = sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or_default();
    (upper + lower) / 2.0
}

impl RunWatch {
    /// At the beginning of a run whose trainable tensors are `entries`.
    pub(super) fn new(entries: Vec<EntryIndex>) -> Self {
        RunWatch {
            losses: VecDeque::new(),
            spike: None,
            still: 0,
            updates: 0,
            unreached: entries,
            ranks: RankWatch::default(),
        }
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
        let slow = self.ranks.after_step(report.step, &report.rank_secs);
        let found = [self.spike(report), self.still(report), unreached, slow];
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
    /// What is said of ranks that compute for `secs(step)`, over 100 steps.
    fn slow_ranks(secs: impl Fn(u64) -> Vec<f64>) -> Vec<String> {
        let mut watch = RankWatch::default();
        (1..=100).filter_map(|step| watch.after_step(step, &secs(step))).collect()
    }

    /// Between -1 and 1, without an order.
    fn noise(step: u64, rank: u64) -> f64 {
        ((step * 8 + rank) as f64 * 12.9898).sin()
    }

    #[test]
    fn a_slow_rank_is_named_once_within_20_steps() {
        let even = |step: u64, rank: u64| 0.1 * (1.0 + 0.05 * noise(step, rank));
        let one = |step| vec![even(step, 0), even(step, 1), 1.3 * even(step, 2), even(step, 3)];
        let said = slow_ranks(one);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(
            said[0].starts_with("step 16: rank 2 is the slowest, and the others wait for it"),
            "{said:?}"
        );
        // From step 51 on; of two ranks the other is the median.
        let later = |step| vec![even(step, 0) * if step > 50 { 2.0 } else { 1.0 }, even(step, 1)];
        let said = slow_ranks(later);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with("step 62: rank 0 is the slowest"), "{said:?}");
        // Another one takes its place.
        let first = |step, rank: u64| even(step, rank) * if (step > 50) == (rank == 1) { 2.0 } else { 1.0 };
        let said = slow_ranks(|step| vec![first(step, 0), first(step, 1), even(step, 2)]);
        assert_eq!(said.len(), 2, "{said:?}");
    }

    #[test]
    fn even_ranks_give_no_alarm() {
        assert_eq!(
            slow_ranks(|step| (0..4).map(|rank| 0.1 * (1.0 + 0.1 * noise(step, rank))).collect()),
            [""; 0]
        );
        // Now and then one has a long row, or takes turns with others; short steps differ by what the system does.
        assert_eq!(slow_ranks(|step| vec![0.1, if step % 2 == 0 { 0.3 } else { 0.1 }]), [""; 0]);
        assert_eq!(
            slow_ranks(|step| (0..3).map(|rank| if step % 3 == rank { 0.3 } else { 0.1 }).collect()),
            [""; 0]
        );
        assert_eq!(slow_ranks(|_| vec![0.004, 0.002]), [""; 0]);
        assert_eq!(slow_ranks(|_| vec![0.1]), [""; 0]);
    }
}
