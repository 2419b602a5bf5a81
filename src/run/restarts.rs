//! `--max-restarts`: the run in a process of its own, which is started again from its newest checkpoint when it crashed,
//! was killed, or gave up for a reason that may be gone the next time.
//!
//! A thread that hangs, memory that the system takes back by killing, and a device that is broken until its process ends
//! are all undone by the end of a process alone, so that is what a restart is. The parent computes nothing, holds no device
//! and passes signals on; a run that a signal has ended is not started again. Should the parent be killed, the system
//! asks the child to save and stop (Linux).
//!
//! Over several hosts each process has such a parent. A failure ends the children of all; then the parents meet
//! (`elastic`), and those that do meet go on, as fewer ranks if a host is gone.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libc::c_int;
use signal_hook::consts::{SIGCONT, SIGKILL, SIGSTOP, SIGTERM, SIGTSTP};

use super::elastic::{self, ElasticPlace};
use super::ranks;
use super::signals::{self, SeenSignal};
use crate::checkpoint;
use crate::cli::TrainArgs;
use crate::error::{Error, ErrorCategory, Result};
use crate::report::{Terminal, Verbosity, finish};
use crate::threads;

/// Between two looks at the child and at the signals that have come.
const POLL: Duration = Duration::from_millis(50);

/// How long a child may be stopped (`SIGSTOP`) while its parent is not.
const STOPPED: Duration = Duration::from_secs(15);

/// Before a restart: other processes of the run end meanwhile, and their ports are free again.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs what `args` ask for in a child process, up to `restarts` times again. Ends this process with the child's exit code.
///
/// # Errors
/// The child cannot be started; it was killed and no restart is left; the run's processes are those of an MPI job.
pub(crate) fn supervise(args: &TrainArgs, restarts: u16) -> Result<()> {
    let launch = ranks::launch(args)?;
    if launch.master.is_some() && !ranks::on_gpus(args)? {
        return Err(Error::user("cannot restart one process of an MPI job")
            .because("MPI ends all processes of a job when one has ended, and takes no new ones in")
            .hint("restart the job: as long as `mpirun` ends with 75, start it again with `--resume`"));
    }
    let mut words: Vec<OsString> = std::env::args_os().skip(1).collect();
    if args.output_folder.is_none() && args.resume.is_some() {
        // A restart forgets the folder that `--resume` names, which may stand for the output folder too.
        words.extend([OsString::from("--output"), args.output().into()]);
    }
    let signals = signals::seen_by_parent()?;
    let terminal = Terminal::stderr(Verbosity::Normal);
    let (mut resume, mut place) = (None, None);
    for left in (0..=restarts).rev() {
        let mut child = start(&child_words(&words, resume, place.as_ref()), place.as_ref())?;
        let (status, asked_to_stop) = wait(&mut child, &signals)?;
        let again = left > 0 && !asked_to_stop && may_succeed(status);
        match (again, status.code()) {
            (true, _) => {}
            (false, Some(code)) => end_with(code),
            // It was asked before it could save.
            (false, None) if asked_to_stop => stop_now(),
            (false, None) => return Err(killed(status, restarts)),
        }
        let (number, how) = (restarts - left + 1, said(status));
        terminal.warn(format!("the run {how}: restart {number} of {restarts}, from its newest checkpoint"));
        resume =
            Some(if checkpoint::has_any(args.output())? { ResumeWith::Newest } else { ResumeWith::AsTyped });
        place = unless_stopped(&signals, || {
            std::thread::sleep(PAUSE);
            let meets = launch.master.is_some();
            if meets { elastic::meet(&launch, &terminal) } else { Ok(None) }
        })?;
    }
    Ok(())
}

/// Ends this process, in which there is nothing to save.
fn stop_now() -> ! {
    end_with(i32::from(ErrorCategory::Stopped.exit_code()))
}

fn end_with(code: i32) -> ! {
    finish();
    std::process::exit(code)
}

/// Does `work`, unless a signal asks to stop meanwhile: no child is there to hear it.
fn unless_stopped<T: Send>(signals: &[SeenSignal], work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let work = threads::start_in(scope, "between tries", None, work)?;
        while !work.is_finished() {
            let asks = |seen: &SeenSignal| seen.signal != SIGTSTP && seen.flag.load(Ordering::SeqCst);
            if signals.iter().any(asks) {
                stop_now();
            }
            std::thread::sleep(POLL);
        }
        work.join().unwrap_or_else(|_| Err(Error::internal("the thread between two tries panicked")))
    })
}

/// What a run that is started again goes on from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ResumeWith {
    /// The newest checkpoint in the output folder.
    Newest,
    /// It has saved nothing yet: what the user named, if anything.
    AsTyped,
}

/// The words of the command line for a child, which supervises nothing itself and may have another place than at first.
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
            // With the folder that it names, if it does.
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

fn start(words: &[OsString], place: Option<&ElasticPlace>) -> Result<Child> {
    let binary = std::env::current_exe()
        .map_err(|e| Error::internal("cannot find this binary").because(e.to_string()))?;
    let mut command = Command::new(&binary);
    // In a group of its own: what a terminal sends comes to the child through its parent alone, and not twice.
    command.args(words).process_group(0);
    if let Some(place) = place {
        command.envs(place.environment());
    }
    ends_with_parent(&mut command);
    command.spawn().map_err(|error| Error::cannot_start(binary.display(), &error))
}

/// Has the system ask the child to save and stop when this process has gone (Linux).
pub(super) fn ends_with_parent(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: both are system calls that may be made between fork and exec.
    unsafe {
        command.pre_exec(move || {
            #[cfg(target_os = "linux")]
            if libc::prctl(libc::PR_SET_PDEATHSIG, SIGTERM) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // The parent may have gone before.
            if libc::getppid().unsigned_abs() == parent {
                Ok(())
            } else {
                Err(std::io::ErrorKind::Other.into())
            }
        });
    }
}

/// Waits for the child to end, and passes on what signals come; whether one of them asked it to stop.
fn wait(child: &mut Child, signals: &[SeenSignal]) -> Result<(ExitStatus, bool)> {
    let mut asked_to_stop = false;
    let mut stopped_since = None;
    loop {
        let failed = |e: std::io::Error| Error::internal("cannot wait for the run").because(e.to_string());
        if let Some(status) = child.try_wait().map_err(failed)? {
            return Ok((status, asked_to_stop));
        }
        for seen in signals.iter().filter(|seen| seen.flag.swap(false, Ordering::SeqCst)) {
            if seen.signal == SIGTSTP {
                // Ctrl-Z: both stop, and go on together.
                send(child, SIGSTOP);
                signals::stop_here();
                send(child, SIGCONT);
                stopped_since = None;
            } else {
                asked_to_stop = true;
                send(child, seen.signal);
            }
        }
        if is_stopped(child.id()) {
            let since = *stopped_since.get_or_insert_with(Instant::now);
            if since.elapsed() > STOPPED {
                send(child, SIGKILL);
            }
        } else {
            stopped_since = None;
        }
        std::thread::sleep(POLL);
    }
}

fn send(child: &Child, signal: c_int) {
    if let Ok(pid) = libc::pid_t::try_from(child.id()) {
        // SAFETY: a system call; the child has not been waited for, so the id is still its.
        unsafe { libc::kill(pid, signal) };
    }
}

/// Whether a process is stopped, where Linux tells.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    // proc(5): the state follows the name, which is in parentheses and may hold any character.
    stat.is_ok_and(|stat| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T')))
}

/// Whether a run that ended so may go on when it is started again: it was killed, a peer, the network or a device failed, or
/// a fault of this program ended it, which need not come a second time.
fn may_succeed(status: ExitStatus) -> bool {
    let codes = [ErrorCategory::Transient, ErrorCategory::Internal].map(|kind| i32::from(kind.exit_code()));
    status.code().is_none_or(|code| codes.contains(&code))
}

/// How a run has ended, for people.
fn said(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "was killed".to_owned(),
    }
}

fn killed(status: ExitStatus, restarts: u16) -> Error {
    Error::new(ErrorCategory::Transient, format!("the run {}", said(status)))
        .because(format!("it was started again {restarts} times"))
        .hint("the same command with `--resume` goes on from the newest checkpoint")
}

#[cfg(test)]
mod tests {
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
        assert_eq!(said(ExitStatus::from_raw(SIGKILL)), "was killed by signal 9");
    }
}
