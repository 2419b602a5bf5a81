//! The output folder of a training run: what there is to go on from, whether the run may write there, and its lock.
//!
//! A folder is a run's by its record (`.finetune/run.json`). One of a program that kept no record yet is recognised by a
//! sound checkpoint in it: its manifest and digests. What else lies there is then taken for the run's by its contents:
//! recipe.toml if it has every key that the checkpoint was made under, metrics.jsonl if it is empty or has a line of a run,
//! README.md if it says that this program wrote it, and beside such a recipe.toml the files that the checkpoint has too.

use std::path::Path;

use chrono::{DateTime, FixedOffset};

use super::alerts::ALERTS;
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

/// Written by every run beside the weights.
const TEXTS: [&str; 4] = [RECIPE, METRICS, CARD, REPORT];
/// A line for each step.
pub(crate) const METRICS: &str = "metrics.jsonl";
/// The model card.
pub(crate) const CARD: &str = "README.md";
/// The folder of event files.
pub(crate) const TENSORBOARD: &str = "tensorboard";
/// The run at a glance.
pub(crate) const REPORT: &str = "report.html";

/// What was found in the output folder before the run is planned.
pub(crate) struct OutputFolder {
    /// The checkpoint to go on from.
    pub(crate) resumed: Option<SavedCheckpoint>,
    /// The record of the run whose folder it is.
    record: Option<RunRecord>,
    /// The folder, locked where there was something in it to go on with.
    claimed: Option<RunFolder>,
}

impl OutputFolder {
    /// Looks at the output folder; the `first` process of the run answers for it.
    ///
    /// # Errors
    /// There is no going on from what `--resume` names, or not in this folder; the folder is in use or not free.
    pub(crate) fn prepare(args: &TrainArgs, first: bool, terminal: &Terminal) -> Result<Self> {
        let output = args.output();
        let Some(from) = &args.resume else {
            if first {
                refuse_occupied(output)?;
            }
            return Ok(OutputFolder { resumed: None, record: None, claimed: None });
        };
        // Locked before it is looked at: no checkpoint comes or goes any more.
        let is_run = RunRecord::read(output)?.is_some() || checkpoint::has_any(output)?;
        let claimed = (first && is_run).then(|| RunFolder::claim(output)).transpose()?;
        claimed.iter().flat_map(RunFolder::notes).for_each(|note| terminal.line(note));
        let record = RunRecord::read(output)?;
        let has_ended = record.as_ref().is_some_and(|record| record.is_finished(output));
        let resumed = find(from.as_deref(), output, terminal)?;
        if first {
            refuse_other_runs(output, record.as_ref(), resumed.as_ref())?;
        }
        if resumed.is_none() && !has_ended {
            say_from_the_beginning(from.as_deref(), output, terminal);
        }
        Ok(OutputFolder { resumed, record, claimed })
    }

    /// Returns whether the run of `plan` has left its whole result here, and no checkpoint or one of its last step:
    /// nothing is left to do.
    ///
    /// # Errors
    /// Another run has left its result here.
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

    /// The moment that the run's chat template was told, where the run to go on with recorded it.
    ///
    /// # Errors
    /// What was recorded is no date.
    pub(crate) fn date(&self) -> Result<Option<DateTime<FixedOffset>>> {
        let recorded = match &self.resumed {
            Some(saved) => saved.state.chat_template_date.as_deref(),
            None => self.record.as_ref().and_then(|record| record.chat_template_date.as_deref()),
        };
        recorded.map(parse_date).transpose()
    }

    /// Locks the folder for the run of `plan`, which goes on from `resumed`, and makes sure that nothing is in its way; the
    /// record to begin with. Called when all processes of the run have met.
    ///
    /// # Errors
    /// The folder is in use, or holds what the run would overwrite.
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
                // Another run may have come and gone while this one was planned.
                if RunFolder::is_free(output)? { folder } else { return Err(not_free(output)) }
            }
        };
        let fingerprint = plan.fingerprint();
        if let (Some(record), None) = (&self.record, resumed)
            && record.plan != RunRecord::digest(&fingerprint)
        {
            return Err(Error::user(format!("cannot start over in {}", output.display()))
                .because(format!(
                    "it is of another run, started {}, which left no checkpoint",
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
        record.chat_template_date = plan.rows.date().map(date_text);
        folder.refuse_links(&added_to(&plan.recipe))?;
        refuse_foreign(&folder, &record, output, resumed)?;
        let what = format!("cannot train into {}", output.display());
        folder.require_room(space::needed(plan, output, resumed)?, &what)?;
        Ok((folder, record))
    }
}

/// Returns whether the log in `output` has the evaluation after the last step of `plan`, `step`, if there is to be one.
fn evaluated(plan: &Plan, output: &Path, step: u64) -> bool {
    let wanted = plan.held_out.is_some() && plan.recipe.eval.at_end;
    let is_last = |entry: &MetricsEntry| matches!(entry, MetricsEntry::Eval(_)) && entry.step() == step;
    !wanted || metrics::read(&output.join(METRICS)).is_ok_and(|entries| entries.iter().any(is_last))
}

/// How a date is written down.
pub(crate) fn date_text(date: DateTime<FixedOffset>) -> String {
    date.to_rfc3339()
}

/// Reads what [`date_text`] wrote.
///
/// # Errors
/// The text is no date.
pub(crate) fn parse_date(text: &str) -> Result<DateTime<FixedOffset>> {
    DateTime::parse_from_rfc3339(text).map_err(|e| {
        Error::user("cannot go on with the date of the chat template")
            .because(format!("`{text}` was recorded: {e}; accepted: a date as 2026-01-31T12:00:00+00:00"))
    })
}

/// The checkpoint that `--resume` means, and a word on those that were passed over.
///
fn find(from: Option<&Path>, output: &Path, terminal: &Terminal) -> Result<Option<SavedCheckpoint>> {
    let (saved, passed) = match from {
        Some(folder) if checkpoint::is_one(folder) => (Some(SavedCheckpoint::open(folder)?), Vec::new()),
        Some(folder) => checkpoint::newest(folder)?,
        None => checkpoint::newest(output)?,
    };
    match &saved {
        Some(saved) => {
            passed.iter().for_each(|text| terminal.warn(format!("{text}; passed over")));
            terminal.line(format!("resuming from {}", saved.folder.display()));
        }
        None if !passed.is_empty() => {
            let error = Error::user(format!("cannot resume the run in {}", output.display()));
            return Err(passed
                .into_iter()
                .fold(error, Error::because)
                .hint("start anew in another folder, with `--output`"));
        }
        None => {}
    }
    Ok(saved)
}

/// Says that `--resume` found no checkpoint to go on from.
fn say_from_the_beginning(from: Option<&Path>, output: &Path, terminal: &Terminal) {
    let place = from.unwrap_or(output).display();
    let text = format!("no checkpoint in {place}: starting from the beginning");
    // A folder that was named was expected to hold one.
    if from.is_some() { terminal.warn(text) } else { terminal.line(text) }
}

/// Refuses to go on in a folder that is not the run's own.
fn refuse_other_runs(
    output: &Path,
    record: Option<&RunRecord>,
    resumed: Option<&SavedCheckpoint>,
) -> Result<()> {
    if RunFolder::is_free(output)? {
        return Ok(());
    }
    let shown = output.display();
    let Some(saved) = resumed else {
        if record.is_none() {
            return Err(Error::user(format!("cannot resume in {shown}"))
                .because("no run of this program left what is in it: there is neither .finetune/run.json nor a sound checkpoint")
                .hint("give a new folder with `--output`"));
        }
        return record
            .filter(|record| record.is_finished(output) && !record.missing(output).is_empty())
            .map_or(Ok(()), |record| Err(ended(output, record)));
    };
    if lies_in(saved, output) {
        return Ok(());
    }
    // The run that went on from this checkpoint and was killed before it saved one of its own.
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
    Err(Error::user(format!("cannot go on from {} in {shown}", saved.folder.display()))
        .because(what)
        .hint(format!("give a new folder with `--output`, or `--output {own}` to go on in the run's own")))
}

/// Whether a checkpoint lies in the folder `output` itself, or is a link there or to there.
pub(crate) fn lies_in(saved: &SavedCheckpoint, output: &Path) -> bool {
    let Ok(output) = output.canonicalize() else { return false };
    let parent = |folder: &Path| folder.parent().map(Path::to_owned);
    let there = saved.folder.canonicalize().ok().and_then(|folder| parent(&folder));
    let named = parent(&saved.folder).and_then(|folder| Path::new(".").join(folder).canonicalize().ok());
    [there, named].into_iter().flatten().any(|folder| folder == output)
}

/// Refuses a folder that a new run cannot have; who is at work in it is named.
fn refuse_occupied(output: &Path) -> Result<()> {
    if RunFolder::is_free(output)? {
        return Ok(());
    }
    if RunFolder::has_lock(output) {
        drop(RunFolder::claim(output)?);
    }
    Err(not_free(output))
}

/// The run whose folder it is has left its result, and no checkpoint to go on from.
fn ended(output: &Path, record: &RunRecord) -> Error {
    let error = Error::user(format!("cannot resume in {}", output.display()))
        .because("the run has ended, and left no checkpoint to go on from");
    let missing = record.missing(output);
    if missing.is_empty() {
        return error.hint("what it left is there; to train again, give a new folder with `--output`");
    }
    let lost = format!("of what it left, {} is missing", missing.join(", "));
    error.because(lost).hint(
        "put back what is missing, or train again into a new folder with `--output`; `checkpoint.save_steps` keeps checkpoints, from which `--resume` makes it anew",
    )
}

fn not_free(output: &Path) -> Error {
    Error::user(format!("cannot write to {}", output.display()))
        .because("the folder is not empty")
        .hint("give a new folder with `--output`, or `--resume` to go on with the run in this one")
}

/// Refuses to overwrite what the run did not write.
fn refuse_foreign(
    folder: &RunFolder,
    record: &RunRecord,
    output: &Path,
    resumed: Option<&SavedCheckpoint>,
) -> Result<()> {
    let mut names: Vec<String> = TEXTS.map(String::from).into();
    names.extend(resumed.map(SavedCheckpoint::result_names).transpose()?.unwrap_or_default());
    let found = folder.foreign(record, &names)?;
    if found.is_empty() {
        return Ok(());
    }
    let error = Error::user(format!("cannot train in {}", output.display()));
    let why = |name: String| format!("{name} would be overwritten, and is not as the run wrote it");
    let error = found.into_iter().map(why).fold(error, Error::because);
    Err(error.hint("move it to another folder, or give a new one with `--output`"))
}

/// A record for the folder of a run that kept none, whose checkpoint is `saved`.
fn adopted(
    output: &Path,
    saved: &SavedCheckpoint,
    fingerprint: &std::collections::BTreeMap<String, String>,
) -> Result<RunRecord> {
    let mut record = RunRecord::new(fingerprint)?;
    let said = saved.said_keys()?;
    let has_recipe = text_of(&output.join(RECIPE))?.parse::<toml::Table>().is_ok_and(|recipe| {
        said.iter()
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

/// The files and folders below the output folder that a run adds to, whatever is there.
fn added_to(recipe: &Recipe) -> Vec<&'static str> {
    let traces = TraceSchedule::of(&recipe.profile).is_some();
    let optional = [(profile::FOLDER, traces), (TENSORBOARD, recipe.log.tensorboard)];
    let asked = optional.into_iter().filter_map(|(name, asked)| asked.then_some(name));
    std::iter::once(ALERTS).chain(asked).collect()
}

/// The text of a file; nothing of one that is not there or holds no text.
fn text_of(path: &Path) -> Result<String> {
    match input_file::read_text("read", path) {
        Err(error) if error.kind() == ErrorCategory::User => Ok(String::new()),
        read => read,
    }
}

/// Returns whether a file is the log of a run, be it an empty one.
fn is_log(path: &Path) -> Result<bool> {
    if path.metadata().map_err(|error| Error::io("read", path, &error))?.len() == 0 {
        return Ok(true);
    }
    match metrics::read(path) {
        Err(error) if error.kind() == ErrorCategory::User => Ok(false),
        read => Ok(!read?.is_empty()),
    }
}
