//! What a run needs on hardware that need not be here: memory by cause, time, cost, what would be better, and the ways to
//! split it over ranks. All of it from headers and shapes; nothing is loaded and nothing printed.
//!
//! Memory is [`crate::planning`]'s, the very figures that a run is held to. Time is a model (see [`step_time`]) at rates that a
//! table assumes or a calibration measured ([`rates`]).

pub mod advice;
mod answer;
pub mod conventions;
pub mod explorer;
mod figure_range;
pub mod flops;
pub mod hardware;
pub(crate) mod inputs;
mod method_splits;
pub mod price;
pub mod rates;
pub mod run_time;
pub mod splits;
pub mod step_time;
pub mod text;

use serde::Serialize;

use crate::data::Dataset;
use crate::error::{Error, Result};
use crate::loading::base_model::format;
use crate::parallel::ShardingStrategy;
use crate::planning::{
    KeptGroup, MemoryParts, MemoryPlan, Method, PlannedStep, Rows, StepInputs, WorldSize, widest_micro_batch,
};
use crate::recipe::{Recipe, Recompute, Strategy};
use advice::{Improvement, RecipeChange};
use conventions::{RuleOfThumb, conventions};
use hardware::Hardware;
use price::Price;
use rates::ComputeRates;
use run_time::RunTime;
use splits::{ParallelSplit, RefusedSplit};
use step_time::{StepTime, Workload};

/// What a run is sized for.
pub struct SizingRequest<'a> {
    /// The recipe as a command line gave it; what that leaves open is decided in `recipe`.
    pub(crate) typed: &'a Recipe,
    /// The recipe, and what was found for it.
    pub(crate) recipe: &'a Recipe,
    pub(crate) inputs: StepInputs<'a>,
    /// Ranks of all hosts.
    pub(crate) world: WorldSize,
    /// Where it is to run, and how fast that computes; none: here, without a time.
    pub(crate) timed: Option<(&'a Hardware, &'a ComputeRates)>,
    /// What its speeds were measured on; none: the table says them.
    pub(crate) speeds: Option<&'a str>,
    /// What it costs.
    pub(crate) prices: &'a [Price],
    /// Optimizer steps, where they are known.
    pub(crate) steps: Option<u64>,
    /// Those of an epoch, where the rows are known.
    pub(crate) steps_of_epoch: Option<u64>,
    /// Tokens of the held-out rows.
    pub(crate) held_out_tokens: u64,
}

/// A cause of memory, its bytes on a rank, and what they are made of.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MemoryTerm {
    /// Such as `weights`.
    pub cause: &'static str,
    /// On each rank.
    pub bytes: u64,
    /// How they come about.
    pub formula: String,
}

/// What is kept of a forward, and what is computed again for it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecomputePolicy {
    /// The value of `train.recompute`, or what is computed again: projections of attention with attention itself, or those
    /// into the MLP.
    pub policy: String,
    /// Bytes that are kept, on each rank.
    pub bytes: u64,
    /// The part of a block's projections that is computed again, 0 to 1.
    pub again: f64,
    /// Whether this engine runs it.
    pub runs: bool,
}

/// Everything that is known of a run before it begins.
#[derive(Debug, Clone, Serialize)]
pub struct Sizing {
    /// The model's id, or the name of its folder.
    pub model: String,
    /// Parameters of the model and its adapters.
    pub parameters: u64,
    /// Parameters that train.
    pub trainable: u64,
    /// How it is trained, in words.
    pub method: String,
    /// The dtype that is computed with.
    pub dtype: &'static str,
    /// The hardware; none: this machine.
    pub hardware: Option<Hardware>,
    /// Ranks of all hosts.
    pub ranks: usize,
    /// The value of `parallel.strategy`.
    pub strategy: String,
    /// Why it was picked.
    pub why: Option<String>,
    /// The value of `train.recompute`.
    pub recompute: String,
    /// Tokens of the largest micro-batch.
    pub micro_batch_tokens: u64,
    /// Micro-batches of a rank in a step.
    pub micro_batches: u64,
    /// Bytes that a rank needs.
    pub bytes: u64,
    /// Bytes that it may plan with; none where nothing tells.
    pub budget: Option<u64>,
    /// Bytes that it needs of its host's memory beside them.
    pub host_bytes: u64,
    /// Its share of the host's memory; none where nothing tells.
    pub host_budget: Option<u64>,
    /// Whether both are enough.
    pub fits: Option<bool>,
    /// The same by cause.
    pub memory: Vec<MemoryTerm>,
    /// Activations under each policy of recomputing.
    pub activations: Vec<RecomputePolicy>,
    /// What rules of thumb say.
    pub conventions: Vec<RuleOfThumb>,
    /// Bytes a parameter of weights, gradients and states of all ranks, here.
    pub bytes_per_parameter: f64,
    /// What the speeds were measured on; none: the table says them.
    pub speeds: Option<String>,
    /// Of a step.
    pub time: Option<StepTime>,
    /// Of the run.
    pub run: Option<RunTime>,
    /// The cost of the run, or of a billion tokens where its length is open.
    pub cost: Option<f64>,
    /// Ways to train the model, from the one that changes most of it to the smallest.
    pub leaves: Vec<RecipeChange>,
    /// Changes of the recipe that make it faster.
    pub better: Vec<Improvement>,
    /// Ways to split it, the best first.
    pub splits: Vec<ParallelSplit>,
    /// Ways that cannot be.
    pub refused: Vec<RefusedSplit>,
}

impl SizingRequest<'_> {
    /// Sizes the run.
    ///
    /// # Errors
    /// Keys of the recipe that contradict one another or the ranks.
    pub fn answer(&self) -> Result<Sizing> {
        let step = self.step(self.recipe)?;
        let (memory, kind) = (step.fit.memory, step.fit.strategy);
        let count = |trains: bool| -> u64 {
            let counted = step.descs.iter().filter(|desc| desc.kind.trains() || !trains);
            counted.map(|desc| desc.elements() as u64).sum()
        };
        let (parameters, trainable) = (count(false), count(true));
        let parts = self.inputs.parts(self.recipe, &step, self.world)?;
        let budget = self.inputs.budget(self.world.all);
        let bytes = memory.total();
        let load = self.workload(self.recipe);
        let time = self.time(self.recipe, &step);
        let run = time.and_then(|time| self.run_time(&time, &step, load));
        let (splits, refused) = self.splits(&step, &parts, budget)?;
        Ok(Sizing {
            model: self.inputs.base.found.name(),
            parameters,
            trainable,
            method: self.method(self.recipe)?,
            dtype: self.inputs.engine.dtype.as_str(),
            hardware: self.timed.map(|(hardware, _)| hardware.clone()),
            ranks: self.world.all,
            strategy: named(kind),
            why: step.fit.why.clone(),
            recompute: step.fit.recompute.to_string(),
            micro_batch_tokens: widest_micro_batch(self.recipe, self.inputs.rows) as u64,
            micro_batches: load.micro_batches,
            bytes,
            budget: budget.map(|budget| budget + memory.process),
            host_bytes: memory.host,
            host_budget: self.host_budget(),
            fits: (budget.is_some() || self.host_budget().is_some()).then(|| self.has_room(&memory)),
            memory: terms(&memory, step.fit.recompute, &parts),
            activations: self.activations(&parts)?,
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

    /// The step of a recipe; where it leaves the strategy open and none fits, that of FSDP, which needs least.
    pub(crate) fn step(&self, recipe: &Recipe) -> Result<PlannedStep> {
        if let Some(step) = self.inputs.planned(recipe, self.world)? {
            return Ok(step);
        }
        let mut smallest = recipe.clone();
        smallest.parallel.strategy = Strategy::Fsdp;
        let mut step = self.step_of_named(&smallest)?;
        step.fit.why = Some("no strategy fits, this one needs least".into());
        Ok(step)
    }

    /// A step of a recipe that names its strategy, whether it fits or not.
    fn step_of_named(&self, recipe: &Recipe) -> Result<PlannedStep> {
        let step = self.inputs.planned(recipe, self.world)?;
        step.ok_or_else(|| Error::internal("a named strategy was not planned"))
    }

    /// What a rank may take of its host's memory: nine tenths of it are shared by all ranks there.
    fn host_budget(&self) -> Option<u64> {
        let (hardware, _) = self.timed.filter(|(hardware, _)| hardware.device.host_memory_gb > 0.0)?;
        Some((hardware.device.host_memory_gb * 1e9 * 0.9 / hardware.per_host as f64) as u64)
    }

    /// Whether a rank finds what it needs, on its device and its host.
    fn has_room(&self, memory: &MemoryPlan) -> bool {
        let needed = memory.total() - memory.process;
        self.inputs.budget(self.world.all).is_none_or(|budget| needed <= budget)
            && self.host_budget().is_none_or(|budget| memory.host <= budget)
    }

    fn method(&self, recipe: &Recipe) -> Result<String> {
        let own = self.inputs.adapter_of(recipe)?;
        let adapter = self.inputs.adapter_setup.or(own.as_ref());
        let format = self.inputs.base.format.or_else(|| recipe.quantization.as_ref().map(format));
        Ok(Method::new(adapter, format).to_string())
    }

    /// What a step is given, in the mean.
    pub(crate) fn workload(&self, recipe: &Recipe) -> Workload {
        let longest = recipe.data.longest_row() as f64;
        let rows = recipe.train.micro_batch_rows() as f64;
        let micro_batches = recipe.train.accumulation() as u64;
        let (mean, seen) = match self.inputs.rows {
            Rows::Of(data) => mean_lengths(data, longest),
            Rows::Full => (longest, longest),
        };
        let tokens = if recipe.data.packing { rows * longest } else { rows * mean };
        Workload { tokens, row: seen, micro_batches }
    }

    pub(crate) fn time(&self, recipe: &Recipe, step: &PlannedStep) -> Option<StepTime> {
        let load = self.workload(recipe);
        Some(StepTime::new(&self.inputs.base.config, recipe, step, self.timed?, load))
    }

    /// The cost of the run at all prices; of a billion tokens where the number of steps is open.
    pub(crate) fn cost(
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

    /// What `train.recompute` can be, and what is between its two ends.
    fn activations(&self, parts: &MemoryParts) -> Result<Vec<RecomputePolicy>> {
        let kept = |policy: Recompute| {
            let mut recipe = self.recipe.clone();
            recipe.train.recompute = crate::recipe::AutoOr::Fixed(policy);
            Ok::<u64, Error>(self.step(&recipe)?.fit.memory.activations)
        };
        let (none, block) = (kept(Recompute::None)?, kept(Recompute::Block)?);
        let config = &self.inputs.base.config;
        let (d, f, heads) = (config.hidden_size, config.intermediate_size, config.heads);
        let products = (d * heads.qkv_width() + heads.q_width() * d + 3 * d * f) as f64;
        let policy = |policy: String, bytes: u64, again: f64, runs: bool| RecomputePolicy {
            policy,
            bytes,
            again,
            runs,
        };
        // Of all blocks but the one that is at work.
        let others = |bytes: u64| bytes - bytes / config.num_layers().max(1) as u64;
        let without = |names: &[&str]| {
            let gone = parts.saved.iter().filter(|(what, _)| names.contains(what)).map(|(_, bytes)| *bytes);
            none.saturating_sub(others(gone.sum()))
        };
        let attention = without(&["q, k and v", "attention's output", "its log-sum-exps"]);
        Ok(vec![
            policy(Recompute::None.to_string(), none, 0.0, true),
            policy("attention".into(), attention, (d * heads.qkv_width()) as f64 / products, false),
            policy("mlp".into(), without(&["gate and up"]), (2 * d * f) as f64 / products, false),
            policy(Recompute::Block.to_string(), block, 1.0, true),
        ])
    }
}

/// The mean length of rows, cut to `longest`, and the mean length of the row that a token stands in.
pub(crate) fn mean_lengths(data: &Dataset, longest: f64) -> (f64, f64) {
    let lengths = data.examples().iter().map(|example| (example.ids.len() as f64).min(longest));
    let (count, sum, squares) =
        lengths.fold((0.0, 0.0, 0.0), |(n, sum, squares), x| (n + 1.0, sum + x, squares + x * x));
    if sum > 0.0 { (sum / count, squares / sum) } else { (longest, longest) }
}

/// The name of a strategy in recipes.
pub(crate) fn named(kind: ShardingStrategy) -> String {
    match kind {
        ShardingStrategy::Hsdp(size) => format!("hsdp over groups of {size}"),
        other => format!("{other:?}").to_lowercase(),
    }
}

/// Bytes of one copy of all that is kept: weights, gradients, states.
fn kept_bytes(parts: &MemoryParts) -> u64 {
    [&parts.weights, &parts.gradients, &parts.optimizer].into_iter().flatten().map(|group| group.bytes).sum()
}

/// Every cause of the plan's total, with what it is made of.
fn terms(memory: &MemoryPlan, recompute: Recompute, parts: &MemoryParts) -> Vec<MemoryTerm> {
    let saved = |(what, bytes): &(&str, u64)| format!("{what} {}", text::gigabytes(*bytes));
    let activations: Vec<String> = parts.saved.iter().filter(|(_, bytes)| *bytes > 0).map(saved).collect();
    let kept = match recompute {
        Recompute::None => activations.join(" + "),
        Recompute::Block => {
            format!("the blocks' inputs, and one block at a time of: {}", activations.join(" + "))
        }
    };
    let all = [
        ("weights", memory.weights, groups(&parts.weights)),
        ("gradients", memory.gradients, groups(&parts.gradients)),
        ("optimizer", memory.optimizer, groups(&parts.optimizer)),
        ("activations", memory.activations, kept),
        ("workspace", memory.workspace, workspace(memory)),
        ("saving", memory.saving, "copies of what is saved, until it is written".into()),
        ("process", memory.process, "the program; driver and communication on a GPU".into()),
        ("host memory", memory.host, "offloaded values and states, and copies of what is saved".into()),
        ("file", memory.file, "offloaded values in `parallel.offload_folder`".into()),
    ];
    let term = |(cause, bytes, formula)| MemoryTerm { cause, bytes, formula };
    all.into_iter().filter(|(_, bytes, _)| *bytes > 0).map(term).collect()
}

/// Such as `a chunk of logits (0.13 GB) and a block's widest tensors: 1.02 GB + gathered blocks 2.43 GB`.
fn workspace(memory: &MemoryPlan) -> String {
    let of_block = text::gigabytes(memory.workspace - memory.in_flight);
    let logits = text::gigabytes(memory.logits);
    let in_flight = match memory.in_flight {
        0 => String::new(),
        bytes => format!(" + gathered blocks and gradients in flight {}", text::gigabytes(bytes)),
    };
    format!("a chunk of logits ({logits}) and a block's widest tensors: {of_block}{in_flight}")
}

/// Such as `trained, bf16: 2 B x 6.74B / 8`.
fn groups(groups: &[KeptGroup]) -> String {
    let said = |group: &KeptGroup| {
        let each = group.bytes as f64 / group.elements.max(1) as f64;
        let over = if group.over > 1 { format!(" / {}", group.over) } else { String::new() };
        let each = format!("{each:.3}");
        let each = each.trim_end_matches('0').trim_end_matches('.');
        format!("{}: {each} B x {}{over}", group.what, crate::units::count(group.elements))
    };
    groups.iter().map(said).collect::<Vec<_>>().join(" + ")
}
