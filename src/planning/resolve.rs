//! From a recipe and facts (config.json, headers, devices, data) to a [`Plan`], in which nothing is optional any more.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device};
use chrono::{DateTime, FixedOffset};

use super::bf16_copy;
use super::changes::{ModelSettings, Suggestion, changes, first_for};
use super::fit::{MemoryBudget, ParallelDecision, Rows, StepInputs};
use super::global_batch::{decide_accumulation, decide_rows, sampler_options};
use super::memory::MemoryPlan;
use super::method::Method;
use super::parallel;
use super::parallel::WorldSize;
use super::run_params::ParamCache;
use crate::adapter::{self, LowRankFactors};
use crate::checkpoint::SavedCheckpoint;
use crate::collective::Phase;
use crate::data::{Dataset, Sampler};
use crate::error::Result;
use crate::loading::BaseCheck;
use crate::loading::adapter_setup::AdapterSetup;
use crate::loading::base_model::{BaseModel, EngineOptions};
use crate::loading::dataset::DatasetLoader;
use crate::loading::param_layout::Trains;
use crate::loading::resolver::{ResolvedSource, Resolver};
use crate::model::ModelConfig;
use crate::parallel::ShardingStrategy;
use crate::recipe::{AutoOr, ComputeDtype, Recipe, Recompute, Strategy};
use crate::units;
use crate::weights::{DigestTask, ModelFiles, ModelIdentity, StoredDtype};

/// What will run.
#[derive(Debug)]
pub struct Plan {
    /// The recipe with every "auto" decided but for `parallel.strategy`, which [`Plan::strategy`] tells.
    pub recipe: Recipe,
    /// The base model, found and understood.
    pub base: BaseModel,
    /// What trains; none: all weights.
    pub adapter_setup: Option<AdapterSetup>,
    /// Where the adapter that it starts from was found.
    adapter_found: Option<ResolvedSource>,
    /// Tokenizer and template.
    pub rows: DatasetLoader,
    /// The rows to learn from, and where they came from.
    pub train: (Dataset, Vec<ResolvedSource>),
    /// The held-out rows.
    pub held_out: Option<(Dataset, Vec<ResolvedSource>)>,
    /// Device, dtype, attention.
    pub engine: EngineOptions,
    /// What forward keeps for backward (gradient checkpointing).
    pub recompute: Recompute,
    /// What a step needs.
    pub memory: MemoryPlan,
    /// Optimizer steps of the run.
    pub total_steps: u64,
    /// `train.global_batch_size`, where the rows of a step were given so; `recipe` has what it came to on these ranks.
    pub(crate) global_batch: Option<usize>,
    /// Ranks that train together.
    pub ranks: usize,
    /// Who keeps what.
    pub strategy: ShardingStrategy,
    /// Why it was picked, when the recipe left it open.
    pub(crate) why: Option<String>,
    identities: BaseIdentities,
    params: ParamCache,
    /// The dtype of each tensor of the base, whatever a checkpoint keeps it in.
    pub(crate) stored_dtypes: BTreeMap<String, StoredDtype>,
    /// What PiSSA took from the weights when they were loaded, by module.
    pub(crate) initial: OnceLock<Arc<BTreeMap<String, LowRankFactors>>>,
}

impl Plan {
    /// Finds model and data and decides what the recipe left open.
    ///
    /// # Errors
    /// Whatever in recipe, model or data cannot be used; all of it before weights are read.
    /// `resumed` is the checkpoint that the run goes on from, `now` the moment that the chat template is told.
    pub fn resolve(
        mut recipe: Recipe,
        resolver: &Resolver<'_>,
        device: Device,
        world: WorldSize,
        resumed: Option<&SavedCheckpoint>,
        now: DateTime<FixedOffset>,
    ) -> Result<Self> {
        let global_batch = decide_rows(&mut recipe, world.all, resumed)?;
        let mut base = BaseModel::open(&recipe.model, recipe.quantization.as_ref(), resolver)?;
        recipe.data.fit_positions(base.config.max_position_embeddings);
        let mut engine = engine_options(&recipe, device)?;
        let adapter_found = find_adapter(&recipe, resolver, &mut base)?;
        let saved = adapter_found.as_ref().map(|found| found.folder.as_path());
        let (tokenizer, tokens) = base.tokenizer_with(&recipe.model.new_tokens)?;
        let named = (base.found.id.as_str(), &base.config);
        let adapter_setup = adapter_setup(&mut recipe, saved, named, &tokens)?;
        base.check(Trains::adapter_or_all(adapter_setup.as_ref()))?;
        let rows = base.dataset_loader(tokenizer, &recipe.data)?.at(now);
        let (train, held_out) = rows.load_run(&recipe.data, recipe.train.seed, resolver)?;
        decide_accumulation(&mut recipe, Some(&train.0), world.all)?;
        let inputs = StepInputs {
            base: &base,
            adapter_setup: adapter_setup.as_ref(),
            rows: Rows::Of(&train.0),
            new_tokens: &tokens,
            engine: &engine,
            room: MemoryBudget::Local,
            params: &ParamCache::default(),
        };
        inputs.split_rows(&mut recipe, world)?;
        let total_steps = Sampler::new(&train.0, sampler_options(&recipe, world.all))?.total_steps();
        let ParallelDecision { strategy, why, recompute, memory } = inputs.decide(&recipe, world)?;
        engine.offload = parallel::offload(&recipe.parallel);
        engine.offload.check(memory.file)?;
        decided(&mut recipe, recompute, engine.dtype, strategy, base.found.commit.as_deref());
        engine.reducing = parallel::reducing(&recipe, engine.traits);
        Ok(Plan {
            recipe,
            stored_dtypes: base.stored_dtypes(),
            base,
            adapter_setup,
            adapter_found,
            rows,
            train,
            held_out,
            engine,
            recompute,
            memory,
            total_steps,
            global_batch,
            ranks: world.all,
            strategy,
            why,
            identities: BaseIdentities::default(),
            // Others than those of the decision, where the engine has since learned what it keeps elsewhere.
            params: ParamCache::default(),
            initial: OnceLock::new(),
        })
    }

    /// The strategy of the run, as a recipe names it.
    pub fn strategy(&self) -> Strategy {
        parallel::named(self.strategy)
    }

    /// The recipe with the strategy of this run's ranks.
    pub(crate) fn recipe_of_ranks(&self) -> Recipe {
        let mut recipe = self.recipe.clone();
        recipe.parallel.strategy = self.strategy();
        recipe
    }

    /// The resolved recipe as people get it: with `train.global_batch_size` where that was given, so that it makes the same
    /// steps on other ranks.
    pub(crate) fn portable_recipe(&self) -> Recipe {
        let mut recipe = self.recipe.clone();
        if self.global_batch.is_some() {
            recipe.train.global_batch_size = self.global_batch;
            recipe.train.gradient_accumulation_steps = AutoOr::Auto;
        }
        recipe
    }

    /// The resolved recipe that a run leaves in its folder. Of several ranks a comment tells how many, and the strategy; of
    /// a global batch, its share of a rank.
    pub fn recipe_text(&self) -> String {
        let recipe = self.portable_recipe().to_toml();
        if self.global_batch.is_some() {
            return format!(
                "# Trained by {} with strategy \"{}\"; on each, gradient_accumulation_steps came to {}.\n{recipe}",
                units::exact(self.ranks, "rank"),
                self.strategy(),
                self.recipe.train.accumulation()
            );
        }
        if self.ranks == 1 {
            return recipe;
        }
        format!(
            "# Trained by {} ranks with strategy \"{}\". To repeat the run, give it as many ranks again.\n{recipe}",
            self.ranks,
            self.strategy()
        )
    }

    /// Trainable and all parameters.
    pub fn parameters(&self) -> (u64, u64) {
        let all =
            self.base.descs(Trains::adapter_or_all(self.adapter_setup.as_ref()), None).unwrap_or_default();
        let count = |trainable: bool| {
            all.iter()
                .filter(|desc| desc.kind.trains() || !trainable)
                .map(|desc| desc.elements() as u64)
                .sum()
        };
        (count(true), count(false))
    }

    /// Bytes of the model's files that loading it reads; none when it starts random.
    pub fn bytes_read(&self) -> Option<u64> {
        let files = self.base.files.as_ref()?;
        Some(files.files().filter_map(|(path, _)| Some(path.metadata().ok()?.len())).sum())
    }

    /// The sampler at the beginning of the run.
    ///
    /// # Errors
    /// The data hold no row, or the sizes of a step are not usable.
    pub fn sampler(&self) -> Result<Sampler<'_>> {
        Sampler::new(&self.train.0, sampler_options(&self.recipe, self.ranks))
    }

    /// Which model the run starts from, with the digest of every byte once [`Plan::finish_digest`] was called.
    ///
    /// # Errors
    /// As [`BaseModel::identity`].
    pub fn identity(&self) -> Result<&ModelIdentity> {
        if let Some(identity) = self.identities.whole.get().or_else(|| self.identities.sampled.get()) {
            return Ok(identity);
        }
        let identity = self.base.identity(self.recipe.train.seed)?;
        Ok(self.identities.sampled.get_or_init(|| identity))
    }

    /// Takes over the digest of every byte of the base, which `task` makes; what the run saves says it.
    ///
    /// # Errors
    /// As [`DigestTask::wait`] and [`BaseModel::identity`].
    pub fn finish_digest(&self, task: DigestTask) -> Result<()> {
        let digest = task.wait()?;
        let identity = self.identity()?.clone().with_digest(&digest);
        self.identities.whole.get_or_init(|| identity);
        Ok(())
    }

    /// Compares the base with that of the checkpoint `resumed`, or of the adapter that the run starts from; none where
    /// there is neither. `force_base` takes another one too.
    ///
    /// # Errors
    /// The user's: they are different models; what the adapter says of its base is malformed.
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

    /// Takes the weights from a checkpoint instead of the base; returns what goes on otherwise than it was, in words.
    /// The keys in `allowed` may be other than they were.
    ///
    /// # Errors
    /// The checkpoint is of another run.
    pub fn resume(&mut self, saved: &SavedCheckpoint, allowed: &[String]) -> Result<Vec<String>> {
        // While the files are still the base's.
        self.identity()?;
        let mut changes = saved.check_same_run(&self.fingerprint(), allowed)?;
        changes.extend(self.harmless_changes(saved));
        match &mut self.adapter_setup {
            Some(adapter_setup) => adapter_setup.resume(adapter::SavedAdapter::read(&saved.folder)?),
            None => self.base.files = Some(ModelFiles::open(&saved.folder)?),
        }
        Ok(changes)
    }

    /// The commits of what came from the hub, by what was asked for there.
    pub fn commits(&self) -> BTreeMap<String, String> {
        let rows = self.held_out.iter().chain([&self.train]).flat_map(|(_, found)| found);
        let found = rows.chain(&self.adapter_found).chain([&self.base.found]);
        let mut commits = BTreeMap::new();
        for (id, commit) in found.filter_map(|found| Some((&found.id, found.commit.as_ref()?))) {
            // The rows to train on and those held out may be of two commits.
            let other = commits.get(id).is_some_and(|known| known != commit);
            let id = if other { format!("{id}@{commit}") } else { id.clone() };
            commits.insert(id, commit.clone());
        }
        commits
    }

    /// Micro-batches of a step, those of all ranks together.
    pub fn micro_batches(&self) -> usize {
        self.recipe.train.accumulation().saturating_mul(self.ranks)
    }

    /// What the memory and the time of a step depend on. New tokens are in the adapter, where there is one.
    pub(crate) fn inputs(&self) -> StepInputs<'_> {
        StepInputs {
            base: &self.base,
            adapter_setup: self.adapter_setup.as_ref(),
            rows: Rows::Of(&self.train.0),
            new_tokens: &[],
            engine: &self.engine,
            room: MemoryBudget::Local,
            params: &self.params,
        }
    }

    /// Settings that this run does not use and with which a device has more memory in `phase`, as they are typed and with
    /// what a rank would need, in order of what they cost.
    pub fn memory_advice(&self, phase: Phase) -> Vec<String> {
        let (inputs, world) = (self.inputs(), WorldSize::on_one_host(self.ranks));
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

    /// The training method, for the plan, the card and the report.
    pub fn method(&self) -> Method {
        Method::new(self.adapter_setup.as_ref(), self.base.format)
    }
}

/// What trains of the model `named` beside its weights, from the folder `saved` of an adapter or as the recipe says.
fn adapter_setup(
    recipe: &mut Recipe,
    saved: Option<&Path>,
    named: (&str, &ModelConfig),
    new_tokens: &[u32],
) -> Result<Option<AdapterSetup>> {
    match (saved, &recipe.adapter) {
        (Some(folder), _) => AdapterSetup::from_saved(recipe, folder, named, new_tokens).map(Some),
        (None, Some(adapter)) => AdapterSetup::from_recipe(adapter, named, new_tokens).map(Some),
        (None, None) => Ok(None),
    }
}

/// How `device` computes what `recipe` asks for.
fn engine_options(recipe: &Recipe, device: Device) -> Result<EngineOptions> {
    let mut engine = EngineOptions::new(&recipe.model, device, recipe.train.seed)?;
    engine.bf16_copy = bf16_copy::is_wanted(recipe);
    engine.master = parallel::master_weights(recipe, engine.dtype)?;
    Ok(engine)
}

/// The adapter that the run starts from, whose tokenizer goes before the model's.
fn find_adapter(
    recipe: &Recipe,
    resolver: &Resolver<'_>,
    base: &mut BaseModel,
) -> Result<Option<ResolvedSource>> {
    let source = recipe.adapter.as_ref().and_then(|adapter| adapter.path.as_ref());
    let found = source.map(|source| resolver.adapter(source)).transpose()?;
    found.as_ref().map_or(Ok(()), |found| base.adopt(&found.folder))?;
    Ok(found)
}

/// Which model a run starts from.
#[derive(Debug, Default)]
struct BaseIdentities {
    /// Once somebody asked.
    sampled: OnceLock<ModelIdentity>,
    /// With the digest of every byte, once that is made.
    whole: OnceLock<ModelIdentity>,
}

/// Writes what was left open into the recipe, but for the strategy: it depends on the ranks, which a recipe does not hold.
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
