//! Runs in a child process of this binary: start, signals, and description of the end.
//!
//! The child is in a process group of its own, so that only its parent passes it a terminal's
//! signals. If the parent is killed, the system signals the child to save and stop (Linux).

use std::ffi::OsString;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::Ordering;
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

/// Starts this binary with the arguments `words` and the variables `environment` beside those of
/// this process.
pub(crate) fn start(
    words: &[OsString],
    environment: impl Iterator<Item = (&'static str, String)>,
) -> Result<Child> {
    let binary = binary()?;
    let mut command = Command::new(&binary);
    // In a group of its own, the child gets a terminal's signals only from its parent, and not
    // twice.
    command.args(words).process_group(0).envs(environment);
    ends_with_parent(&mut command);
    command.spawn().map_err(|error| Error::cannot_start(binary.display(), &error))
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

/// Waits for the child to end and passes signals on. Returns its status, and whether a signal asked
/// it to stop.
pub(crate) fn wait(child: &mut Child, signals: &[SeenSignal]) -> Result<(ExitStatus, bool)> {
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
    let found = all.into_iter().find(|category| i32::from(category.exit_code()) == code);
    found.unwrap_or(ErrorCategory::Internal)
}
