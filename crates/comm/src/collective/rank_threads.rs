//! Ranks as threads of this process: their names, panics, and the failure that ends the process.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{Scope, ScopedJoinHandle};

use crate::error::{Error, ErrorCategory, Result};
use crate::threads;

/// Stack size of a rank's thread: that of a main thread, which a single rank uses.
const STACK_BYTES: usize = 8 << 20;

/// The failure that ended the ranks of a process.
#[derive(Debug, Clone)]
pub struct RankFailure {
    /// The root cause as far as this process knows it, with rank, phase and last call.
    pub error: Error,
    /// Rank of this process that failed, with the reason in one line; none for a failure elsewhere.
    pub own: Option<(usize, String)>,
}

impl RankFailure {
    /// A failure outside of this process's ranks.
    pub(super) fn heard(error: Error) -> Self {
        RankFailure { error, own: None }
    }

    /// The same failure of all ranks of this process, the first of which is `rank`.
    pub(super) fn of_all(rank: usize, error: Error) -> Self {
        let why = in_a_line(&error);
        RankFailure { error, own: Some((rank, why)) }
    }
}

/// Starts a thread for `rank`.
pub(super) fn start<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    rank: usize,
    work: impl FnOnce() -> Result<T> + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, Result<T>>> {
    threads::start_in(scope, &format!("rank-{rank}"), Some(STACK_BYTES), work)
}

/// Waits for a rank's thread.
pub(super) fn join<T>(thread: Result<ScopedJoinHandle<'_, Result<T>>>) -> Result<T> {
    thread?.join().unwrap_or_else(|panic| Err(panicked(&*panic)))
}

/// Result of `work`; a panic becomes an error.
pub(super) fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panicked(&*panic)))
}

/// A panic is an internal error, but its run has lost a rank and can resume from the last
/// checkpoint: so it is transient.
fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    Error::new(ErrorCategory::Transient, "the thread panicked")
        .because(text.unwrap_or("its message is not text"))
}

/// Returns true if `error` results from `cause`, a failure of another rank: it is `cause`, or has
/// it as a cause.
pub(super) fn stems_from(error: &Error, cause: &Error) -> bool {
    error.what() == cause.what() || error.causes().iter().any(|text| text == cause.what())
}

/// Text of an error in one line: `what: cause: cause`
pub(super) fn in_a_line(error: &Error) -> String {
    std::iter::once(error.what())
        .chain(error.causes().iter().map(String::as_str))
        .collect::<Vec<_>>()
        .join(": ")
}
