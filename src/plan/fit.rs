//! Whether a step fits the memory of its ranks: the strategy and the recomputing with which it does, and where none
//! does, the changes of the run with which it would. All figures come from [`MemoryPlan::of_step`].

use super::bf16_copy;
use super::changes::{Change, ModelSettings, WITHOUT_MASTERS, changes, more_ranks};
use super::memory::{MemoryOptions, MemoryPlan, Saving, available};
use super::parallel;
use super::parallel::{WorldSize, named_strategy, pick_strategy};
use crate::data::Dataset;
use crate::error::{Error, Result};
use crate::export::bitsandbytes::LinearLayers;
use crate::ops::has_kernels;
use crate::optim::OptimizerOptions;
use crate::recipe::{self, AutoOr, Recipe, Recompute};
use crate::report::memory::current_bytes;
use crate::setup::adapter_setup::AdapterSetup;
use crate::setup::base_model::{BaseModel, EngineOptions, format};
use crate::setup::param_layout::Trains;
use crate::sharding::{ParamDesc, ShardingStrategy};
use crate::units;

/// Bytes of the program and of its threads' stacks that come into memory with the first step: 3.6 MiB of code in a release
/// build and 4.6 in one for debugging were measured over the quickstart, the rest for stacks.
const STARTED: u64 = 5 << 20;

/// Bytes that this process will hold beside what its ranks load, asked before they do: the program, tokenizer and data.
pub(crate) fn process_bytes() -> u64 {
    current_bytes().unwrap_or(0) + STARTED
}

/// What the memory of a step depends on, beside the recipe's own keys.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepInputs<'a> {
    pub(super) base: &'a BaseModel,
    pub(super) adapter_setup: Option<&'a AdapterSetup>,
    pub(super) data: &'a Dataset,
    /// Ids of `model.new_tokens`.
    pub(super) new_tokens: &'a [u32],
    pub(super) engine: &'a EngineOptions,
}

/// How a step is run, and the memory that it needs on each rank.
#[derive(Debug)]
pub(super) struct Fit {
    pub(super) kind: ShardingStrategy,
    /// Why the strategy was picked, where the recipe left it open.
    pub(super) why: Option<String>,
    pub(super) recompute: Recompute,
    pub(super) memory: MemoryPlan,
}

impl StepInputs<'_> {
    /// The strategy and the recomputing of `recipe`, decided where it leaves them open; what it names is taken whether it
    /// fits or not.
    ///
    /// # Errors
    /// Keys of `[parallel]` that contradict the number of ranks; a bf16 copy that nothing would read; `strategy = "auto"`, and no strategy fits.
    pub(super) fn decide(&self, recipe: &Recipe, world: WorldSize) -> Result<Fit> {
        match self.fit(recipe, world)? {
            Some(mut fit) => {
                if world.all == 1 && on_host(self.engine) {
                    fit.memory.process = process_bytes();
                }
                bf16_copy::check(recipe, self.engine, fit.kind)?;
                Ok(fit)
            }
            None => Err(self.refusal(recipe, world)?),
        }
    }

    /// As [`StepInputs::decide`]; none where the strategy is left open and none fits.
    fn fit(&self, recipe: &Recipe, world: WorldSize) -> Result<Option<Fit>> {
        let own = self.adapter_of(recipe)?;
        let adapter_setup = self.adapter_setup.or(own.as_ref());
        let descs = self.descs(recipe, adapter_setup)?;
        let tokens = widest_micro_batch(recipe, self.data);
        let engine = EngineOptions { offload: parallel::offload(&recipe.parallel), ..self.engine.clone() };
        let needed = |kind, recompute| {
            let how = how(recipe, &engine, kind, world.all);
            MemoryPlan::of_step(&self.base.config, &descs, adapter_setup, tokens, recompute, &how)
        };
        let budget = self.budget(world.all);
        let picked = match named_strategy(recipe, world)? {
            Some(kind) => Some((kind, None)),
            None => pick_strategy(world.all, budget, |kind| needed(kind, least(recipe))),
        };
        Ok(picked.map(|(kind, why)| {
            let recompute = decide_recompute(recipe.train.recompute, budget, |r| needed(kind, r));
            Fit { kind, why, recompute, memory: needed(kind, recompute) }
        }))
    }

    /// The adapter of a recipe that has one where the run has none.
    fn adapter_of(&self, recipe: &Recipe) -> Result<Option<AdapterSetup>> {
        let wanted = recipe.adapter.as_ref().filter(|_| self.adapter_setup.is_none());
        let named = (self.base.found.id.as_str(), &self.base.config);
        wanted.map(|adapter| AdapterSetup::from_recipe(adapter, named, self.new_tokens)).transpose()
    }

    fn descs(&self, recipe: &Recipe, adapter_setup: Option<&AdapterSetup>) -> Result<Vec<ParamDesc>> {
        let (base, trains) = (self.base, Trains::adapter_or_all(adapter_setup));
        match recipe.quantization.as_ref().filter(|_| base.format.is_none()) {
            None => base.descs(trains, Some(self.engine)),
            Some(wanted) => {
                let skipped = LinearLayers::new(&base.config, &wanted.skip_modules)?.skipped;
                base.slots_in((Some(format(wanted)), &skipped), trains, Some(self.engine))
            }
        }
    }

    /// Bytes that each of `ranks` ranks may plan with; none where nothing tells. Ranks on the CPU share one memory, and
    /// a tenth is left for what the estimate does not know.
    fn budget(&self, ranks: usize) -> Option<u64> {
        let sharing = if self.engine.device.is_cpu() { ranks as u64 } else { 1 };
        available(&self.engine.device).map(|bytes| bytes / sharing / 10 * 9)
    }

    fn settings(&self) -> ModelSettings {
        ModelSettings::of(self.base, self.engine)
    }

    /// The error where no strategy fits, with the changes that would make one fit.
    fn refusal(&self, recipe: &Recipe, world: WorldSize) -> Result<Error> {
        let mut smallest = recipe.clone();
        smallest.parallel.strategy = recipe::Strategy::Fsdp;
        let needed = self.fit(&smallest, world)?.map(|fit| fit.memory).unwrap_or_default();
        let have = self.budget(world.all).unwrap_or_default();
        let error =
            Error::user(format!("cannot train on {} ranks: no strategy fits their memory", world.all))
                .because(format!(
                    "fsdp, which needs least, needs {} a rank ({}); {} are there",
                    units::bytes(needed.total()),
                    needed.by_cause(),
                    units::bytes(have)
                ));
        let mut all = changes(recipe, self.settings());
        all.push(more_ranks(world));
        let mut fitting = Vec::new();
        for change in &all {
            if let Some(found) = self.first_that_fits(change, recipe, world)? {
                fitting.push(found);
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

    /// The first adjustment of a change with which the run fits, as it is typed, and what it needs then.
    fn first_that_fits(&self, change: &Change, recipe: &Recipe, world: WorldSize) -> Result<Option<String>> {
        for adjustment in &change.adjustments {
            let (mut recipe, mut world) = (recipe.clone(), world);
            (adjustment.apply)(&mut recipe, &mut world);
            if let Some(fit) = self.fit(&recipe, world)? {
                return Ok(Some(said(&adjustment.typed, &fit)));
            }
        }
        Ok(None)
    }

    /// Changes one after another until the run fits.
    fn together(&self, all: &[Change], recipe: &Recipe, world: WorldSize) -> Result<Option<String>> {
        let (mut recipe, mut world, mut typed) = (recipe.clone(), world, Vec::new());
        for change in all {
            for (i, adjustment) in change.adjustments.iter().enumerate() {
                (adjustment.apply)(&mut recipe, &mut world);
                // A further adjustment of a change takes the place of the one before.
                typed.truncate(typed.len() - usize::from(i > 0));
                if recipe.adapter.is_some() {
                    typed.retain(|text| *text != WITHOUT_MASTERS);
                }
                typed.push(adjustment.typed.as_str());
                if let Some(fit) = self.fit(&recipe, world)? {
                    return Ok(Some(said(&typed.join(" "), &fit)));
                }
            }
        }
        Ok(None)
    }
}

fn said(typed: &str, fit: &Fit) -> String {
    let strategy = parallel::named(fit.kind);
    format!("`{typed}` ({} a rank with {strategy})", units::bytes(fit.memory.total()))
}

/// The recomputing that needs least: where it is left open it may make room for a strategy that sends less.
fn least(recipe: &Recipe) -> Recompute {
    match recipe.train.recompute {
        AutoOr::Auto => Recompute::Block,
        AutoOr::Fixed(chosen) => chosen,
    }
}

fn decide_recompute(
    wanted: AutoOr<Recompute>,
    budget: Option<u64>,
    needed: impl Fn(Recompute) -> MemoryPlan,
) -> Recompute {
    match wanted {
        AutoOr::Fixed(chosen) => chosen,
        AutoOr::Auto => match budget {
            Some(bytes) if needed(Recompute::None).total() > bytes => Recompute::Block,
            _ => Recompute::None,
        },
    }
}

/// How parameters are kept under a strategy.
fn how<'a>(
    recipe: &Recipe,
    engine: &'a EngineOptions,
    kind: ShardingStrategy,
    ranks: usize,
) -> MemoryOptions<'a> {
    MemoryOptions {
        dtype: engine.dtype,
        optimizer_state: OptimizerOptions::from(&recipe.optimizer).state_layout(),
        kind,
        ranks,
        saving: match (recipe.checkpoint.save_steps, recipe.checkpoint.async_save) {
            (None, _) => Saving::Outputs,
            (Some(_), false) => Saving::BetweenSteps,
            (Some(_), true) => Saving::InBackground,
        },
        sharded_over: kind.shard_size(ranks),
        accumulates: parallel::accumulates(recipe, &engine.device),
        master: recipe.optimizer.master,
        kept_gradients: parallel::kept_gradients(recipe),
        overlaps_reductions: ranks > 1 && !engine.device.is_cpu(),
        offload: &engine.offload,
        on_host: on_host(engine),
        bf16_copy: engine.bf16_copy,
    }
}

/// Whether what is computed with lies in the memory of the host.
fn on_host(engine: &EngineOptions) -> bool {
    engine.device.is_cpu() && !has_kernels(&engine.device)
}

/// Tokens of the largest micro-batch that can come.
fn widest_micro_batch(recipe: &Recipe, data: &Dataset) -> usize {
    let (rows, longest) = (recipe.train.micro_batch_size, recipe.data.max_seq_len);
    let mut lengths: Vec<usize> =
        data.examples().iter().map(|example| example.ids.len().min(longest)).collect();
    if recipe.data.packing {
        return rows.saturating_mul(longest).min(lengths.iter().sum());
    }
    lengths.sort_unstable_by(|a, b| b.cmp(a));
    lengths.iter().take(rows).sum()
}
