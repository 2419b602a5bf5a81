//! Output folder of a training run: the checkpoint to resume from, the right to write there, and
//! the lock.
//!
//! A folder belongs to a run by its record (`.finetune/run.json`). Folders of old versions, which
//! wrote no record, are recognised by an intact checkpoint: its manifest and digests match. Their
//! other files belong to the run by their contents: recipe.toml if it has every key of the
//! checkpoint, metrics.jsonl if it is empty or has a line of a run, README.md if it names this
//! program as its author, and beside such a recipe.toml the files that the checkpoint has too.

use std::path::Path;

use chrono::{DateTime, FixedOffset};

use super::alerts::ALERTS;
use super::reference::{REFERENCE, is_precomputed};
use super::space;
use crate::checkpoint::{self, RunFolder, RunRecord, SavedCheckpoint};
use crate::cli::TrainArgs;
use crate::error::{Error, ErrorCategory, Result, input_file};
use crate::planning::Plan;
pub(crate) use crate::planning::RECIPE;
use crate::profile::{self, TraceSchedule};
use crate::recipe::Recipe;
use crate::report::Terminal;
use crate::report::metrics::{self, MetricsEntry};

/// Files that every run writes beside the weights.
const TEXTS: [&str; 4] = [RECIPE, METRICS, CARD, REPORT];
/// Log of the run, a line for each step.
pub(crate) const METRICS: &str = "metrics.jsonl";
/// Model card of the result.
pub(crate) const CARD: &str = "README.md";
/// Folder of TensorBoard's event files.
pub(crate) const TENSORBOARD: &str = "tensorboard";
/// Report of the run, an HTML page.
pub(crate) const REPORT: &str = "report.html";

/// Returns the last part of a path, which names a run, or files of this machine in title, front
/// matter and tables of a card; `otherwise` if the path has none.
pub(super) fn last_name(path: &Path, otherwise: &str) -> String {
    path.file_name().map_or_else(|| otherwise.to_owned(), |name| name.to_string_lossy().into_owned())
}

/// State of the output folder before the run is planned.
pub(crate) struct OutputFolder {
    /// Checkpoint to resume from.
    pub(crate) resumed: Option<SavedCheckpoint>,
    /// Record of the run that the folder belongs to.
    record: Option<RunRecord>,
    /// Lock of the folder, taken early if it holds a run to resume.
    claimed: Option<RunFolder>,
}

impl OutputFolder {
    /// Refuses the folder of a new run if it is not free. The folder of a run to resume is left to
    /// [`OutputFolder::prepare`].
    ///
    /// # Errors
    /// The folder is in use or not free.
    pub(crate) fn check_new(args: &TrainArgs) -> Result<()> {
        if args.resume.is_some() { Ok(()) } else { refuse_occupied(args.output()) }
    }

    /// Examines the output folder. Only the `first` process of the run locks it and refuses it.
    ///
    /// # Errors
    /// The run cannot resume from the folder of `--resume`, or not in this output folder; the
    /// folder is in use or not free.
    pub(crate) fn prepare(args: &TrainArgs, first: bool, terminal: &Terminal) -> Result<Self> {
        let output = args.output();
        let Some(from) = &args.resume else {
            if first {
                Self::check_new(args)?;
            }
            return Ok(OutputFolder { resumed: None, record: None, claimed: None });
        };
        // Locks first, so that no checkpoint appears or disappears afterwards.
        let is_run = holds_run(output)?;
        let claimed = (first && is_run).then(|| RunFolder::claim(output)).transpose()?;
        claimed.iter().flat_map(RunFolder::notes).for_each(|note| terminal.line(note));
        let record = RunRecord::read(output)?;
        let has_ended = record.as_ref().is_some_and(|record| record.is_finished(output));
        let folder_state =
            OutputFolder { resumed: find(from.as_deref(), output, terminal)?, record, claimed };
        if first {
            folder_state.refuse_other_runs(output)?;
        }
        if folder_state.resumed.is_none() && !has_ended {
            let folder = from.as_deref().unwrap_or(output).display();
            let text = format!("no checkpoint in {folder}: starting from the beginning");
            // The user expects a checkpoint in a folder that `--resume` names.
            if from.is_some() { terminal.warn(text) } else { terminal.line(text) }
        }
        Ok(folder_state)
    }

    /// Refuses to resume in a folder that does not belong to the run.
    fn refuse_other_runs(&self, output: &Path) -> Result<()> {
        if RunFolder::is_free(output)? {
            return Ok(());
        }
        let (shown, record) = (output.display(), self.record.as_ref());
        let Some(saved) = &self.resumed else {
            if record.is_none() {
                return Err(Error::user(format!("cannot resume in {shown}"))
                    .because("the folder belongs to no run of finetune: it has neither .finetune/run.json nor an intact checkpoint")
                    .hint("give a new folder with `--output`"));
            }
            return record
                .filter(|record| record.is_finished(output) && !record.missing(output).is_empty())
                .map_or(Ok(()), |record| Err(ended(output, record)));
        };
        if lies_in(saved, output) {
            return Ok(());
        }
        // This run resumed from the checkpoint and was killed before it saved its own.
        if let Some(from) = record.and_then(|record| record.resumed_from.as_ref())
            && *from == saved.digest()?
            && !checkpoint::has_any(output)?
        {
            return Ok(());
        }
        let what = match record {
            Some(record) => format!("{shown} holds another run, started {}", record.started),
            None => format!("{shown} is not empty"),
        };
        let own = saved.folder.parent().unwrap_or(Path::new(".")).display();
        Err(Error::user(format!("cannot resume from {} in {shown}", saved.folder.display()))
            .because(what)
            .hint(format!(
                "give a new folder with `--output`, or `--output {own}` to resume in the run's own folder"
            )))
    }

    /// Returns whether the run of `plan` is complete: its whole result is here, with no checkpoint
    /// or one of its last step.
    ///
    /// # Errors
    /// The folder holds the result of another run.
    pub(crate) fn has_ended(&self, plan: &Plan, output: &Path) -> Result<bool> {
        if let (Some(saved), Some(record)) = (&self.resumed, &self.record) {
            let same = record.plan == RunRecord::digest(&plan.fingerprint()) && lies_in(saved, output);
            let is_whole = record.completed && record.is_finished(output) && record.is_as_written(output)?;
            let is_last = saved.state.step >= plan.total_steps
                || saved.state.is_out_of_patience(plan.recipe.eval.patience);
            return Ok(same && is_whole && is_last && evaluated(plan, output, saved.state.step));
        }
        let ended_here =
            self.record.as_ref().filter(|record| self.resumed.is_none() && record.is_finished(output));
        match ended_here {
            Some(record) if record.plan == RunRecord::digest(&plan.fingerprint()) => Ok(true),
            Some(record) => Err(ended(output, record)),
            None => Ok(false),
        }
    }

    /// Returns the date that the run passed to its chat template, if the run to resume recorded
    /// one.
    ///
    /// # Errors
    /// The recorded text is no date.
    pub(crate) fn date(&self) -> Result<Option<DateTime<FixedOffset>>> {
        let recorded = match &self.resumed {
            Some(saved) => saved.state.chat_template_date.as_deref(),
            None => self.record.as_ref().and_then(|record| record.chat_template_date.as_deref()),
        };
        recorded.map(parse_date).transpose()
    }

    /// Locks the folder for the run of `plan`, which resumes from `resumed`, and checks that the
    /// run may write there. Returns the lock and the first record. Called after all processes of
    /// the run have joined.
    ///
    /// # Errors
    /// The folder is in use, or holds files that the run would overwrite.
    pub(crate) fn claim(
        self,
        args: &TrainArgs,
        plan: &Plan,
        resumed: Option<&SavedCheckpoint>,
    ) -> Result<(RunFolder, RunRecord)> {
        let output = args.output();
        let folder = match self.claimed {
            Some(folder) => folder,
            None => {
                let folder = RunFolder::claim(output)?;
                // Another run may have used the folder while this one was planned.
                if RunFolder::is_free(output)? { folder } else { return Err(not_free(output)) }
            }
        };
        let fingerprint = plan.fingerprint();
        if let (Some(record), None) = (&self.record, resumed)
            && record.plan != RunRecord::digest(&fingerprint)
        {
            return Err(Error::user(format!("cannot start over in {}", output.display()))
                .because(format!(
                    "the folder belongs to another run, started {}, which left no checkpoint",
                    record.started
                ))
                .hint("give a new folder with `--output`"));
        }
        let mut record = match (self.record, resumed) {
            (Some(record), _) => record,
            (None, Some(saved)) if lies_in(saved, output) => adopted(output, saved, &fingerprint)?,
            (None, from) => {
                let resumed_from = from.map(SavedCheckpoint::digest).transpose()?;
                let mut record = RunRecord::new(&fingerprint)?;
                record.resumed_from = resumed_from;
                record
            }
        };
        record.plan = RunRecord::digest(&fingerprint);
        record.completed = false;
        record.sources = plan.commits();
        record.chat_template_date = plan.dataset_loader.date().map(|date| date.to_rfc3339());
        folder.refuse_links(&added_to(&plan.recipe))?;
        refuse_foreign(&folder, &record, (plan, output), resumed)?;
        let what = format!("cannot train into {}", output.display());
        folder.require_room(space::needed(plan, output, resumed)?, &what)?;
        Ok((folder, record))
    }
}

/// Returns whether the log in `output` has the evaluation after `step`, the last step of `plan`, if
/// the plan has one.
fn evaluated(plan: &Plan, output: &Path, step: u64) -> bool {
    let wanted = plan.held_out.is_some() && plan.recipe.eval.at_end;
    let is_last = |entry: &MetricsEntry| matches!(entry, MetricsEntry::Eval(_)) && entry.step() == step;
    !wanted || metrics::read(&output.join(METRICS)).is_ok_and(|entries| entries.iter().any(is_last))
}

/// Parses the date of a record: RFC 3339.
///
/// # Errors
/// The text is no date.
pub(crate) fn parse_date(text: &str) -> Result<DateTime<FixedOffset>> {
    DateTime::parse_from_rfc3339(text).map_err(|e| {
        Error::user("cannot resume with the recorded date of the chat template")
            .because(format!("the date is `{text}`: {e}; accepted: a date such as 2026-01-31T12:00:00+00:00"))
    })
}

/// Returns whether the folder has the record or a checkpoint of a run.
fn holds_run(output: &Path) -> Result<bool> {
    Ok(RunRecord::read(output)?.is_some() || checkpoint::has_any(output)?)
}

/// Returns the checkpoint that `--resume` names, and warns about checkpoints that it skips.
fn find(from: Option<&Path>, output: &Path, terminal: &Terminal) -> Result<Option<SavedCheckpoint>> {
    let (saved, passed) = match from {
        Some(folder) if checkpoint::is_one(folder) => (Some(SavedCheckpoint::open(folder)?), Vec::new()),
        Some(folder) => checkpoint::newest(folder)?,
        None => checkpoint::newest(output)?,
    };
    match &saved {
        Some(saved) => {
            passed.iter().for_each(|text| terminal.warn(format!("{text}; skipped")));
            terminal.line(format!("resuming from {}", saved.folder.display()));
        }
        None if !passed.is_empty() => {
            let error = Error::user(format!("cannot resume from {}", from.unwrap_or(output).display()));
            return Err(passed
                .into_iter()
                .fold(error, Error::because)
                .hint("start again in a new folder, with `--output`"));
        }
        None => {}
    }
    Ok(saved)
}

/// Returns whether a checkpoint is directly in the folder `output`, or is a link in it or into it.
pub(crate) fn lies_in(saved: &SavedCheckpoint, output: &Path) -> bool {
    let Ok(output) = output.canonicalize() else { return false };
    let parent = |folder: &Path| folder.parent().map(Path::to_owned);
    let linked = saved.folder.canonicalize().ok().and_then(|folder| parent(&folder));
    let named = parent(&saved.folder).and_then(|folder| Path::new(".").join(folder).canonicalize().ok());
    [linked, named].into_iter().flatten().any(|folder| folder == output)
}

/// Refuses a folder that a new run cannot use. If a run is active in it, the error names that run.
fn refuse_occupied(output: &Path) -> Result<()> {
    if RunFolder::is_free(output)? {
        return Ok(());
    }
    if RunFolder::has_lock(output) {
        drop(RunFolder::claim(output)?);
    }
    Err(not_free(output))
}

/// Returns the error for a run that has ended without a checkpoint to resume from.
fn ended(output: &Path, record: &RunRecord) -> Error {
    let error = Error::user(format!("cannot resume in {}", output.display()))
        .because("the run has ended, and left no checkpoint to resume from");
    let missing = record.missing(output);
    if missing.is_empty() {
        return error.hint("its result is complete; to train again, give a new folder with `--output`");
    }
    let lost = format!("its result is incomplete, without {}", missing.join(", "));
    error.because(lost).hint(
        "restore the missing files, or train again into a new folder with `--output`; with checkpoints (`checkpoint.save_steps`) `--resume` can write the result again",
    )
}

fn not_free(output: &Path) -> Error {
    // `--resume` names the error of an unreadable record.
    let hint = if holds_run(output).unwrap_or(true) {
        "give a new folder with `--output`, or `--resume` to go on with the run in this one"
    } else {
        "give a new or empty folder with `--output`"
    };
    Error::user(format!("cannot write to {}", output.display())).because("the folder is not empty").hint(hint)
}

/// Refuses to overwrite files that the run did not write.
fn refuse_foreign(
    folder: &RunFolder,
    record: &RunRecord,
    (plan, output): (&Plan, &Path),
    resumed: Option<&SavedCheckpoint>,
) -> Result<()> {
    let mut names: Vec<String> = TEXTS.map(String::from).into();
    names.extend(is_precomputed(plan).then(|| REFERENCE.to_owned()));
    names.extend(resumed.map(SavedCheckpoint::result_names).transpose()?.unwrap_or_default());
    let foreign_files = folder.foreign(record, &names)?;
    if foreign_files.is_empty() {
        return Ok(());
    }
    let error = Error::user(format!("cannot train in {}", output.display()));
    let why = |name: String| format!("{name} would be overwritten, and is not the file that the run wrote");
    let error = foreign_files.into_iter().map(why).fold(error, Error::because);
    Err(error.hint("move it to another folder, or give a new one with `--output`"))
}

/// Creates a record for the folder of a run without one, whose checkpoint is `saved`.
fn adopted(
    output: &Path,
    saved: &SavedCheckpoint,
    fingerprint: &std::collections::BTreeMap<String, String>,
) -> Result<RunRecord> {
    let mut record = RunRecord::new(fingerprint)?;
    let recorded = saved.recorded_keys()?;
    let has_recipe = text_of(&output.join(RECIPE))?.parse::<toml::Table>().is_ok_and(|recipe| {
        recorded
            .iter()
            .filter_map(|key| key.split_once('.'))
            .all(|(section, key)| recipe.get(section).is_some_and(|section| section.get(key).is_some()))
    });
    let names = saved.result_names()?;
    let ours = |name: &str| match name {
        METRICS => is_log(&output.join(METRICS)),
        CARD => Ok(has_recipe && text_of(&output.join(CARD))?.contains("trained by `finetune`")),
        _ => Ok(has_recipe),
    };
    for name in TEXTS.into_iter().chain(names.iter().map(String::as_str)) {
        if output.join(name).is_file() && ours(name)? {
            record.adopt(output, name)?;
        }
    }
    Ok(record)
}

/// Returns the names in the output folder that a run appends to, whatever they contain.
fn added_to(recipe: &Recipe) -> Vec<&'static str> {
    let traces = TraceSchedule::of(&recipe.profile).is_some();
    let optional = [(profile::FOLDER, traces), (TENSORBOARD, recipe.log.tensorboard)];
    let asked = optional.into_iter().filter_map(|(name, asked)| asked.then_some(name));
    std::iter::once(ALERTS).chain(asked).collect()
}

/// Returns the text of a file, or an empty text if the file is missing or is no text.
fn text_of(path: &Path) -> Result<String> {
    match input_file::read_text("read", path) {
        Err(error) if error.kind() == ErrorCategory::User => Ok(String::new()),
        read => read,
    }
}

/// Returns whether a file is the log of a run; an empty file is one.
fn is_log(path: &Path) -> Result<bool> {
    if path.metadata().map_err(|error| Error::io("read", path, &error))?.len() == 0 {
        return Ok(true);
    }
    match metrics::read(path) {
        Err(error) if error.kind() == ErrorCategory::User => Ok(false),
        read => Ok(!read?.is_empty()),
    }
}
