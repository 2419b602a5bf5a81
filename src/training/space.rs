//! What a run will write, from shapes alone: the ground on which a disk without room is refused before training.
//!
//! Counted are tensors, so that nothing is refused that would have had room: headers, tokenizers and logs come on top.

use std::path::Path;

use crate::checkpoint::{self, SavedCheckpoint};
use crate::error::Result;
use crate::loading::Trains;
use crate::planning::{Plan, StoredAs, WrittenBytes};

/// Bytes of a checkpoint of the run of `plan`: the trained tensors as they are updated, and the optimizer's state.
pub(crate) fn checkpoint_bytes(plan: &Plan) -> Result<u64> {
    Ok(saved(plan)?.checkpoint)
}

/// Bytes that the disk of `output` must have free for the run of `plan` from `resumed` on: its checkpoints beside those
/// that are there, one more while the oldest is still to go, and the result beside an earlier one.
pub(crate) fn needed(plan: &Plan, output: &Path, resumed: Option<&SavedCheckpoint>) -> Result<u64> {
    let done = resumed.map_or(0, |saved| saved.state.step);
    let epoch = plan.sampler()?.steps_per_epoch();
    let (saves, keep) = plan.recipe.checkpoints([done, plan.total_steps], epoch);
    let there = checkpoint::count(output)?;
    let WrittenBytes { checkpoint: one, result } = saved(plan)?;
    let at_end = more_checkpoints(there, saves, keep).saturating_mul(one).saturating_add(result);
    let while_saving = more_checkpoints(there, saves, keep.saturating_add(1)).saturating_mul(one);
    Ok(at_end.max(while_saving))
}

/// How many more checkpoints than the `there` ones lie in a folder at a time, where `saves` come and `most` may be there.
fn more_checkpoints(there: u64, saves: u64, most: u64) -> u64 {
    there.saturating_add(saves).min(most).saturating_sub(there)
}

/// What the run of `plan` writes at a time.
fn saved(plan: &Plan) -> Result<WrittenBytes> {
    let descs = plan.base.descs(Trains::adapter_or_all(plan.adapter_setup.as_ref()), None)?;
    let dtypes = if plan.adapter_setup.is_some() { Default::default() } else { plan.stored_dtypes.clone() };
    let stored = StoredAs { given: plan.recipe.checkpoint.output_dtype, dtypes };
    Ok(WrittenBytes::of(&descs, &plan.recipe, &stored))
}

#[cfg(test)]
mod tests {
    use super::more_checkpoints;

    #[test]
    fn checkpoints_that_come_beside_those_that_are_there() {
        for (there, saves, most, more) in
            [(0, 0, 2, 0), (0, 1, 2, 1), (0, 9, 3, 3), (2, 9, 3, 1), (5, 9, 3, 0), (1, 1, 9, 1)]
        {
            assert_eq!(more_checkpoints(there, saves, most), more, "{there} {saves} {most}");
        }
    }
}
