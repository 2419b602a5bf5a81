//! Signals that end a command with one output: the unfinished output is removed first.
//!
//! A signal sets a flag. A thread that polls it removes the unfinished output and ends the process.
//! The process works on until then, so no call is interrupted and no handler removes files.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use libc::c_int;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level;

use super::signals::{FirstSignal, is_ignored, stop_or_end};
use crate::error::{ErrorCategory, Result};
use crate::report::{Terminal, finish};
use crate::threads;
use crate::weights::discard_unfinished;

const SIGNALS: [c_int; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Interval of polling the flag.
const PAUSE: Duration = Duration::from_millis(20);

/// Does `work`, which publishes `output` at its end. A signal before that removes the unfinished
/// output and ends the process with exit code 130. A second one after half a second ends it at
/// once.
///
/// # Errors
/// Those of `work`; internal: the system refuses a signal handler.
pub(crate) fn removing_on_signals<T>(
    output: &Path,
    terminal: &Terminal,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let code = i32::from(ErrorCategory::Stopped.exit_code());
    let (stop, done) = (Arc::new(AtomicBool::new(false)), AtomicBool::new(false));
    let mut handlers = Vec::new();
    let first = FirstSignal::none_yet();
    for signal in SIGNALS.into_iter().filter(|signal| !is_ignored(*signal)) {
        handlers.push(stop_or_end(signal, &stop, &first)?);
    }
    let result = thread::scope(|scope| {
        let watcher = threads::start_in(scope, "signals", None, || {
            while !done.load(Ordering::SeqCst) {
                if stop.load(Ordering::SeqCst) {
                    let begun = discard_unfinished();
                    let left = format!("; removed the unfinished {}", output.display());
                    terminal.warn(format!("stopped by a signal{}", if begun { left.as_str() } else { "" }));
                    finish();
                    std::process::exit(code);
                }
                thread::park_timeout(PAUSE);
            }
        })?;
        // Dropped also when `work` panics; otherwise the scope would wait for the watcher forever.
        let end = EndWatch { done: &done, watcher: watcher.thread() };
        let result = work();
        drop(end);
        result
    });
    for handler in handlers {
        low_level::unregister(handler);
    }
    result
}

/// Ends the watcher when it is dropped.
struct EndWatch<'a> {
    done: &'a AtomicBool,
    watcher: &'a thread::Thread,
}

impl Drop for EndWatch<'_> {
    fn drop(&mut self) {
        self.done.store(true, Ordering::SeqCst);
        self.watcher.unpark();
    }
}
