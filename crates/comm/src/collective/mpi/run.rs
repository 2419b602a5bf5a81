//! Ranks of a process in an MPI job: threads that start, work and end together, from the start of
//! MPI to its end or the first failure.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use super::transport::MpiTransport;
use super::{MpiCommunicator, MpiRank};
use crate::collective::launch::Launch;
use crate::collective::rank_threads;
use crate::collective::rank_threads::{RankFailure, caught, in_a_line, stems_from};
use crate::error::{Error, ErrorCategory, Result};

/// Ends the waits of this process's ranks after a failure elsewhere. It keeps no other value alive.
#[derive(Clone)]
pub struct Stop(Weak<MpiTransport>);

impl Stop {
    /// Makes the ranks' calls return `cause`, unless another failure came first. It does not inform
    /// other processes.
    pub fn raise(&self, cause: Error) {
        if let Some(wire) = self.0.upgrade() {
            wire.fail(cause);
        }
    }
}

/// Starts MPI and runs `work` for each rank of this process, in threads `rank-4`, `rank-5`, …, with
/// its index in the process; `armed` gets the [`Stop`] of the ranks. Call it once per process. MPI
/// ends on this thread, after all ranks, and waits for the other processes.
///
/// # Errors
/// MPI cannot start, or has other processes than `launch`. If `work` returns an error or panics in
/// any process, all ranks' calls fail: the result is the first failure, which the other processes
/// have received if a rank here failed. A stop on request, which all ranks make together, is
/// returned and is no failure.
pub fn run_ranks<T: Send>(
    launch: &Launch,
    deadline: Duration,
    armed: impl FnOnce(Stop),
    work: impl Fn(usize, Arc<MpiCommunicator>) -> Result<T> + Sync,
) -> Result<Vec<T>, RankFailure> {
    let wire =
        MpiTransport::start(launch, deadline).map_err(|error| RankFailure::of_all(launch.rank, error))?;
    let wire = Arc::new(wire);
    armed(Stop(Arc::downgrade(&wire)));
    let first: OnceLock<RankFailure> = OnceLock::new();
    let rank = |local_rank: usize| {
        let member = Arc::new(MpiRank::new(&wire, launch.rank + local_rank));
        let world = Arc::new(MpiCommunicator::world(&member, launch.world_size));
        let done = caught(|| work(local_rank, world));
        if let Err(error) = &done
            && error.kind() != ErrorCategory::SavedAndStopped
            && wire.healthy().err().is_none_or(|cause| !stems_from(error, &cause))
        {
            let (at, rank) = (member.status(), member.rank);
            let news = at.news(rank, &in_a_line(error));
            let own = Some((rank, in_a_line(&news)));
            first.get_or_init(|| RankFailure { error: at.around(rank, error.clone()), own });
            wire.raise(&news);
        }
        done
    };
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let start = |local_rank| {
            let rank = &rank;
            rank_threads::start(scope, launch.rank + local_rank, move || rank(local_rank)).inspect_err(
                |error| {
                    first.get_or_init(|| RankFailure::of_all(launch.rank + local_rank, error.clone()));
                    wire.raise(error);
                },
            )
        };
        let started: Vec<_> = (0..launch.ranks_here).map(start).collect();
        started.into_iter().map(rank_threads::join).collect()
    });
    let done: Result<Vec<T>> = results.into_iter().collect();
    done.map_err(|error| match first.into_inner() {
        Some(failure) => failure,
        None if error.kind() == ErrorCategory::SavedAndStopped => RankFailure::heard(error),
        None => RankFailure::heard(wire.fail(error)),
    })
}
