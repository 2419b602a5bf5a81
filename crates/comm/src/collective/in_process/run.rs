//! Ranks as threads: started together, ended together, and of several errors the one that came first.

use std::sync::Arc;

use super::InProcess;
use super::shared::SharedWorld;
use crate::collective::rank_threads::{caught, in_a_line, join, start};
use crate::error::{Error, Result};

/// Runs `work` for each end in a thread of its own, `rank-0`, `rank-1`, …; a single one on this thread.
///
/// # Errors
/// When a rank returns an error or panics, its peers' calls fail and the error is that rank's, of its kind, with its
/// rank, phase and last call; not the survivors', whose calls failed because of it. What all ranks say alike is said once.
/// Every thread is waited for: one that neither calls nor returns keeps this from returning.
pub fn run_ranks<T: Send>(
    ends: Vec<InProcess>,
    work: impl Fn(InProcess) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    if ends.len() <= 1 {
        return ends.into_iter().map(work).collect();
    }
    let shared = Arc::clone(&ends[0].rank_handle.shared);
    let ranks: Vec<usize> = ends.iter().map(InProcess::world_rank).collect();
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let begin = |end: InProcess| {
            let (rank_handle, work) = (Arc::clone(&end.rank_handle), &work);
            let started = start(scope, rank_handle.rank, move || run_rank(end, work));
            started.inspect_err(|error| rank_handle.shared.abort(rank_handle.rank, &in_a_line(error)))
        };
        let threads: Vec<_> = ends.into_iter().map(begin).collect();
        threads.into_iter().map(join).collect()
    });
    if results.iter().all(Result::is_ok) {
        return results.into_iter().collect();
    }
    Err(first_failure(&shared, &ranks, results))
}

/// One rank; its seat is held until its peers know how it ended.
fn run_rank<T>(end: InProcess, work: impl Fn(InProcess) -> Result<T>) -> Result<T> {
    let rank_handle = Arc::clone(&end.rank_handle);
    let result = caught(|| work(end));
    if let Err(error) = &result {
        rank_handle.shared.abort(rank_handle.rank, &in_a_line(error));
    }
    result
}

/// The error of the rank that failed first. `results` are those of `ranks`, at least one an error.
fn first_failure<T>(shared: &SharedWorld, ranks: &[usize], results: Vec<Result<T>>) -> Error {
    let rank_errors = ranks.iter().zip(results).filter_map(|(rank, result)| Some((*rank, result.err()?)));
    let mut errors: Vec<(usize, Error)> = rank_errors.collect();
    let text = errors[0].1.to_string();
    let alike = errors.len() == ranks.len() && errors.iter().all(|(_, error)| error.to_string() == text);
    let state = shared.lock();
    let Some(failure) = &state.failure else { return errors.swap_remove(0).1 };
    let own = errors.iter().position(|(rank, _)| failure.own && *rank == failure.rank);
    match own {
        Some(first) if alike => errors.swap_remove(first).1,
        Some(first) => state.around(failure.rank, errors.swap_remove(first).1),
        None => failure.error.clone(),
    }
}
