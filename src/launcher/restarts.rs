//! `--max-restarts`: runs the training in a child process, and restarts it from its newest
//! checkpoint after a crash, a kill, or an error that may not happen again.
//!
//! A restart is a new process, because only the end of a process undoes a hung thread, an
//! out-of-memory kill, or a device that is broken until its process ends. The parent computes
//! nothing, holds no device and passes signals on. It does not restart a run that a signal has
//! ended. If the parent is killed, the system signals the child to save and stop (Linux).
//!
//! On several hosts each process has such a parent. A failure ends all children. Then the parents
//! join again (`elastic`) and continue, with fewer ranks if a host is missing.

use std::ffi::{OsStr, OsString};
use std::process::ExitStatus;
use std::time::Duration;

use super::child;
use super::elastic::{self, ElasticPlace};
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

/// Runs the training of `args` in a child process and restarts it up to `restarts` times. Ends this
/// process with the child's exit code.
///
/// # Errors
/// The child cannot be started; it was killed after the last restart; the run's processes belong to
/// an MPI job.
pub(crate) fn supervise(args: &TrainArgs, restarts: u16) -> Result<()> {
    let launch = ranks::launch(args)?;
    if launch.master.is_some() && !ranks::on_gpus(args)? {
        return Err(Error::user("cannot restart one process of an MPI job")
            .because("MPI ends all processes of a job when one ends, and accepts no new ones")
            .hint("restart the job: as long as `mpirun` ends with 75, start it again with `--resume`"));
    }
    let mut words: Vec<OsString> = std::env::args_os().skip(1).collect();
    if args.output_folder.is_none() && args.resume.is_some() {
        // A restart drops the folder of `--resume`, which may also name the output folder.
        words.extend([OsString::from("--output"), args.output().into()]);
    }
    let signals = signals::seen_by_parent()?;
    let terminal = Terminal::stderr(Verbosity::Normal);
    let (mut resume, mut place) = (None, None);
    for left in (0..=restarts).rev() {
        let environment = place.as_ref().map(ElasticPlace::environment);
        let mut child =
            child::start(&child_words(&words, resume, place.as_ref()), environment.into_iter().flatten())?;
        let (status, asked_to_stop) = child::wait(&mut child, &signals)?;
        let again = left > 0 && !asked_to_stop && may_succeed(status);
        match (again, status.code()) {
            (true, _) => {}
            (false, Some(code)) => child::end_with(code),
            // A signal came before the child could save.
            (false, None) if asked_to_stop => child::stop_now(),
            (false, None) => return Err(killed(status, restarts)),
        }
        let (number, how) = (restarts - left + 1, child::how_it_ended(status));
        terminal.warn(format!("the run {how}: restart {number} of {restarts}, from its newest checkpoint"));
        resume =
            Some(if checkpoint::has_any(args.output())? { ResumeWith::Newest } else { ResumeWith::AsTyped });
        place = unless_stopped(&signals, || {
            std::thread::sleep(PAUSE);
            if launch.master.is_some() { elastic::meet(&launch, &terminal) } else { Ok(None) }
        })?;
    }
    Ok(())
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

/// Returns the command line of a child: without `--max-restarts`, and with its new `place` among
/// the processes, if any.
fn child_words(
    words: &[OsString],
    resume: Option<ResumeWith>,
    place: Option<&ElasticPlace>,
) -> Vec<OsString> {
    let starts_with = |word: &OsStr, text: &str| word.as_encoded_bytes().starts_with(text.as_bytes());
    let mut kept = Vec::new();
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
            kept.push(word.clone());
        }
    }
    if resume.is_some() && !named {
        kept.push("--resume".into());
    }
    match place {
        Some(place) => place.in_words(kept),
        None => kept,
    }
}

/// Returns whether a restart may succeed: the run was killed, a peer, the network or a device
/// failed, or an internal error ended it, which may not happen again.
fn may_succeed(status: ExitStatus) -> bool {
    let codes = [ErrorCategory::Transient, ErrorCategory::Internal].map(|kind| i32::from(kind.exit_code()));
    status.code().is_none_or(|code| codes.contains(&code))
}

fn killed(status: ExitStatus, restarts: u16) -> Error {
    Error::new(ErrorCategory::Transient, format!("the run {}", child::how_it_ended(status)))
        .because(format!("finetune restarted it {}", units::exact(restarts, "time")))
        .hint("the same command with `--resume` goes on from the newest checkpoint")
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
            let words: Vec<_> = child_words(&words(text), resume, None)
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
