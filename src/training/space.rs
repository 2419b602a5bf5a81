//! Bytes that a run will write, by shapes alone. A disk with less free space is refused before
//! training.
//!
//! Only tensors count, so that no run with enough space is refused. Headers, tokenizers and logs
//! need a little more.

use std::path::Path;

use crate::checkpoint::{self, SavedCheckpoint};
use crate::error::Result;
use crate::loading::Trains;
use crate::planning::{Plan, StoredAs, WrittenBytes};

/// Returns the bytes that must be free on the disk of `output` for the run of `plan` from `resumed`
/// on: its checkpoints beside the existing ones, one more while the oldest is not yet removed, and
/// the result beside an earlier one.
pub(crate) fn needed(plan: &Plan, output: &Path, resumed: Option<&SavedCheckpoint>) -> Result<u64> {
    let done = resumed.map_or(0, |saved| saved.state.step);
    let epoch = plan.sampler()?.steps_per_epoch();
    let (saves, keep) = plan.recipe.checkpoints([done, plan.total_steps], epoch);
    let existing = checkpoint::count(output)?;
    let WrittenBytes { checkpoint: one, result } = saved(plan)?;
    let at_end = more_checkpoints(existing, saves, keep).saturating_mul(one).saturating_add(result);
    let while_saving = more_checkpoints(existing, saves, keep.saturating_add(1)).saturating_mul(one);
    Ok(at_end.max(while_saving))
}

/// Returns the largest number of checkpoints beside the `there` existing ones, after `saves` saves
/// of which a folder keeps `most`.
fn more_checkpoints(there: u64, saves: u64, most: u64) -> u64 {
    there.saturating_add(saves).min(most).saturating_sub(there)
}

/// Returns the bytes of a checkpoint of the run of `plan`, the trained tensors in the dtype of the
/// update and the optimizer state, and those of the result.
pub(crate) fn saved(plan: &Plan) -> Result<WrittenBytes> {
    let descs = plan.base.descs(Trains::adapter_or_all(plan.adapter_setup.as_ref()), None)?;
    let given = plan.recipe.checkpoint.output_dtype;
    let stored = match plan.adapter_setup {
        Some(_) => StoredAs { given, dtypes: Default::default(), retained_bytes: 0 },
        None => {
            StoredAs { given, dtypes: plan.stored_dtypes.clone(), retained_bytes: plan.base.retained.bytes() }
        }
    };
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
