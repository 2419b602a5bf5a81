//! Checks of the numbers of a run: a loss far above those before, a zero gradient, trainable
//! tensors that no gradient reaches, a slow rank, a rising held-out loss. They only warn; a dead
//! model alone ends the run. No number of the run depends on them.

use std::collections::VecDeque;

use crate::error::{Error, ErrorCategory, Result};
use crate::median::median;
use crate::parallel::{EntryIndex, ParamStore};
use crate::report::alerts::rules::{LossSpikes, StillGradients};
use crate::report::{EvalReport, StepReport};
use crate::units;

/// Number of updates after which every trainable tensor must have had a gradient. The first step of
/// a warm-up has learning rate 0, and the A of LoRA has a gradient only after its B has moved.
const REACHED_AFTER: u64 = 10;
/// Minimum number of updates of a shorter run for the same check.
const REACHED_AT_END: u64 = 5;
/// Consecutive steps with the same loss and no gradient after which a model is dead.
const DEAD_STEPS: u64 = 10;
/// Consecutive rises of the held-out loss after which a warning is printed.
const RISING_EVALUATIONS: u64 = 3;
/// Maximum number of tensors that a warning names.
const NAMED: usize = 3;
/// Number of steps over which ranks are compared, and the number of them in which a slow rank must
/// be slow. A rank that slows down is named after 12 steps, or 16 from the start. One long row or a
/// short load on a machine does not trigger it.
const RANK_STEPS: (usize, usize) = (16, 12);
/// Fraction by which a slow rank computes longer than the median of the others. Even ranks differ
/// by a few hundredths; at this fraction all other ranks waste a seventh of their time.
const SLOW_RANK: f64 = 0.15;
/// Minimum extra seconds a step of a slow rank: system noise dominates steps of a few milliseconds.
const LEAST_SLOW_SECS: f64 = 0.005;

/// The state of all checks of a run.
#[derive(Default)]
pub(super) struct RunWatch {
    spikes: LossSpikes,
    still: StillGradients,
    /// Number of steps that updated weights.
    updates: u64,
    /// Trainable tensors whose gradients were all zero so far; the same on all ranks.
    unreached: Vec<EntryIndex>,
    ranks: RankWatch,
    dead: DeadSteps,
    held_out: HeldOutLosses,
}

/// Counter of the last steps in which nothing changed.
#[derive(Default)]
struct DeadSteps {
    loss: Option<f64>,
    in_a_row: u64,
}

impl DeadSteps {
    /// Counts a step, and returns an error if the model is dead.
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
        .because(format!(
            "the loss was exactly {loss} and the gradient norm 0 in the last {DEAD_STEPS} steps"
        ))
        .hint(
            "check the trained tokens with `finetune data`, and the values of `adapter.lora_alpha` and \
                 `optimizer.learning_rate`; if the files of the model hold only zeros, download it again",
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
    /// Returns the warning after the evaluation of step `step`, if any.
    fn after(&mut self, step: u64, loss: f64) -> Option<String> {
        let rises = self.last.replace(loss).is_some_and(|before| loss > before);
        self.rises = if rises { self.rises + 1 } else { 0 };
        (self.rises == RISING_EVALUATIONS).then(|| {
            format!(
                "step {step}: the held-out loss has risen {RISING_EVALUATIONS} evaluations in a row, to {loss:.4}: the model \
                 overfits; train for fewer steps, lower `optimizer.learning_rate`, or add rows"
            )
        })
    }
}

/// Search for a rank that the others wait for.
#[derive(Default)]
struct RankWatch {
    /// Compute seconds of each rank in the last steps.
    recent: VecDeque<Vec<f64>>,
    /// The rank named last.
    named: Option<usize>,
}

impl RankWatch {
    /// Returns the warning after a step in which each rank computed for `secs`, if any.
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
             longer than the median of the others ({others:.3} s), in {times} of the last {window} steps; check its machine \
             for other work, heat, a slower device or fewer threads",
            100.0 * (own - others) / others.max(LEAST_SLOW_SECS)
        ))
    }
}

/// Returns the rank that computed much longer than the others, if any.
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
    /// Creates the checks of a run whose trainable tensors are `entries`.
    pub(super) fn new(entries: Vec<EntryIndex>) -> Self {
        RunWatch { unreached: entries, ..RunWatch::default() }
    }

    /// Returns the tensors whose gradients are checked after a step.
    pub(super) fn unreached(&self) -> &[EntryIndex] {
        &self.unreached
    }

    /// Removes the tensors that had a gradient; `reached` has a flag for each of
    /// [`RunWatch::unreached`].
    pub(super) fn reach(&mut self, reached: &[bool]) {
        let mut reached = reached.iter();
        self.unreached.retain(|_| !reached.next().copied().unwrap_or(true));
    }

    /// Returns the warnings after a step that updated weights.
    pub(super) fn after_step(&mut self, report: &StepReport, store: &ParamStore) -> Vec<String> {
        self.updates += 1;
        let unreached = (self.updates == REACHED_AFTER).then(|| self.say_unreached(store)).flatten();
        let slow = self.ranks.after_step(report.step, &report.rank_secs);
        let found = [self.spikes.after(report), self.still.after(report)];
        found.into_iter().flatten().map(|found| found.message).chain(unreached).chain(slow).collect()
    }

    /// Ends a run whose model cannot learn, after a step that updated weights. All ranks see the
    /// same numbers.
    ///
    /// # Errors
    /// The loss was the same to the bit and the gradient norm 0 in the last steps.
    pub(super) fn check_alive(&mut self, report: &StepReport) -> Result<()> {
        self.dead.check(report.step, report.loss, report.grad_norm)
    }

    /// Returns the warning after an evaluation of the held-out rows, if any.
    pub(super) fn after_evaluation(&mut self, report: &EvalReport) -> Option<String> {
        self.held_out.after(report.step, report.eval_loss)
    }

    /// Returns the warning at the end of a run that is too short for the one after `REACHED_AFTER`.
    pub(super) fn at_end(&mut self, store: &ParamStore) -> Option<String> {
        let judged = (REACHED_AT_END..REACHED_AFTER).contains(&self.updates);
        judged.then(|| self.say_unreached(store)).flatten()
    }

    /// Returns a warning that names the tensors without a gradient so far, once.
    fn say_unreached(&mut self, store: &ParamStore) -> Option<String> {
        let (all, found) = (store.trainable_entries().len(), std::mem::take(&mut self.unreached));
        // If no tensor has a gradient, the norm is 0, and `StillGradients` warns.
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

    /// Returns the warnings about ranks that compute for `secs(step)`, over 100 steps.
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

    /// Returns a pseudo-random number between -1 and 1.
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
        // Rank 0 is slow from step 51 on; of two ranks the other is the median.
        let later = |step| vec![even(step, 0) * if step > 50 { 2.0 } else { 1.0 }, even(step, 1)];
        let said = slow_ranks(later);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with("step 62: rank 0 is the slowest"), "{said:?}");
        // Another rank becomes the slow one.
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
        // A rank may have a long row now and then, or ranks take turns; short steps differ by
        // noise.
        assert_eq!(slow_ranks(|step| vec![0.1, if step % 2 == 0 { 0.3 } else { 0.1 }]), [""; 0]);
        assert_eq!(
            slow_ranks(|step| (0..3).map(|rank| if step % 3 == rank { 0.3 } else { 0.1 }).collect()),
            [""; 0]
        );
        assert_eq!(slow_ranks(|_| vec![0.004, 0.002]), [""; 0]);
        assert_eq!(slow_ranks(|_| vec![0.1]), [""; 0]);
    }
}
