//! Warnings before a run about settings and data that are not errors.

use super::Plan;
use crate::data::Dataset;
use crate::model::{ModelConfig, RopeKind};
use crate::optim::Schedule;
use crate::recipe::LEAST_SEQ_LEN;

/// Returns the report on the rows `held_out`. It counts those that equal rows of `train`: their
/// loss measures memorization.
pub fn held_out_report(held_out: &Dataset, train: &Dataset) -> String {
    let report = held_out.report();
    match held_out.count_alike(train) {
        (0, _) => report.to_string(),
        (alike, all) => format!(
            "{report}\nwarning: {alike} of {all} held-out rows equal training rows, apart from case, spaces and \
             punctuation: their loss shows how well the model remembers them, not what it learned"
        ),
    }
}

impl Plan {
    /// Returns the warnings before the run, each in a sentence.
    pub fn warnings(&self) -> Vec<String> {
        let held_out = self.held_out.as_ref().map(|(held_out, _)| held_out);
        let data = [Some(&self.train.0), held_out].into_iter().flatten();
        let schedule = self.schedule().ok().and_then(|schedule| short_warm_up(&schedule));
        let rows = data.filter_map(|data| self.long_rows(data));
        rows.chain(schedule)
            .chain(ignored_dropout(&self.base.config))
            .chain(self.unusual_settings())
            .collect()
    }

    /// Returns the report on the held-out rows; none without such rows.
    pub fn held_out_report(&self) -> Option<String> {
        let (held_out, _) = self.held_out.as_ref()?;
        Some(held_out_report(held_out, &self.train.0))
    }

    /// Warns of rows with more tokens than the model has positions.
    fn long_rows(&self, data: &Dataset) -> Option<String> {
        let config = &self.base.config;
        let positions = config.max_position_embeddings;
        let lengths = data.examples().iter().map(|example| example.ids.len());
        let long: Vec<usize> = lengths.filter(|length| *length > positions).collect();
        let rows = if long.len() == 1 { "1 row has".to_owned() } else { format!("{} rows have", long.len()) };
        // Shorter rows than this are not accepted.
        let shorter = (positions >= LEAST_SEQ_LEN).then(|| format!("write `data.max_seq_len = {positions}`"));
        beyond_positions(config, *long.iter().max()?, &rows, shorter.as_deref())
    }
}

/// Warns that `sequences` ("3 rows have") exceed the positions of the model. The longest has
/// `longest` tokens; `shorter` is a way out. Returns none if they fit, or if the rope is dynamic
/// and stretches for them.
fn beyond_positions(
    config: &ModelConfig,
    longest: usize,
    sequences: &str,
    shorter: Option<&str>,
) -> Option<String> {
    let positions = config.max_position_embeddings;
    let stretches = config.ropes.iter().any(|rope| matches!(rope.kind, RopeKind::Dynamic { .. }));
    (longest > positions && !stretches).then(|| {
        let shorter = shorter.map(|shorter| format!("{shorter}, or ")).unwrap_or_default();
        format!(
            "{sequences} more tokens than the {positions} positions that the model was made for, up to {longest}: \
             {shorter}give the model a `rope_scaling`"
        )
    })
}

/// Warns that a prompt, `sequence` ("the prompt has") of `tokens` tokens, exceeds the positions of
/// the model; none if it fits.
pub fn prompt_beyond_positions(config: &ModelConfig, sequence: &str, tokens: usize) -> Option<String> {
    let shorter = "give a shorter prompt or a smaller `--max-new-tokens`";
    beyond_positions(config, tokens, sequence, Some(shorter))
}

/// Warns of dropout inside the model, which the engine does not compute.
fn ignored_dropout(config: &ModelConfig) -> Option<String> {
    let keys = &config.dropouts;
    (!keys.is_empty()).then(|| {
        format!(
            "the model's config.json has {}: transformers drops values with this probability in training, finetune \
             drops none",
            keys.join(" and ")
        )
    })
}

/// Warns of a warm-up that is as long as the run or longer.
fn short_warm_up(schedule: &Schedule) -> Option<String> {
    let Schedule { total_steps, warmup_steps, learning_rate, .. } = *schedule;
    if !schedule.kind.has_warmup() || warmup_steps < total_steps {
        return None;
    }
    let highest = schedule.at(total_steps.saturating_sub(1));
    let of_run = format!("the {total_steps} steps");
    // A rate of 0 is refused elsewhere.
    (highest > 0.0).then(|| format!(
        "the warm-up of {warmup_steps} is not over in {of_run} of this run: the learning rate reaches {highest:.2e} of \
         {learning_rate:.2e}; write `scheduler.warmup_steps = 0`, or \
         train for more steps"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::SchedulerKind;

    fn said(kind: SchedulerKind, warmup_steps: u64, total_steps: u64) -> Option<String> {
        short_warm_up(&Schedule {
            kind,
            learning_rate: 1e-4,
            warmup_steps,
            total_steps,
            min_lr_ratio: 0.0,
            num_cycles: 1.0,
            power: 1.0,
            num_decay_steps: 0,
        })
    }

    #[test]
    fn a_warm_up_as_long_as_the_run_is_said() {
        assert_eq!(said(SchedulerKind::Cosine, 1, 1), None, "such a run is refused");
        let some = said(SchedulerKind::Linear, 8, 4).expect("a low rate");
        assert!(some.contains("reaches 3.75e-5 of 1.00e-4"), "{some}");
        assert_eq!(said(SchedulerKind::Cosine, 1, 2), None);
        assert_eq!(said(SchedulerKind::Cosine, 0, 1), None);
        assert_eq!(said(SchedulerKind::Constant, 1, 1), None);
    }
}
