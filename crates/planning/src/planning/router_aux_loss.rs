//! The coefficient of the loss that balances the load of experts.

use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::objectives::{self, ObjectiveCost};
use crate::recipe::{AutoOr, Recipe};

/// Returns the coefficient of a run: that of `train.router_aux_loss`, or of config.json.
///
/// # Errors
/// User: the recipe gives a coefficient for a model without experts, or with a router whose scores
/// a bias balances.
pub fn router_aux_loss(recipe: &Recipe, model: &ModelConfig) -> Result<f64> {
    let of_model = model.experts().map(|experts| experts.aux_coefficient).next();
    match (recipe.train.router_aux_loss, of_model) {
        (AutoOr::Auto, of_model) => Ok(of_model.unwrap_or(0.0)),
        (AutoOr::Fixed(coefficient), None) if coefficient > 0.0 => {
            Err(Error::user("the model has no experts to balance")
                .because(format!(
                    "`train.router_aux_loss` is {coefficient}; accepted for this model: 0, \"auto\""
                ))
                .hint("remove `router_aux_loss` from the recipe, or choose a model with experts"))
        }
        (AutoOr::Fixed(coefficient), _) if coefficient > 0.0 && model.experts().any(|e| e.has_bias) => {
            Err(Error::user("the router of this model balances its experts by a bias")
                .because(format!(
                    "`train.router_aux_loss` is {coefficient}; accepted for this model: 0, \"auto\""
                ))
                .hint("remove `router_aux_loss` from the recipe: the bias stays as pretraining left it"))
        }
        (AutoOr::Fixed(coefficient), _) => Ok(coefficient),
    }
}

/// Returns the work and memory beside cross-entropy: those of the objective, and the forward that
/// counts the load of experts before a loss can balance it.
pub fn objective_cost(recipe: &Recipe, model: &ModelConfig) -> ObjectiveCost {
    let cost = objectives::objective(&recipe.objective).cost();
    // A recipe that is refused costs nothing more.
    let counts = router_aux_loss(recipe, model).is_ok_and(|coefficient| coefficient > 0.0);
    ObjectiveCost { extra_forwards: cost.extra_forwards + usize::from(counts), ..cost }
}
