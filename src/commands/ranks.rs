//! Ranks as threads of this process.

use std::sync::Arc;

use crate::collective::{Collective, local};
use crate::error::Result;
use crate::ops::threads;

/// Runs `rank` on each of `ranks` ranks, which divide the threads there are, and returns the first one's failure.
pub(super) fn run_ranks(ranks: usize, rank: impl Fn(Arc<dyn Collective>) -> Result<()> + Sync) -> Result<()> {
    let each = (threads::count() / ranks).max(1);
    local::run_ranks(local::World::ends(ranks), |end| threads::in_own_pool(each, || rank(Arc::new(end))))?;
    Ok(())
}
