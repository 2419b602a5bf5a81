//! Aborts of communicators, each on its own thread.
//!
//! `ncclCommAbort` synchronizes NCCL's stream, so it may never return while another thread is
//! inside the driver. A rank waits only a limited time for the aborts of its process, and can then
//! report its error. A stuck abort means that kernels of this process may never end, nor the ranks
//! that wait for them. So if aborts are still stuck after twice that time, the process ends with
//! the cause of the failure. Nothing joins these threads: a process that returns from `main` does
//! not wait for them.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::error::Error;
use crate::locks::locked;
use crate::threads;

/// Maximum time that a rank waits for the aborts of its process. Tests exceed it only where they
/// set another limit.
pub(super) const LIMIT: Duration = Duration::from_secs(if cfg!(test) { 300 } else { 10 });

/// The aborts of a process; see the module.
#[derive(Debug)]
pub(super) struct AbortThreads {
    limit: Duration,
    /// Ends the process; none: a stuck abort has no further effect.
    end: Option<fn(&Error)>,
    state: Mutex<AbortState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct AbortState {
    /// Number of aborts that have not returned.
    running: usize,
    /// True while a thread waits to end the process.
    is_ending: bool,
}

impl AbortThreads {
    /// Creates it without any abort; `end` ends the process with an error.
    pub(super) fn new(limit: Duration, end: Option<fn(&Error)>) -> Arc<Self> {
        Arc::new(AbortThreads { limit, end, state: Mutex::default(), ended: Condvar::new() })
    }

    /// Starts `abort`. If the system refuses the thread, the abort counts as stuck.
    pub(super) fn start(self: &Arc<Self>, abort: impl FnOnce() + Send + 'static) {
        locked(&self.state).running += 1;
        let own = Arc::clone(self);
        let run = move || {
            abort();
            locked(&own.state).running -= 1;
            own.ended.notify_all();
        };
        drop(threads::start("nccl-abort", run));
    }

    /// Ends the process with `cause` if an abort is still stuck after twice the limit.
    pub(super) fn watch(self: &Arc<Self>, cause: &Error) {
        let Some(end) = self.end else { return };
        if std::mem::replace(&mut locked(&self.state).is_ending, true) {
            return;
        }
        let (own, error) = (Arc::clone(self), cause.clone());
        let last = move || {
            if own.end_within(2 * own.limit) {
                locked(&own.state).is_ending = false;
            } else {
                end(&error);
            }
        };
        if threads::start("nccl-end", last).is_err() && !self.end_within(self.limit) {
            end(cause);
        }
    }

    /// Waits for all aborts, at most for the limit.
    pub(super) fn wait(&self) {
        self.end_within(self.limit);
    }

    /// Waits for the aborts, at most for `limit`. Returns true if all have returned.
    fn end_within(&self, limit: Duration) -> bool {
        let state = locked(&self.state);
        let waited = self.ended.wait_timeout_while(state, limit, |state| state.running > 0);
        waited.unwrap_or_else(PoisonError::into_inner).0.running == 0
    }
}
