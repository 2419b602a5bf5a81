//! Checks for unusual settings: a plan warns of most, and refuses a run that learns nothing.

use super::Plan;
use crate::data::Role;
use crate::error::{Error, Result};
use crate::model;
use crate::recipe::{DataSource, ModelInit, ObjectiveKind, StepInterval};

/// The usual learning rates: of an adapter, and of all weights.
const USUAL_RATES: [f64; 2] = [2e-4, 2e-5];
/// Multiple of the usual learning rate from which a plan warns.
const UNUSUAL_TIMES: f64 = 10.0;
/// Number of steps up to which a plan warns of too few steps.
const FEW_STEPS: u64 = 10;

/// A learning rate that is far too high.
pub struct UnusualRate {
    /// The rate of the recipe.
    pub rate: f64,
    /// Its multiple of the usual rate.
    pub times: f64,
    /// The usual rate of the method.
    pub usual: f64,
}

impl Plan {
    /// Refuses a run whose learning rate is 0 in each of its steps.
    ///
    /// # Errors
    /// The user's: the run would learn nothing.
    pub fn check_learns(&self) -> Result<()> {
        let schedule = self.schedule()?;
        if (0..self.total_steps).any(|step| schedule.at(step) > 0.0) {
            return Ok(());
        }
        let train = &self.recipe.train;
        let steps = match self.total_steps {
            1 => "one step, and that is".to_owned(),
            steps => format!("{steps} steps, and all of them are"),
        };
        let made = match train.max_steps {
            Some(_) => format!("it has {steps}"),
            None if self.train.dataset.len() == 1 => format!("its one row makes {steps}"),
            None => format!("its {} rows make {steps}", self.train.dataset.len()),
        };
        let keys = [
            (train.max_steps.is_some(), "train.max_steps=30"),
            (train.max_steps.is_none() && train.accumulation() > 1, "train.gradient_accumulation_steps=1"),
            (train.max_steps.is_none() && train.epochs < 3.0, "train.epochs=3"),
        ];
        let wanted: Vec<_> = keys.iter().filter(|(helps, _)| *helps).map(|(_, key)| *key).collect();
        let wanted = if wanted.is_empty() { vec!["scheduler.warmup_steps=0"] } else { wanted };
        let typed = wanted.iter().map(|key| format!("--set {key}")).collect::<Vec<_>>().join(" ");
        Err(Error::user(format!("this run would learn nothing: {made} warm-up"))
            .hint(format!("try `{typed}`")))
    }

    /// Returns a warning for each unusual setting, each in a sentence.
    pub(super) fn unusual_settings(&self) -> Vec<String> {
        let warnings = [
            self.high_learning_rate(),
            self.wide_adapter(),
            self.few_steps(),
            self.late_evaluation(),
            self.unequal_labels(),
        ];
        warnings.into_iter().flatten().chain(self.long_warm_up_ratio()).collect()
    }

    /// Returns the learning rate if it is far too high. Returns none for random weights and for the
    /// builtin model of the quickstart, which need another rate.
    pub fn unusual_rate(&self) -> Option<UnusualRate> {
        let model = &self.recipe.model;
        if model.init == ModelInit::Random || matches!(model.id, Some(DataSource::Builtin(_))) {
            return None;
        }
        high_rate(
            self.recipe.optimizer.learning_rate?,
            USUAL_RATES[usize::from(self.adapter_setup.is_none())],
        )
    }

    fn high_learning_rate(&self) -> Option<String> {
        let UnusualRate { rate, times, usual } = self.unusual_rate()?;
        let method = if self.adapter_setup.is_some() { "an adapter" } else { "all weights" };
        Some(format!(
            "the learning rate {rate:e} is {times:.0} times the usual for {method}, {usual:e}: the loss may rise instead of \
             fall; write `optimizer.learning_rate = {usual:e}`, or watch the held-out loss"
        ))
    }

    /// Warns of labelled answers whose weights leave good and bad ones out of balance: the weighted
    /// good ones should be 1 to 4/3 times the weighted bad ones (arXiv:2402.01306, equation 8).
    fn unequal_labels(&self) -> Option<String> {
        let objective = &self.recipe.objective;
        if objective.kind != ObjectiveKind::Kto {
            return None;
        }
        let count = |role: Role| self.train.dataset.examples().iter().filter(|one| one.role == role).count();
        let (good, bad) = (count(Role::Desirable), count(Role::Undesirable));
        let (own, other) = (objective.desirable_weight, objective.undesirable_weight);
        let ratio = good as f64 * own / (bad as f64 * other);
        if good == bad || good * bad == 0 || (0.995..=1.345).contains(&ratio) {
            return None;
        }
        let (wanted, key) = if good < bad {
            (bad as f64 * other / good as f64, "desirable_weight")
        } else {
            (good as f64 * own / bad as f64, "undesirable_weight")
        };
        Some(format!(
            "{good} good and {bad} bad answers weigh {ratio:.2} to 1; 1 to 1.33 is usual: write \
             `objective.{key} = {wanted:.2}`"
        ))
    }

    /// Warns of a rank above the smaller side of a weight.
    fn wide_adapter(&self) -> Option<String> {
        let modules = model::modules(&self.base.config);
        let targets = &self.adapter_setup.as_ref()?.targets;
        let wide: Vec<_> = targets
            .iter()
            .filter_map(|target| {
                let module = modules.iter().find(|module| module.name == target.name)?;
                let side = module.shape.iter().copied().min()?;
                (target.r > side).then_some((target, side))
            })
            .collect();
        let (first, side) = wide.iter().min_by_key(|(_, side)| *side)?;
        Some(format!(
            "`adapter.r` is {}, above the smaller side of {} of {} layers that it adapts, such as {} ({side}): ranks above \
             it add parameters and nothing that can be learned; write `adapter.r = {side}` or less",
            first.r,
            wide.len(),
            targets.len(),
            first.name
        ))
    }

    /// Warns of a run whose rows make only a few steps. A user who sets `train.max_steps` gets no
    /// warning.
    fn few_steps(&self) -> Option<String> {
        let (steps, train) = (self.total_steps, &self.recipe.train);
        let steps_in_words = if steps == 1 { "one step".to_owned() } else { format!("{steps} steps") };
        (train.max_steps.is_none() && steps <= FEW_STEPS).then(|| {
            let smaller = if self.micro_batches() > self.world_size {
                "fewer rows a step (`train.gradient_accumulation_steps`), "
            } else {
                ""
            };
            format!(
                "this run has only {steps_in_words}, which seldom changes a model: give it more rows, {smaller}or more \
                 epochs (`train.epochs`, now {})",
                train.epochs
            )
        })
    }

    /// Warns if `eval.steps` is beyond the last step.
    fn late_evaluation(&self) -> Option<String> {
        let StepInterval::Every(steps) = self.recipe.eval.interval() else { return None };
        (steps > self.total_steps).then(|| format!(
            "`eval.steps` is {steps}, beyond the {} steps of this run: held-out rows are not evaluated between the first step \
             and the last",
            self.total_steps
        ))
    }

    /// Warns of a warm-up ratio above 0.1, which finetune limits to a tenth of the steps.
    fn long_warm_up_ratio(&self) -> Option<String> {
        let ratio = self.recipe.scheduler.warmup_ratio.filter(|ratio| *ratio > 0.1)?;
        let steps = (ratio * self.total_steps as f64) as u64;
        Some(format!(
            "`scheduler.warmup_ratio` is {ratio}, and a ratio gives a tenth of the steps at most, {} here; a longer warm-up is \
             written as `scheduler.warmup_steps = {steps}`",
            super::schedule::share_of_steps(ratio, self.total_steps)
        ))
    }
}

/// Returns the rate, its multiple of `usual`, and `usual`, if the rate is at least ten times as
/// high.
fn high_rate(rate: f64, usual: f64) -> Option<UnusualRate> {
    let times = rate / usual;
    // A small tolerance, so that 2e-3 counts as ten times 2e-4.
    (times > UNUSUAL_TIMES - 1e-9).then_some(UnusualRate { rate, times, usual })
}

#[cfg(test)]
mod tests {
    use super::{UnusualRate, high_rate};

    #[test]
    fn a_learning_rate_of_ten_times_the_usual_is_said() {
        let UnusualRate { rate, times, usual } = high_rate(2e-3, 2e-4).expect("ten times");
        assert_eq!((rate, times.round(), usual), (2e-3, 10.0, 2e-4));
        assert!(high_rate(1.9e-3, 2e-4).is_none());
        assert!(high_rate(2e-4, 2e-5).is_some());
    }
}
