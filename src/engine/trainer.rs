//! The optimizer step.

use candle_core::Tensor;

use super::Engine;
use crate::checkpoint::{Moment, Saved, SavedMoment, SnapshotTensor};
use crate::data::Step;
use crate::error::{Error, Kind, Result};
use crate::model::DropoutContext;
use crate::ops::adamw_int8::Int8Moment;
use crate::ops::random::Stream;
use crate::ops::reduce::copy_into;
use crate::ops::threads;
use crate::optim::{MomentDtype, Moments, Optimizer, OptimizerOptions, Piece, Schedule};
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
    /// Learning rate of LoRA's B and of magnitudes over that of the rest (LoRA+).
    pub lora_plus_ratio: f64,
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
            pieces(bucket, &options, &mut all, &mut places)?;
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
        let sum = threads::inside(|| -> Result<f64> {
            let mut sum = 0f64;
            for batch in &step.micro_batches {
                let dropout = Some(DropoutContext { stream, first_token: batch.first_token });
                sum += self.engine.micro_step(batch, scale, self.options.recompute, dropout)?;
            }
            Ok(sum)
        })?;
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
        self.engine.strategy.after_update()?;
        Ok(StepResult { loss, grad_norm, learning_rate })
    }

    /// Every trainable tensor as it is now, in f32; its moments too unless only the weights are wanted.
    pub fn snapshot(&self, with_moments: bool) -> Result<Vec<SnapshotTensor>> {
        let values = self.engine.strategy.trainable_values()?;
        let tensor = |((slot, value), place): ((Slot, Tensor), &Place)| {
            let moments = with_moments.then(|| self.saved_moments(place)).transpose()?;
            let values = value.flatten_all()?.to_vec1()?;
            Ok(SnapshotTensor { name: slot.name, shape: slot.shape, values, moments })
        };
        values.into_iter().zip(&self.places).map(tensor).collect()
    }

    fn saved_moments(&self, place: &Place) -> Result<[SavedMoment; 2]> {
        let save = |moment: Moment| -> Result<SavedMoment> {
            Ok(match &self.optimizer.moments()[place.piece] {
                Moments::F32(both) => {
                    let part = both[moment as usize].narrow(0, place.start, place.slot.elements())?;
                    SavedMoment::F32(part.to_vec1()?)
                }
                Moments::Int8(both) => SavedMoment::Int8 {
                    codes: both[moment as usize].codes.to_vec1()?,
                    absmax: both[moment as usize].absmax.to_vec1()?,
                },
            })
        };
        Ok([save(Moment::First)?, save(Moment::Second)?])
    }

    /// Goes on from a checkpoint whose weights the engine was loaded with: takes over moments and count of updates.
    pub fn restore(&mut self, saved: &Saved) -> Result<()> {
        for place in &self.places {
            let name = &place.slot.name;
            for moment in [Moment::First, Moment::Second] {
                match &self.optimizer.moments()[place.piece] {
                    Moments::F32(both) => {
                        let tensor = both[moment as usize].narrow(0, place.start, place.slot.elements())?;
                        let mut values = vec![0f32; tensor.elem_count()];
                        saved.moment(name, moment, &mut values)?;
                        copy_into(&tensor, &Tensor::from_vec(values, tensor.shape(), tensor.device())?)?;
                    }
                    Moments::Int8(both) => {
                        let Int8Moment { codes, absmax } = &both[moment as usize];
                        let mut scales = vec![0f32; absmax.elem_count()];
                        let found = saved.int8_moment(name, moment, &mut scales)?;
                        codes.slice_set(&Tensor::from_slice(found, codes.shape(), codes.device())?, 0, 0)?;
                        copy_into(absmax, &Tensor::from_vec(scales, absmax.shape(), absmax.device())?)?;
                    }
                }
            }
        }
        self.optimizer.resume(saved.state.step);
        Ok(())
    }
}

/// The runs of a bucket whose entries are updated alike; padding between entries belongs to the run before it and
/// stays zero. Blocks of 8-bit moments are counted within a tensor, so there each entry is a run.
fn pieces(
    bucket: &Bucket,
    options: &TrainerOptions,
    all: &mut Vec<Piece>,
    places: &mut Vec<Place>,
) -> Result<()> {
    let Some(grad) = &bucket.grad else { return Ok(()) };
    let rate = |slot: &Slot| {
        // PEFT's groups: B, and all vectors.
        let is_b = slot.name.contains("lora_B") || slot.shape.len() == 1;
        if is_b { options.lora_plus_ratio } else { 1.0 }
    };
    let kind = |entry: &Entry| (entry.slot.decay, rate(&entry.slot));
    let alone = options.optimizer.state == MomentDtype::Int8;
    let mut i = 0;
    while i < bucket.entries.len() {
        let (decay, rate) = kind(&bucket.entries[i]);
        let alike = bucket.entries[i..].iter().take_while(|entry| kind(entry) == (decay, rate)).count();
        let same = if alone { 1 } else { alike };
        let (first, start) = (&bucket.entries[i], bucket.entries[i].start);
        let end = match bucket.entries.get(i + same) {
            _ if alone => start + first.slot.elements(),
            Some(next) => next.start,
            None => grad.elem_count(),
        };
        let part = |flat: &Tensor| flat.narrow(0, start, end - start);
        let place =
            |entry: &Entry| Place { slot: entry.slot.clone(), piece: all.len(), start: entry.start - start };
        places.extend(bucket.entries[i..i + same].iter().map(place));
        all.push(Piece { param: part(bucket.updated())?, grad: part(grad)?, decay, rate });
        i += same;
    }
    Ok(())
}
