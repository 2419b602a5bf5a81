//! The optimizer step.

use candle_core::Tensor;

use super::Engine;
use crate::checkpoint::{Moment, Saved, SnapshotTensor};
use crate::data::Step;
use crate::error::{Error, Kind, Result};
use crate::model::DropoutContext;
use crate::ops::random::Stream;
use crate::ops::reduce::copy_into;
use crate::optim::{Optimizer, OptimizerOptions, Piece, Schedule};
use crate::strategy::{Bucket, Entry, Slot};

/// What forward keeps for backward (gradient checkpointing).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recompute {
    /// Everything a block's backward needs.
    None,
    /// A block's input; its forward runs again in backward.
    Block,
}

/// The constants of a run.
#[derive(Debug, Clone)]
pub struct TrainerOptions {
    /// AdamW's.
    pub optimizer: OptimizerOptions,
    /// Learning rates.
    pub schedule: Schedule,
    /// Gradients are scaled down to this norm; none: left as they are.
    pub max_grad_norm: Option<f64>,
    /// Seeds dropout.
    pub seed: u64,
    /// Gradient checkpointing.
    pub recompute: Recompute,
}

/// What a step was.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepResult {
    /// Mean loss over the step's targets.
    pub loss: f64,
    /// Norm of the gradients before clipping.
    pub grad_norm: f64,
    /// The rate that was used.
    pub learning_rate: f64,
}

/// An engine that learns.
#[derive(Debug)]
pub struct Trainer {
    /// The model.
    pub engine: Engine,
    options: TrainerOptions,
    optimizer: Optimizer,
    places: Vec<Place>,
}

/// Where the moments of a slot lie in the optimizer's pieces.
#[derive(Debug)]
struct Place {
    slot: Slot,
    piece: usize,
    start: usize,
}

impl Trainer {
    /// An optimizer over the engine's trainable parameters.
    pub fn new(engine: Engine, options: TrainerOptions) -> Result<Self> {
        let (mut all, mut places) = (Vec::new(), Vec::new());
        for bucket in engine.strategy.trainable() {
            pieces(bucket, &mut all, &mut places)?;
        }
        let optimizer = Optimizer::new(options.optimizer, all)?;
        Ok(Trainer { engine, options, optimizer, places })
    }

    /// One step: gradients of all micro-batches, clipping, one update. Steps count from 1.
    ///
    /// # Errors
    /// [`Kind::Diverged`] when the loss or the gradient norm is not finite; nothing was updated then.
    pub fn step(&mut self, step: &Step) -> Result<StepResult> {
        let number = self.optimizer.updates() + 1;
        let stream = Stream::new(self.options.seed).named("dropout").part(number);
        self.engine.strategy.zero_gradients()?;
        let scale = 1.0 / step.valid as f64;
        let mut sum = 0f64;
        for batch in &step.micro_batches {
            let dropout = Some(DropoutContext { stream, first_token: batch.first_token });
            sum += self.engine.micro_step(batch, scale, self.options.recompute, dropout)?;
        }
        let loss = sum * scale;
        let grad_norm = self.engine.strategy.gradient_norm()?;
        if !loss.is_finite() || !grad_norm.is_finite() {
            let found = self.engine.first_non_finite(&step.micro_batches)?;
            return Err(Error::new(Kind::Diverged, format!("the numbers diverged at step {number}"))
                .because(format!("loss {loss}, gradient norm {grad_norm}; the first bad value is in {found}"))
                .because("nothing was updated in this step")
                .hint(
                    "lower `optimizer.learning_rate`, or look at the rows of this step with `finetune data`",
                ));
        }
        // As torch's clip_grad_norm_.
        let clip = self.options.max_grad_norm.map_or(1.0, |max| (max / (grad_norm + 1e-6)).min(1.0));
        let learning_rate = self.options.schedule.at(number - 1);
        self.optimizer.update(learning_rate, clip)?;
        self.engine.strategy.trainable().try_for_each(Bucket::refresh)?;
        Ok(StepResult { loss, grad_norm, learning_rate })
    }

    /// Every trainable tensor as it is now, in f32; its moments too unless only the weights are wanted.
    pub fn snapshot(&self, with_moments: bool) -> Result<Vec<SnapshotTensor>> {
        let host = |t: &Tensor| -> Result<Vec<f32>> { Ok(t.flatten_all()?.to_vec1::<f32>()?) };
        let values = self.engine.strategy.trainable_values()?;
        let tensor = |((slot, value), place): ((Slot, Tensor), &Place)| {
            let moments = match with_moments {
                true => {
                    let [first, second] = self.moments(place)?;
                    [host(&first)?, host(&second)?]
                }
                false => Default::default(),
            };
            Ok(SnapshotTensor { name: slot.name, shape: slot.shape, values: host(&value)?, moments })
        };
        values.into_iter().zip(&self.places).map(tensor).collect()
    }

    /// Goes on from a checkpoint whose weights the engine was loaded with: takes over moments and count of updates.
    pub fn restore(&mut self, saved: &Saved) -> Result<()> {
        for place in &self.places {
            let [first, second] = self.moments(place)?;
            for (tensor, moment) in [(first, Moment::First), (second, Moment::Second)] {
                let mut values = vec![0f32; tensor.elem_count()];
                saved.moment(&place.slot.name, moment, &mut values)?;
                copy_into(&tensor, &Tensor::from_vec(values, tensor.shape(), tensor.device())?)?;
            }
        }
        self.optimizer.resume(saved.state.step);
        Ok(())
    }

    /// Views of a slot's moments.
    fn moments(&self, place: &Place) -> Result<[Tensor; 2]> {
        let [first, second] = &self.optimizer.moments()[place.piece];
        let view = |t: &Tensor| t.narrow(0, place.start, place.slot.elements());
        Ok([view(first)?, view(second)?])
    }
}

/// The runs of a bucket whose entries are decayed alike; padding between entries belongs to the run before it and
/// stays zero.
fn pieces(bucket: &Bucket, all: &mut Vec<Piece>, places: &mut Vec<Place>) -> Result<()> {
    let Some(grad) = &bucket.grad else { return Ok(()) };
    let end_of_all = grad.elem_count();
    let mut i = 0;
    while i < bucket.entries.len() {
        let decay = bucket.entries[i].slot.decay;
        let same = bucket.entries[i..].iter().take_while(|entry| entry.slot.decay == decay).count();
        let start = bucket.entries[i].start;
        let end = bucket.entries.get(i + same).map_or(end_of_all, |next| next.start);
        let part = |flat: &Tensor| flat.narrow(0, start, end - start);
        let place =
            |entry: &Entry| Place { slot: entry.slot.clone(), piece: all.len(), start: entry.start - start };
        places.extend(bucket.entries[i..i + same].iter().map(place));
        all.push(Piece { param: part(bucket.updated())?, grad: part(grad)?, decay });
        i += same;
    }
    Ok(())
}
