//! Child processes of this binary: start, signals, and description of the end.
//!
//! A child is in a process group of its own, so that only its parent passes it a terminal's
//! signals. If the parent is killed, the system signals the child to save and stop (Linux).

use std::ffi::OsString;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libc::c_int;
use signal_hook::consts::{SIGCONT, SIGKILL, SIGSTOP, SIGTERM, SIGTSTP};

use super::signals::{self, SeenSignal};
use crate::error::{Error, ErrorCategory, Result};
use crate::report::finish;

/// Interval of polling the child and the signals.
pub(crate) const POLL: Duration = Duration::from_millis(50);

/// Longest time that a child may be stopped (`SIGSTOP`) while its parent is not.
const STOPPED: Duration = Duration::from_secs(15);

/// Exit code of a rank's process that ends because another one failed. Its parent does not take it
/// for the cause.
pub(crate) const HEARD: u8 = 76;

/// Variable by which a parent informs the process of a rank that it reads [`HEARD`].
pub(crate) const OF_RANK: &str = "FINETUNE_RANK_PROCESS";

/// Set if the ranks of this process ended because another process failed.
static HAS_HEARD: AtomicBool = AtomicBool::new(false);

/// Records that the ranks of this process ended because another process failed.
pub(crate) fn record_failure_elsewhere() {
    HAS_HEARD.store(true, Ordering::SeqCst);
}

/// Returns the exit code for `error`, the end of this process. A process hears only of errors of a
/// peer; another one is its own.
pub(crate) fn exit_code(error: &Error) -> u8 {
    let has_heard = std::env::var_os(OF_RANK).is_some() && HAS_HEARD.load(Ordering::SeqCst);
    code_of(error.kind(), has_heard)
}

fn code_of(kind: ErrorCategory, has_heard: bool) -> u8 {
    if has_heard && kind == ErrorCategory::Transient { HEARD } else { kind.exit_code() }
}

/// Returns the command that starts this binary with the arguments `words`.
pub(crate) fn command(words: &[OsString]) -> Result<Command> {
    let mut command = Command::new(binary()?);
    // In a group of its own, the child gets a terminal's signals only from its parent, and not
    // twice.
    command.args(words).process_group(0);
    ends_with_parent(&mut command);
    Ok(command)
}

/// Returns the path of this binary.
pub(crate) fn binary() -> Result<std::path::PathBuf> {
    std::env::current_exe().map_err(|e| Error::internal("cannot find this binary").because(e.to_string()))
}

/// Makes the system signal the child to save and stop when this process ends (Linux).
pub(crate) fn ends_with_parent(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: both are system calls that may be made between fork and exec.
    unsafe {
        command.pre_exec(move || {
            #[cfg(target_os = "linux")]
            if libc::prctl(libc::PR_SET_PDEATHSIG, SIGTERM) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // The parent may have ended before.
            if libc::getppid().unsigned_abs() == parent {
                Ok(())
            } else {
                Err(std::io::ErrorKind::Other.into())
            }
        });
    }
}

/// A child process. Dropping one that has not ended kills it.
pub(crate) struct Running {
    child: Child,
    status: Option<ExitStatus>,
    stopped_since: Option<Instant>,
}

impl Running {
    /// Starts the process of `command`.
    ///
    /// # Errors
    /// [`Error::cannot_start`].
    pub(crate) fn start(mut command: Command) -> Result<Self> {
        let started = command.spawn();
        let child = started.map_err(|error| Error::cannot_start(command.get_program().display(), &error))?;
        Ok(Running { child, status: None, stopped_since: None })
    }

    /// Returns the status of the process at its end, as of the last [`Running::has_ended`].
    pub(crate) fn status(&self) -> Option<ExitStatus> {
        self.status
    }

    /// Returns whether the process has ended. Kills one that is stopped for too long.
    ///
    /// # Errors
    /// Internal: the system does not answer.
    pub(crate) fn has_ended(&mut self) -> Result<bool> {
        if self.status.is_none() {
            let failed =
                |e: std::io::Error| Error::internal("cannot wait for the run").because(e.to_string());
            self.status = self.child.try_wait().map_err(failed)?;
        }
        if self.status.is_some() || !is_stopped(self.child.id()) {
            self.stopped_since = None;
        } else if self.stopped_since.get_or_insert_with(Instant::now).elapsed() > STOPPED {
            self.send(SIGKILL);
        }
        Ok(self.status.is_some())
    }

    /// Sends a signal to the process, unless it has ended.
    pub(crate) fn send(&self, signal: c_int) {
        if let (None, Ok(pid)) = (self.status, libc::pid_t::try_from(self.child.id())) {
            // SAFETY: a system call; the child has not been waited for, so the id is still its.
            unsafe { libc::kill(pid, signal) };
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // After an error in this process the child would continue in vain.
        if self.status.is_none() {
            drop(self.child.kill().and_then(|()| self.child.wait()));
        }
    }
}

/// Passes the signals that have come since the last call on to `children`. Returns whether one of
/// them asks to stop.
pub(crate) fn pass_on(signals: &[SeenSignal], children: &mut [&mut Running]) -> bool {
    let mut asked_to_stop = false;
    for seen in signals.iter().filter(|seen| seen.flag.swap(false, Ordering::SeqCst)) {
        if seen.signal == SIGTSTP {
            // Ctrl-Z: all stop, and go on together.
            children.iter().for_each(|child| child.send(SIGSTOP));
            signals::stop_here();
            for child in &mut *children {
                child.send(SIGCONT);
                child.stopped_since = None;
            }
        } else {
            asked_to_stop = true;
            children.iter().for_each(|child| child.send(seen.signal));
        }
    }
    asked_to_stop
}

/// Returns whether a process is stopped; false on systems without `/proc`.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    // proc(5): the state follows the name, which is in parentheses and may hold any character.
    stat.is_ok_and(|stat| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T')))
}

/// Returns whether a signal asks to stop that no child has received yet.
pub(crate) fn asked_to_stop(signals: &[SeenSignal]) -> bool {
    signals.iter().any(|seen| seen.signal != SIGTSTP && seen.flag.load(Ordering::SeqCst))
}

/// Ends this process, which has nothing to save.
pub(crate) fn stop_now() -> ! {
    end_with(i32::from(ErrorCategory::Stopped.exit_code()))
}

/// Ends this process with the exit code of a child.
pub(crate) fn end_with(code: i32) -> ! {
    finish();
    std::process::exit(code)
}

/// Describes the end of a run for messages.
pub(crate) fn how_it_ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "was killed".to_owned(),
    }
}

/// Returns the error category with the exit code of the child. A killed child is transient, because
/// another try may succeed.
pub(crate) fn category(status: ExitStatus) -> ErrorCategory {
    let Some(code) = status.code() else { return ErrorCategory::Transient };
    let all = [
        ErrorCategory::User,
        ErrorCategory::Usage,
        ErrorCategory::Diverged,
        ErrorCategory::Storage,
        ErrorCategory::Transient,
        ErrorCategory::SavedAndStopped,
        ErrorCategory::Stopped,
    ];
    let category = all.into_iter().find(|category| i32::from(category.exit_code()) == code);
    category.unwrap_or(ErrorCategory::Internal)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that fails by itself keeps its code, also if it has heard of another failure.
    #[test]
    fn only_a_lost_peer_is_heard_of() {
        let codes = |kind| [false, true].map(|has_heard| code_of(kind, has_heard));
        assert_eq!(codes(ErrorCategory::Transient), [75, HEARD]);
        assert_eq!(codes(ErrorCategory::Storage), [74; 2]);
        assert_eq!(codes(ErrorCategory::Diverged), [4; 2]);
    }
}
