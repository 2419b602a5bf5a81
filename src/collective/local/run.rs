//! Ranks as threads: started together, ended together, and of several errors the one that came first.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, ScopedJoinHandle};

use super::Local;
use super::shared::Shared;
use crate::error::{Error, Kind, Result};

/// Stack of a rank's thread: a main thread's, which is what a single rank has.
const STACK_BYTES: usize = 8 << 20;

/// Runs `work` for each end in a thread of its own, `rank-0`, `rank-1`, …; a single one on this thread.
///
/// # Errors
/// When a rank returns an error or panics, its peers' calls fail and the error is that rank's, of its kind, with its
/// rank and phase; not the survivors', whose calls failed because of it. What all ranks say alike is said once. Every
/// thread is waited for: one that neither calls nor returns keeps this from returning.
pub fn run_ranks<T: Send>(ends: Vec<Local>, work: impl Fn(Local) -> Result<T> + Sync) -> Result<Vec<T>> {
    if ends.len() <= 1 {
        return ends.into_iter().map(work).collect();
    }
    let shared = Arc::clone(&ends[0].seat.shared);
    let ranks: Vec<usize> = ends.iter().map(Local::world_rank).collect();
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let start = |end: Local| {
            let (seat, work) = (Arc::clone(&end.seat), &work);
            let builder = Builder::new().name(format!("rank-{}", seat.rank)).stack_size(STACK_BYTES);
            builder.spawn_scoped(scope, move || run_rank(end, work)).map_err(|error| {
                let error =
                    Error::new(Kind::Transient, format!("cannot start a thread for rank {}", seat.rank))
                        .because(error.to_string());
                seat.shared.abort(seat.rank, &in_a_line(&error));
                error
            })
        };
        let threads: Vec<Result<ScopedJoinHandle<'_, Result<T>>>> = ends.into_iter().map(start).collect();
        threads
            .into_iter()
            .map(|thread| thread?.join().unwrap_or_else(|panic| Err(panicked(&*panic))))
            .collect()
    });
    if results.iter().all(Result::is_ok) {
        return results.into_iter().collect();
    }
    Err(first_failure(&shared, &ranks, results))
}

/// One rank; its seat is held until its peers know how it ended.
fn run_rank<T>(end: Local, work: impl Fn(Local) -> Result<T>) -> Result<T> {
    let seat = Arc::clone(&end.seat);
    let result = catch_unwind(AssertUnwindSafe(|| work(end))).unwrap_or_else(|panic| Err(panicked(&*panic)));
    if let Err(error) = &result {
        seat.shared.abort(seat.rank, &in_a_line(error));
    }
    result
}

/// A panic is a fault of ours, but to whoever starts runs it is a rank that was lost: the run can go on from its last
/// checkpoint.
fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    Error::new(Kind::Transient, "the thread panicked").because(text.unwrap_or("its message is no text"))
}

/// `what: cause: cause`
fn in_a_line(error: &Error) -> String {
    std::iter::once(error.what())
        .chain(error.causes().iter().map(String::as_str))
        .collect::<Vec<_>>()
        .join(": ")
}

/// The error of the rank that failed first. `results` are those of `ranks`, at least one an error.
fn first_failure<T>(shared: &Shared, ranks: &[usize], results: Vec<Result<T>>) -> Error {
    let rank_errors = ranks.iter().zip(results).filter_map(|(rank, result)| Some((*rank, result.err()?)));
    let mut errors: Vec<(usize, Error)> = rank_errors.collect();
    let text = errors[0].1.to_string();
    let alike = errors.len() == ranks.len() && errors.iter().all(|(_, error)| error.to_string() == text);
    let state = shared.lock();
    let Some(failure) = &state.failure else { return errors.swap_remove(0).1 };
    let own = errors.iter().position(|(rank, _)| failure.own && *rank == failure.rank);
    match own {
        Some(first) if alike => errors.swap_remove(first).1,
        Some(first) => {
            let what = format!("rank {} failed{}", failure.rank, state.in_phase(failure.rank));
            errors.swap_remove(first).1.during(what)
        }
        None => failure.error.clone(),
    }
}
