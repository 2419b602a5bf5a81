//! Signals that ask a run to save and stop.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use libc::c_int;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGXCPU};
use signal_hook::flag;

use crate::error::{Error, ErrorCategory, Result};

/// Sent by a person or by whoever ends the process for good: the second of these does not wait for a save.
const ENDING: [c_int; 2] = [SIGINT, SIGTERM];

/// Sent ahead of the end by batch systems (Slurm's `--signal`, SGE's notifications, a limit on CPU time, which signals
/// once a second) and closing terminals: however often, they ask for a save.
const WARNING: [c_int; 4] = [SIGUSR1, SIGUSR2, SIGHUP, SIGXCPU];

/// A flag that is set by the first signal which asks for a save. A second SIGINT or SIGTERM ends the program at once.
///
/// # Errors
/// The system refuses a handler.
pub(crate) fn watch() -> Result<Arc<AtomicBool>> {
    let (stop, ending) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let failed = |e: std::io::Error| Error::internal("cannot watch signals").because(e.to_string());
    for signal in ENDING {
        let code = i32::from(ErrorCategory::Stopped.exit_code());
        // Called in this order: the first such signal finds `ending` still unset.
        flag::register_conditional_shutdown(signal, code, Arc::clone(&ending)).map_err(failed)?;
        flag::register(signal, Arc::clone(&ending)).map_err(failed)?;
        flag::register(signal, Arc::clone(&stop)).map_err(failed)?;
    }
    for signal in WARNING {
        // As under `nohup`: whoever started the process wants it to go on.
        if !is_ignored(signal) {
            flag::register(signal, Arc::clone(&stop)).map_err(failed)?;
        }
    }
    Ok(stop)
}

/// Whether the process was started with `signal` ignored.
pub(super) fn is_ignored(signal: c_int) -> bool {
    // SAFETY: zeroes are a valid `sigaction`, which the call fills in; without a new action it changes nothing.
    unsafe {
        let mut current: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut current) == 0
            && current.sa_sigaction == libc::SIG_IGN
    }
}

/// A signal that a parent passes on to the process in which the run is, and whether it has come.
pub(crate) struct SeenSignal {
    pub(crate) signal: c_int,
    pub(crate) flag: Arc<AtomicBool>,
}

/// The signals that [`watch`] knows, and that of Ctrl-Z, for a parent; those that the process ignores are left out.
///
/// # Errors
/// The system refuses a handler.
pub(crate) fn seen_by_parent() -> Result<Vec<SeenSignal>> {
    let failed = |e: std::io::Error| Error::internal("cannot watch signals").because(e.to_string());
    let all = ENDING.into_iter().chain(WARNING).chain([SIGTSTP]);
    let seen = all.filter(|signal| !is_ignored(*signal)).map(|signal| {
        let flag = Arc::new(AtomicBool::new(false));
        flag::register(signal, Arc::clone(&flag)).map_err(failed)?;
        Ok(SeenSignal { signal, flag })
    });
    seen.collect()
}

/// Stops this process until it is told to go on, as Ctrl-Z does.
pub(crate) fn stop_here() {
    // SAFETY: a system call that takes a signal's number.
    unsafe { libc::raise(libc::SIGSTOP) };
}
