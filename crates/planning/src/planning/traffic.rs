//! Bytes that a step sends between ranks and copies from the host.

use std::collections::BTreeMap;

use super::memory::{MemoryOptions, weight_bytes};
use super::parallel::reduce_dtype;
use crate::error::Result;
use crate::model::Segment;
use crate::parallel::{ParamDesc, SentBytes, TrainedRun};
use crate::recipe::Recipe;
use crate::recipe::enums::StoredActivations;

/// Returns the bytes that a rank sends in a step of `recipe`. Padding of buckets is not counted.
///
/// # Errors
/// The ranks that split a parameter do not divide it.
pub(super) fn sent(
    descs: &[ParamDesc],
    options: &MemoryOptions<'_>,
    recipe: &Recipe,
    stored: &StoredActivations,
) -> Result<SentBytes> {
    let mut gathered: BTreeMap<Segment, usize> = BTreeMap::new();
    // The trained parameters of a segment form one bucket, but for the table of per-layer inputs.
    let mut trained: BTreeMap<(Segment, bool, usize), TrainedRun> = BTreeMap::new();
    for desc in descs {
        let spec = options.strategy.sharding_spec(desc.kind.role());
        let (value, _) = weight_bytes(desc, options)?;
        if spec.values.is_sharded() {
            *gathered.entry(desc.segment).or_default() += value as usize;
        }
        if desc.kind.trains() {
            let elements = desc.local_elements(options.mesh)?;
            let value_bytes = value as usize / elements.max(1);
            let run = trained.entry((desc.segment, desc.is_of_per_layer_table(), value_bytes));
            run.or_insert(TrainedRun { spec, elements: 0, value_bytes }).elements += elements;
        }
    }
    let (turns, dtype) = (recipe.train.accumulation() as u64, reduce_dtype(&recipe.parallel));
    Ok(SentBytes::of_step(options.mesh, turns, stored, gathered.into_iter(), trained.into_values(), dtype))
}

/// Returns the bytes of offloaded values, in host memory or in a file, that a micro-batch copies to
/// the device: those of blocks for each use, those of embedding and head twice.
///
/// # Errors
/// Those of [`sent`].
pub(super) fn brought(
    descs: &[ParamDesc],
    options: &MemoryOptions<'_>,
    stored: &StoredActivations,
) -> Result<u64> {
    let away = descs.iter().filter(|desc| options.offload.has_values(desc.kind.role()));
    let uses =
        |desc: &ParamDesc| if let Segment::Block(layer) = desc.segment { stored.uses(layer) } else { 2 };
    away.map(|desc| Ok(uses(desc) * weight_bytes(desc, options)?.0)).sum()
}
