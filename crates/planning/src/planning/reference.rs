//! The reference of a preference objective: whether the run can compute it during training.

use crate::error::{Error, Result};
use crate::loading::AdapterSetup;
use crate::recipe::Recipe;

/// Checks that the model with its adapter switched off is the objective's reference, the model as
/// training starts, unless the run computes the log-probabilities of the reference first.
///
/// # Errors
/// User: it is not, so the recipe needs `precompute_ref_log_probs`.
pub(super) fn check_reference(recipe: &Recipe, adapter: Option<&AdapterSetup>) -> Result<()> {
    let objective = &recipe.objective;
    if !objective.has_reference() || objective.precompute_ref_log_probs {
        return Ok(());
    }
    let cause = match adapter {
        None => "all weights train, so no adapter can be switched off".to_owned(),
        Some(_) if recipe.adapter.as_ref().is_some_and(|adapter| adapter.path.is_some()) => {
            "the reference is the adapter of `adapter.path` as training starts, which training changes"
                .to_owned()
        }
        Some(adapter) => match adapter.reference_change() {
            Some(change) => change,
            None => return Ok(()),
        },
    };
    Err(Error::user("cannot compute the reference of the objective during training")
        .because(cause)
        .because(format!("`objective.kind` is \"{}\", which compares the model with its start", objective.kind))
        .hint(
            "write `precompute_ref_log_probs = true` in [objective]: the run then computes the log-probabilities of all \
             rows under the reference before its first step",
        ))
}
