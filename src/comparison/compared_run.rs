//! One run of a comparison, read from its output folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::checkpoint::RunRecord;
use crate::error::{Error, Result, input_file};
use crate::recipe::Recipe;
use crate::report::metrics::{self, EvalReport, MetricsEntry, StepReport};
use crate::training::output_folder::{METRICS, RECIPE};

/// A run with the entries of its metrics.jsonl.
pub(crate) struct ComparedRun {
    /// Name in tables: the last part of the folder's path if it is unique, else the path.
    pub(crate) name: String,
    /// Output folder as the user typed it.
    pub(crate) folder: PathBuf,
    /// Values of recipe.toml with the defaults of absent keys, by `section.key`.
    pub(crate) recipe: BTreeMap<String, String>,
    /// Lines of metrics.jsonl.
    pub(crate) entries: Vec<MetricsEntry>,
    /// True if the run has ended by itself (all its steps, or `eval.patience`) and its result is
    /// whole.
    pub(crate) is_complete: bool,
}

impl ComparedRun {
    /// Reads the run in `folder`.
    ///
    /// # Errors
    /// The user's: `folder` is no output folder of a run, or its recipe.toml is no recipe. Storage:
    /// a file cannot be read.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let log = folder.join(METRICS);
        let record = RunRecord::read(folder)?;
        let has_log = log.is_file();
        let entries = if has_log { metrics::read(&log)? } else { Vec::new() };
        // A folder without a record belongs to a run if it has a log.
        if record.is_none() && (entries.is_empty() || !folder.join(RECIPE).is_file()) {
            return Err(no_run(folder, has_log, !entries.is_empty()));
        }
        let is_complete = record.is_some_and(|record| record.completed && record.is_finished(folder));
        let recipe = read_recipe(&folder.join(RECIPE))?;
        let name = folder
            .file_name()
            .map_or_else(|| folder.display().to_string(), |name| name.to_string_lossy().into_owned());
        Ok(ComparedRun { name, folder: folder.to_owned(), recipe, entries, is_complete })
    }

    fn steps(&self) -> impl DoubleEndedIterator<Item = &StepReport> {
        self.entries.iter().filter_map(|entry| match entry {
            MetricsEntry::Step(report) => Some(report),
            _ => None,
        })
    }

    fn evals(&self) -> impl DoubleEndedIterator<Item = &EvalReport> {
        self.entries.iter().filter_map(|entry| match entry {
            MetricsEntry::Eval(report) => Some(report),
            _ => None,
        })
    }

    /// Returns the number of completed optimizer steps.
    pub(crate) fn steps_done(&self) -> u64 {
        self.steps().next_back().map_or(0, |report| report.step)
    }

    /// Returns the loss of the last step, in nats per token.
    pub(crate) fn training_loss(&self) -> Option<f64> {
        self.steps().next_back().map(|report| report.loss)
    }

    /// Returns the evaluation before the first step.
    pub(crate) fn before(&self) -> Option<&EvalReport> {
        self.evals().find(|report| report.step == 0)
    }

    /// Returns the evaluation with the lowest loss after the first step; the first of equal ones.
    pub(crate) fn best(&self) -> Option<&EvalReport> {
        let after = self.evals().filter(|report| report.step > 0);
        after.min_by(|one, other| one.eval_loss.total_cmp(&other.eval_loss))
    }

    /// Returns the last evaluation after the first step.
    pub(crate) fn last(&self) -> Option<&EvalReport> {
        self.evals().rfind(|report| report.step > 0)
    }

    /// Returns the fraction of held-out rows, 0 to 1, with an exact answer in the last evaluation
    /// that has this figure.
    pub(crate) fn exact_match(&self) -> Option<f64> {
        self.evals().rev().find_map(|report| report.eval_exact_match)
    }

    /// Returns the seconds of all steps with their saves, without loading and evaluations.
    pub(crate) fn secs(&self) -> f64 {
        // Logs of older versions have no parts of a step.
        let secs = self.steps().map(|report| match report.all_parts() {
            parts if parts > 0.0 => parts,
            _ => report.step_secs,
        });
        secs.filter(|secs| secs.is_finite()).sum()
    }

    /// Returns the peak memory of the run in bytes.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.steps().map(|report| report.peak_bytes).max().unwrap_or(0)
    }

    /// Returns whether the recipe has a table of this name.
    pub(crate) fn has_section(&self, name: &str) -> bool {
        self.recipe.keys().any(|key| key.split_once('.').is_some_and(|(section, _)| section == name))
    }

    /// Returns the evaluation of the resulting weights: the best one if the recipe keeps the best
    /// weights, else the last.
    pub(crate) fn result_eval(&self) -> Option<&EvalReport> {
        let keys = ["eval.keep_best", "eval.patience"];
        let keeps_best = keys.iter().any(|key| self.recipe.get(*key).is_some_and(|value| value != "false"));
        if keeps_best { self.best() } else { self.last() }
    }
}

/// Returns the values of a run's recipe.toml; none if the run has not written it yet.
fn read_recipe(path: &Path) -> Result<BTreeMap<String, String>> {
    if !path.is_file() {
        return Ok(BTreeMap::new());
    }
    let text = input_file::read_text("read", path)?;
    let mut values = Recipe::values_of(&text).ok_or_else(|| {
        Error::user(format!("cannot read {}", path.display()))
            .because("it is no recipe; accepted: TOML tables of keys, as every run leaves them")
            .hint("compare the run without this file, or with the one that the run wrote")
    })?;
    Recipe::add_defaults(&mut values);
    Ok(values)
}

/// Returns the error for a folder without a run's record: `has_log` if it has a metrics.jsonl,
/// `has_lines` if that has lines of a run.
fn no_run(folder: &Path, has_log: bool, has_lines: bool) -> Error {
    let error = Error::user(format!("cannot compare {}", folder.display()));
    let error = match folder.metadata() {
        Err(io_error) if io_error.kind() == std::io::ErrorKind::NotFound => {
            error.because("there is no such folder")
        }
        Err(io_error) => error.because(io_error.to_string()),
        Ok(metadata) if !metadata.is_dir() => error.because("it is a file"),
        Ok(_) if has_log => {
            let no_lines = (!has_lines).then(|| format!("its {METRICS} has no line of a run"));
            let no_recipe = (!folder.join(RECIPE).is_file()).then(|| format!("it holds no {RECIPE}"));
            no_lines.into_iter().chain(no_recipe).fold(error, Error::because)
        }
        Ok(_) => error.because(format!("it holds neither .finetune/run.json nor {METRICS}")),
    };
    error
        .because("accepted: output folders of training runs, as `--output` named them")
        .hint("name folders that hold metrics.jsonl, such as `finetune compare out/r4 out/r8`")
}
