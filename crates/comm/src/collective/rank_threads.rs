//! Ranks as threads of this process: started under their names, panics caught, and how the process ended.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{Scope, ScopedJoinHandle};

use crate::error::{Error, ErrorCategory, Result};
use crate::threads;

/// Stack of a rank's thread: a main thread's, which is what a single rank has.
const STACK_BYTES: usize = 8 << 20;

/// The failure that ended the ranks of a process.
#[derive(Debug, Clone)]
pub struct RankFailure {
    /// The root cause as far as this process knows it, with rank, phase and last call.
    pub error: Error,
    /// The rank of this process whose own failure it is, with why, in a line; none when this process only heard of it.
    pub own: Option<(usize, String)>,
}

impl RankFailure {
    /// A failure that is no rank's of this process.
    pub(super) fn heard(error: Error) -> Self {
        RankFailure { error, own: None }
    }

    /// A failure of all ranks of this process alike, of which `rank` is the first.
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

/// The result of `work`; a panic is an error.
pub(super) fn caught<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panicked(&*panic)))
}

/// A panic is a fault of ours, but to whoever starts runs it is a rank that was lost: the run can go on from its last
/// checkpoint.
fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    Error::new(ErrorCategory::Transient, "the thread panicked")
        .because(text.unwrap_or("its message is no text"))
}

/// Whether `error` is what a rank returned because of `cause`, a failure it heard of: that, or that with words around it.
pub(super) fn stems_from(error: &Error, cause: &Error) -> bool {
    error.what() == cause.what() || error.causes().iter().any(|text| text == cause.what())
}

/// `what: cause: cause`
pub(super) fn in_a_line(error: &Error) -> String {
    std::iter::once(error.what())
        .chain(error.causes().iter().map(String::as_str))
        .collect::<Vec<_>>()
        .join(": ")
}
