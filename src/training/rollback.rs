//! Roll-back to a checkpoint within a run. Trained parameters and optimizer state are overwritten
//! in place with the values of the checkpoint; frozen parameters never changed.

use std::ops::Range;
use std::path::Path;

use crate::adapter::SavedAdapter;
use crate::checkpoint::{self, CHANGES_ON_REQUEST};
use crate::collective::Phase;
use crate::engine::Trainer;
use crate::error::{Error, ErrorCategory, Result};
use crate::loading::initial_values::InitialValues;
use crate::planning::Plan;

/// Resets `trainer` to the newest checkpoint of the run of `plan` in `output` within `steps`, and
/// returns its step; none without an intact checkpoint. All ranks call it.
///
/// # Errors
/// The checkpoint is of another run, cannot be read, or is not the same on all ranks; a peer
/// failed.
pub(crate) fn roll_back(
    plan: &Plan,
    output: &Path,
    trainer: &mut Trainer,
    steps: Range<u64>,
) -> Result<Option<u64>> {
    let (newest, _) = checkpoint::newest_in(output, steps)?;
    // Checkpoints from before a resume with another learning rate belong to the run too.
    let allowed = CHANGES_ON_REQUEST.map(str::to_owned);
    let of_this_run = newest.filter(|saved| saved.check_same_run(&plan.fingerprint(), &allowed).is_ok());
    let store = &trainer.engine.store;
    let own = of_this_run.as_ref().map_or(0.0, |saved| saved.state.step as f64);
    let mut sums = [own];
    store.sum("the checkpoint to roll back to", &mut sums)?;
    if sums[0] != own * store.mesh().world().size() as f64 {
        return Err(Error::new(ErrorCategory::Transient, "ranks find different checkpoints to roll back to")
            .because(format!("this rank finds the checkpoint of step {own} in {}", output.display()))
            .hint("give all hosts the same shared folder with `--output`"));
    }
    let Some(saved) = of_this_run else { return Ok(None) };
    let setup = plan.adapter_setup.as_ref();
    let setup = setup.map(|setup| SavedAdapter::read(&saved.folder).map(|saved| setup.resumed(saved)));
    let adapter_setup = setup.transpose()?;
    let weights = adapter_setup.is_none().then(|| plan.base.open_checkpoint(&saved.folder)).transpose()?;
    let files = weights.as_ref().or(plan.base.files.as_ref());
    let values = InitialValues::new(&plan.base.config, files, adapter_setup.as_ref(), plan.recipe.train.seed);
    trainer.engine.store.refill_trainable(&mut |desc, local, to| values.fill(desc, local, to))?;
    // Sharing out the new values has ended; the optimizer state is read from storage again.
    trainer.engine.store.mesh().world().enter(Phase::Load)?;
    trainer.restore(&saved)?;
    Ok(Some(saved.state.step))
}
