//! Decides the strategy and the recomputing with which a step fits the memory of its ranks. If no
//! strategy fits, suggests changes of the run with which one does. All figures come from
//! [`MemoryPlan`].

use std::sync::Arc;

use super::activation_memory::least_recompute;
use super::bf16_copy;
use super::changes::{Change, ModelSettings, WITHOUT_MASTERS, changes, more_ranks};
use super::cuda_graphs;
use super::fp8_base;
use super::memory::{MemoryOptions, MemoryPlan, MicroBatchTensors, Saving, available};
use super::memory_parts::MemoryParts;
use super::parallel;
use super::parallel::{WorldSize, named_strategy, pick_strategy};
use super::run_params::{ParamCache, RunParams};
use super::traffic;
use crate::data::Dataset;
use crate::error::{Error, Result};
use crate::export::quantized::LinearLayers;
use crate::loading::adapter_setup::AdapterSetup;
use crate::loading::base_model::{BaseModel, EngineOptions, format};
use crate::loading::param_layout::Trains;
use crate::model::ModelConfig;
use crate::objectives;
use crate::ops::matmul_fp8::Fp8Rows;
use crate::optim::OptimizerOptions;
use crate::parallel::{MeshShape, ParamDesc, SentBytes, ShardingStrategy, SharedFrozen};
use crate::recipe::enums::StoredActivations;
use crate::recipe::{self, AutoOr, Recipe, Recompute, StepInterval};
use crate::report::memory::current_bytes;
use crate::units;

/// Bytes of code and thread stacks that enter memory with the first step. The quickstart measured
/// 3.6 MiB of code in a release build and 4.6 MiB in a debug build; the rest is for stacks.
const STARTED: u64 = 5 << 20;

/// Returns the bytes that this process holds before its ranks load: the program, tokenizer and
/// data.
pub fn process_bytes() -> u64 {
    current_bytes().unwrap_or(0) + STARTED
}

/// Inputs of the memory estimate of a step, apart from the recipe's own keys.
#[derive(Debug, Clone, Copy)]
pub struct StepInputs<'a> {
    /// The base model.
    pub base: &'a BaseModel,
    /// The adapter that the run starts from; none: the recipe's own.
    pub adapter_setup: Option<&'a AdapterSetup>,
    /// The rows of the steps.
    pub row_lengths: Rows<'a>,
    /// Ids of `model.new_tokens`.
    pub new_tokens: &'a [u32],
    /// The options of the engine.
    pub engine: &'a EngineOptions,
    /// The memory that the step may use.
    pub budget: MemoryBudget,
    /// Cache of the parameters listed so far.
    pub params: &'a ParamCache,
}

/// The rows of the steps.
#[derive(Debug, Clone, Copy)]
pub enum Rows<'a> {
    /// The rows of a data set.
    Of(&'a Dataset),
    /// Rows that are all as long as `data.max_seq_len` allows.
    Full,
}

/// The memory available to a run.
#[derive(Debug, Clone, Copy)]
pub enum MemoryBudget {
    /// The memory of this machine, less what is in use.
    Local,
    /// The least free memory of the devices of all processes, which plan alike; none if one of them
    /// is unknown.
    Agreed(Option<u64>),
    /// The memory of a device that may be on another machine.
    Given {
        /// Bytes available to a rank.
        free: u64,
        /// Bytes that the driver, or on a CPU the program, holds in addition.
        process: u64,
    },
}

/// The decided strategy and recomputing of a step, and its memory on each rank.
#[derive(Debug)]
pub(crate) struct ParallelDecision {
    pub strategy: ShardingStrategy,
    /// The reason for the strategy, if the recipe leaves it open.
    pub why: Option<String>,
    pub recompute: Recompute,
    pub memory: MemoryPlan,
}

/// A step with its layout over the ranks.
#[derive(Debug)]
pub struct PlannedStep {
    pub(crate) fit: ParallelDecision,
    /// The number of ranks along each axis.
    pub mesh: MeshShape,
    /// Every parameter of the run.
    pub descs: Arc<[ParamDesc]>,
    /// Bytes that a rank sends.
    pub sent: SentBytes,
    /// Bytes copied from the host in a micro-batch to use offloaded values.
    pub(crate) brought: u64,
}

impl PlannedStep {
    /// Returns the tensors that forward keeps of each block.
    pub(crate) fn stored(&self, config: &ModelConfig) -> StoredActivations {
        self.fit.recompute.stored(config.num_layers(), true)
    }
}

impl StepInputs<'_> {
    /// Decides the strategy and the recomputing of `recipe` where it leaves them open. Values that
    /// the recipe names are used even if they do not fit.
    ///
    /// # Errors
    /// Keys of `[parallel]` contradict the number of ranks; `strategy = "auto"` and no strategy
    /// fits; the errors of [`StepInputs::check`].
    pub(crate) fn decide(&self, recipe: &Recipe, world: WorldSize) -> Result<ParallelDecision> {
        match self.fit(recipe, world)? {
            Some(fit) => self.check(recipe, fit.strategy).map(|()| fit),
            None => Err(self.refusal(recipe, world)?),
        }
    }

    /// Refuses what a run of `recipe` with this strategy cannot compute.
    ///
    /// # Errors
    /// No operation would read the bf16 copy; no block has a graph; the run cannot multiply in fp8.
    pub fn check(&self, recipe: &Recipe, strategy: ShardingStrategy) -> Result<()> {
        bf16_copy::check(recipe, self.engine, strategy)?;
        cuda_graphs::check(recipe, &self.base.config)?;
        fp8_base::check(recipe, &self.base.config, self.engine)
    }

    /// Returns the bytes of a rank's process beside its tensors, if they are known; else 0.
    fn process(&self, world: WorldSize) -> u64 {
        match self.budget {
            MemoryBudget::Given { process, .. } => process,
            MemoryBudget::Local if world.all == 1 && self.engine.traits.on_host() => process_bytes(),
            MemoryBudget::Local | MemoryBudget::Agreed(_) => 0,
        }
    }

    /// Decides like `StepInputs::decide`; returns none if the strategy is open and none fits.
    pub(super) fn fit(&self, recipe: &Recipe, world: WorldSize) -> Result<Option<ParallelDecision>> {
        Ok(self.planned(recipe, world)?.map(|step| step.fit))
    }

    /// Decides like `StepInputs::decide` and adds the details of the step. Returns none if the
    /// strategy is open and none fits.
    ///
    /// # Errors
    /// Those of `StepInputs::decide`, except that no strategy fits.
    pub fn planned(&self, recipe: &Recipe, world: WorldSize) -> Result<Option<PlannedStep>> {
        let params = self.run_params(recipe)?;
        let adapter_setup = self.adapter_setup.or(params.own_adapter.as_ref());
        let descs = Arc::clone(&params.descs);
        let tokens = widest_micro_batch(recipe, self.row_lengths);
        let engine = self.engine_of(recipe, adapter_setup, world);
        let any = how(recipe, &engine, ShardingStrategy::Single, world.all)?;
        let tensors = MicroBatchTensors::new(&self.base.config, &descs, adapter_setup, tokens, &any);
        let needed = |kind, recompute| {
            let how = how(recipe, &engine, kind, world.all)?;
            MemoryPlan::of_tensors(&tensors, &descs, adapter_setup.is_some(), recompute, &how)
        };
        let budget = self.budget(world.all);
        // If recomputing is open, it may allow a strategy that sends less.
        let least =
            if let AutoOr::Fixed(chosen) = recipe.train.recompute { chosen } else { Recompute::Block };
        let picked = match named_strategy(recipe, world)? {
            Some(kind) => Some((kind, None)),
            None => pick_strategy(world.all, budget, |kind| needed(kind, least))?,
        };
        let Some((kind, why)) = picked else { return Ok(None) };
        let recompute = match (recipe.train.recompute, budget) {
            (AutoOr::Fixed(chosen), _) => chosen,
            (AutoOr::Auto, Some(bytes)) => least_recompute(self.base.config.num_layers(), |recompute| {
                let memory = needed(kind, recompute)?;
                // A few blocks more leave the memory in which a run is faster.
                let is_part = matches!(recompute, Recompute::First(_));
                Ok(if is_part { memory.total() } else { memory.required() } <= bytes)
            })?,
            (AutoOr::Auto, None) => Recompute::None,
        };
        let memory = MemoryPlan { process: self.process(world), ..needed(kind, recompute)? };
        let fit = ParallelDecision { strategy: kind, why, recompute, memory };
        let options = how(recipe, &engine, kind, world.all)?;
        let stored = recompute.stored(self.base.config.num_layers(), true);
        let sent = traffic::sent(&descs, &options, recipe, &stored)?;
        let brought = traffic::brought(&descs, &options, &stored)?;
        Ok(Some(PlannedStep { fit, mesh: options.mesh, descs, sent, brought }))
    }

    /// Returns the engine's options for `recipe`. The ranks of a process share frozen weights,
    /// except if the first values of an adapter derive from them.
    fn engine_of(
        &self,
        recipe: &Recipe,
        adapter_setup: Option<&AdapterSetup>,
        world: WorldSize,
    ) -> EngineOptions {
        let mut engine = self.engine.clone();
        engine.offload = parallel::offload(&recipe.parallel);
        engine.bf16_copy = bf16_copy::is_wanted(recipe);
        engine.fp8 = fp8_base::weights(recipe, &self.base.config);
        let derives = adapter_setup.is_some_and(AdapterSetup::derives_from_weights);
        engine.frozen = if derives { SharedFrozen::default() } else { SharedFrozen::new(world.here) };
        engine
    }

    /// Returns the parts of the memory of a step of `recipe`: weights, gradients, states and
    /// activations.
    ///
    /// # Errors
    /// Those of `StepInputs::decide`.
    pub(crate) fn parts(&self, recipe: &Recipe, step: &PlannedStep, world: WorldSize) -> Result<MemoryParts> {
        let params = self.run_params(recipe)?;
        let adapter_setup = self.adapter_setup.or(params.own_adapter.as_ref());
        let engine = self.engine_of(recipe, adapter_setup, world);
        let options = how(recipe, &engine, step.fit.strategy, world.all)?;
        let tokens = widest_micro_batch(recipe, self.row_lengths);
        MemoryParts::new(&self.base.config, &step.descs, adapter_setup, tokens, &options)
    }

    /// Returns the parameters of `recipe`.
    ///
    /// # Errors
    /// The adapter fits no module of the model or names a missing one; `skip_modules` names a
    /// module that does not exist.
    fn run_params(&self, recipe: &Recipe) -> Result<Arc<RunParams>> {
        self.params.get((recipe.adapter.clone(), recipe.quantization.clone()), || {
            let own_adapter = self.adapter_of(recipe)?;
            let descs = self.descs(recipe, self.adapter_setup.or(own_adapter.as_ref()))?;
            Ok(RunParams { own_adapter, descs: descs.into() })
        })
    }

    /// Returns the adapter of the recipe, if the run itself has none.
    pub(crate) fn adapter_of(&self, recipe: &Recipe) -> Result<Option<AdapterSetup>> {
        let wanted = recipe.adapter.as_ref().filter(|_| self.adapter_setup.is_none());
        let named = (self.base.source.id.as_str(), &self.base.config);
        wanted.map(|adapter| AdapterSetup::from_recipe(adapter, named, self.new_tokens)).transpose()
    }

    fn descs(&self, recipe: &Recipe, adapter_setup: Option<&AdapterSetup>) -> Result<Vec<ParamDesc>> {
        let (base, trains) = (self.base, Trains::adapter_or_all(adapter_setup));
        match recipe.quantization.as_ref().filter(|_| base.format.is_none()) {
            None => base.descs(trains, Some(self.engine)),
            Some(wanted) => {
                let skipped = LinearLayers::new(&base.config, &wanted.skip_modules)?.skipped;
                base.param_descs_as((Some(format(wanted)), &skipped), trains, Some(self.engine))
            }
        }
    }

    /// Returns the bytes available to each of `ranks` ranks; none if they are unknown. Ranks on the
    /// CPU share one memory. A tenth stays in reserve for what the estimate does not count.
    pub fn budget(&self, ranks: usize) -> Option<u64> {
        let free = match self.budget {
            MemoryBudget::Given { free, .. } => return Some(free / 10 * 9),
            MemoryBudget::Agreed(free) => free,
            MemoryBudget::Local => available(&self.engine.device),
        };
        let sharing = if self.engine.device.is_cpu() { ranks as u64 } else { 1 };
        free.map(|bytes| bytes / sharing / 10 * 9)
    }

    /// Returns the error if no strategy fits, with the changes that make one fit.
    fn refusal(&self, recipe: &Recipe, world: WorldSize) -> Result<Error> {
        let mut smallest = recipe.clone();
        smallest.parallel.strategy = recipe::Strategy::Fsdp;
        let needed = self.fit(&smallest, world)?.map(|fit| fit.memory).unwrap_or_default();
        let have = self.budget(world.all).unwrap_or_default();
        let error =
            Error::user(format!("cannot train on {} ranks: no strategy fits their memory", world.all))
                .because(format!(
                    "fsdp, which needs least, needs {} a rank ({}); {} available",
                    units::bytes(needed.total()),
                    needed.by_cause(),
                    units::bytes(have)
                ));
        let settings = ModelSettings::of(self.base, self.engine);
        let mut all = changes(recipe, settings);
        all.push(more_ranks(world, settings.on_gpu));
        let mut fitting = Vec::new();
        for change in &all {
            if let Some(suggestion) = self.first_that_fits(change, recipe, world)? {
                fitting.push(suggestion);
            }
        }
        if fitting.is_empty() {
            fitting.extend(self.together(&all, recipe, world)?);
        }
        Ok(if fitting.is_empty() {
            error.hint("give a smaller model, or more or larger devices")
        } else {
            error.hint(format!("one of these fits: {}", fitting.join(", ")))
        })
    }

    /// Returns the first adjustment of a change with which the run fits, as typed, and the memory
    /// it needs.
    fn first_that_fits(&self, change: &Change, recipe: &Recipe, world: WorldSize) -> Result<Option<String>> {
        for adjustment in &change.adjustments {
            let (mut recipe, mut world) = (recipe.clone(), world);
            (adjustment.apply)(&mut recipe, &mut world);
            if let Some(fit) = self.fit(&recipe, world)? {
                return Ok(Some(description(&adjustment.typed, &fit)));
            }
        }
        Ok(None)
    }

    /// Combines changes one after another until the run fits.
    fn together(&self, all: &[Change], recipe: &Recipe, world: WorldSize) -> Result<Option<String>> {
        let (mut recipe, mut world, mut typed) = (recipe.clone(), world, Vec::new());
        for change in all {
            for (i, adjustment) in change.adjustments.iter().enumerate() {
                (adjustment.apply)(&mut recipe, &mut world);
                // A stronger adjustment of a change replaces the one before.
                typed.truncate(typed.len() - usize::from(i > 0));
                if recipe.adapter.is_some() {
                    typed.retain(|text| *text != WITHOUT_MASTERS);
                }
                typed.push(adjustment.typed.as_str());
                if let Some(fit) = self.fit(&recipe, world)? {
                    return Ok(Some(description(&typed.join(" "), &fit)));
                }
            }
        }
        Ok(None)
    }
}

fn description(typed: &str, fit: &ParallelDecision) -> String {
    let strategy = parallel::named(fit.strategy);
    format!("`{typed}` ({} a rank with {strategy})", units::bytes(fit.memory.total()))
}

/// Returns the storage of parameters under a strategy.
fn how<'a>(
    recipe: &Recipe,
    engine: &'a EngineOptions,
    strategy: ShardingStrategy,
    ranks: usize,
) -> Result<MemoryOptions<'a>> {
    Ok(MemoryOptions {
        dtype: engine.dtype,
        optimizer_state: OptimizerOptions::from(&recipe.optimizer).state_layout(),
        strategy,
        mesh: strategy.mesh_shape(ranks)?,
        saving: match (recipe.checkpoint.save_steps, recipe.checkpoint.async_save) {
            (StepInterval::Never, _) => Saving::Outputs,
            (_, false) => Saving::BetweenSteps,
            (_, true) => Saving::InBackground,
        },
        accumulates: parallel::accumulates(recipe, engine.traits),
        master: recipe.optimizer.master,
        kept_gradients: parallel::kept_gradients(recipe),
        over_nccl: ranks > 1 && !engine.traits.is_cpu,
        offload: &engine.offload,
        on_host: engine.traits.on_host(),
        bf16_copy: engine.bf16_copy,
        fp8: &engine.fp8,
        scales_rows: Fp8Rows::scaled_in_product(&engine.device),
        graphs: recipe.train.cuda_graphs,
        frozen_ranks: if engine.traits.on_host() { engine.frozen.ranks() } else { 1 },
        objective: objectives::objective(&recipe.objective).cost(),
    })
}

/// Returns the tokens of the largest possible micro-batch.
pub(crate) fn widest_micro_batch(recipe: &Recipe, rows: Rows<'_>) -> usize {
    let (size, longest) = (recipe.train.micro_batch_rows(), recipe.longest_group());
    let Rows::Of(data) = rows else { return size.saturating_mul(longest) };
    let mut lengths: Vec<usize> = data.group_lengths().map(|tokens| tokens.min(longest)).collect();
    if recipe.data.packing {
        return size.saturating_mul(longest).min(lengths.iter().sum());
    }
    lengths.sort_unstable_by(|a, b| b.cmp(a));
    lengths.iter().take(size).sum()
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::loading::Resolver;
    use crate::recipe::enums::{Attention, ModelInit};
    use crate::recipe::{AdapterSection, DataSource, ModelSection};
    use crate::report::{Terminal, Verbosity};

    /// The suggested ranks have the memory that a plan of as many ranks has.
    #[test]
    fn advised_ranks_share_the_frozen_weights_as_ranks_of_a_run_do() -> Result<()> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let config = r#"{"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}"#;
        std::fs::write(folder.path().join("config.json"), config).expect("space for a file");
        let terminal = Terminal::stderr(Verbosity::Quiet);
        let id = Some(DataSource::Path(folder.path().into()));
        let model = ModelSection { id, init: ModelInit::Random, ..ModelSection::default() };
        let base = BaseModel::open(&model, None, &Resolver::new(true, &terminal)?)?;
        let mut recipe = Recipe { model, ..Recipe::default() };
        recipe.adapter = Some(AdapterSection::default());
        recipe.parallel.strategy = recipe::Strategy::Ddp;
        let inputs = StepInputs {
            base: &base,
            adapter_setup: None,
            row_lengths: Rows::Full,
            new_tokens: &[],
            engine: &EngineOptions::alone(Device::Cpu, DType::F32, Attention::Flash, 0),
            budget: MemoryBudget::Local,
            params: &ParamCache::default(),
        };
        let weights = |world: WorldSize| -> Result<Option<u64>> {
            Ok(inputs.fit(&recipe, world)?.map(|fit| fit.memory.weights))
        };
        let two = WorldSize::in_one_process(2);
        let mut advised = two;
        let first = more_ranks(two, false).adjustments.remove(0);
        (first.apply)(&mut recipe.clone(), &mut advised);
        assert_eq!((first.typed.as_str(), advised), ("--ranks 4", WorldSize::in_one_process(4)));
        assert_eq!(weights(advised)?, weights(WorldSize::in_one_process(4))?);
        assert!(weights(advised)? < weights(two)?);
        // Processes share nothing.
        let apart = WorldSize { all: 2, local: Some(2), here: 1 };
        let mut advised = apart;
        let first = more_ranks(apart, false).adjustments.remove(0);
        (first.apply)(&mut recipe.clone(), &mut advised);
        assert_eq!(first.typed, "4 ranks in all");
        assert_eq!(weights(advised)?, weights(apart)?);
        Ok(())
    }
}
