//! Going back to a checkpoint in the middle of a run: what is trained and the optimizer's state take the values that they
//! had there, where they lie. What is frozen never changed, and stays.

use std::ops::Range;
use std::path::Path;

use crate::adapter::SavedAdapter;
use crate::checkpoint::{self, CHANGES_ON_REQUEST};
use crate::collective::Phase;
use crate::engine::Trainer;
use crate::error::{Error, ErrorCategory, Result};
use crate::loading::initial_values::InitialValues;
use crate::planning::Plan;
use crate::weights::ModelFiles;

/// Puts `trainer` back to the newest checkpoint of the run of `plan` in `output` that is of one of `steps`, and returns its
/// step; none where there is no sound one. All ranks call it.
///
/// # Errors
/// The checkpoint is of another run, cannot be read, or is not the same on all ranks; a peer failed.
pub(crate) fn roll_back(
    plan: &Plan,
    output: &Path,
    trainer: &mut Trainer,
    steps: Range<u64>,
) -> Result<Option<u64>> {
    let (found, _) = checkpoint::newest_in(output, steps)?;
    // One from before the run went on with another learning rate is its checkpoint, too.
    let allowed = CHANGES_ON_REQUEST.map(str::to_owned);
    let found = found.filter(|saved| saved.check_same_run(&plan.fingerprint(), &allowed).is_ok());
    let store = &trainer.engine.store;
    let own = found.as_ref().map_or(0.0, |saved| saved.state.step as f64);
    let mut sums = [own];
    store.sum("the checkpoint to roll back to", &mut sums)?;
    if sums[0] != own * store.mesh().world().size() as f64 {
        return Err(Error::new(ErrorCategory::Transient, "not all ranks find the same checkpoint")
            .because(format!("this one finds that of step {own} in {}", output.display()))
            .hint("all hosts must write to one and the same folder"));
    }
    let Some(saved) = found else { return Ok(None) };
    let adapter_setup = match &plan.adapter_setup {
        Some(setup) => Some(setup.resumed(SavedAdapter::read(&saved.folder)?)),
        None => None,
    };
    let weights = match &adapter_setup {
        Some(_) => None,
        None => Some(ModelFiles::open(&saved.folder)?),
    };
    let files = weights.as_ref().or(plan.base.files.as_ref());
    let values = InitialValues::new(&plan.base.config, files, adapter_setup.as_ref(), plan.recipe.train.seed);
    trainer.engine.store.refill_trainable(&mut |desc, to| values.fill(desc, to))?;
    // The new values were spread; what follows is read from storage again.
    trainer.engine.store.mesh().world().enter(Phase::Load)?;
    trainer.restore(&saved)?;
    Ok(Some(saved.state.step))
}
