//! Log-probabilities of a preference run's reference, computed before the first step and kept in
//! the output folder for a resume.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::checkpoint::{RunFolder, RunRecord};
use crate::collective::{Collective, Phase};
use crate::data::{self, Batch, Dataset, ExampleSource as _};
use crate::engine::{Reference, ReferenceLogProbs, Trainer};
use crate::error::{Error, Result, input_file};
use crate::planning::Plan;
use crate::report::Terminal;

/// Log-probabilities of the reference, in the output folder.
pub(crate) const REFERENCE: &str = "reference_log_probs.json";

/// Sections of a fingerprint that the log-probabilities depend on.
const SECTIONS: [&str; 6] = ["adapter", "data", "model", "objective", "quantization", "tokenizer"];

/// The file's contents.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredReference {
    /// Digest of the model's settings and of the rows for training.
    fingerprint: String,
    /// Digest of the held-out rows; empty without any.
    held_out_rows: String,
    /// The log-probability of each example for training.
    train: Vec<f64>,
    /// Those of the held-out examples.
    held_out: Vec<f64>,
}

impl StoredReference {
    /// Describes the run of `plan`, without log-probabilities.
    fn describe(plan: &Plan) -> Self {
        let facts = plan.fingerprint().into_iter();
        let section = |key: &str| key.split_once('.').map_or(key, |(section, _)| section).to_owned();
        let facts: BTreeMap<String, String> =
            facts.filter(|(key, _)| SECTIONS.contains(&section(key).as_str())).collect();
        let digest = |rows: &Dataset| rows.digest().to_hex().to_string();
        StoredReference {
            fingerprint: RunRecord::digest(&facts),
            held_out_rows: plan
                .held_out
                .as_ref()
                .map(|held_out| digest(&held_out.dataset))
                .unwrap_or_default(),
            train: Vec::new(),
            held_out: Vec::new(),
        }
    }

    /// Reads the file in `folder`, if there is one, for a run with the description `wanted`.
    fn read(folder: &Path, wanted: &Self) -> Result<Option<Self>> {
        let path = folder.join(REFERENCE);
        if !path.is_file() {
            return Ok(None);
        }
        let unusable = |why: String| {
            Error::user(format!("cannot use {}", path.display())).because(why).hint(
                "restore the file of this run and the data set that it was computed from, or start again in a new folder with `--output`",
            )
        };
        let stored: StoredReference = serde_json::from_str(&input_file::read_text("read", &path)?)
            .map_err(|error| unusable(format!("it holds no log-probabilities of a reference: {error}")))?;
        if stored.fingerprint != wanted.fingerprint {
            return Err(unusable("it was computed with another model or from other training rows".into()));
        }
        if stored.held_out_rows != wanted.held_out_rows {
            return Err(unusable("it was computed from other held-out rows".into()));
        }
        Ok(Some(stored))
    }
}

/// Returns whether the run of `plan` computes the log-probabilities of its reference first.
pub(crate) fn is_precomputed(plan: &Plan) -> bool {
    plan.recipe.objective.has_reference() && plan.recipe.objective.precompute_ref_log_probs
}

/// The run that the log-probabilities belong to.
pub(super) struct ReferenceRun<'a> {
    pub(super) plan: &'a Plan,
    /// The folder with those of an earlier part of the run: that of the checkpoint to resume, or
    /// the output folder.
    pub(super) from: &'a Path,
    /// True if the run resumes from a checkpoint.
    pub(super) is_resumed: bool,
    /// The output folder, in the process of the first rank.
    pub(super) folder: Option<&'a RunFolder>,
    pub(super) terminal: &'a Terminal,
}

/// Returns the trainer with the log-probabilities of its reference, if the recipe precomputes them:
/// those of an earlier part of the run, or those of the model as it is now, before the first step.
/// All ranks call it.
///
/// # Errors
/// User: the run resumes, and its file is missing or belongs to other rows or another model.
/// Storage: the file cannot be written. A tensor operation failed; a peer failed.
pub(super) fn with_reference(
    run: &ReferenceRun<'_>,
    trainer: Trainer,
    world: &dyn Collective,
) -> Result<Trainer> {
    let ReferenceRun { plan, from, .. } = *run;
    if !is_precomputed(plan) {
        return Ok(trainer);
    }
    world.enter(Phase::Evaluate)?;
    let first = world.rank() == 0;
    let mut reference = StoredReference::describe(plan);
    let stored = if first { StoredReference::read(from, &reference)? } else { None };
    if first && stored.is_none() && run.is_resumed {
        return Err(Error::user(format!("cannot resume from {}", from.display()))
            .because(format!("{REFERENCE}, which has the log-probabilities of the reference, is missing"))
            .hint("restore the file, or start again in a new folder with `--output`"));
    }
    // All ranks learn together whether the first one has read the file.
    let mut has_read = [f64::from(u8::from(stored.is_some()))];
    trainer.engine.store.sum("reference read", &mut has_read)?;
    if has_read[0] > 0.0 {
        let (train, held_out) = stored.map(|stored| (stored.train, stored.held_out)).unwrap_or_default();
        reference.train = broadcast(&trainer, train, plan.train.dataset.len())?;
        reference.held_out = broadcast(&trainer, held_out, num_held_out(plan))?;
    } else {
        let show = |done, total| {
            if first {
                run.terminal.detail(format!("reference: {done} of {total} samples"));
            }
        };
        ReferenceLogProbs { train: reference.train, held_out: reference.held_out } =
            reference_log_probs(plan, &trainer, show)?;
    }
    if let (Some(folder), true) = (run.folder, first) {
        let text = serde_json::to_string(&reference)
            .map_err(|error| Error::internal("cannot write log-probabilities").because(error.to_string()))?;
        folder.write_text(REFERENCE, &(text + "\n"))?;
    }
    let StoredReference { train, held_out, .. } = reference;
    Ok(trainer.with_reference(Reference::Precomputed(ReferenceLogProbs { train, held_out })))
}

fn num_held_out(plan: &Plan) -> usize {
    plan.held_out.as_ref().map_or(0, |held_out| held_out.dataset.len())
}

/// Sends values of the first rank to all: the others have none.
fn broadcast(trainer: &Trainer, mut values: Vec<f64>, len: usize) -> Result<Vec<f64>> {
    values.resize(len, 0.0);
    trainer.engine.store.sum("log-probabilities of the reference", &mut values)?;
    Ok(values)
}

/// Computes the log-probabilities of all samples of a plan under the model as it is now. Calls
/// `seen` with the numbers of samples done and of all. All ranks call it.
///
/// # Errors
/// A tensor operation failed; a peer failed.
pub(crate) fn reference_log_probs(
    plan: &Plan,
    trainer: &Trainer,
    seen: impl Fn(u64, usize),
) -> Result<ReferenceLogProbs> {
    let of_rows = |rows: &Dataset| {
        trainer.reference_log_probs(&batches_in_order(plan, rows), rows.len(), |done| seen(done, rows.len()))
    };
    let held_out = plan.held_out.as_ref().map(|held_out| of_rows(&held_out.dataset)).transpose()?;
    Ok(ReferenceLogProbs { train: of_rows(&plan.train.dataset)?, held_out: held_out.unwrap_or_default() })
}

/// Returns micro-batches of all examples in order, as large as those of the run.
pub(crate) fn batches_in_order(plan: &Plan, rows: &Dataset) -> Vec<Batch> {
    let tokens = plan.recipe.train.micro_batch_rows() * plan.recipe.longest_group();
    data::batch::in_order(rows.examples(), tokens).collect()
}
