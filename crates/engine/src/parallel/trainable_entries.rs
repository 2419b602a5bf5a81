//! Access to single trainable tensors of a store: checks for gradients, and new values.

use candle_core::{Device, Tensor};

use super::bucket::{Bucket, FillParam, LoadTarget};
use super::param_store::ParamStore;
use crate::error::Result;
use crate::ops::elementwise::sums_of_squares;

/// A trainable tensor: its bucket among those that train, and its index among the bucket's entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EntryIndex {
    bucket: usize,
    entry: usize,
}

impl ParamStore {
    /// Returns every trainable tensor, in the same order on all ranks.
    pub(crate) fn trainable_entries(&self) -> Vec<EntryIndex> {
        let of_bucket =
            |(bucket, entries): (usize, usize)| (0..entries).map(move |entry| EntryIndex { bucket, entry });
        let counts = self.trainable().map(|bucket| bucket.entries.len());
        counts.enumerate().flat_map(of_bucket).collect()
    }

    /// Returns the name of a trainable tensor of this store.
    pub(crate) fn trainable_name(&self, at: EntryIndex) -> Option<&str> {
        Some(self.trainable().nth(at.bucket)?.entries.get(at.entry)?.desc.name.as_str())
    }

    /// Returns for each of `entries` whether this rank's part of its gradient has a non-zero value.
    ///
    /// # Errors
    /// A tensor operation failed.
    pub(crate) fn has_gradients(&self, entries: &[EntryIndex]) -> Result<Vec<bool>> {
        let buckets: Vec<&Bucket> = self.trainable().collect();
        let mut parts: Vec<Option<Tensor>> = Vec::new();
        for at in entries {
            let bucket = buckets[at.bucket];
            let (own, range) = (bucket.own(), bucket.entries[at.entry].range());
            let (from, to) = (range.start.max(own.start), range.end.min(own.end));
            let grad = bucket.gradient()?.filter(|_| from < to);
            parts.push(grad.map(|grad| grad.narrow(0, from - own.start, to - from)).transpose()?);
        }
        let held: Vec<&Tensor> = parts.iter().flatten().collect();
        let mut squares = sums_of_squares(&held, &self.options.device)?.read()?.into_iter();
        let has =
            |part: &Option<Tensor>| part.as_ref().and_then(|_| squares.next()).is_some_and(|sum| sum != 0.0);
        Ok(parts.iter().map(has).collect())
    }

    /// Sets every trainable tensor to the f32 values that `fill` writes, and updates the compute
    /// values. All ranks call it.
    ///
    /// # Errors
    /// Those of `fill`; a tensor operation failed; a peer failed.
    pub fn refill_trainable(&self, fill: &mut FillParam<'_>) -> Result<()> {
        for bucket in self.trainable() {
            let (own, updated) = (bucket.own(), bucket.updated()?);
            for entry in &bucket.entries {
                let range = entry.range();
                let (from, to) = (range.start.max(own.start), range.end.min(own.end));
                if from < to {
                    let mut values = vec![0f32; range.len()];
                    fill(&entry.desc, &entry.local, LoadTarget::F32(&mut values))?;
                    let part = &values[from - range.start..to - range.start];
                    let part = Tensor::from_slice(part, part.len(), &Device::Cpu)?;
                    updated.narrow(from - own.start, to - from)?.store_cast(&part)?;
                }
            }
            bucket.copy_master()?;
        }
        self.all_gather_params()
    }
}
