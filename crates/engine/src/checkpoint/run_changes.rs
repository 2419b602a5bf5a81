//! The changes under which a run may continue from a checkpoint.
//!
//! A fingerprint holds the settings that determine the numbers of a run. A run may continue with
//! more steps, and with another split of a step into micro-batches. With `--allow-change` it may
//! also continue with another learning rate or schedule. Any other change makes a different run.

use std::collections::{BTreeMap, BTreeSet};

use super::{ACCUMULATION, SavedCheckpoint, TrainingState};
use crate::error::{Error, Result};
use crate::recipe::quoted_for_shell;

/// Recipe keys that may change if `--allow-change` names them.
pub const CHANGES_ON_REQUEST: [&str; 8] = [
    "optimizer.learning_rate",
    "scheduler.kind",
    "scheduler.warmup_steps",
    "scheduler.warmup_ratio",
    "scheduler.min_lr_ratio",
    "scheduler.num_cycles",
    "scheduler.power",
    "scheduler.num_decay_steps",
];
/// Optimizer steps of the whole run; not a recipe key.
const STEPS: &str = "steps";
/// Recipe keys that determine [`STEPS`].
const LENGTH: [&str; 2] = ["train.epochs", "train.max_steps"];
/// Number of rows in a micro-batch.
pub(super) const MICRO_BATCH: &str = "train.micro_batch_size";
/// The digest of the tokenized training rows; not a recipe key.
const DATA: &str = "data";
/// Tokens of the longest row.
const MAX_SEQ_LEN: &str = "data.max_seq_len";

type Fingerprint = BTreeMap<String, String>;

/// A difference between the fingerprints of a saved run and of the run that continues it.
struct RunDifference<'a> {
    key: &'a str,
    then: Option<&'a str>,
    now: Option<&'a str>,
}

impl RunDifference<'_> {
    fn in_words(&self) -> String {
        if self.key == DATA {
            return "the training rows differ from those of the checkpoint".to_owned();
        }
        let shown = |value: Option<&str>| value.unwrap_or("nothing").to_owned();
        format!("{}: {} in the checkpoint, {} now", self.key, shown(self.then), shown(self.now))
    }
}

fn differences<'a>(then: &'a Fingerprint, now: &'a Fingerprint) -> Vec<RunDifference<'a>> {
    let keys: BTreeSet<&String> = then.keys().chain(now.keys()).collect();
    let changes = keys.into_iter().map(|key| RunDifference {
        key,
        then: then.get(key).map(String::as_str),
        now: now.get(key).map(String::as_str),
    });
    changes.filter(|difference| difference.then != difference.now).collect()
}

/// A number of a fingerprint.
fn number(fingerprint: &Fingerprint, key: &str) -> Option<u64> {
    fingerprint.get(key)?.parse().ok()
}

/// Returns the rows, or bins of rows, of a step.
pub(super) fn rows(fingerprint: &Fingerprint) -> Option<u64> {
    number(fingerprint, MICRO_BATCH)?.checked_mul(number(fingerprint, ACCUMULATION)?)
}

/// Returns whether a run of the fingerprint `then` may continue as one of `now`, as far as `key` is
/// concerned.
fn goes_on(key: &str, then: &Fingerprint, now: &Fingerprint) -> bool {
    if key == STEPS || LENGTH.contains(&key) {
        let steps = number(then, STEPS).zip(number(now, STEPS));
        return steps.is_some_and(|(then, now)| then <= now);
    }
    [MICRO_BATCH, ACCUMULATION].contains(&key) && rows(then).is_some() && rows(then) == rows(now)
}

impl TrainingState {
    /// Returns the rows of a micro-batch, if this checkpoint records them.
    pub fn micro_batch_size(&self) -> Option<usize> {
        self.fingerprint.get(MICRO_BATCH)?.parse().ok()
    }

    /// Returns the most tokens of a row, if this checkpoint records them.
    pub fn max_seq_len(&self) -> Option<usize> {
        self.fingerprint.get(MAX_SEQ_LEN)?.parse().ok()
    }

    /// Returns whether the run of `later` may have continued from here, perhaps with permitted
    /// changes.
    pub(super) fn is_earlier_of(&self, later: &TrainingState) -> bool {
        let (then, now) = (&self.fingerprint, &later.fingerprint);
        differences(then, now)
            .iter()
            .all(|change| goes_on(change.key, then, now) || CHANGES_ON_REQUEST.contains(&change.key))
    }
}

impl SavedCheckpoint {
    /// Refuses to continue as a different run. Returns the permitted differences as messages. The
    /// keys in `allowed` may differ.
    ///
    /// # Errors
    /// User: names every difference between the saved run and `current` that is not permitted.
    pub fn check_same_run(&self, current: &Fingerprint, allowed: &[String]) -> Result<Vec<String>> {
        let then = &self.state.fingerprint;
        let is_allowed = |key: &str| allowed.iter().any(|allowed| allowed == key);
        let (changes, refused): (Vec<_>, Vec<_>) = differences(then, current)
            .into_iter()
            .partition(|change| goes_on(change.key, then, current) || is_allowed(change.key));
        if refused.is_empty() {
            return Ok(changes.iter().map(RunDifference::in_words).collect());
        }
        let error = Error::user(format!("cannot resume {}", self.folder.display()));
        let mut error = refused.iter().map(RunDifference::in_words).fold(error, Error::because);
        if let (Some(rows), true) = (rows(then), refused.iter().any(|change| change.key == MICRO_BATCH)) {
            error = error.because(format!(
                "a step has {rows} rows; accepted: micro-batches that add up to {rows} rows over all ranks"
            ));
        }
        let (on_request, others): (Vec<&str>, Vec<&str>) =
            refused.iter().map(|change| change.key).partition(|key| CHANGES_ON_REQUEST.contains(key));
        let flags: Vec<String> = on_request.iter().map(|key| format!("`--allow-change {key}`")).collect();
        let anew =
            "resume with the recipe, model and data of the first run, or start anew with another --output";
        Err(error.hint(match (flags.as_slice(), others.as_slice()) {
            ([], [DATA]) => {
                format!("{anew}; to go on with the new rows: `{} --output more`", self.as_a_start())
            }
            ([], _) => anew.to_owned(),
            (flags, []) => format!("add {} to accept the change; otherwise {anew}", flags.join(" ")),
            (flags, _) => format!("{anew}; add {} to accept that change", flags.join(" ")),
        }))
    }

    /// Returns the flags that start another run from the weights of this checkpoint.
    fn as_a_start(&self) -> String {
        let has_adapter = self.state.fingerprint.keys().any(|key| key.starts_with("adapter."));
        let folder = quoted_for_shell(&self.folder.display().to_string());
        if has_adapter { format!("--set adapter.path={folder}") } else { format!("--model {folder}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(changes: &[(&str, &str)]) -> Fingerprint {
        let plain = [
            ("adapter.r", "16"),
            ("optimizer.learning_rate", "0.1"),
            ("scheduler.kind", "\"cosine\""),
            ("steps", "4"),
            ("train.epochs", "1.0"),
            ("train.gradient_accumulation_steps", "4"),
            ("train.micro_batch_size", "2"),
        ];
        plain.iter().chain(changes).map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn may(changes: &[(&str, &str)]) -> bool {
        let (then, now) = (fingerprint(&[]), fingerprint(changes));
        differences(&then, &now).iter().all(|change| goes_on(change.key, &then, &now))
    }

    #[test]
    fn what_goes_on_without_a_word() {
        assert!(may(&[]));
        assert!(may(&[("steps", "8"), ("train.epochs", "2.0")]));
        assert!(may(&[("train.max_steps", "4")]), "other words for as many steps");
        assert!(may(&[("train.micro_batch_size", "1"), ("train.gradient_accumulation_steps", "8")]));
        assert!(may(&[("train.micro_batch_size", "8"), ("train.gradient_accumulation_steps", "1")]));
        for refused in [
            [("steps", "3"), ("train.epochs", "0.7")],
            [("train.micro_batch_size", "1"), ("steps", "4")],
            [("train.micro_batch_size", "2"), ("train.gradient_accumulation_steps", "8")],
            [("optimizer.learning_rate", "0.2"), ("steps", "8")],
            [("adapter.r", "8"), ("steps", "8")],
            [("new.key", "8"), ("steps", "8")],
        ] {
            assert!(!may(&refused), "{refused:?}");
        }
    }
}
