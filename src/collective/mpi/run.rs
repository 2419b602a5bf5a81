//! This process as one rank of an MPI job, from its start to its end or the first failure.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Mpi;
use super::wire::Wire;
use crate::collective::threads::{Failed, caught, in_a_line, stems_from};
use crate::error::{Error, Result};

/// Ends the waits of this process's rank for a failure that was heard of elsewhere. It keeps nothing alive.
#[derive(Clone)]
pub struct Stop(Weak<Wire>);

impl Stop {
    /// From now on the rank's calls return `cause`, unless another failure came first. The peers are not told.
    pub fn raise(&self, cause: Error) {
        if let Some(wire) = self.0.upgrade() {
            wire.fail(cause);
        }
    }
}

/// Starts MPI and runs `work` as the rank of this process; `armed` gets what stops it from outside.
///
/// # Errors
/// When `work` returns an error or panics, or a peer did: the first failure, of which the peers have been told if it is
/// this rank's.
pub fn run_rank<T>(
    deadline: Duration,
    armed: impl FnOnce(Stop),
    work: impl FnOnce(Arc<Mpi>) -> Result<T>,
) -> Result<T, Failed> {
    let world = Arc::new(Mpi::world(deadline).map_err(Failed::heard)?);
    armed(Stop(Arc::downgrade(&world.wire)));
    let done = caught(|| work(Arc::clone(&world)));
    done.map_err(|error| {
        let (wire, rank) = (&world.wire, world.wire.rank);
        if let Some(first) = wire.healthy().err().filter(|first| stems_from(&error, first)) {
            return Failed::heard(first);
        }
        let at = wire.place();
        let news = at.news(rank, &in_a_line(&error));
        wire.raise(&news);
        Failed { error: at.around(rank, error), own: Some((rank, in_a_line(&news))) }
    })
}
