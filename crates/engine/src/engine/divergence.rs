//! Search for the source of values that are not finite: the first weight, output or gradient that
//! holds one, its rank, and a remedy. All ranks search together and report the same.

use candle_core::DType;

use super::Engine;
use crate::collective::Phase;
use crate::data::{Batch, Step};
use crate::error::{Error, ErrorCategory, Result};
use crate::model::AdapterSwitch;
use crate::parallel::FiniteCheck;
use crate::runtime::copy::to_host_vec;

/// The first value that is not finite.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BadValue {
    /// Its location, with the rank if the run has several: `the weight lm_head.weight on rank 1`.
    pub(crate) location: String,
    /// The kind of tensor that holds it.
    pub(crate) holder: BadValueHolder,
}

/// The kind of tensor that holds a value that is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadValueHolder {
    /// A weight that does not train.
    FrozenWeight,
    /// A weight that trains.
    TrainedWeight,
    /// An output on the micro-batch of this index among those checked.
    Output(usize),
    /// A gradient of a parameter.
    Gradient,
    /// No tensor: the value is finite when it is computed again.
    Nothing,
}

/// A step whose loss or gradient norm is not finite.
pub(super) struct DivergedStep<'a> {
    pub(super) step: &'a Step,
    /// The step's number, counted from 1.
    pub(super) number: u64,
    /// The loss over all ranks.
    pub(super) loss: f64,
    pub(super) grad_norm: f64,
    /// This rank's loss.
    pub(super) own_loss: f64,
    /// The ranks whose gradients are not finite before they are summed, if all losses are finite.
    pub(super) bad_gradients: &'a [usize],
}

impl Engine {
    /// Finds the first NaN or infinity that `batches` show in a weight, a block's output or a
    /// gradient. All ranks call it with the same batches and get the same result.
    ///
    /// # Errors
    /// A forward failed; a peer failed.
    pub(crate) fn first_non_finite(&self, batches: &[Batch]) -> Result<BadValue> {
        let held = |check, holder| -> Result<Option<BadValue>> {
            let description = self.store.first_found(self.store.first_non_finite(check)?)?;
            Ok(description.map(|location| BadValue { location, holder }))
        };
        if let Some(bad) = held(FiniteCheck::FrozenWeights, BadValueHolder::FrozenWeight)? {
            return Ok(bad);
        }
        if let Some(bad) = held(FiniteCheck::TrainedWeights, BadValueHolder::TrainedWeight)? {
            return Ok(bad);
        }
        for (i, batch) in batches.iter().enumerate() {
            let output = self.first_non_finite_output(batch)?;
            let bad_output = output.map(|output| format!("the output of {output} on micro-batch {}", i + 1));
            if let Some(description) = self.store.first_found(bad_output)? {
                return Ok(BadValue { location: description, holder: BadValueHolder::Output(i) });
            }
        }
        let bad = held(FiniteCheck::Gradients, BadValueHolder::Gradient)?;
        let description = "no weight, recomputed output or gradient".to_owned();
        Ok(bad.unwrap_or(BadValue { location: description, holder: BadValueHolder::Nothing }))
    }

    /// Returns the first layer, or the head, whose output for `batch` is not finite on this rank.
    /// It computes all layers, because the peers need this rank to gather each.
    fn first_non_finite_output(&self, batch: &Batch) -> Result<Option<String>> {
        let mut layer_name = None;
        let hidden = self.hidden_by_layer(batch, AdapterSwitch::On, |layer, x| {
            let x = x.to_dtype(DType::F32)?;
            if layer_name.is_none() && to_host_vec::<f32>(&x)?.iter().any(|v| !v.is_finite()) {
                layer_name = Some(format!("model.layers.{layer}"));
            }
            Ok(())
        })?;
        let scores =
            self.store.head()?.score(&self.config, &hidden, &batch.targets, AdapterSwitch::On, None)?;
        let head = scores.iter().any(|score| !score.loss.is_finite());
        Ok(layer_name.or(head.then(|| "lm_head".to_owned())))
    }

    /// Returns the error for a step whose loss or gradient norm is not finite and that updated
    /// nothing. All ranks call it.
    pub(super) fn diverged(&self, diverged: &DivergedStep<'_>) -> Result<Error> {
        let DivergedStep { step, number, loss, grad_norm, own_loss, bad_gradients } = diverged;
        // Whole forward passes follow, which the norm phase does not expect.
        self.store.mesh().world().enter(Phase::Evaluate)?;
        let bad = self.store.ranks_that(!own_loss.is_finite())?;
        let bad_value = self.first_non_finite(&step.micro_batches)?;
        let mut description = bad_value.location;
        let mesh = self.store.mesh();
        let ranks = mesh.world().size();
        if let BadValueHolder::Output(i) = bad_value.holder
            && let Some(rank) = (0..ranks).find(|rank| mesh.data_rank_of(*rank) == i % mesh.data_size())
            && ranks > 1
        {
            description += &format!(", which rank {rank} trained on");
        }
        let mut error = Error::new(ErrorCategory::Diverged, format!("the numbers diverged at step {number}"))
            .because(format!(
                "loss {loss}, gradient norm {grad_norm}; the first bad value is in {description}"
            ));
        let texts = [whose_loss(&bad, ranks), whose_gradients(bad_gradients, ranks)];
        error = texts.into_iter().flatten().fold(error, Error::because);
        Ok(error.because("this step updated nothing").hint(hint(bad_value.holder, *number)))
    }
}

/// Returns a text that names the ranks whose gradients are not finite, unless all or none have
/// such.
fn whose_gradients(bad: &[usize], ranks: usize) -> Option<String> {
    match bad {
        _ if bad.is_empty() || bad.len() == ranks => None,
        [one] => Some(format!("before they are summed, the gradients of rank {one} alone are not finite")),
        _ => Some(format!("before they are summed, the gradients of ranks {} are not finite", listed(bad))),
    }
}

fn listed(ranks: &[usize]) -> String {
    ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

/// Returns a text about the ranks whose loss is not finite, unless all ranks have such a loss.
fn whose_loss(bad: &[usize], ranks: usize) -> Option<String> {
    match bad {
        _ if bad.len() == ranks => None,
        [] => Some("the loss of every rank is finite".to_owned()).filter(|_| ranks > 1),
        [one] => Some(format!("the loss of rank {one} is not finite, that of every other rank is")),
        _ => Some(format!("the losses of ranks {} are not finite, that of every other rank is", listed(bad))),
    }
}

/// Returns a remedy for a step with this `number`.
fn hint(holder: BadValueHolder, number: u64) -> &'static str {
    match holder {
        BadValueHolder::FrozenWeight => {
            "the model's files contain this value, and no training option changes that: download \
             the model again, or use another one"
        }
        BadValueHolder::TrainedWeight if number == 1 => {
            "the model's files contain this value, because no step has changed it yet: download \
             the model again, or use another one"
        }
        BadValueHolder::Nothing => {
            "all values are finite when they are computed again: check the memory and the processor of the rank that the \
             error names, and continue with `--resume`"
        }
        _ => "lower `optimizer.learning_rate`, or check the rows of this step with `finetune data`",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_some_ranks_have_is_theirs() {
        let text = |bad: &[usize], ranks| whose_loss(bad, ranks).unwrap_or_default();
        assert_eq!([text(&[0], 1), text(&[0, 1], 2), text(&[], 1)], [""; 3]);
        assert_eq!(text(&[2], 3), "the loss of rank 2 is not finite, that of every other rank is");
        assert!(text(&[0, 2], 3).starts_with("the losses of ranks 0, 2 are not finite"));
        assert_eq!(text(&[], 2), "the loss of every rank is finite");
        let text = |bad: &[usize], ranks| whose_gradients(bad, ranks).unwrap_or_default();
        assert_eq!([text(&[], 2), text(&[0, 1], 2)], [""; 2]);
        assert!(text(&[0, 2], 3).contains("the gradients of ranks 0, 2 are not finite"));
    }

    #[test]
    fn a_frozen_weight_is_not_answered_with_the_learning_rate() {
        assert!(!hint(BadValueHolder::FrozenWeight, 7).contains("learning_rate"));
        assert!(!hint(BadValueHolder::TrainedWeight, 1).contains("learning_rate"));
        for holder in [BadValueHolder::TrainedWeight, BadValueHolder::Output(0), BadValueHolder::Gradient] {
            assert!(hint(holder, 7).contains("learning_rate"), "{holder:?}");
        }
    }
}
