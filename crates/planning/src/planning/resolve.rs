//! Turns a recipe and facts (config.json, headers, devices, data) into a [`Plan`], in which nothing
//! is optional.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device};
use chrono::{DateTime, FixedOffset};

use super::bf16_copy;
use super::changes::{ModelSettings, Suggestion, changes, first_for};
use super::fit::{MemoryBudget, ParallelDecision, Rows, StepInputs};
use super::fp8_base;
use super::global_batch::{decide_accumulation, decide_rows, sampler_options};
use super::memory::MemoryPlan;
use super::method::Method;
use super::parallel;
use super::parallel::WorldSize;
use super::reference::check_reference;
use super::router_aux_loss::router_aux_loss;
use super::run_params::ParamCache;
use crate::adapter::{self, LowRankFactors};
use crate::checkpoint::SavedCheckpoint;
use crate::collective::Phase;
use crate::data::Sampler;
use crate::error::Result;
use crate::loading::BaseCheck;
use crate::loading::adapter_setup::AdapterSetup;
use crate::loading::base_model::{BaseModel, EngineOptions};
use crate::loading::dataset::{DatasetLoader, LoadedDataset};
use crate::loading::param_layout::Trains;
use crate::loading::resolver::{ResolvedSource, Resolver};
use crate::model::ModelConfig;
use crate::parallel::{ParamDesc, ShardingStrategy, SharedFrozen};
use crate::recipe::{AutoOr, ComputeDtype, Recipe, Recompute, Strategy};
use crate::units;
use crate::weights::{DigestTask, ModelIdentity, StoredDtype};

/// A run with every decision made.
#[derive(Debug)]
pub struct Plan {
    /// The recipe with every "auto" decided except `parallel.strategy`; see [`Plan::strategy`].
    pub recipe: Recipe,
    /// The base model: found, its config and headers read.
    pub base: BaseModel,
    /// The adapter that trains; none: all weights train.
    pub adapter_setup: Option<AdapterSetup>,
    /// The saved adapter that the run starts from, with its location.
    adapter_source: Option<ResolvedSource>,
    /// The tokenizer, the chat template and the rules of `[data]`.
    pub dataset_loader: DatasetLoader,
    /// The training rows and their sources.
    pub train: LoadedDataset,
    /// The held-out rows.
    pub held_out: Option<LoadedDataset>,
    /// Device, dtype, attention.
    pub engine: EngineOptions,
    /// The activations that forward keeps for backward (gradient checkpointing).
    pub recompute: Recompute,
    /// The memory of a step.
    pub memory: MemoryPlan,
    /// Optimizer steps of the run.
    pub total_steps: u64,
    /// `train.global_batch_size` if the recipe sets it. `recipe` then holds the accumulation on
    /// these ranks.
    pub global_batch: Option<usize>,
    /// Number of ranks that train together.
    pub world_size: usize,
    /// The sharding of parameters over the ranks.
    pub strategy: ShardingStrategy,
    /// The reason for the strategy, if the recipe leaves it open.
    pub why: Option<String>,
    /// The identity of the model that the run starts from, by a sample of its weights, after the
    /// first request.
    sampled_identity: OnceLock<ModelIdentity>,
    /// The identity with the digest of every byte, once that is computed.
    whole_identity: OnceLock<ModelIdentity>,
    /// The memory that decided keys that are "auto".
    pub(super) budget: MemoryBudget,
    params: ParamCache,
    /// The dtype of each tensor of the base, independent of the dtypes of a checkpoint.
    pub stored_dtypes: BTreeMap<String, StoredDtype>,
    /// The factors that PiSSA took from the weights while loading, by module.
    pub initial: OnceLock<Arc<BTreeMap<String, LowRankFactors>>>,
}

impl Plan {
    /// Finds model and data, and decides everything that the recipe leaves open, for `device` with
    /// the memory `budget`. `resumed` is the checkpoint to resume from. `now` is the time that the
    /// chat template sees.
    ///
    /// # Errors
    /// Anything in recipe, model or data that cannot be used; reported before any weight is read.
    pub fn resolve(
        mut recipe: Recipe,
        resolver: &Resolver<'_>,
        (device, budget): (Device, MemoryBudget),
        world: WorldSize,
        resumed: Option<&SavedCheckpoint>,
        now: DateTime<FixedOffset>,
    ) -> Result<Self> {
        let global_batch = decide_rows(&mut recipe, world.all, resumed)?;
        let mut base = BaseModel::open(&recipe.model, recipe.quantization.as_ref(), resolver)?;
        router_aux_loss(&recipe, &base.config)?;
        recipe.data.fit_positions(base.config.max_position_embeddings);
        let mut engine = engine_options(&recipe, &base.config, device, world)?;
        // The tokenizer of the adapter that the run starts from replaces the model's.
        let source = recipe.adapter.as_ref().and_then(|adapter| adapter.path.as_ref());
        let adapter_source = source.map(|source| resolver.adapter(source)).transpose()?;
        adapter_source.as_ref().map_or(Ok(()), |source| base.adopt(&source.folder))?;
        let saved = adapter_source.as_ref().map(|source| source.folder.as_path());
        let (tokenizer, tokens) = base.tokenizer_with(&recipe.model.new_tokens)?;
        let named = (base.source.id.as_str(), &base.config);
        let adapter_setup = adapter_setup(&mut recipe, saved, named, &tokens)?;
        adapter_setup.iter().filter_map(AdapterSetup::warning).for_each(|text| resolver.warn(text));
        base.check(Trains::adapter_or_all(adapter_setup.as_ref()))?;
        let dataset_loader = base.dataset_loader(tokenizer, &recipe.data)?.for_objective(&recipe).at(now);
        let (train, held_out) = dataset_loader.load_run(&recipe.data, recipe.train.seed, resolver)?;
        decide_accumulation(&mut recipe, Some(&train.dataset), world.all)?;
        let inputs = StepInputs {
            base: &base,
            adapter_setup: adapter_setup.as_ref(),
            row_lengths: Rows::Of(&train.dataset),
            new_tokens: &tokens,
            engine: &engine,
            budget,
            params: &ParamCache::default(),
        };
        inputs.split_rows(&mut recipe, world)?;
        let total_steps = Sampler::new(&train.dataset, sampler_options(&recipe, world.all))?.total_steps();
        let ParallelDecision { strategy, why, recompute, memory } = inputs.decide(&recipe, world)?;
        engine.offload = parallel::offload(&recipe.parallel);
        engine.offload.check(memory.file)?;
        decided(&mut recipe, recompute, engine.dtype, strategy, base.source.commit.as_deref());
        engine.reducing = parallel::reducing(&recipe, engine.traits);
        Ok(Plan {
            recipe,
            stored_dtypes: base.stored_dtypes(),
            base,
            adapter_setup,
            adapter_source,
            dataset_loader,
            train,
            held_out,
            engine,
            recompute,
            memory,
            total_steps,
            global_batch,
            world_size: world.all,
            strategy,
            why,
            sampled_identity: OnceLock::new(),
            whole_identity: OnceLock::new(),
            budget,
            // A new cache: the engine got its offload options after the decision, which can change
            // the parameters.
            params: ParamCache::default(),
            initial: OnceLock::new(),
        })
    }

    /// Returns the strategy of the run by its name in a recipe.
    pub fn strategy(&self) -> Strategy {
        parallel::named(self.strategy)
    }

    /// Returns the recipe with the strategy of this run's ranks.
    pub fn recipe_of_ranks(&self) -> Recipe {
        let mut recipe = self.recipe.clone();
        recipe.parallel.strategy = self.strategy();
        recipe
    }

    /// Returns the resolved recipe for other numbers of ranks. It contains
    /// `train.global_batch_size` if the user set it, so that other ranks make the same steps.
    pub fn portable_recipe(&self) -> Recipe {
        let mut recipe = self.recipe.clone();
        if self.global_batch.is_some() {
            recipe.train.global_batch_size = self.global_batch;
            recipe.train.gradient_accumulation_steps = AutoOr::Auto;
        }
        recipe
    }

    /// Returns the resolved recipe that a run writes to its folder. With several ranks, a comment
    /// states their number and strategy; with a global batch, also the accumulation of a rank.
    pub fn recipe_text(&self) -> String {
        let recipe = self.portable_recipe().to_toml();
        if self.global_batch.is_some() {
            return format!(
                "# Trained by {} with strategy \"{}\"; gradient_accumulation_steps was {} on each rank.\n{recipe}",
                units::exact(self.world_size, "rank"),
                self.strategy(),
                self.recipe.train.accumulation()
            );
        }
        if self.world_size == 1 {
            return recipe;
        }
        format!(
            "# Trained by {} ranks with strategy \"{}\". To repeat the run, use the same number of ranks.\n{recipe}",
            self.world_size,
            self.strategy()
        )
    }

    /// Returns the number of trainable parameters and of all parameters.
    pub fn parameters(&self) -> (u64, u64) {
        let all =
            self.base.descs(Trains::adapter_or_all(self.adapter_setup.as_ref()), None).unwrap_or_default();
        parameter_counts(&all)
    }

    /// Returns the bytes of the model's files that loading reads; none if the model starts random.
    pub fn bytes_read(&self) -> Option<u64> {
        let files = self.base.files.as_ref()?;
        Some(files.files().filter_map(|(path, _)| Some(path.metadata().ok()?.len())).sum())
    }

    /// Returns the sampler at the first step of the run.
    ///
    /// # Errors
    /// The data hold no row, or the sizes of a step are not usable.
    pub fn sampler(&self) -> Result<Sampler<'_>> {
        Sampler::new(&self.train.dataset, sampler_options(&self.recipe, self.world_size))
    }

    /// Returns the identity of the model that the run starts from. It has the digest of every byte
    /// after [`Plan::finish_digest`].
    ///
    /// # Errors
    /// Those of [`BaseModel::identity`].
    pub fn identity(&self) -> Result<&ModelIdentity> {
        if let Some(identity) = self.whole_identity.get().or_else(|| self.sampled_identity.get()) {
            return Ok(identity);
        }
        let identity = self.base.identity(self.recipe.train.seed)?;
        Ok(self.sampled_identity.get_or_init(|| identity))
    }

    /// Adds the digest of every byte of the base, computed by `task`, to the identity that the run
    /// saves.
    ///
    /// # Errors
    /// Those of [`DigestTask::wait`] and [`BaseModel::identity`].
    pub fn finish_digest(&self, task: DigestTask) -> Result<()> {
        let digest = task.wait()?;
        let identity = self.identity()?.clone().with_digest(&digest);
        self.whole_identity.get_or_init(|| identity);
        Ok(())
    }

    /// Compares the base with that of the checkpoint `resumed` or of the adapter that the run
    /// starts from. Returns none without either. `force_base` accepts another model.
    ///
    /// # Errors
    /// The user's: the models differ, or the record of the base in the adapter is malformed.
    pub fn check_base(
        &self,
        resumed: Option<&SavedCheckpoint>,
        force_base: bool,
    ) -> Result<Option<BaseCheck>> {
        let start = self.adapter_setup.as_ref().and_then(|adapter_setup| adapter_setup.start.saved());
        let (what, trained_on) = match (resumed, start) {
            (Some(saved), _) => (format!("checkpoint {}", saved.folder.display()), saved.state.base.clone()),
            (None, Some(start)) => (format!("adapter {}", start.folder().display()), start.base_model()?),
            (None, None) => return Ok(None),
        };
        BaseCheck::new(&what, trained_on.as_ref(), self.identity()?, force_base).map(Some)
    }

    /// Takes the weights from the checkpoint `saved` instead of the base. Returns the changed keys
    /// as text. The keys in `allowed` may differ from the checkpoint.
    ///
    /// # Errors
    /// The checkpoint belongs to another run.
    pub fn resume(&mut self, saved: &SavedCheckpoint, allowed: &[String]) -> Result<Vec<String>> {
        // Computed first: afterwards the files are those of the checkpoint.
        self.identity()?;
        let mut changes = saved.check_same_run(&self.fingerprint_beside(saved), allowed)?;
        changes.extend(self.harmless_changes(saved));
        match &mut self.adapter_setup {
            Some(adapter_setup) => adapter_setup.resume(adapter::SavedAdapter::read(&saved.folder)?),
            None => self.base.files = Some(self.base.open_checkpoint(&saved.folder)?),
        }
        Ok(changes)
    }

    /// Returns the commit of each hub repository in use, by its id in the recipe.
    pub fn commits(&self) -> BTreeMap<String, String> {
        let rows = self.held_out.iter().chain([&self.train]).flat_map(|data| &data.sources);
        let sources = rows.chain(&self.adapter_source).chain([&self.base.source]);
        let mut commits = BTreeMap::new();
        for (id, commit) in sources.filter_map(|source| Some((&source.id, source.commit.as_ref()?))) {
            // Training rows and held-out rows may come from two commits of a repository.
            let other = commits.get(id).is_some_and(|known| known != commit);
            let id = if other { format!("{id}@{commit}") } else { id.clone() };
            commits.insert(id, commit.clone());
        }
        commits
    }

    /// Returns the micro-batches of a step, summed over all ranks.
    pub fn micro_batches(&self) -> usize {
        self.recipe.train.accumulation().saturating_mul(self.world_size)
    }

    /// Returns the inputs of the memory and time estimates. New tokens are part of the adapter, if
    /// it exists.
    pub fn inputs(&self) -> StepInputs<'_> {
        StepInputs {
            base: &self.base,
            adapter_setup: self.adapter_setup.as_ref(),
            row_lengths: Rows::Of(&self.train.dataset),
            new_tokens: &[],
            engine: &self.engine,
            budget: self.budget,
            params: &self.params,
        }
    }

    /// Returns the ranks of the run, as if one host had all of them.
    pub fn world(&self) -> WorldSize {
        WorldSize { here: self.engine.frozen.ranks(), ..WorldSize::in_one_process(self.world_size) }
    }

    /// Returns unused settings that free device memory in `phase`, as typed flags with the bytes a
    /// rank would need. The order is that of their cost.
    pub fn memory_advice(&self, phase: Phase) -> Vec<String> {
        let (inputs, world) = (self.inputs(), self.world());
        let settings = ModelSettings::of(&self.base, &self.engine);
        let advised = |adjustment: &Suggestion| {
            let (mut recipe, mut world) = (self.recipe_of_ranks(), world);
            (adjustment.apply)(&mut recipe, &mut world);
            let needed = inputs.fit(&recipe, world).ok().flatten();
            let figure = needed.map(|fit| format!(" ({} a rank)", units::bytes(fit.memory.total())));
            format!("`{}`{}", adjustment.typed, figure.unwrap_or_default())
        };
        first_for(phase, &changes(&self.recipe, settings)).map(advised).collect()
    }

    /// Returns the training method for the plan, the model card and the report.
    pub fn method(&self) -> Method {
        Method::new(self.adapter_setup.as_ref(), self.base.format)
    }
}

/// Returns the number of trainable parameters among `descs`, and of all of them.
pub(crate) fn parameter_counts(descs: &[ParamDesc]) -> (u64, u64) {
    let count = |trainable: bool| {
        let counted = descs.iter().filter(|desc| desc.kind.trains() || !trainable);
        counted.map(|desc| desc.global_elements() as u64).sum()
    };
    (count(true), count(false))
}

/// Returns the engine's options that follow from the recipe and the model alone.
fn engine_options(
    recipe: &Recipe,
    model: &ModelConfig,
    device: Device,
    world: WorldSize,
) -> Result<EngineOptions> {
    let mut engine = EngineOptions::new(&recipe.model, device, recipe.train.seed)?;
    engine.bf16_copy = bf16_copy::is_wanted(recipe);
    engine.fp8 = fp8_base::weights(recipe, model);
    engine.frozen = SharedFrozen::new(world.here);
    engine.master = parallel::master_weights(recipe, engine.dtype)?;
    Ok(engine)
}

/// Returns the adapter for the model `named`: from the folder `saved`, else as the recipe describes
/// it. None if the recipe has no adapter. Checks that the objective can compute its reference.
fn adapter_setup(
    recipe: &mut Recipe,
    saved: Option<&Path>,
    named: (&str, &ModelConfig),
    new_tokens: &[u32],
) -> Result<Option<AdapterSetup>> {
    let setup = match (saved, &recipe.adapter) {
        (Some(folder), _) => Some(AdapterSetup::from_saved(recipe, folder, named, new_tokens)?),
        (None, Some(adapter)) => Some(AdapterSetup::from_recipe(adapter, named, new_tokens)?),
        (None, None) => None,
    };
    check_reference(recipe, setup.as_ref())?;
    Ok(setup)
}

/// Writes the decisions into the recipe, except the strategy: it depends on the number of ranks,
/// which is not in a recipe.
fn decided(
    recipe: &mut Recipe,
    recompute: Recompute,
    dtype: DType,
    strategy: ShardingStrategy,
    commit: Option<&str>,
) {
    recipe.train.recompute = AutoOr::Fixed(recompute);
    recipe.model.dtype = if dtype == DType::F32 { ComputeDtype::F32 } else { ComputeDtype::Bf16 };
    if let (Strategy::Hsdp, ShardingStrategy::Hsdp(size)) = (recipe.parallel.strategy, strategy) {
        recipe.parallel.shard_size = Some(size);
    }
    if let Some(commit) = commit {
        recipe.model.revision = commit.to_owned();
    }
}
