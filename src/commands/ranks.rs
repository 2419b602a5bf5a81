//! Ranks as threads of this process.

use std::sync::Arc;

use crate::collective::{Collective, local};
use crate::error::{Context as _, Result};
use crate::ops::threads;

/// Plants a fault in a rank, as `1:backward:panic`: for tests of how runs end.
const FAULT: &str = "FINETUNE_FAULT";

/// Runs `rank` on each of `ranks` ranks, which divide the threads there are, and returns the first one's failure.
pub(super) fn run_ranks(ranks: usize, rank: impl Fn(Arc<dyn Collective>) -> Result<()> + Sync) -> Result<()> {
    let each = (threads::count() / ranks).max(1);
    let mut world = local::World::new(ranks);
    if let Ok(text) = std::env::var(FAULT) {
        world = world.with_fault(text.parse().during(|| format!("cannot use {FAULT}"))?);
    }
    local::run_ranks(world.ends(), |end| threads::in_own_pool(each, || rank(Arc::new(end))))?;
    Ok(())
}
