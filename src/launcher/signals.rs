//! Signals that ask a run to save and stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use libc::c_int;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGXCPU};
use signal_hook::{SigId, flag, low_level};

use crate::error::{Error, ErrorCategory, Result};
use crate::report::ui::restore_screen;

/// Signals of a user or a batch system that end the process. The second one does not wait for a
/// save.
const ENDING: [c_int; 2] = [SIGINT, SIGTERM];

/// Signals that batch systems (Slurm's `--signal`, SGE's notifications, a limit on CPU time, which
/// signals once a second) and closing terminals send ahead of the end. Any number of them requests
/// one save.
const WARNING: [c_int; 4] = [SIGUSR1, SIGUSR2, SIGHUP, SIGXCPU];

/// Signal that ends a process whose ranks do not run yet, and later requests a save.
pub(crate) const ENDS_BEFORE_RUN: c_int = SIGUSR1;

/// Milliseconds after a first ending signal in which a second one counts as the same. A job may
/// signal the process and its group, or a launcher may pass the system's signal on.
const ONE_REQUEST_MS: u64 = 500;

/// Lets the first signal set `stop`, to request a save. A later SIGINT or SIGTERM ends the program
/// at once, unless it comes within half a second of the first.
///
/// # Errors
/// The system refuses a signal handler.
pub(crate) fn watch(stop: &Arc<AtomicBool>) -> Result<()> {
    let first = FirstSignal::none_yet();
    for signal in ENDING {
        stop_or_end(signal, stop, &first)?;
    }
    for signal in WARNING {
        // A parent such as `nohup` ignores the signal so that the process continues.
        if !is_ignored(signal) {
            flag::register(signal, Arc::clone(stop)).map_err(failed)?;
        }
    }
    Ok(())
}

/// Time of the first ending signal: milliseconds after `began`, at least 1; 0 before any signal.
#[derive(Clone)]
pub(crate) struct FirstSignal {
    began: Instant,
    ms: Arc<AtomicU64>,
}

impl FirstSignal {
    pub(crate) fn none_yet() -> Self {
        FirstSignal { began: Instant::now(), ms: Arc::default() }
    }
}

/// Registers a handler by which `signal` sets `stop`. A signal after the `first` ends the program
/// at once, unless it comes within half a second.
///
/// # Errors
/// The system refuses a signal handler.
pub(crate) fn stop_or_end(signal: c_int, stop: &Arc<AtomicBool>, first: &FirstSignal) -> Result<SigId> {
    let (stop, first) = (Arc::clone(stop), first.clone());
    let again = move || {
        let now = first.began.elapsed().as_millis() as u64 + 1;
        stop.store(true, Ordering::SeqCst);
        match first.ms.compare_exchange(0, now, Ordering::SeqCst, Ordering::SeqCst) {
            Err(first) if now > first + ONE_REQUEST_MS => {
                restore_screen();
                low_level::exit(i32::from(ErrorCategory::Stopped.exit_code()))
            }
            _ => {}
        }
    };
    // SAFETY: the handler reads the clock, changes atomics, and may give the screen back by calls
    // that handlers may make and end the process by `_exit`: it neither allocates nor locks.
    unsafe { low_level::register(signal, again) }.map_err(failed)
}

fn failed(error: std::io::Error) -> Error {
    Error::internal("cannot watch signals").because(error.to_string())
}

/// Returns whether the process was started with `signal` ignored.
pub(crate) fn is_ignored(signal: c_int) -> bool {
    // SAFETY: zeroes are a valid `sigaction`, which the call fills in; without a new action it
    // changes nothing.
    unsafe {
        let mut current: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut current) == 0
            && current.sa_sigaction == libc::SIG_IGN
    }
}

/// A signal that a parent passes on to the child with the run, and its flag.
pub(crate) struct SeenSignal {
    pub(crate) signal: c_int,
    pub(crate) flag: Arc<AtomicBool>,
}

/// Registers flags for the signals of [`watch`] and of Ctrl-Z, for a parent process. Signals that
/// the process ignores are left out.
///
/// # Errors
/// The system refuses a signal handler.
pub(crate) fn seen_by_parent() -> Result<Vec<SeenSignal>> {
    let all = ENDING.into_iter().chain(WARNING).chain([SIGTSTP]);
    let seen = all.filter(|signal| !is_ignored(*signal)).map(|signal| {
        let flag = Arc::new(AtomicBool::new(false));
        flag::register(signal, Arc::clone(&flag)).map_err(failed)?;
        Ok(SeenSignal { signal, flag })
    });
    seen.collect()
}

/// Stops this process until a SIGCONT, as Ctrl-Z does.
pub(crate) fn stop_here() {
    // SAFETY: a system call that takes a signal's number.
    unsafe { libc::raise(libc::SIGSTOP) };
}
