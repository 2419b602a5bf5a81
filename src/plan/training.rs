//! A training run, resolved: nothing is optional any more.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device};
use chrono::{DateTime, FixedOffset};

use super::fit::{Fit, StepInputs};
use super::memory::MemoryPlan;
use super::method::Method;
use super::parallel;
use super::parallel::WorldSize;
use crate::adapter::{self, AdapterTensor, LowRankFactors};
use crate::checkpoint::{SavedCheckpoint, SnapshotPart, SnapshotTensor, WriteWeights};
use crate::collective::Collective;
use crate::data::{Dataset, Sampler, SamplerOptions, Split};
use crate::engine::{Recompute, SaveAssignment, Trainer, TrainerOptions};
use crate::error::{Error, Result};
use crate::export::hf;
use crate::optim::{OptimizerOptions, Schedule};
use crate::recipe::{self, ComputeDtype, Dtype, Recipe};
use crate::runtime::thread_pool::run_in_pool;
use crate::setup::BaseCheck;
use crate::setup::adapter_setup::AdapterSetup;
use crate::setup::base_model::{BaseModel, EngineOptions};
use crate::setup::dataset::DatasetLoader;
use crate::setup::initial_values::AdapterPart;
use crate::setup::param_layout::{Trains, tied_module};
use crate::setup::pissa::{saved_config, saved_matrix};
use crate::setup::resolver::{ResolvedSource, Resolver};
use crate::sharding::{DeviceMesh, GradReduceOptions, Offload, ParamDesc, ShardingStrategy};
use crate::units;
use crate::weights::{ModelFiles, ModelIdentity, StoredDtype, WriteEntry, Written};

/// What will run.
#[derive(Debug)]
pub struct Plan {
    /// The recipe with every "auto" decided.
    pub recipe: Recipe,
    /// The model.
    pub base: BaseModel,
    /// What trains; none: all weights.
    pub adapter_setup: Option<AdapterSetup>,
    /// Tokenizer and template.
    pub rows: DatasetLoader,
    /// The rows to learn from, and where they came from.
    pub train: (Dataset, Vec<ResolvedSource>),
    /// The held-out rows.
    pub held_out: Option<(Dataset, Vec<ResolvedSource>)>,
    /// Device, dtype, attention.
    pub engine: EngineOptions,
    /// Gradient checkpointing.
    pub recompute: Recompute,
    /// What a step needs.
    pub memory: MemoryPlan,
    /// Optimizer steps of the run.
    pub total_steps: u64,
    /// Ranks that train together.
    pub ranks: usize,
    /// Who keeps what.
    pub kind: ShardingStrategy,
    /// Why it was picked, when the recipe left it open.
    why: Option<String>,
    /// Which model the run starts from, once somebody asked.
    identity: OnceLock<ModelIdentity>,
    /// What PiSSA took from the weights when they were loaded, by module.
    initial: OnceLock<Arc<BTreeMap<String, LowRankFactors>>>,
}

impl Plan {
    /// Finds model and data and decides what the recipe left open.
    ///
    /// # Errors
    /// Whatever in recipe, model or data cannot be used; all of it before weights are read.
    /// `resumed` is the checkpoint that the run goes on from, `now` the moment that the chat template is told.
    pub fn resolve(
        mut recipe: Recipe,
        finder: &Resolver<'_>,
        device: Device,
        world: WorldSize,
        resumed: Option<&SavedCheckpoint>,
        now: DateTime<FixedOffset>,
    ) -> Result<Self> {
        parallel::split_global_batch(&mut recipe, world.all, resumed)?;
        let mut base = BaseModel::open(&recipe.model, recipe.quantization.as_ref(), finder)?;
        let mut engine = EngineOptions::new(&recipe.model, device, recipe.train.seed);
        let saved = recipe.adapter.as_ref().and_then(|adapter| adapter.path.as_ref());
        let saved = saved.map(|source| finder.adapter(source)).transpose()?.map(|found| found.folder);
        saved.as_deref().map_or(Ok(()), |folder| base.adopt(folder))?;
        let (tokenizer, tokens) = base.tokenizer_with(&recipe.model.new_tokens)?;
        let named = (base.found.id.as_str(), &base.config);
        let adapter_setup = match (&saved, &recipe.adapter) {
            (Some(folder), _) => Some(AdapterSetup::from_saved(&mut recipe, folder, named, &tokens)?),
            (None, Some(adapter)) => Some(AdapterSetup::from_recipe(adapter, named, &tokens)?),
            (None, None) => None,
        };
        base.check(Trains::adapter_or_all(adapter_setup.as_ref()))?;
        let rows = DatasetLoader::new(tokenizer, &recipe.data, base.config.vocab_size)?.at(now);
        let train = rows.load(&recipe.data.train, Split::Train, finder)?;
        let held_out = (!recipe.data.eval.is_empty())
            .then(|| rows.load(&recipe.data.eval, Split::Eval, finder))
            .transpose()?;
        let total_steps = Sampler::new(&train.0, sampler_options(&recipe, world.all))?.total_steps();
        let inputs = StepInputs {
            base: &base,
            adapter_setup: adapter_setup.as_ref(),
            data: &train.0,
            new_tokens: &tokens,
            engine: &engine,
        };
        let Fit { kind, why, recompute, memory } = inputs.decide(&recipe, world)?;
        engine.offload = parallel::offload(&recipe.parallel);
        engine.offload.check(memory.file)?;
        decided(&mut recipe, recompute, engine.dtype, kind, base.found.commit.as_deref());
        let accumulates = recipe.train.gradient_accumulation_steps > 1;
        engine.reducing = GradReduceOptions { accumulates, dtype: parallel::reduce_dtype(&recipe.parallel) };
        Ok(Plan {
            recipe,
            base,
            adapter_setup,
            rows,
            train,
            held_out,
            engine,
            recompute,
            memory,
            total_steps,
            ranks: world.all,
            kind,
            why,
            identity: OnceLock::new(),
            initial: OnceLock::new(),
        })
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
    pub fn sampler(&self) -> Result<Sampler<'_>> {
        Sampler::new(&self.train.0, sampler_options(&self.recipe, self.ranks))
    }

    /// Which model the run starts from.
    ///
    /// # Errors
    /// As [`BaseModel::identity`].
    pub fn identity(&self) -> Result<&ModelIdentity> {
        if let Some(identity) = self.identity.get() {
            return Ok(identity);
        }
        let identity = self.base.identity(self.recipe.train.seed)?;
        Ok(self.identity.get_or_init(|| identity))
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

    /// Takes the weights from a checkpoint instead of the base.
    ///
    /// # Errors
    /// The checkpoint is of another run.
    pub fn resume(&mut self, saved: &SavedCheckpoint) -> Result<()> {
        // While the files are still the base's.
        self.identity()?;
        saved.check_same_run(&self.fingerprint())?;
        match &mut self.adapter_setup {
            Some(adapter_setup) => adapter_setup.resume(adapter::SavedAdapter::read(&saved.folder)?),
            None => self.base.files = Some(ModelFiles::open(&saved.folder)?),
        }
        Ok(())
    }

    /// A rank's trainer on its `device`, with weights loaded; `resumed` is what [`Plan::resume`] was given. All ranks call
    /// it.
    pub fn trainer(
        &self,
        resumed: Option<&SavedCheckpoint>,
        world: Arc<dyn Collective>,
        device: &Device,
    ) -> Result<Trainer> {
        let (ranks, device) = (DeviceMesh::new(self.kind, world)?, device.clone());
        let engine = EngineOptions { ranks, device, ..self.engine.clone() };
        let (engine, initial) = run_in_pool(&Device::Cpu, || {
            self.base.load(Trains::adapter_or_all(self.adapter_setup.as_ref()), &engine)
        })?;
        self.initial.get_or_init(|| Arc::new(initial));
        let options = TrainerOptions {
            optimizer: OptimizerOptions {
                betas: self.recipe.optimizer.betas,
                eps: self.recipe.optimizer.eps,
                weight_decay: self.recipe.optimizer.weight_decay,
                state: self.recipe.optimizer.state,
            },
            lora_plus_ratio: self.recipe.optimizer.lora_plus_ratio,
            schedule: self.schedule()?,
            max_grad_norm: Some(self.recipe.train.max_grad_norm).filter(|max| *max > 0.0),
            seed: self.recipe.train.seed,
            recompute: self.recompute,
            save_assignment: if self.adapter_setup.is_some() {
                SaveAssignment::Rank0
            } else {
                SaveAssignment::RoundRobin
            },
        };
        let mut trainer = Trainer::new(engine, options)?;
        if let Some(saved) = resumed {
            trainer.restore(saved)?;
        }
        Ok(trainer)
    }

    fn schedule(&self) -> Result<Schedule> {
        let scheduler = &self.recipe.scheduler;
        let learning_rate = self.recipe.optimizer.learning_rate.ok_or_else(|| {
            Error::user("no learning rate is given")
                .hint("write `[optimizer] learning_rate = 2e-4`, for example")
        })?;
        let share = scheduler.warmup_ratio.unwrap_or(0.0) * self.total_steps as f64;
        Ok(Schedule {
            kind: scheduler.kind,
            learning_rate,
            warmup_steps: scheduler.warmup_steps.unwrap_or(share.ceil() as u64),
            total_steps: self.total_steps,
            min_lr_ratio: scheduler.min_lr_ratio,
            num_cycles: scheduler.num_cycles as f64,
            power: scheduler.power,
            num_decay_steps: scheduler.num_decay_steps.unwrap_or(0),
        })
    }

    /// Micro-batches of a step, those of all ranks together.
    pub fn micro_batches(&self) -> usize {
        self.recipe.train.gradient_accumulation_steps.saturating_mul(self.ranks)
    }

    /// What decides the numbers of the run: a checkpoint goes on only under the same.
    pub fn fingerprint(&self) -> BTreeMap<String, String> {
        let mut recipe = self.recipe.clone();
        // These change what is saved, said or how long it takes, not the numbers.
        recipe.checkpoint = recipe::CheckpointSection::default();
        recipe.log = recipe::LogSection::default();
        recipe.eval = recipe::EvalSection::default();
        recipe.data.train = Vec::new();
        recipe.data.eval = Vec::new();
        recipe.train.recompute = recipe::Recompute::Auto;
        recipe.model.id = None;
        // How a run is spread over ranks does not change it: what counts is all ranks' micro-batches.
        recipe.parallel = recipe::ParallelSection {
            strategy: recipe::Strategy::Single,
            reduce_dtype: recipe.parallel.reduce_dtype,
            ..recipe::ParallelSection::default()
        };
        recipe.train.gradient_accumulation_steps = self.micro_batches();
        let mut facts = recipe.values();
        let short = |hash: blake3::Hash| hash.to_hex()[..16].to_owned();
        facts.insert("data".into(), short(self.train.0.digest()));
        facts.insert("steps".into(), self.total_steps.to_string());
        facts.insert("tokenizer".into(), short(self.rows.tokenizer.digest()));
        facts
    }

    /// The recipe as text, but for what names places of one host: what processes of one run must have alike.
    pub fn run_text(&self) -> String {
        let mut recipe = self.recipe.clone();
        recipe.model.id = None;
        (recipe.data.train, recipe.data.eval) = (Vec::new(), Vec::new());
        recipe.parallel.offload_folder = None;
        format!("{}\n{} ranks, {} steps", recipe.to_toml(), self.ranks, self.total_steps)
    }

    /// Writes trained weights in the form this run leaves: a PEFT adapter, or a Hugging Face model, whose tensors the
    /// ranks of `trainer` share. `exact`: in f32, as checkpoints need it; else as `checkpoint.output_dtype` says.
    ///
    /// # Errors
    /// As [`Plan::identity`].
    pub fn writer(&self, exact: bool, trainer: &Trainer) -> Result<WriteWeights> {
        let given = if exact { Dtype::F32 } else { self.recipe.checkpoint.output_dtype };
        let tokenizer = self.base.other_tokenizer(&self.rows.tokenizer);
        let Some(adapter_setup) = &self.adapter_setup else {
            let dtypes = self.stored_dtypes();
            let dtype = |name: &str| {
                let own = || dtypes.get(name).copied().unwrap_or(StoredDtype::F32);
                stored(given).unwrap_or_else(own)
            };
            let entry =
                |desc: ParamDesc| WriteEntry { dtype: dtype(&desc.name), name: desc.name, shape: desc.shape };
            let shares = trainer.shares().into_iter().map(|descs| descs.into_iter().map(entry).collect());
            let parts = hf::ExportParts::new(shares.collect(), self.base.found.folder.clone(), tokenizer);
            return Ok(Arc::new(
                move |folder: &Path, tensors: &[SnapshotTensor], part: SnapshotPart| match part {
                    SnapshotPart::Tensors(rank) => write_tensors(&parts, rank, folder, tensors),
                    SnapshotPart::Rest => parts.write_rest(folder),
                },
            ));
        };
        let initial = self.initial.get().cloned().unwrap_or_default();
        let config = if adapter_setup.is_pissa() {
            saved_config(&adapter_setup.config)
        } else {
            adapter_setup.config.clone()
        };
        let dtype = stored(given).unwrap_or(StoredDtype::F32);
        let tied = self.base.config.tie_word_embeddings && !adapter_setup.unties();
        let adapter = AdapterOutput { config, base: self.identity()?.clone(), tied, initial, dtype };
        Ok(Arc::new(move |folder: &Path, tensors: &[SnapshotTensor], part: SnapshotPart| match part {
            SnapshotPart::Tensors(0) => adapter.write(folder, tensors),
            SnapshotPart::Tensors(_) => Ok(Vec::new()),
            SnapshotPart::Rest => {
                let written = tokenizer.as_ref().map_or(Ok(()), |tokenizer| tokenizer.write(folder));
                written.map(|()| Vec::new())
            }
        }))
    }

    /// The dtype of each tensor of the base; what config.json says for one that starts random.
    fn stored_dtypes(&self) -> BTreeMap<String, StoredDtype> {
        let named = self.base.config.dtype.as_deref().and_then(|name| match name {
            "float32" => Some(StoredDtype::F32),
            "bfloat16" => Some(StoredDtype::BF16),
            "float16" => Some(StoredDtype::F16),
            _ => None,
        });
        let of = |name: &str| {
            let info = self.base.files.as_ref().and_then(|files| files.info(name));
            info.map(|info| info.dtype).filter(|dtype| dtype.is_float()).or(named).unwrap_or(StoredDtype::F32)
        };
        crate::model::parameters(&self.base.config)
            .into_iter()
            .map(|spec| (spec.name.clone(), of(&spec.name)))
            .collect()
    }

    /// What is kept away from the device, in lines of its own.
    fn describe_offload(&self) -> String {
        let MemoryPlan { host, file, .. } = self.memory;
        let mut text = String::new();
        if self.engine.offload == Offload::None {
            return text;
        }
        if host > 0 {
            text += &format!("\nbeside it, in host memory: {}", units::bytes(host));
        }
        if let Offload::Params(Some(folder)) = &self.engine.offload {
            text += &format!("\nin a file in {}: {}", folder.display(), units::bytes(file));
        } else if self.engine.device.is_cpu() {
            text += "\non the CPU offload to host memory frees nothing; `parallel.offload_folder` keeps parameters on a disk";
        }
        text
    }

    /// The training method, for the plan, the card and the report.
    pub fn method(&self) -> Method {
        Method::new(self.adapter_setup.as_ref(), self.base.format)
    }

    /// The plan in a few lines.
    pub fn describe(&self) -> String {
        let (trainable, all) = self.parameters();
        let method = self.method();
        let recompute = match self.recompute {
            Recompute::None => "none",
            Recompute::Block => "block",
        };
        let memory = &self.memory;
        let away = self.describe_offload();
        let spread = match (self.ranks, &self.why) {
            (1, _) => String::new(),
            (n, why) => {
                let why = why.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
                format!(
                    "\n{n} ranks, strategy {}{why}; below, what each of them needs",
                    self.recipe.parallel.strategy
                )
            }
        };
        format!(
            "training {method}: {} of {} parameters, {:?}, {} steps{spread}\nmemory of a step: {} = {} (recompute {recompute}){away}",
            units::count(trainable),
            units::count(all),
            self.engine.dtype,
            self.total_steps,
            units::bytes(memory.total()),
            memory.by_cause(),
        )
    }
}

/// Writes what was left open into the recipe.
fn decided(
    recipe: &mut Recipe,
    recompute: Recompute,
    dtype: DType,
    kind: ShardingStrategy,
    commit: Option<&str>,
) {
    recipe.train.recompute = match recompute {
        Recompute::None => recipe::Recompute::None,
        Recompute::Block => recipe::Recompute::Block,
    };
    recipe.model.dtype = if dtype == DType::F32 { ComputeDtype::F32 } else { ComputeDtype::Bf16 };
    recipe.parallel.strategy = parallel::named(kind);
    if let ShardingStrategy::Hsdp(size) = kind {
        recipe.parallel.shard_size = Some(size);
    }
    if let Some(commit) = commit {
        recipe.model.revision = commit.to_owned();
    }
}

/// The steps of all ranks together.
fn sampler_options(recipe: &Recipe, ranks: usize) -> SamplerOptions {
    SamplerOptions {
        seed: recipe.train.seed,
        shuffle: recipe.data.shuffle,
        packing: recipe.data.packing,
        max_seq_len: recipe.data.max_seq_len,
        micro_batch_size: recipe.train.micro_batch_size,
        gradient_accumulation_steps: recipe.train.gradient_accumulation_steps.saturating_mul(ranks),
        epochs: recipe.train.epochs,
        max_steps: recipe.train.max_steps,
    }
}

fn stored(dtype: Dtype) -> Option<StoredDtype> {
    match dtype {
        Dtype::Auto => None,
        Dtype::F32 => Some(StoredDtype::F32),
        Dtype::Bf16 => Some(StoredDtype::BF16),
        Dtype::F16 => Some(StoredDtype::F16),
    }
}

/// An adapter as a run leaves it.
struct AdapterOutput {
    config: adapter::AdapterConfig,
    base: ModelIdentity,
    /// Embedding and head are one parameter.
    tied: bool,
    /// What PiSSA took from the weights, by module.
    initial: Arc<BTreeMap<String, LowRankFactors>>,
    dtype: StoredDtype,
}

impl AdapterOutput {
    fn write(&self, folder: &Path, tensors: &[SnapshotTensor]) -> Result<Vec<Written>> {
        let mut values: BTreeMap<AdapterTensor, Cow<'_, [f32]>> = BTreeMap::new();
        for tensor in tensors {
            let AdapterPart { module, kind } = AdapterPart::of(&tensor.name)?;
            let (shape, data) = match self.initial.get(module) {
                None => (tensor.shape.clone(), Cow::Borrowed(tensor.values.as_slice())),
                Some(factors) => {
                    let (shape, data) = saved_matrix(kind, &tensor.shape, &tensor.values, factors);
                    (shape, Cow::Owned(data))
                }
            };
            values.insert(AdapterTensor { module: module.to_owned(), kind, shape }, data);
        }
        // A tied pair trains as one parameter; PEFT reads it under both names.
        let twins: Vec<_> = values
            .iter()
            .filter_map(|(tensor, values)| {
                let module = tied_module(&tensor.module).filter(|_| self.tied && tensor.kind.is_saved())?;
                Some((AdapterTensor { module: module.to_owned(), ..tensor.clone() }, values.clone()))
            })
            .collect();
        values.extend(twins);
        let list: Vec<AdapterTensor> = values.keys().cloned().collect();
        adapter::write(folder, &self.config, &self.base, &list, self.dtype, |tensor, sink| {
            match values.get(tensor) {
                Some(values) => sink.write_values(values),
                None => Err(Error::internal(format!("no values for {}", tensor.name()))),
            }
        })
    }
}

fn write_tensors(
    parts: &hf::ExportParts,
    rank: usize,
    folder: &Path,
    tensors: &[SnapshotTensor],
) -> Result<Vec<Written>> {
    let by_name: BTreeMap<&str, &SnapshotTensor> = tensors.iter().map(|t| (t.name.as_str(), t)).collect();
    parts.write(rank, folder, |entry, sink| match by_name.get(entry.name.as_str()) {
        Some(tensor) => sink.write_values(&tensor.values),
        None => Err(Error::internal(format!("no values for {}", entry.name))),
    })
}
