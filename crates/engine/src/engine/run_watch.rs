//! What in the numbers of a run deserves a word although it goes on: a loss far above those before, a gradient that is
//! zero, trainable tensors that no gradient reaches, a rank that the others wait for. It only looks: no number of the run
//! depends on it.

use std::collections::VecDeque;

use crate::error::{Error, ErrorCategory, Result};
use crate::median::median;
use crate::parallel::{EntryIndex, ParamStore};
use crate::report::alerts::rules::{LossSpikes, StillGradients};
use crate::report::{EvalReport, StepReport};
use crate::units;

/// Steps after which every tensor that trains must have had a gradient. The first of a warm-up has learning rate 0, and
/// the A of LoRA has a gradient only after its B has moved.
const REACHED_AFTER: u64 = 10;
/// Of a shorter run, the steps that it must have.
const REACHED_AT_END: u64 = 5;
/// Steps in a row of the same loss, without a gradient, after which a model is dead.
const DEAD_STEPS: u64 = 10;
/// Evaluations in a row whose held-out loss is above that of the one before, after which a warning is printed.
const RISING_EVALUATIONS: u64 = 3;
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
    spikes: LossSpikes,
    still: StillGradients,
    /// Steps that had an update.
    updates: u64,
    /// Trainable tensors whose gradients were all zero so far, alike on all ranks.
    unreached: Vec<EntryIndex>,
    ranks: RankWatch,
    dead: DeadSteps,
    held_out: HeldOutLosses,
}

/// The last steps, as far as nothing moved in them.
#[derive(Default)]
struct DeadSteps {
    loss: Option<f64>,
    in_a_row: u64,
}

impl DeadSteps {
    /// Counts a step; the error of a run that goes nowhere.
    fn check(&mut self, step: u64, loss: f64, grad_norm: f64) -> Result<()> {
        let is_same = self.loss.is_none_or(|before| before.to_bits() == loss.to_bits());
        self.in_a_row = match (grad_norm == 0.0, is_same) {
            (true, true) => self.in_a_row + 1,
            (true, false) => 1,
            (false, _) => 0,
        };
        self.loss = (grad_norm == 0.0).then_some(loss);
        if self.in_a_row < DEAD_STEPS {
            return Ok(());
        }
        Err(Error::new(
            ErrorCategory::Diverged,
            format!("the model is dead at step {step}: it learns nothing"),
        )
        .because(format!("the loss was {loss} to the last bit and the gradient norm 0 in {DEAD_STEPS} steps"))
        .hint(
            "look at the trained tokens with `finetune data`, at the weights with `finetune inspect`, and at \
                 `adapter.lora_alpha` and `optimizer.learning_rate`",
        ))
    }
}

/// The held-out losses of a run.
#[derive(Default)]
struct HeldOutLosses {
    last: Option<f64>,
    rises: u64,
}

impl HeldOutLosses {
    /// The warning after the evaluation that follows step `step`, if there is one.
    fn after(&mut self, step: u64, loss: f64) -> Option<String> {
        let rises = self.last.replace(loss).is_some_and(|before| loss > before);
        self.rises = if rises { self.rises + 1 } else { 0 };
        (self.rises == RISING_EVALUATIONS).then(|| {
            format!(
                "step {step}: the held-out loss has risen {RISING_EVALUATIONS} evaluations in a row, to {loss:.4}: the model \
                 learns its rows by heart; train for fewer steps, lower `optimizer.learning_rate`, or add rows"
            )
        })
    }
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
        let own = median(self.recent.iter().map(|secs| secs[rank])).unwrap_or_default();
        let others = median(self.recent.iter().map(|secs| median_of_others(secs, rank))).unwrap_or_default();
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
    let others = secs.iter().enumerate().filter(|(other, _)| *other != rank).map(|(_, secs)| *secs);
    median(others).unwrap_or_default()
}

impl RunWatch {
    /// At the beginning of a run whose trainable tensors are `entries`.
    pub(super) fn new(entries: Vec<EntryIndex>) -> Self {
        let (spikes, still, ranks) = (LossSpikes::default(), StillGradients::default(), RankWatch::default());
        let (dead, held_out) = (DeadSteps::default(), HeldOutLosses::default());
        RunWatch { spikes, still, updates: 0, unreached: entries, ranks, dead, held_out }
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
        let found = [self.spikes.after(report), self.still.after(report)];
        found.into_iter().flatten().map(|found| found.message).chain(unreached).chain(slow).collect()
    }

    /// Ends a run whose model cannot learn, after a step that updated something. All ranks see the same numbers.
    ///
    /// # Errors
    /// The loss was the same to the bit and the gradient norm 0 in the last steps.
    pub(super) fn check_alive(&mut self, report: &StepReport) -> Result<()> {
        self.dead.check(report.step, report.loss, report.grad_norm)
    }

    /// The warning after an evaluation of the held-out rows, if there is one.
    pub(super) fn after_evaluation(&mut self, report: &EvalReport) -> Option<String> {
        self.held_out.after(report.step, report.eval_loss)
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
            "{} of {all} trainable tensors had no gradient in {}, and learn nothing: {}{others}",
            found.len(),
            units::exact(self.updates, "step"),
            names.join(", ")
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said of ranks that compute for `secs(step)`, over 100 steps.
    fn slow_ranks(secs: impl Fn(u64) -> Vec<f64>) -> Vec<String> {
        let mut watch = RankWatch::default();
        (1..=100).filter_map(|step| watch.after_step(step, &secs(step))).collect()
    }

    #[test]
    fn a_model_is_dead_after_ten_equal_steps_without_a_gradient() {
        let dead = |steps: &[(f64, f64)]| {
            let mut watch = DeadSteps::default();
            (1..)
                .zip(steps)
                .find_map(|(step, (loss, norm))| watch.check(step, *loss, *norm).err().map(|_| step))
        };
        let still = [(2.5, 0.0); 12];
        assert_eq!(dead(&still), Some(10));
        assert_eq!(dead(&still[..9]), None);
        let mut moved = still;
        moved[4].1 = 1e-9;
        assert_eq!(dead(&moved), None);
        let mut other = [(2.5, 0.0); 16];
        other[4].0 = 2.500_000_1;
        assert_eq!(dead(&other), Some(15));
    }

    #[test]
    fn a_held_out_loss_that_rises_three_times_is_said_once() {
        let mut losses = HeldOutLosses::default();
        let said: Vec<u64> = (0..)
            .zip([3.0, 2.0, 2.1, 2.2, 2.3, 2.4, 2.0, 2.1, 2.2, 2.2, 2.3, 2.4, 2.5])
            .filter_map(|(step, loss)| losses.after(step, loss).map(|_| step))
            .collect();
        assert_eq!(said, [4, 12]);
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
