//! The optimizer step.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::divergence::DivergedStep;
use super::reference::{DataUse, Reference, part_with_loss};
use super::{EmbeddingNoise, Engine, MicroStep, Stage};
use crate::collective::Phase;
use crate::data::{Batch, Step};
use crate::error::{Error, Result};
use crate::model::{DropoutContext, ExpertBalance};
use crate::objectives::{
    CrossEntropy, Evaluation, ExpertLoad, LossSums, MetricSum, Objective, StepSums, StepTotals,
};
use crate::ops::BlockGraphs;
use crate::ops::stochastic_rounding::StochasticRounding;
use crate::optim::{Optimizer, OptimizerOptions, ParamGroup, Schedule};
use crate::parallel::{Bucket, BucketEntry, LrGroup, OffloadTarget};
use crate::recipe::enums::{Recompute, StateDtype};
use crate::runtime::copy::to_device;
use crate::runtime::rng::RngStream;
use crate::runtime::thread_pool;

/// Options of a trainer, constant during a run.
#[derive(Debug, Clone)]
pub struct TrainerOptions {
    /// The optimizer's algorithm and the storage of its state.
    pub optimizer: OptimizerOptions,
    /// Ratio of the learning rate of LoRA's B and of magnitudes to that of the rest (LoRA+).
    pub lora_plus_ratio: f64,
    /// The learning rate of each step.
    pub schedule: Schedule,
    /// Norm to which larger gradients are scaled down; `None` disables clipping.
    pub max_grad_norm: Option<f64>,
    /// The coefficient of the loss that balances the load of experts; 0 without it.
    pub router_aux_loss: f64,
    /// The factor of the noise on embeddings (NEFTune); 0 without it.
    pub neftune_alpha: f64,
    /// The seed of dropout, of noise and of stochastic rounding.
    pub seed: u64,
    /// The activations that forward keeps for backward (gradient checkpointing).
    pub recompute: Recompute,
    /// The assignment of trained tensors to the ranks that save them.
    pub save_assignment: SaveAssignment,
    /// True if passes over blocks are launched as graphs, where their devices have them.
    pub has_graphs: bool,
}

/// The assignment of trained tensors to the ranks that save them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveAssignment {
    /// All to the first rank: for adapters, which are one small file.
    Rank0,
    /// Buckets to the ranks in turn.
    RoundRobin,
}

/// Result of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepResult {
    /// Mean loss over the step's targets, or over the objective's own denominator.
    pub loss: f64,
    /// Norm of the gradients before clipping.
    pub grad_norm: f64,
    /// The learning rate of the update.
    pub learning_rate: f64,
    /// The objective's own metrics, summed over the step; cross-entropy has none.
    pub metrics: Vec<MetricSum>,
    /// The load of the model's experts, with the loss that balances it without its coefficient.
    pub experts: ExpertLoad,
    /// Divisor of the summed loss: the number of targets, unless the objective has its own
    /// denominator.
    pub divisor: f64,
}

/// An engine with an objective and an optimizer.
#[derive(Debug)]
pub struct Trainer {
    /// The model in training.
    pub engine: Engine,
    pub(super) options: TrainerOptions,
    pub(super) objective: Arc<dyn Objective>,
    pub(super) reference: Reference,
    pub(super) optimizer: Optimizer,
    /// The slice of a bucket that each parameter group of the optimizer updates.
    pub(super) slices: Vec<ParamSlice>,
    /// The graphs of the blocks, if it has them.
    graphs: Option<BlockGraphs>,
}

/// The slice of a bucket that one parameter group updates.
#[derive(Debug)]
pub(super) struct ParamSlice {
    /// Index among the trainable buckets.
    pub(super) bucket: usize,
    /// Range of elements of the bucket.
    pub(super) range: Range<usize>,
}

impl Trainer {
    /// Creates an optimizer over the engine's trainable parameters that minimizes cross-entropy.
    ///
    /// # Errors
    /// The memory does not suffice for the optimizer's state.
    pub fn new(engine: Engine, options: TrainerOptions) -> Result<Self> {
        let mut states = Vec::new();
        for (index, bucket) in engine.store.trainable().enumerate() {
            states.extend(param_groups(index, bucket, &options, engine.store.offload())?);
        }
        let (all, slices) = states.into_iter().unzip();
        let optimizer = if engine.store.offload().has_state() {
            Optimizer::offloaded(options.optimizer.clone(), all, &engine.device, None)?
        } else {
            Optimizer::new(options.optimizer.clone(), all)?
        };
        let graphs = options.has_graphs.then(BlockGraphs::default);
        let (objective, reference) = (Arc::new(CrossEntropy), Reference::default());
        Ok(Trainer { engine, options, objective, reference, optimizer, slices, graphs })
    }

    /// Returns the same trainer with another loss to minimize.
    #[must_use]
    pub fn with_objective(self, objective: Arc<dyn Objective>) -> Self {
        Trainer { objective, ..self }
    }

    /// Returns the same trainer with another reference for its objective.
    #[must_use]
    pub fn with_reference(self, reference: Reference) -> Self {
        Trainer { reference, ..self }
    }

    /// Returns the largest number of values that an update had on the device at once; 0 if nothing
    /// is offloaded.
    pub fn most_staged(&self) -> usize {
        self.optimizer.most_staged()
    }

    /// Returns a warning once after the GPU had no memory for a block's graph.
    pub(crate) fn graph_warning(&self) -> Option<&'static str> {
        self.graphs.as_ref()?.warning()
    }

    /// Runs one step: gradients of all micro-batches, clipping, one update. Steps count from 1.
    /// `step` is the whole step on every rank, and each rank computes its share of the
    /// micro-batches.
    ///
    /// # Errors
    /// [`crate::error::ErrorCategory::Diverged`] if the loss or the gradient norm is not finite;
    /// the step then updates nothing. A peer failed. The device failed; the error names this step
    /// ([`Error::at_step`]).
    pub fn step(&mut self, step: &Step) -> Result<StepResult> {
        let number = self.optimizer.updates() + 1;
        self.numbered_step(step, number).map_err(|error| error.at_step(number))
    }

    /// Counts the steps up to `step` as done, whether or not they updated anything.
    pub(crate) fn skip_to(&mut self, step: u64) {
        self.optimizer.resume(step);
    }

    /// Computes the gradients of `batch` on every rank and discards them. If the memory does not
    /// suffice for such a micro-batch, this fails before a step does. Nothing that a step depends
    /// on changes.
    ///
    /// # Errors
    /// The device or a peer failed.
    pub fn rehearse(&self, batch: &Batch) -> Result<()> {
        let store = &self.engine.store;
        store.zero_gradients()?;
        let stream = RngStream::new(self.options.seed).named("dropout").part(0);
        let batch = &*part_with_loss(&*self.objective, batch);
        let reference = self.reference_of(batch, DataUse::Training)?;
        let micro_step = MicroStep {
            objective: &*self.objective,
            scale: 1.0 / batch.len().max(1) as f64,
            totals: StepTotals::of(std::slice::from_ref(batch)),
            reference: reference.as_deref(),
            recompute: self.options.recompute,
            dropout: Some(DropoutContext { stream, first_token: 0 }),
            noise: self.noise(0),
            balance: None,
            last: true,
            graphs: self.graphs.as_ref(),
        };
        thread_pool::run_in_pool(&self.engine.device, || self.engine.micro_step(batch, micro_step))?;
        store.mesh().world().enter(Phase::Norm)?;
        store.norm_of(store.gradient_squares()?)?;
        store.zero_gradients()
    }

    /// Evaluates the objective on held-out micro-batches. All ranks call it with the same ones.
    ///
    /// # Errors
    /// Those of [`Engine::evaluate`].
    pub fn evaluate(&self, batches: &[Batch]) -> Result<Evaluation> {
        let reference = |batch: &Batch| self.reference_of(batch, DataUse::Evaluation);
        self.engine.evaluate(&*self.objective, batches, reference, |_| ())
    }

    /// Returns the noise on embeddings in step `number`.
    fn noise(&self, number: u64) -> Option<EmbeddingNoise> {
        EmbeddingNoise::of_step(self.options.neftune_alpha, self.options.seed, number)
    }

    fn numbered_step(&mut self, step: &Step, number: u64) -> Result<StepResult> {
        let store = &self.engine.store;
        store.zero_gradients()?;
        let totals = StepTotals { targets: step.valid as f64, ..StepTotals::of(&step.micro_batches) };
        let divisor = self.objective.denominator(&totals);
        let scale = 1.0 / divisor;
        let sums = self.gradients(step, number, totals)?;
        store.mesh().world().enter(Phase::Norm)?;
        // Started before the loss is read, so that the host waits for a GPU once.
        let squares = store.gradient_squares()?;
        let mut own_loss = 0.0;
        let StepSums { loss: loss_sum, mut metrics, mut experts } = sums.reduce(|values| {
            own_loss = values[0];
            store.sum("losses", values)
        })?;
        metrics.extend(self.objective.derived(&metrics));
        let loss = loss_sum * scale;
        let grad_norm = store.norm_of(squares)?;
        if !loss.is_finite() || !grad_norm.is_finite() {
            let bad_gradients = &self.ranks_with_bad_gradients(step, number, totals, own_loss)?;
            let diverged = DivergedStep { step, number, loss, grad_norm, own_loss, bad_gradients };
            return Err(self.engine.diverged(&diverged)?);
        }
        store.mesh().world().enter(Phase::Update)?;
        // Same as torch's clip_grad_norm_.
        let clip = self.options.max_grad_norm.map_or(1.0, |max| (max / (grad_norm + 1e-6)).min(1.0));
        let learning_rate = self.options.schedule.at(number - 1);
        self.optimizer.update(learning_rate, clip)?;
        store.all_gather_params()?;
        if self.options.router_aux_loss > 0.0 {
            experts.balance /= self.options.router_aux_loss;
        }
        Ok(StepResult { loss, grad_norm, learning_rate, metrics, experts, divisor })
    }

    /// Returns the ranks whose gradients are not finite although all losses are, by computing them
    /// again. Returns none if a loss is not finite or the run has one data rank. All ranks call it.
    fn ranks_with_bad_gradients(
        &self,
        step: &Step,
        number: u64,
        totals: StepTotals,
        own_loss: f64,
    ) -> Result<Vec<usize>> {
        let store = &self.engine.store;
        if store.mesh().data_size() == 1 || !store.ranks_that(!own_loss.is_finite())?.is_empty() {
            return Ok(Vec::new());
        }
        store.zero_gradients()?;
        store.start_nonfinite_check();
        let again = self.gradients(step, number, totals);
        let bad = store.stop_nonfinite_check();
        again?;
        store.ranks_that(bad)
    }

    /// Adds up the gradients of this rank's micro-batches, and returns the sums of their losses and
    /// metrics.
    fn gradients(&self, step: &Step, number: u64, totals: StepTotals) -> Result<LossSums> {
        let stream = RngStream::new(self.options.seed).named("dropout").part(number);
        let noise = self.noise(number);
        let mesh = self.engine.store.mesh();
        let turns = step.local_micro_batches(mesh.data_rank(), mesh.data_size());
        let reference = |batch: &Batch| self.reference_of(batch, DataUse::Training);
        let totals = self.engine.with_drift(totals, &*self.objective, &turns, reference)?;
        let with_loss = |batch| part_with_loss(&*self.objective, batch);
        let turns: Vec<Cow<'_, Batch>> = turns.iter().map(|batch| with_loss(batch)).collect();
        let is_idle = |turn| turn * mesh.data_size() + mesh.data_rank() >= step.micro_batches.len();
        let micro_step = |turn: usize, batch: &Batch| MicroStep {
            objective: &*self.objective,
            scale: 1.0 / self.objective.denominator(&totals),
            totals,
            reference: None,
            recompute: self.options.recompute,
            dropout: Some(DropoutContext { stream, first_token: batch.first_token }),
            noise,
            balance: None,
            last: turn + 1 == turns.len(),
            graphs: self.graphs.as_ref(),
        };
        thread_pool::run_in_pool(&self.engine.device, || {
            let mut load = ExpertLoad::default();
            for (turn, batch) in turns.iter().enumerate().filter(|_| self.options.router_aux_loss > 0.0) {
                load.add(self.expert_load(batch, micro_step(turn, batch))?.counted(!is_idle(turn)));
            }
            let balance = self.balance(load)?;
            let mut sums = LossSums::default();
            for (turn, batch) in turns.iter().enumerate() {
                let balance = balance.as_ref().filter(|_| !is_idle(turn));
                let reference = reference(batch)?;
                let step = MicroStep { balance, reference: reference.as_deref(), ..micro_step(turn, batch) };
                let mut part = self.engine.micro_step(batch, step)?;
                part.experts = part.experts.counted(!is_idle(turn));
                sums.add(part)?;
            }
            Ok(sums)
        })
    }

    /// Returns the load of the experts in a micro-batch, by a forward through the blocks alone.
    fn expert_load(&self, batch: &Batch, step: MicroStep<'_>) -> Result<ExpertLoad> {
        let blocks = Stage { has_head: false, ..Stage::whole(&self.engine.config) };
        // Recomputing keeps the fewest tensors.
        let step = MicroStep { recompute: Recompute::Block, ..step };
        let (_, state) = self.engine.forward(&blocks, batch, None, step)?;
        Ok(state.experts)
    }

    /// Returns the loss that balances the experts, given the load of this rank's micro-batches;
    /// `None` for a model without experts. All ranks call it.
    fn balance(&self, mut load: ExpertLoad) -> Result<Option<ExpertBalance>> {
        let mut values: Vec<f64> = load.values().collect();
        if values.is_empty() {
            return Ok(None);
        }
        self.engine.store.sum("loads of experts", &mut values)?;
        load.set(&values);
        let factor = self.options.router_aux_loss * load.picks.len() as f64 / (load.tokens * load.tokens);
        let pull: Vec<f32> = load.picks.iter().map(|picks| (factor * picks) as f32).collect();
        let pull = Tensor::from_slice(&pull, pull.len(), &Device::Cpu)?;
        Ok(Some(ExpertBalance::new(to_device(&pull, &self.engine.device)?)))
    }
}

/// Returns the runs of a bucket whose entries have the same update rule, within this rank's part.
/// Padding between entries belongs to the run before it and stays zero. With an 8-bit state each
/// entry is a run, because its blocks are counted within a tensor.
fn param_groups(
    index: usize,
    bucket: &Bucket,
    options: &TrainerOptions,
    offload: &OffloadTarget,
) -> Result<Vec<(ParamGroup, ParamSlice)>> {
    let Some(grad) = bucket.gradient()? else { return Ok(Vec::new()) };
    let (param, value, own) = (bucket.updated()?, bucket.value_beside_master(offload)?, bucket.own());
    let rate = |group: LrGroup| match group {
        LrGroup::Base => 1.0,
        LrGroup::LoraPlus => options.lora_plus_ratio,
    };
    let decay_and_rate = |entry: &BucketEntry| {
        let rule = entry.desc.kind.update_rule();
        rule.map(|rule| (rule.decay, rate(rule.lr_group)))
    };
    let stream = RngStream::new(options.seed).named("stochastic rounding").part(index as u64);
    let layout = options.optimizer.state_layout();
    let alone = layout.dtype == StateDtype::Int8;
    let mut slices = Vec::new();
    let mut rest = &bucket.entries[..];
    while let [first, ..] = rest {
        let Some((decay, rate)) = decay_and_rate(first) else {
            return Err(Error::internal(format!("{} has a gradient but does not train", first.desc.name)));
        };
        let alike = rest.iter().take_while(|entry| decay_and_rate(entry) == Some((decay, rate))).count();
        let (_, after) = rest.split_at(if alone { 1 } else { alike });
        let end = match after.first() {
            _ if alone => first.range().end,
            Some(next) => next.start,
            None => own.end.max(first.range().end),
        };
        rest = after;
        let range = first.start.max(own.start)..end.min(own.end);
        if range.is_empty() {
            continue;
        }
        let (start, len) = (range.start - own.start, range.len());
        let large = layout.is_int8(first.desc.global_elements());
        let (param, grad) = (param.narrow(start, len)?, grad.narrow(0, start, len)?);
        let value = value.as_ref().map(|value| value.narrow(0, start, len)).transpose()?;
        let rounding = StochasticRounding::new(stream, range.start as u64);
        let group = ParamGroup { param, value, rounding, grad, decay, rate, large };
        slices.push((group, ParamSlice { bucket: index, range }));
    }
    Ok(slices)
}
