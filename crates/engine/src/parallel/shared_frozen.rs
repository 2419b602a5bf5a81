//! Frozen weights that the ranks of a process share on the CPU. The first rank that needs a bucket
//! loads it, and all compute with the same memory, which no step writes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::bucket::Bucket;
use super::param::{BucketKey, ParamDesc};
use super::placement::{ParamRole, ShardingStrategy};
use super::quantized_bucket::QuantizedBucket;
use super::views::TOKEN_ROWS;
use crate::error::Result;
use crate::locks::locked;
use crate::model::Segment;

/// The frozen buckets of the ranks that are threads of one process. Each rank takes each bucket
/// once; after the last has taken it, only the ranks hold it.
#[derive(Debug, Clone)]
pub struct SharedFrozen {
    ranks: usize,
    slots: Arc<Mutex<BTreeMap<BucketKey, Slot>>>,
}

/// A bucket on its way to the ranks, and the number of ranks that have asked for it.
#[derive(Debug, Default)]
struct Slot {
    asked: usize,
    loaded: Arc<Mutex<Option<FrozenBucket>>>,
}

/// A bucket of frozen values, which its copies share.
#[derive(Debug, Clone)]
pub(super) enum FrozenBucket {
    Dense(Box<Bucket>),
    Quantized(QuantizedBucket),
}

impl SharedFrozen {
    /// Creates an empty store for the `ranks` ranks of a process, each in its own thread pool.
    pub fn new(ranks: usize) -> Self {
        SharedFrozen { ranks, slots: Arc::default() }
    }

    /// Returns the number of ranks of the process.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the bucket `key`, which the first rank that asks gets by `load` while the others
    /// wait. After a failed `load`, the next rank tries.
    pub(super) fn take(
        &self,
        key: BucketKey,
        load: impl FnOnce() -> Result<FrozenBucket>,
    ) -> Result<FrozenBucket> {
        let loaded = {
            let mut slots = locked(&self.slots);
            let slot = slots.entry(key).or_default();
            slot.asked += 1;
            let loaded = Arc::clone(&slot.loaded);
            if slot.asked == self.ranks {
                slots.remove(&key);
            }
            loaded
        };
        let mut loaded = locked(&loaded);
        if let Some(bucket) = &*loaded {
            return Ok(bucket.clone());
        }
        let bucket = load()?;
        *loaded = Some(bucket.clone());
        Ok(bucket)
    }
}

/// Returns whether an adapter trains rows of a table.
pub fn trains_rows(descs: &[ParamDesc]) -> bool {
    descs.iter().any(|desc| desc.name.ends_with(TOKEN_ROWS))
}

/// Returns whether ranks of a process can share the values of the parameters of `segment` with this
/// role: they are frozen and whole. Tables with rows that train are not frozen: each rank writes
/// its rows into its own.
pub fn is_shareable(
    strategy: ShardingStrategy,
    role: ParamRole,
    segment: Segment,
    trains_rows: bool,
) -> bool {
    let is_whole = !strategy.sharding_spec(role).values.is_sharded();
    let is_written = trains_rows && !matches!(segment, Segment::Block(_));
    role == ParamRole::Frozen && is_whole && !is_written
}

impl Default for SharedFrozen {
    fn default() -> Self {
        SharedFrozen::new(1)
    }
}
