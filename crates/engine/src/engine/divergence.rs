//! Where numbers that are not finite come from: the first weight, output or gradient that holds one, the rank that has it,
//! and what would help. All ranks look together and say the same.

use super::Engine;
use crate::collective::Phase;
use crate::data::{Batch, Step};
use crate::error::{Error, ErrorCategory, Result};
use crate::model::AdapterSwitch;
use crate::parallel::FiniteCheck;

/// The first value that is not finite.
#[derive(Debug, Clone, PartialEq)]
pub struct BadValue {
    /// Where it is, with the rank where there are several: `the weight lm_head.weight on rank 1`.
    pub place: String,
    /// What holds it.
    pub holder: BadValueHolder,
}

/// What holds a value that is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadValueHolder {
    /// A weight that does not train.
    FrozenWeight,
    /// A weight that trains.
    TrainedWeight,
    /// An output on the micro-batch of this index among those looked at.
    Output(usize),
    /// A gradient of a parameter.
    Gradient,
    /// Nothing that can be found any more: computed again it is finite.
    Nothing,
}

/// The sums of a step that are not finite.
pub(super) struct DivergedStep<'a> {
    pub(super) step: &'a Step,
    /// Its number, counted from 1.
    pub(super) number: u64,
    /// Over all ranks.
    pub(super) loss: f64,
    pub(super) grad_norm: f64,
    /// This rank's loss.
    pub(super) own_loss: f64,
    /// The ranks whose gradients are not finite before they are summed, where all losses are finite.
    pub(super) bad_gradients: &'a [usize],
}

impl Engine {
    /// The first place where micro-batches turn up a NaN or an infinity (a weight, a block's output, a gradient). All ranks
    /// call it with the same batches and get the same answer.
    ///
    /// # Errors
    /// A forward failed; a peer failed.
    pub fn first_non_finite(&self, batches: &[Batch]) -> Result<BadValue> {
        let held = |check, holder| -> Result<Option<BadValue>> {
            let place = self.store.first_found(self.store.first_non_finite(check)?)?;
            Ok(place.map(|place| BadValue { place, holder }))
        };
        if let Some(found) = held(FiniteCheck::FrozenWeights, BadValueHolder::FrozenWeight)? {
            return Ok(found);
        }
        if let Some(found) = held(FiniteCheck::TrainedWeights, BadValueHolder::TrainedWeight)? {
            return Ok(found);
        }
        for (i, batch) in batches.iter().enumerate() {
            let output = self.first_non_finite_output(batch)?;
            let found = output.map(|output| format!("the output of {output} on micro-batch {}", i + 1));
            if let Some(place) = self.store.first_found(found)? {
                return Ok(BadValue { place, holder: BadValueHolder::Output(i) });
            }
        }
        let found = held(FiniteCheck::Gradients, BadValueHolder::Gradient)?;
        let place = "no weight, output or gradient that is still there".to_owned();
        Ok(found.unwrap_or(BadValue { place, holder: BadValueHolder::Nothing }))
    }

    /// The first layer, or the head, whose output for `batch` is not finite on this rank. It goes through all layers,
    /// because the peers need this rank to gather each.
    fn first_non_finite_output(&self, batch: &Batch) -> Result<Option<String>> {
        let layer = self.first_non_finite_layer(batch)?;
        let scores = self.score(batch, AdapterSwitch::On)?;
        let head = scores.iter().any(|score| !score.loss.is_finite());
        Ok(layer.map(|layer| format!("model.layers.{layer}")).or(head.then(|| "lm_head".to_owned())))
    }

    /// The error for a step whose loss or gradient norm is not finite; nothing was updated in it. All ranks call it.
    pub(super) fn diverged(&self, diverged: &DivergedStep<'_>) -> Result<Error> {
        let DivergedStep { step, number, loss, grad_norm, own_loss, bad_gradients } = diverged;
        // Whole forwards follow, which no other pass through the gradient norm has.
        self.store.mesh().world().enter(Phase::Evaluate)?;
        let bad = self.store.ranks_that(!own_loss.is_finite())?;
        let found = self.first_non_finite(&step.micro_batches)?;
        let mut place = found.place;
        let mesh = self.store.mesh();
        let ranks = mesh.world().size();
        if let BadValueHolder::Output(i) = found.holder
            && let Some(rank) = (0..ranks).find(|rank| mesh.data_rank_of(*rank) == i % mesh.data_size())
            && ranks > 1
        {
            place += &format!(", which rank {rank} trained on");
        }
        let mut error = Error::new(ErrorCategory::Diverged, format!("the numbers diverged at step {number}"))
            .because(format!("loss {loss}, gradient norm {grad_norm}; the first bad value is in {place}"));
        let texts = [whose_loss(&bad, ranks), whose_gradients(bad_gradients, ranks)];
        error = texts.into_iter().flatten().fold(error, Error::because);
        Ok(error.because("nothing was updated in this step").hint(hint(found.holder, *number)))
    }
}

/// Whose gradients are not finite, where that tells ranks apart.
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

/// Whose loss is not finite, where that tells ranks apart.
fn whose_loss(bad: &[usize], ranks: usize) -> Option<String> {
    match bad {
        _ if bad.len() == ranks => None,
        [] => Some("the loss of every rank is finite".to_owned()).filter(|_| ranks > 1),
        [one] => Some(format!("the loss of rank {one} is not finite, that of every other rank is")),
        _ => Some(format!("the losses of ranks {} are not finite, that of every other rank is", listed(bad))),
    }
}

/// What would help in the step of this `number`.
fn hint(holder: BadValueHolder, number: u64) -> &'static str {
    match holder {
        BadValueHolder::FrozenWeight => {
            "training has not made it, and no setting of it helps: the weight came so with the model; check the files with \
             `finetune inspect`, or fetch the model again"
        }
        BadValueHolder::TrainedWeight if number == 1 => {
            "no step has changed it: the weight came so with the model; check the files with `finetune inspect`, or fetch \
             the model again"
        }
        BadValueHolder::Nothing => {
            "what was not finite is finite when it is computed again: look at the memory and the processor of the rank that \
             is named, and go on with `--resume`"
        }
        _ => "lower `optimizer.learning_rate`, or look at the rows of this step with `finetune data`",
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
