//! The process between a run and its alert program, so that the program never outlives the run.
//!
//! A killed run (`kill -9`) cannot end its children. So finetune starts itself as a guard, which
//! starts the program in a process group. The guard kills the group when the time is over or the
//! run has ended. Linux's own signal at the end of a parent (`PR_SET_PDEATHSIG`) is not enough: it
//! reaches the program and not its children. It also comes when the thread that started it ends,
//! and setting it takes a `fork` of the process that trains.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use libc::pid_t;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

/// The first argument of finetune as a guard; then follow the run's process id, the time limit in
/// milliseconds, and the program with its arguments.
pub(super) const ARGUMENT: &str = "alert-guard";
/// The pause between two checks of the program and the run.
const PAUSE: Duration = Duration::from_millis(20);
/// Most checks for remaining processes after a kill.
const MOST_LOOKS: usize = 1000;

/// Serves as a guard if the arguments of this process ask for it. Writes the reason to stdout if
/// the program failed, else nothing.
pub fn serve_if_asked() -> Option<ExitCode> {
    let mut words = std::env::args_os().skip(1);
    if words.next()? != ARGUMENT {
        return None;
    }
    let mut number = || words.next()?.into_string().ok()?.parse().ok();
    let (Some(run), Some(millis)) = (number(), number()) else { return Some(ExitCode::FAILURE) };
    outlive_signals();
    adopt_orphans();
    let run = pid_t::try_from(run).unwrap_or_default();
    let words: Vec<OsString> = words.collect();
    // The parent of all orphans sees every process below it.
    let scope = if cfg!(target_os = "linux") { KillScope::Descendants } else { KillScope::Group };
    if let Err(why) = watch(&words, Duration::from_millis(millis), run, scope) {
        // Without a run the pipe has no reader.
        drop(write!(std::io::stdout(), "{why}"));
    }
    Some(ExitCode::SUCCESS)
}

/// Keeps the guard alive on signals to all processes of a job, which the program may ignore. The
/// program does not inherit handlers, other than ignored signals.
fn outlive_signals() {
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        // Without the handler the guard ends at the signal.
        drop(signal_hook::flag::register(signal, Arc::default()));
    }
}

/// Makes this process the parent of orphans below it (Linux), so that [`watch`] sees them.
fn adopt_orphans() {
    #[cfg(target_os = "linux")]
    // SAFETY: a system call that takes numbers.
    unsafe {
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1);
    }
}

/// The processes that the guard ends with the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KillScope {
    /// The processes of its group.
    Group,
    /// All processes below this one, which has no other children: also those that have left the
    /// group.
    Descendants,
}

/// Runs a program until it and its remaining processes in `scope` have ended. Kills them after
/// `time`, or if the process `run` is no longer the parent of this one.
///
/// # Errors
/// The reason for which the program failed.
fn watch(words: &[OsString], time: Duration, run: pid_t, scope: KillScope) -> Result<(), String> {
    let (program, arguments) = words.split_first().ok_or("it has no name")?;
    let mut command = Command::new(program);
    command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    let child = command.spawn().map_err(|error| error.to_string())?;
    let group = pid_t::try_from(child.id()).map_err(|error| error.to_string())?;
    let until = Instant::now() + time;
    let mut ended = None;
    while reap(group, scope, &mut ended) {
        // SAFETY: a system call without arguments.
        let has_run = unsafe { libc::getppid() } == run;
        if !has_run || Instant::now() >= until {
            end(group, scope, &mut ended);
            break;
        }
        thread::sleep(PAUSE);
    }
    match ended {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(format!("it ended with {status}")),
        None => Err(format!("it was still running after {} s", time.as_secs_f64())),
    }
}

/// Kills the processes of `scope`. Children of a killed process become this one's, so it repeats
/// until none is left.
fn end(group: pid_t, scope: KillScope, leader: &mut Option<ExitStatus>) {
    // SAFETY: a system call that takes numbers. At worst the group is gone.
    unsafe { libc::kill(-group, libc::SIGKILL) };
    if scope == KillScope::Group {
        return;
    }
    for _ in 0..MOST_LOOKS {
        for child in children() {
            // SAFETY: as above; a child of this process keeps its number until it is waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        if !reap(group, scope, leader) {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the children of this process (Linux).
fn children() -> Vec<pid_t> {
    let own = std::process::id();
    let list = std::fs::read_to_string(format!("/proc/self/task/{own}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|number| number.parse().ok()).collect()
}

/// Reaps the ended processes of `scope`; `leader` gets the status of the program. Returns whether
/// any process is left.
fn reap(group: pid_t, scope: KillScope, leader: &mut Option<ExitStatus>) -> bool {
    let whom = if scope == KillScope::Descendants { -1 } else { -group };
    loop {
        let mut status = 0;
        // SAFETY: a system call that writes a number to the given pointer.
        match unsafe { libc::waitpid(whom, &raw mut status, libc::WNOHANG) } {
            0 => return true,
            -1 => return false,
            pid if pid == group => *leader = Some(ExitStatus::from_raw(status)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, time: Duration) -> Result<(), String> {
        let words = ["sh", "-c", script].map(OsString::from);
        // SAFETY: a system call without arguments.
        watch(&words, time, unsafe { libc::getppid() }, KillScope::Group)
    }

    #[test]
    fn a_program_that_fails_hangs_or_is_not_there_is_named() {
        let long = Duration::from_secs(600);
        assert_eq!(shell("exit 0", long), Ok(()));
        assert_eq!(shell("exit 3", long), Err("it ended with exit status: 3".into()));
        let hung = shell("sleep 600 & wait", Duration::from_millis(100));
        assert_eq!(hung, Err("it was still running after 0.1 s".into()));
        let missing = watch(&["no such program".into()], long, 0, KillScope::Group);
        assert!(missing.is_err_and(|why| why.contains("No such file")));
        assert!(watch(&[], long, 0, KillScope::Group).is_err());
    }

    #[test]
    fn a_program_whose_run_has_gone_is_killed() {
        let words = ["sleep", "600"].map(OsString::from);
        let no_process = -1;
        assert!(watch(&words, Duration::from_secs(600), no_process, KillScope::Group).is_err());
    }
}
