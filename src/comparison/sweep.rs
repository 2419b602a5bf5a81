//! `--sweep`: trains one run for each value of some recipe keys, one after another, and prints a
//! table of all.
//!
//! Each run is a child process of this binary with the flags of the sweep, its own values (`--set`)
//! and its own folder. This process computes nothing and passes signals on.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use super::comparison_table::ComparisonTable;
use crate::checkpoint::RunFolder;
use crate::cli::{SweepAxis, TrainArgs};
use crate::collective::launch::{Flags, Launch};
use crate::error::{Error, ErrorCategory, Result};
use crate::launcher::processes::{self, RankProcess, RunEnd};
use crate::launcher::{child, signals};
use crate::private_file::{without_address, without_user};
use crate::recipe::Recipe;
use crate::report::{Terminal, finish};
use crate::training::alerts;

/// Largest number of runs in a sweep.
const MOST_RUNS: usize = 64;

/// One run of a sweep.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SweepRun {
    /// Values of the run, each as `--set` takes it.
    set: Vec<String>,
    /// Output folder of the run.
    folder: PathBuf,
}

impl SweepRun {
    /// Returns the values for messages, without addresses.
    fn label(&self) -> String {
        let shown: Vec<String> = self.set.iter().map(|set| without_address(&without_user(set))).collect();
        shown.join(" ")
    }

    /// Returns the arguments of the run's process: those of the sweep and its own.
    fn words(&self, common: &[OsString], resume: bool) -> Vec<OsString> {
        let mut words = common.to_vec();
        self.set.iter().for_each(|set| words.extend(["--set".into(), set.into()]));
        words.extend(["--output".into(), self.folder.clone().into()]);
        words.extend(resume.then(|| OsString::from("--resume")));
        words
    }
}

/// Trains once for each combination of values, and prints the table of the runs. `folder` is the
/// working folder.
///
/// # Errors
/// Before the first run: a setting or a folder is refused, or a launcher started several processes.
/// Afterwards: a run failed, with the category of the first failure; a signal stopped the sweep.
pub(crate) fn run(args: &TrainArgs, folder: &Path, terminal: &Terminal) -> Result<()> {
    let runs = planned_runs(args)?;
    refuse_several_processes(args)?;
    check(args, &runs, folder)?;
    let common = common_words(std::env::args_os().skip(1));
    let signals = signals::seen_by_parent()?;
    let mut failed: Vec<(usize, ExitStatus)> = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        let number = format!("run {} of {}", index + 1, runs.len());
        if child::asked_to_stop(&signals) {
            return Err(Error::new(ErrorCategory::Stopped, format!("the sweep stopped before {number}"))
                .hint("the same command with `--resume` goes on with the sweep"));
        }
        terminal.heading(format!("{number}: {} -> {}", run.label(), run.folder.display()));
        // The child writes to the same terminal.
        finish();
        let process = RankProcess::of_run(&run.words(&common, args.resume.is_some()), None)?;
        let RunEnd { status, asked_to_stop, .. } = processes::until_end(vec![process], &signals)?;
        let stops =
            [ErrorCategory::SavedAndStopped, ErrorCategory::Stopped].contains(&child::category(status));
        let is_last = index + 1 == runs.len();
        if stops || asked_to_stop && !(status.success() && is_last) {
            return Err(stopped(status, &number, is_last));
        }
        if !status.success() {
            let next = if is_last { "" } else { "; the sweep goes on with the next run" };
            terminal.warn(format!("{number} {}{next}", child::how_it_ended(status)));
            failed.push((index, status));
        }
    }
    let folders: Vec<PathBuf> = runs.iter().map(|run| run.folder.clone()).collect();
    conclude(&folders, terminal)?;
    failed.first().map_or(Ok(()), |(_, first)| Err(failure(&runs, &failed, *first)))
}

/// Returns a run for every combination of the values, the last axis fastest.
fn planned_runs(args: &TrainArgs) -> Result<Vec<SweepRun>> {
    let refused = |why: String| Error::user("cannot start the sweep").because(why);
    let mut keys = BTreeSet::new();
    if let Some(twice) = args.sweep.iter().find(|axis| !keys.insert(axis.key.as_str())) {
        return Err(refused(format!("two `--sweep` give {}; accepted: one for each key", twice.key))
            .hint("put all values of a key into one `--sweep`, separated by commas"));
    }
    let count = args.sweep.iter().fold(1_usize, |count, axis| count.saturating_mul(axis.values.len()));
    if count > MOST_RUNS {
        return Err(refused(format!("it has {count} runs; accepted: 1 to {MOST_RUNS}"))
            .hint("give fewer values, or sweep one key after another"));
    }
    if let Some(Some(from)) = &args.resume {
        return Err(refused(format!(
            "`--resume {}` names one checkpoint for all runs; accepted: `--resume` without a folder",
            from.display()
        ))
        .hint("each run goes on in its own folder; to start from an adapter, `--set adapter.path=DIR`"));
    }
    let mut runs = vec![(Vec::new(), String::new())];
    for axis in &args.sweep {
        let of = |before| axis.values.iter().map(move |value| extended(before, axis, value));
        runs = runs.iter().flat_map(of).collect();
    }
    let output = args.output();
    let run = |(set, name): (Vec<String>, String)| SweepRun { set, folder: output.join(name) };
    let runs: Vec<SweepRun> = runs.into_iter().map(run).collect();
    let mut seen = BTreeSet::new();
    if let Some(twice) = runs.iter().find(|run| !seen.insert(&run.folder)) {
        let folder = twice.folder.display();
        return Err(refused(format!(
            "two runs would have the folder {folder}, the second with {}",
            twice.label()
        ))
        .hint(
            "give each value once; a folder's name keeps only letters, digits and . _ + - of a value, \
             so those must differ",
        ));
    }
    Ok(runs)
}

/// Adds the value of one more axis to the values and the name of a run.
fn extended((set, name): &(Vec<String>, String), axis: &SweepAxis, value: &str) -> (Vec<String>, String) {
    let set = set.iter().cloned().chain([format!("{}={value}", axis.key)]).collect();
    let own = axis.name_of(value);
    (set, if name.is_empty() { own } else { format!("{name}-{own}") })
}

fn refuse_several_processes(args: &TrainArgs) -> Result<()> {
    let (processes, devices) = (&args.processes, &args.devices);
    let flags = Flags {
        ranks_here: devices.ranks.map(usize::from).or(devices.gpus.as_ref().map(|gpus| gpus.0.len())),
        world_size: processes.world_size,
        rank: processes.rank,
        master_addr: processes.master_addr.clone(),
        master_port: processes.master_port,
    };
    let launch = Launch::detect(&flags, &|name| std::env::var_os(name))?;
    if launch.master.is_none() {
        return Ok(());
    }
    let (all, source) = (launch.world_size, launch.source.name());
    Err(Error::user("cannot sweep over several processes")
        .because(format!("the world size is {all}, from {source}; a sweep starts its processes itself"))
        .hint(
            "start the sweep outside of the launcher, with `--gpus` or `--ranks`; \
             or start each run by itself with `--set`",
        ))
}

/// Refuses the sweep if one of its runs has an invalid setting or a folder that is not free.
fn check(args: &TrainArgs, runs: &[SweepRun], folder: &Path) -> Result<()> {
    for (index, run) in runs.iter().enumerate() {
        let mut one = args.clone();
        one.sweep.clear();
        one.resume = None;
        one.recipe.set.extend(run.set.iter().cloned());
        let loaded = one.layers(folder).and_then(|layers| Recipe::load(&layers));
        let checked = loaded.and_then(|recipe| alerts::check(&recipe, args.common.offline));
        checked.map_err(|error| {
            error.during(format!(
                "cannot start the sweep: run {} of {}, {}",
                index + 1,
                runs.len(),
                run.label()
            ))
        })?;
        if args.resume.is_none() && !RunFolder::is_free(&run.folder)? {
            return Err(Error::user(format!(
                "cannot start the sweep: cannot write to {}",
                run.folder.display()
            ))
            .because("the folder is not empty")
            .hint("give a new folder with `--output`, or `--resume` to go on with the sweep in this one"));
        }
    }
    Ok(())
}

/// Returns the arguments of all runs: those of this process without `--sweep`, `--output` and
/// `--resume`.
fn common_words(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut common = Vec::new();
    let mut words = words.peekable();
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        let flag = text.split_once('=').map_or(&*text, |(flag, _)| flag);
        if !["--sweep", "--output", "--resume"].contains(&flag) {
            common.push(word);
        } else if flag == &*text && flag != "--resume" {
            // The value is the next word.
            words.next();
        }
    }
    common
}

/// Prints the table of the runs that have begun, and the best of them.
fn conclude(folders: &[PathBuf], terminal: &Terminal) -> Result<()> {
    let Some(table) = ComparisonTable::of_begun(folders)? else { return Ok(()) };
    table.warnings().iter().for_each(|text| terminal.warn(text));
    let verdict: String = table.verdict().iter().map(|line| format!("{line}\n")).collect();
    terminal.data(table.text() + &verdict)
}

/// Returns the end of a sweep that a signal stopped. A run that completed before it could stop has
/// saved its result too.
fn stopped(status: ExitStatus, number: &str, is_last: bool) -> Error {
    let category = match status.code() {
        Some(0) => ErrorCategory::SavedAndStopped,
        Some(_) => child::category(status),
        None => ErrorCategory::Stopped,
    };
    let next = if is_last { "" } else { "; the next run was not started" };
    Error::new(category, format!("the sweep stopped in {number}{next}"))
        .hint("the same command with `--resume` goes on with the sweep")
}

fn failure(runs: &[SweepRun], failed: &[(usize, ExitStatus)], first: ExitStatus) -> Error {
    let what = format!("{} of {} runs of the sweep failed", failed.len(), runs.len());
    let error = Error::new(child::category(first), what);
    let why = |(index, status): &(usize, ExitStatus)| {
        format!("run {}, {}, {}", index + 1, runs[*index].label(), child::how_it_ended(*status))
    };
    let error = failed.iter().map(why).fold(error, Error::because);
    error.hint("the same command with `--resume` runs these again and leaves finished runs alone")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_has_the_words_of_the_sweep_and_its_own() {
        let typed = "train --output o --sweep a.r=1,2 -q --resume --sweep=a.b=3 --set x.y=1 --output=o";
        let common = common_words(typed.split(' ').map(OsString::from));
        let run = SweepRun { set: vec!["a.r=2".into(), "a.b=3".into()], folder: "o/r2-b3".into() };
        let joined = |words: Vec<OsString>| words.join(&OsString::from(" ")).into_string().expect("UTF-8");
        let first = joined(run.words(&common, false));
        assert_eq!(first, "train -q --set x.y=1 --set a.r=2 --set a.b=3 --output o/r2-b3");
        assert_eq!(joined(run.words(&common, true)), format!("{first} --resume"));
    }
}
