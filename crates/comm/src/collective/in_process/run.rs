//! Runs ranks as threads that start and end together, and returns the first of several errors.

use std::sync::Arc;

use super::InProcess;
use super::shared::SharedWorld;
use crate::collective::rank_threads::{caught, in_a_line, join, start};
use crate::error::{Error, Result};

/// Runs `work` for each communicator in a separate thread, `rank-0`, `rank-1`, …; a single one on
/// this thread.
///
/// # Errors
/// If a rank returns an error or panics, its peers' calls fail. The result is that rank's error, of
/// its category, with its rank, phase and last call; the peers' resulting errors are dropped. An
/// error that all ranks share is returned once. The function waits for every thread, so a thread
/// that neither calls nor returns blocks it.
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

/// Runs one rank; keeps its handle until its peers have been informed of its end.
fn run_rank<T>(end: InProcess, work: impl Fn(InProcess) -> Result<T>) -> Result<T> {
    let rank_handle = Arc::clone(&end.rank_handle);
    let result = caught(|| work(end));
    if let Err(error) = &result {
        rank_handle.shared.abort(rank_handle.rank, &in_a_line(error));
    }
    result
}

/// Error of the rank that failed first. `results` belong to `ranks`; at least one is an error.
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
