//! What may be other than it was when a run goes on from a checkpoint, and what may not.
//!
//! A fingerprint holds what decides the numbers of a run. More steps go on, and so does the same step split otherwise into
//! micro-batches; the learning rate and its schedule where that is asked for (`--allow-change`). Anything else would be
//! another run.

use std::collections::{BTreeMap, BTreeSet};

use super::{ACCUMULATION, SavedCheckpoint, TrainingState};
use crate::error::{Error, Result};
use crate::recipe::quoted_for_shell;

/// Keys of a recipe that may change where `--allow-change` names them.
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
/// Optimizer steps of the whole run; not a key of a recipe.
const STEPS: &str = "steps";
/// Keys of a recipe that come to [`STEPS`].
const LENGTH: [&str; 2] = ["train.epochs", "train.max_steps"];
/// Rows that go through the model at once.
pub(super) const MICRO_BATCH: &str = "train.micro_batch_size";
/// The digest of the training rows as tokens; not a key of a recipe.
const DATA: &str = "data";
/// Tokens of the longest row.
const MAX_SEQ_LEN: &str = "data.max_seq_len";

type Fingerprint = BTreeMap<String, String>;

/// What differs between the fingerprints of a saved run and of the one that goes on from it.
struct RunDifference<'a> {
    key: &'a str,
    then: Option<&'a str>,
    now: Option<&'a str>,
}

impl RunDifference<'_> {
    fn in_words(&self) -> String {
        if self.key == DATA {
            return "the training rows are others than in the first run".to_owned();
        }
        let shown = |value: Option<&str>| value.unwrap_or("nothing").to_owned();
        format!("{}: {} in the checkpoint, {} now", self.key, shown(self.then), shown(self.now))
    }
}

fn differences<'a>(then: &'a Fingerprint, now: &'a Fingerprint) -> Vec<RunDifference<'a>> {
    let keys: BTreeSet<&String> = then.keys().chain(now.keys()).collect();
    let found = keys.into_iter().map(|key| RunDifference {
        key,
        then: then.get(key).map(String::as_str),
        now: now.get(key).map(String::as_str),
    });
    found.filter(|difference| difference.then != difference.now).collect()
}

/// A number of a fingerprint.
fn number(fingerprint: &Fingerprint, key: &str) -> Option<u64> {
    fingerprint.get(key)?.parse().ok()
}

/// Rows, or bins of them, that a step learns from.
pub(super) fn rows(fingerprint: &Fingerprint) -> Option<u64> {
    number(fingerprint, MICRO_BATCH)?.checked_mul(number(fingerprint, ACCUMULATION)?)
}

/// Whether a run of the fingerprint `then` may go on as one of `now` for all that is said by `key`.
fn goes_on(key: &str, then: &Fingerprint, now: &Fingerprint) -> bool {
    let same_or_both = |one: Option<u64>, other: Option<u64>, fits: fn(u64, u64) -> bool| {
        one.zip(other).is_some_and(|(one, other)| fits(one, other))
    };
    if key == STEPS || LENGTH.contains(&key) {
        return same_or_both(number(then, STEPS), number(now, STEPS), |then, now| then <= now);
    }
    [MICRO_BATCH, ACCUMULATION].contains(&key) && same_or_both(rows(then), rows(now), |then, now| then == now)
}

impl TrainingState {
    /// Rows of a micro-batch, where this checkpoint says it.
    pub fn micro_batch_size(&self) -> Option<usize> {
        self.fingerprint.get(MICRO_BATCH)?.parse().ok()
    }

    /// The most tokens of a row, where this checkpoint says it.
    pub fn max_seq_len(&self) -> Option<usize> {
        self.fingerprint.get(MAX_SEQ_LEN)?.parse().ok()
    }

    /// Whether the run of `later` may have come from here, perhaps with changes under which a run goes on.
    pub(super) fn is_earlier_of(&self, later: &TrainingState) -> bool {
        let (then, now) = (&self.fingerprint, &later.fingerprint);
        differences(then, now)
            .iter()
            .all(|found| goes_on(found.key, then, now) || CHANGES_ON_REQUEST.contains(&found.key))
    }
}

impl SavedCheckpoint {
    /// Refuses to go on as a different run; else what goes on otherwise than it was, in words. The keys in `allowed` may
    /// be other than they were.
    ///
    /// # Errors
    /// The user's: names every difference between the saved run and `current` under which it does not go on.
    pub fn check_same_run(&self, current: &Fingerprint, allowed: &[String]) -> Result<Vec<String>> {
        let then = &self.state.fingerprint;
        let is_allowed = |key: &str| allowed.iter().any(|allowed| allowed == key);
        let (changes, refused): (Vec<_>, Vec<_>) = differences(then, current)
            .into_iter()
            .partition(|found| goes_on(found.key, then, current) || is_allowed(found.key));
        if refused.is_empty() {
            return Ok(changes.iter().map(RunDifference::in_words).collect());
        }
        let mut error = Error::user(format!("cannot resume {}", self.folder.display()));
        for found in &refused {
            error = error.because(found.in_words());
        }
        if let (Some(rows), true) = (rows(then), refused.iter().any(|found| found.key == MICRO_BATCH)) {
            error = error.because(format!(
                "a step has {rows} rows: accepted are micro-batch sizes whose number on all ranks makes that many"
            ));
        }
        let (on_request, others): (Vec<&str>, Vec<&str>) =
            refused.iter().map(|found| found.key).partition(|key| CHANGES_ON_REQUEST.contains(key));
        let flags: Vec<String> = on_request.iter().map(|key| format!("`--allow-change {key}`")).collect();
        let anew =
            "resume with the recipe, model and data of the first run, or start anew with another --output";
        Err(error.hint(match (flags.as_slice(), others.as_slice()) {
            ([], [DATA]) => {
                format!("{anew}; to go on with the new rows: `{} --output more`", self.as_a_start())
            }
            ([], _) => anew.to_owned(),
            (flags, []) => format!("{} goes on all the same; else {anew}", flags.join(" ")),
            (flags, _) => format!("{anew}; {} allows its change", flags.join(" ")),
        }))
    }

    /// The flags with which another run starts from the weights of this checkpoint.
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
        differences(&then, &now).iter().all(|found| goes_on(found.key, &then, &now))
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
