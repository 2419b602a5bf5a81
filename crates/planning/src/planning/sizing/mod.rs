//! Estimates a run on hardware that may be elsewhere: memory by cause, time, cost, better settings,
//! and the ways to split it over ranks. Uses only headers and shapes; loads and prints nothing.
//!
//! The memory figures are those of [`crate::planning`], which real runs use too. Time is a model
//! (see `step_time`) with rates that a table assumes or a calibration measured ([`rates`]).

mod advice;
mod answer;
pub mod conventions;
pub mod explorer;
mod figure_range;
pub mod flops;
pub mod hardware;
pub mod inputs;
mod method_splits;
pub mod price;
pub mod rates;
mod run_time;
pub mod splits;
mod step_time;
pub mod text;

use std::num::NonZeroUsize;

use serde::Serialize;

use crate::data::Dataset;
use crate::error::{Error, Result};
use crate::loading::base_model::format;
use crate::model::unused_weights;
use crate::parallel::ShardingStrategy;
use crate::planning::{
    COMMUNICATOR, KeptGroup, MemoryParts, MemoryPlan, Method, NCCL, PlannedStep, Rows, StepInputs, WorldSize,
    parameter_counts, widest_micro_batch,
};
use crate::recipe::{AutoOr, Recipe, Recompute, Strategy};
use advice::{Improvement, RecipeChange};
use conventions::{RuleOfThumb, conventions};
use hardware::Hardware;
use price::Price;
use rates::ComputeRates;
use run_time::RunTime;
use splits::{ParallelSplit, RefusedSplit};
use step_time::{StepTime, Workload};

/// The inputs of a sizing.
pub struct SizingRequest<'a> {
    /// The recipe from the command line, without the decisions in `recipe`.
    pub typed: &'a Recipe,
    /// The recipe with open keys decided.
    pub recipe: &'a Recipe,
    /// The model, the adapter and the rows.
    pub inputs: StepInputs<'a>,
    /// Ranks of all hosts.
    pub world: WorldSize,
    /// The target hardware and its speed; none: this machine, without times.
    pub timed: Option<(&'a Hardware, &'a ComputeRates)>,
    /// The device that the speeds were measured on; none: they are from the table.
    pub speeds: Option<&'a str>,
    /// The prices of the run.
    pub prices: &'a [Price],
    /// Optimizer steps, if known.
    pub steps: Option<u64>,
    /// Optimizer steps of an epoch, if the rows are known.
    pub steps_of_epoch: Option<u64>,
    /// Tokens of the held-out rows.
    pub held_out_tokens: u64,
}

/// A cause of memory, its bytes on a rank, and their formula.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemoryTerm {
    /// Name of the cause, such as `weights`.
    pub cause: &'static str,
    /// Bytes on each rank.
    pub bytes: u64,
    /// The formula of the bytes.
    pub formula: String,
}

/// The memory and the time of a step under a value of `train.recompute`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecomputePolicy {
    /// The value of `train.recompute`.
    pub policy: String,
    /// Bytes of activations on each rank.
    pub bytes: u64,
    /// Bytes of a step on each rank.
    pub total: u64,
    /// Recomputed operations over those of the model.
    pub again: f64,
    /// Seconds of a step, if the speed of the hardware is known.
    pub secs: Option<f64>,
}

/// The result of a sizing.
#[derive(Debug, Clone, Serialize)]
pub struct Sizing {
    /// The model's id, or the name of its folder.
    pub model: String,
    /// Parameters of the model and its adapters.
    pub parameters: u64,
    /// The same without the weights of experts that a token does not choose.
    pub active_parameters: u64,
    /// Parameters that train.
    pub trainable: u64,
    /// The training method in words.
    pub method: String,
    /// The dtype of the computation.
    pub dtype: &'static str,
    /// The hardware; none: this machine.
    pub hardware: Option<Hardware>,
    /// Ranks of all hosts.
    pub ranks: usize,
    /// The value of `parallel.strategy`.
    pub strategy: String,
    /// The reason for the strategy.
    pub why: Option<String>,
    /// The value of `train.recompute`.
    pub recompute: String,
    /// Tokens of the largest micro-batch.
    pub micro_batch_tokens: u64,
    /// Micro-batches of a rank in a step.
    pub micro_batches: u64,
    /// Bytes that a rank needs.
    pub bytes: u64,
    /// Bytes available to a rank; none if unknown.
    pub budget: Option<u64>,
    /// Bytes that a rank needs of its host's memory in addition.
    pub host_bytes: u64,
    /// Its share of the host's memory; none if unknown.
    pub host_budget: Option<u64>,
    /// True if both are enough; none if both budgets are unknown.
    pub fits: Option<bool>,
    /// The memory by cause.
    pub memory: Vec<MemoryTerm>,
    /// Activations under each policy of recomputing.
    pub activations: Vec<RecomputePolicy>,
    /// The estimates of rules of thumb.
    pub conventions: Vec<RuleOfThumb>,
    /// Bytes per parameter of this plan: weights, gradients and states of all ranks.
    pub bytes_per_parameter: f64,
    /// The device that the speeds were measured on; none: they are from the table.
    pub speeds: Option<String>,
    /// The time of a step.
    pub time: Option<StepTime>,
    /// The time of the run.
    pub run: Option<RunTime>,
    /// The cost of the run, or of a billion tokens if its length is open.
    pub cost: Option<f64>,
    /// Ways to train the model, from the one that changes most of it to the smallest.
    pub leaves: Vec<RecipeChange>,
    /// Changes that make the recipe faster.
    pub better: Vec<Improvement>,
    /// Splits over the ranks, the best first.
    pub splits: Vec<ParallelSplit>,
    /// Splits that are impossible.
    pub refused: Vec<RefusedSplit>,
}

impl SizingRequest<'_> {
    /// Sizes the run.
    ///
    /// # Errors
    /// Keys of the recipe contradict one another or the number of ranks, or ask for what the device
    /// does not compute.
    pub fn answer(&self) -> Result<Sizing> {
        let step = self.step(self.recipe)?;
        let (memory, kind) = (step.fit.memory, step.fit.strategy);
        self.inputs.check(self.recipe, kind)?;
        let (trainable, parameters) = parameter_counts(&step.descs);
        let parts = self.inputs.parts(self.recipe, &step, self.world)?;
        let budget = self.inputs.budget(self.world.all);
        let bytes = memory.total();
        let load = self.workload(self.recipe);
        let time = self.time(self.recipe, &step);
        let run = time.and_then(|time| self.run_time(&time, &step, load));
        let (splits, refused) = self.splits(&step, &parts, budget)?;
        Ok(Sizing {
            model: self.inputs.base.source.name(),
            parameters,
            active_parameters: parameters - unused_weights(&self.inputs.base.config),
            trainable,
            method: self.method(self.recipe)?,
            dtype: self.inputs.engine.dtype.as_str(),
            hardware: self.timed.map(|(hardware, _)| hardware.clone()),
            ranks: self.world.all,
            strategy: named(kind),
            why: step.fit.why.clone(),
            recompute: step.fit.recompute.to_string(),
            micro_batch_tokens: widest_micro_batch(self.recipe, self.inputs.row_lengths) as u64,
            micro_batches: load.micro_batches,
            bytes,
            budget: budget.map(|budget| budget + memory.process),
            host_bytes: memory.host,
            host_budget: self.host_budget(),
            fits: (budget.is_some() || self.host_budget().is_some()).then(|| self.has_room(&memory)),
            memory: terms(&memory, step.fit.recompute, &parts),
            activations: self.activations()?,
            conventions: conventions(parameters, kind, self.world.all as u64),
            bytes_per_parameter: kept_bytes(&parts) as f64 / parameters as f64,
            cost: self.cost(time.as_ref(), run.as_ref(), (self.recipe, &step)),
            speeds: self.speeds.map(str::to_owned),
            leaves: self.leaves()?,
            better: self.better(time.as_ref())?,
            time,
            run,
            splits,
            refused,
        })
    }

    /// Returns the step of a recipe. If the strategy is open and none fits, uses FSDP, which needs
    /// least.
    ///
    /// # Errors
    /// The errors of [`StepInputs::planned`].
    pub fn step(&self, recipe: &Recipe) -> Result<PlannedStep> {
        if let Some(step) = self.inputs.planned(recipe, self.world)? {
            return Ok(step);
        }
        let mut smallest = recipe.clone();
        smallest.parallel.strategy = Strategy::Fsdp;
        let mut step = self.step_of_named(&smallest)?;
        step.fit.why = Some("no strategy fits, this one needs least".into());
        Ok(step)
    }

    /// Returns the step of a recipe that names its strategy, even if it does not fit.
    fn step_of_named(&self, recipe: &Recipe) -> Result<PlannedStep> {
        let step = self.inputs.planned(recipe, self.world)?;
        step.ok_or_else(|| Error::internal("a named strategy was not planned"))
    }

    /// Returns the bytes of host memory for a rank: all ranks of a host share nine tenths of it.
    fn host_budget(&self) -> Option<u64> {
        let (hardware, _) = self.timed.filter(|(hardware, _)| hardware.device.host_memory_gb > 0.0)?;
        Some((hardware.device.host_memory_gb * 1e9 * 0.9 / hardware.per_host as f64) as u64)
    }

    /// True if device and host have the memory that a rank needs.
    fn has_room(&self, memory: &MemoryPlan) -> bool {
        let needed = memory.required() - memory.process;
        self.inputs.budget(self.world.all).is_none_or(|budget| needed <= budget)
            && self.host_budget().is_none_or(|budget| memory.host <= budget)
    }

    fn method(&self, recipe: &Recipe) -> Result<String> {
        let own = self.inputs.adapter_of(recipe)?;
        let adapter = self.inputs.adapter_setup.or(own.as_ref());
        let format = self.inputs.base.format.or_else(|| recipe.quantization.as_ref().map(format));
        Ok(Method::new(adapter, format).to_string())
    }

    /// Returns the mean work of a step.
    pub fn workload(&self, recipe: &Recipe) -> Workload {
        let longest = recipe.data.longest_row() as f64;
        let rows = recipe.train.micro_batch_rows() as f64;
        let micro_batches = recipe.train.accumulation() as u64;
        let (mean, seen) = match self.inputs.row_lengths {
            Rows::Of(data) => mean_lengths(data, longest),
            Rows::Full => (longest, longest),
        };
        let row = if recipe.data.packing { longest } else { mean };
        let tokens = rows * row * recipe.objective.examples_of_row() as f64;
        Workload { tokens, row: seen, micro_batches }
    }

    /// Returns the cost of the run at all prices, or of a billion tokens if the number of steps is
    /// open.
    pub fn cost(
        &self,
        time: Option<&StepTime>,
        run: Option<&RunTime>,
        (recipe, step): (&Recipe, &PlannedStep),
    ) -> Option<f64> {
        let secs = match (run, time) {
            (Some(run), _) => run.total,
            (None, Some(time)) => 1e9 / time.tokens_per_sec,
            (None, None) => return None,
        };
        let of_price = |price: &Price| price.of(secs / 3600.0, self.kept_on_disk(recipe, step));
        (!self.prices.is_empty()).then(|| self.prices.iter().map(of_price).sum())
    }

    /// Returns the values of `train.recompute`, with a number of blocks those at a half and at the
    /// square root of all.
    fn activations(&self) -> Result<Vec<RecomputePolicy>> {
        let half = NonZeroUsize::new(self.inputs.base.config.num_layers() / 2).map(Recompute::First);
        let ends = [Recompute::Block, Recompute::EverySqrt];
        let values = [Recompute::None, Recompute::Selective].into_iter().chain(half).chain(ends);
        values.map(|recompute| self.policy(recompute)).collect()
    }

    fn policy(&self, recompute: Recompute) -> Result<RecomputePolicy> {
        let mut recipe = self.recipe.clone();
        recipe.train.recompute = AutoOr::Fixed(recompute);
        let step = self.step(&recipe)?;
        let flops = self.flops(&recipe, &step, self.workload(&recipe).row);
        Ok(RecomputePolicy {
            policy: recompute.to_string(),
            bytes: step.fit.memory.activations,
            total: step.fit.memory.total(),
            again: flops.recomputed / flops.model(),
            secs: self.time(&recipe, &step).map(|time| time.total),
        })
    }
}

/// Returns the mean length of rows, cut to `longest`, and the mean length of the row of a token.
pub fn mean_lengths(data: &Dataset, longest: f64) -> (f64, f64) {
    let lengths = data.examples().iter().map(|example| (example.ids.len() as f64).min(longest));
    let (count, sum, squares) =
        lengths.fold((0.0, 0.0, 0.0), |(n, sum, squares), x| (n + 1.0, sum + x, squares + x * x));
    if sum > 0.0 { (sum / count, squares / sum) } else { (longest, longest) }
}

/// Returns the name of a strategy in recipes.
pub fn named(strategy: ShardingStrategy) -> String {
    match strategy {
        ShardingStrategy::Hsdp(size) => format!("hsdp over groups of {size}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// Returns the bytes of one copy of weights, gradients and states.
fn kept_bytes(parts: &MemoryParts) -> u64 {
    [&parts.weights, &parts.gradients, &parts.optimizer].into_iter().flatten().map(|group| group.bytes).sum()
}

/// Returns every cause of the plan's total, with its formula.
fn terms(memory: &MemoryPlan, recompute: Recompute, parts: &MemoryParts) -> Vec<MemoryTerm> {
    let saved = |(what, bytes): &(&str, u64)| format!("{what} {}", text::gigabytes(*bytes));
    let activations: Vec<String> = parts.saved.iter().filter(|(_, bytes)| *bytes > 0).map(saved).collect();
    let carried = parts.carried.iter().map(saved);
    let beside: String = carried.map(|part| format!("{part} + ")).collect();
    let all = activations.join(" + ");
    let saved_tensors = match recompute {
        Recompute::None => format!("{beside}{all}"),
        Recompute::Selective => format!("{beside}{all}, but the results of attention of one block at a time"),
        Recompute::First(n) => format!("{beside}but for the first {n} blocks, of which the inputs: {all}"),
        Recompute::Block => format!("{beside}the blocks' inputs, and one block at a time of: {all}"),
        Recompute::Every(n) => {
            format!("{beside}the input of each {n} blocks, and {n} blocks at a time of: {all}")
        }
        Recompute::EverySqrt => {
            format!("{beside}the inputs of runs of blocks, and one run at a time of: {all}")
        }
    };
    let all = [
        ("weights", memory.weights, groups(&parts.weights)),
        ("gradients", memory.gradients, groups(&parts.gradients)),
        ("optimizer", memory.optimizer, groups(&parts.optimizer)),
        ("activations", memory.activations, saved_tensors),
        ("workspace", memory.workspace, workspace(memory)),
        ("saving", memory.saving, "copies of the saved tensors, until they are written".into()),
        (NCCL, memory.nccl, communicators(memory)),
        ("process", memory.process, "the program, or the driver on a GPU".into()),
        ("host memory", memory.host, "offloaded values and states, and copies of the saved tensors".into()),
        ("file", memory.file, "offloaded values in `parallel.offload_folder`".into()),
    ];
    let term = |(cause, bytes, formula)| MemoryTerm { cause, bytes, formula };
    all.into_iter().filter(|(_, bytes, _)| *bytes > 0).map(term).collect()
}

/// Formats as `communicators: 2 x 0.50 GB`.
fn communicators(memory: &MemoryPlan) -> String {
    format!("communicators: {} x {}", memory.nccl / COMMUNICATOR, text::gigabytes(COMMUNICATOR))
}

/// Formats the parts of the workspace:
/// `a chunk of logits (0.13 GB) and a block's widest tensors: 1.02 GB + gathered blocks 2.43 GB`.
fn workspace(memory: &MemoryPlan) -> String {
    let of_block = text::gigabytes(memory.workspace - memory.in_flight);
    let logits = text::gigabytes(memory.logits);
    let in_flight = match memory.in_flight {
        0 => String::new(),
        bytes => format!(" + gathered blocks and gradients in flight {}", text::gigabytes(bytes)),
    };
    format!("a chunk of logits ({logits}) and a block's widest tensors: {of_block}{in_flight}")
}

/// Formats as `trained, bf16: 2 B x 6.74B / 8`.
fn groups(groups: &[KeptGroup]) -> String {
    let text_of = |group: &KeptGroup| {
        let each = group.bytes as f64 / group.elements.max(1) as f64;
        let over = if group.over > 1 { format!(" / {}", group.over) } else { String::new() };
        let each = format!("{each:.3}");
        let each = each.trim_end_matches('0').trim_end_matches('.');
        format!("{}: {each} B x {}{over}", group.what, crate::units::count(group.elements))
    };
    groups.iter().map(text_of).collect::<Vec<_>>().join(" + ")
}
