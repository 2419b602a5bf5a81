//! The parent of a run in other processes: several GPUs have a process each, and `--max-restarts`
//! restarts the run from its newest checkpoint after a crash, a kill, or an error that may not
//! happen again.
//!
//! A restart is new processes, because only the end of a process undoes a hung thread, an
//! out-of-memory kill, or a device that is broken until its process ends. The parent computes
//! nothing, holds no device and passes signals on. It does not restart a run that a signal has
//! ended. If the parent is killed, the system signals the processes to save and stop (Linux).
//!
//! On several hosts each host, or each process of a launcher, has such a parent. A failure ends all
//! ranks. Then the parents join again (`elastic`) and continue, with fewer ranks if a host is
//! missing.

use std::ffi::{OsStr, OsString};
use std::process::ExitStatus;
use std::time::Duration;

use super::child;
use super::elastic;
use super::processes::{self, RankProcess, RunEnd};
use super::ranks;
use super::signals::{self, SeenSignal};
use crate::checkpoint;
use crate::cli::TrainArgs;
use crate::error::{Error, ErrorCategory, Result};
use crate::report::{Terminal, Verbosity};
use crate::threads;
use crate::units;

/// Pause before a restart, in which other processes of the run end and free their ports.
const PAUSE: Duration = Duration::from_secs(1);

/// Returns whether a training command runs in other processes than its own.
pub(crate) fn are_wanted(args: &TrainArgs) -> bool {
    args.max_restarts.is_some_and(|_| !args.dry_run) || processes::are_wanted(args)
}

/// Runs the training of `args` in other processes and restarts it up to `--max-restarts` times.
/// Ends this process with the exit code of the run. `check` comes first on the host of rank 0: it
/// refuses what only the process of that rank would.
///
/// # Errors
/// Those of `check`; a process cannot be started or a GPU is missing; a process was killed after
/// the last restart; the run's processes belong to an MPI job.
pub(crate) fn supervise(args: &TrainArgs, check: impl FnOnce() -> Result<()>) -> Result<()> {
    let restarts = args.max_restarts.unwrap_or(0);
    let launch = ranks::launch(args)?;
    if launch.rank == 0 {
        check()?;
    }
    if args.max_restarts.is_some() && launch.master.is_some() && !ranks::on_gpus(args)? {
        return Err(Error::user("cannot restart one process of an MPI job")
            .because("MPI ends all processes of a job when one ends, and accepts no new ones")
            .hint("restart the job: as long as `mpirun` ends with 75, start it again with `--resume`"));
    }
    let ranks_here = processes::ranks_of(args)?;
    let mut words: Vec<OsString> = std::env::args_os().skip(1).collect();
    if args.output_folder.is_none() && args.resume.is_some() {
        // A restart drops the folder of `--resume`, which may also name the output folder.
        words.extend([OsString::from("--output"), args.output().into()]);
    }
    let signals = signals::seen_by_parent()?;
    let terminal = Terminal::stderr(Verbosity::Normal);
    let (mut resume, mut position) = (None, None);
    for left in (0..=restarts).rev() {
        let words = child_words(&words, resume);
        let mut started = match ranks_here.as_slice() {
            [] => vec![RankProcess::of_run(&words, position.as_ref())?],
            ranks_here => RankProcess::of_ranks(&words, ranks_here, &launch, position)?,
        };
        if args.ui {
            started.iter_mut().take(1).for_each(RankProcess::in_foreground);
        }
        let end = processes::until_end(started, &signals)?;
        if left == 0 || end.asked_to_stop || !may_succeed(end.status) {
            return end.conclude().map_err(|error| after_restarts(error, restarts));
        }
        warn_of_restart(&end, restarts - left + 1, restarts, &terminal);
        resume =
            Some(if checkpoint::has_any(args.output())? { ResumeWith::Newest } else { ResumeWith::AsTyped });
        position = unless_stopped(&signals, || {
            std::thread::sleep(PAUSE);
            if launch.master.is_some() { elastic::meet(&launch, &terminal) } else { Ok(None) }
        })?;
    }
    Ok(())
}

fn warn_of_restart(end: &RunEnd, number: u16, restarts: u16, terminal: &Terminal) {
    let how = end.in_words();
    terminal.warn(format!("{how}: restart {number} of {restarts}, from the newest checkpoint"));
}

/// Does `work`. Ends the process if a signal asks to stop meanwhile, because no child can receive
/// it.
fn unless_stopped<T: Send>(signals: &[SeenSignal], work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let work = threads::start_in(scope, "between tries", None, work)?;
        while !work.is_finished() {
            if child::asked_to_stop(signals) {
                child::stop_now();
            }
            std::thread::sleep(child::POLL);
        }
        work.join().unwrap_or_else(|_| Err(Error::internal("the thread between two tries panicked")))
    })
}

/// Start of a restarted run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ResumeWith {
    /// The newest checkpoint in the output folder.
    Newest,
    /// The checkpoint that the user named, if any, because the run has saved none.
    AsTyped,
}

/// Returns the command line of a child, which is without `--max-restarts`.
fn child_words(words: &[OsString], resume: Option<ResumeWith>) -> Vec<OsString> {
    let starts_with = |word: &OsStr, text: &str| word.as_encoded_bytes().starts_with(text.as_bytes());
    let mut remaining = Vec::new();
    let mut named = false;
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        if word == "--max-restarts" {
            words.next();
        } else if word == "--resume" && resume == Some(ResumeWith::Newest) {
            // The folder of `--resume` is dropped too.
            words.next_if(|next| !starts_with(next, "-"));
        } else if starts_with(word, "--max-restarts=")
            || resume == Some(ResumeWith::Newest) && starts_with(word, "--resume=")
        {
        } else {
            named |= word == "--resume" || starts_with(word, "--resume=");
            remaining.push(word.clone());
        }
    }
    if resume.is_some() && !named {
        remaining.push("--resume".into());
    }
    remaining
}

/// Returns whether a restart may succeed: the run was killed, a peer, the network or a device
/// failed, or an internal error ended it, which may not happen again.
fn may_succeed(status: ExitStatus) -> bool {
    let codes = [ErrorCategory::Transient, ErrorCategory::Internal].map(|kind| i32::from(kind.exit_code()));
    status.code().is_none_or(|code| codes.contains(&code))
}

/// Returns the error of a run that has used all its restarts.
fn after_restarts(error: Error, restarts: u16) -> Error {
    let error = match restarts {
        0 => error,
        _ => error.because(format!("finetune restarted it {}", units::exact(restarts, "time"))),
    };
    match error.kind() {
        ErrorCategory::Transient | ErrorCategory::Internal => {
            error.hint("the same command with `--resume` goes on from the newest checkpoint")
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use signal_hook::consts::SIGKILL;

    use super::*;

    #[test]
    fn a_child_gets_the_words_but_for_the_restarts() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let child = |text, resume| {
            let words: Vec<_> = child_words(&words(text), resume)
                .into_iter()
                .map(|word| word.into_string().unwrap())
                .collect();
            words.join(" ")
        };
        for (typed, first, newest, as_typed) in [
            ("--max-restarts 3 --output o", "--output o", "--output o --resume", "--output o --resume"),
            ("--output o --max-restarts=3", "--output o", "--output o --resume", "--output o --resume"),
            ("--resume --max-restarts 3 -q", "--resume -q", "-q --resume", "--resume -q"),
            ("--resume d -q --max-restarts 3", "--resume d -q", "-q --resume", "--resume d -q"),
            ("--max-restarts 3 --resume=d", "--resume=d", "--resume", "--resume=d"),
        ] {
            assert_eq!(child(typed, None), first);
            assert_eq!(child(typed, Some(ResumeWith::Newest)), newest);
            assert_eq!(child(typed, Some(ResumeWith::AsTyped)), as_typed);
        }
    }

    #[test]
    fn what_the_user_must_change_is_not_tried_again() {
        let code = |code: i32| ExitStatus::from_raw(code << 8);
        assert!([3, 75].into_iter().all(|again| may_succeed(code(again))));
        assert!([0, 1, 2, 4, 74, 85, 130].into_iter().all(|over| !may_succeed(code(over))));
        assert!(may_succeed(ExitStatus::from_raw(SIGKILL)));
        assert_eq!(child::how_it_ended(ExitStatus::from_raw(SIGKILL)), "was killed by signal 9");
    }
}
