//! Opens a base model and builds the engine from it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device};

use super::adapter_setup::AdapterSetup;
use super::assets;
use super::base_check::{BaseCheck, BaseComparison};
use super::initial_values::InitialValues;
use super::param_layout::{StoragePolicy, Trains, descs};
use super::resolver::{ResolvedSource, Resolver};
use crate::adapter::{LowRankFactors, SavedAdapter};
use crate::engine::Engine;
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::export::quantized::LinearLayers;
use crate::model::{self, DeltaMixer, ModelConfig, RotaryTables, TokenMixer};
use crate::ops::attention::KERNEL_HEAD_DIMS;
use crate::ops::causal_conv::KERNEL_TAPS;
use crate::ops::gated_delta::MOST_WIDE_HEAD;
use crate::ops::has_kernels;
use crate::parallel;
use crate::parallel::{
    DeviceMesh, GradReduceOptions, LoadTarget, OffloadTarget, ParamDesc, ParamStore, SharedFrozen,
};
use crate::quant::QuantFormat;
use crate::recipe::enums::Attention;
use crate::recipe::enums::MasterWeights;
use crate::recipe::{ComputeDtype, ModelInit, ModelSection, QuantizationSection};
use crate::report::Terminal;
use crate::runtime::device;
use crate::weights::{
    DigestTask, ModelFiles, ModelIdentity, RetainedTensors, Stack, StackParts, StoredDtype,
};

/// The warning of `model.dequantize = false` for a model without a weight that it keeps.
const KEEPS_NOTHING: &str =
    "`model.dequantize = false` has no effect: the model has no packed weight that a run keeps";

/// A model before its weights are read.
#[derive(Debug)]
pub struct BaseModel {
    /// The source of the model, with its folder.
    pub source: ResolvedSource,
    /// The shape and arithmetic of the model.
    pub config: ModelConfig,
    /// The weights on disk; none if they start random.
    pub files: Option<ModelFiles>,
    /// The format of the frozen linear layers, quantized by the run or stored so.
    pub format: Option<QuantFormat>,
    /// The linear layers that are not quantized.
    pub skipped: Vec<String>,
    /// The folder of the tokenizer: the model's, or that of an adapter with a tokenizer of its own.
    pub tokenizer: PathBuf,
    /// The number of tokens in config.json; the model in use may have more.
    pub stored_tokens: usize,
    /// The arithmetic settings of config.json.
    semantics: BTreeMap<String, String>,
    /// True if its weights are files on this machine.
    has_weights: bool,
    /// True if the head is a separate table, although config.json ties it to the embedding.
    pub head_apart: bool,
    /// The tensors of the model that a written model keeps. In a resumed run, `files` are those of
    /// a checkpoint, which does not have them.
    pub retained: RetainedTensors,
}

/// The properties of a device that determine the layout of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceTraits {
    /// True if it is the CPU.
    pub is_cpu: bool,
    /// True if it has kernels for the operations.
    pub has_kernels: bool,
}

impl DeviceTraits {
    /// A GPU with kernels.
    pub(crate) const GPU: DeviceTraits = DeviceTraits { is_cpu: false, has_kernels: true };
    /// A processor, without kernels.
    pub(crate) const CPU: DeviceTraits = DeviceTraits { is_cpu: true, has_kernels: false };

    /// Returns the properties of a device of this machine.
    pub fn of(device: &Device) -> Self {
        DeviceTraits { is_cpu: device.is_cpu(), has_kernels: has_kernels(device) }
    }

    /// True if the computation uses the memory of the host.
    pub fn on_host(self) -> bool {
        self.is_cpu && !self.has_kernels
    }
}

/// The compute options of an engine.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// The device of the computation.
    pub device: Device,
    /// The properties of the device; for a run on another machine, those of the planned device.
    pub traits: DeviceTraits,
    /// The dtype of the computation.
    pub dtype: DType,
    /// The attention implementation.
    pub attention: Attention,
    /// The seed of random initial values.
    pub seed: u64,
    /// The mesh of ranks that share the weights.
    pub mesh: DeviceMesh,
    /// The options for summing gradients.
    pub reducing: GradReduceOptions,
    /// The tensors that are stored outside the device.
    pub offload: OffloadTarget,
    /// True if quantized weights are also kept in bf16.
    pub bf16_copy: bool,
    /// The names of the weights that are multiplied in fp8 while they are frozen.
    pub fp8: Arc<BTreeSet<String>>,
    /// Selects f32 masters, or bf16 weights that the optimizer updates directly.
    pub master: MasterWeights,
    /// The frozen weights that the ranks of this process share on the CPU.
    pub frozen: SharedFrozen,
}

impl EngineOptions {
    /// Returns the options of `[model]` on this device.
    ///
    /// # Errors
    /// The device does not support that dtype.
    pub fn new(model: &ModelSection, device: Device, seed: u64) -> Result<Self> {
        let dtype = match model.dtype {
            ComputeDtype::Auto => device::default_dtype(&device),
            ComputeDtype::F32 => DType::F32,
            ComputeDtype::Bf16 => DType::BF16,
        };
        device::check_dtype(&device, dtype)?;
        Ok(EngineOptions::alone(device, dtype, model.attention, seed))
    }

    /// Returns a warning if a GPU computes operations of the model without kernels, and so slowly.
    /// Returns none on the CPU, and for attention "eager", which is slow by choice.
    pub fn without_kernels(&self, config: &ModelConfig) -> Option<String> {
        if !has_kernels(&self.device) {
            let old = "no operation has a kernel for this GPU: they need compute capability 8.0";
            return (!self.device.is_cpu())
                .then(|| format!("{old}; every operation uses its slow reference form"));
        }
        if let Some(delta) = config.gated_deltas().find(|delta| !delta_has_kernels(delta)) {
            let taps = KERNEL_TAPS.map(|taps| taps.to_string()).join(" or ");
            return Some(format!(
                "Gated DeltaNet has kernels for a convolution over {taps} tokens and heads of at most {MOST_WIDE_HEAD}; over {} tokens and heads of {} and {} it uses its slow reference form",
                delta.conv_kernel, delta.heads.key_dim, delta.heads.value_dim
            ));
        }
        if let Some(slow) = slow_convolution(config) {
            return Some(slow);
        }
        let has_kernels = |dim: usize| self.dtype == DType::BF16 && KERNEL_HEAD_DIMS.contains(&dim);
        let mut widths = config.attentions().map(|attention| attention.heads.head_dim);
        let dim = widths.find(|dim| !has_kernels(*dim))?;
        if self.attention == Attention::Eager {
            return None;
        }
        let dims = KERNEL_HEAD_DIMS.map(|dim| dim.to_string()).join(", ");
        Some(format!(
            "attention has kernels for bf16 and heads of {dims}; {} and heads of {dim} use its slow reference form",
            self.dtype.as_str()
        ))
    }

    /// Returns a warning if products in fp8 are computed in software.
    pub fn software_fp8(&self) -> Option<String> {
        (self.device.is_cpu() && !has_kernels(&self.device) && !self.fp8.is_empty()).then(|| {
            "a CPU has no products in fp8 (`train.base_products`): it computes the numbers of a GPU in software, slower than in bf16"
                .to_owned()
        })
    }

    /// Returns a warning if the device has no graphs although a run `wants` them.
    pub fn without_graphs(&self, wants: bool) -> Option<String> {
        (wants && self.device.is_cpu() && !has_kernels(&self.device)).then(|| {
            "`train.cuda_graphs` has no effect on a CPU: operations run at once, without launches".to_owned()
        })
    }

    /// Returns the options for one rank and one micro-batch a step.
    pub fn alone(device: Device, dtype: DType, attention: Attention, seed: u64) -> Self {
        let reducing = GradReduceOptions { accumulates: false, dtype: DType::F32, block_dtype: DType::F32 };
        EngineOptions {
            traits: DeviceTraits::of(&device),
            device,
            dtype,
            attention,
            seed,
            mesh: DeviceMesh::alone(),
            reducing,
            offload: OffloadTarget::default(),
            bf16_copy: false,
            fp8: Arc::default(),
            master: MasterWeights::F32,
            frozen: SharedFrozen::default(),
        }
    }
}

/// Returns a warning if the short convolutions of a model have no kernel.
fn slow_convolution(config: &ModelConfig) -> Option<String> {
    let kernel = config.blocks.iter().find_map(|block| match block.token_mixer {
        TokenMixer::ShortConv(conv) if !KERNEL_TAPS.contains(&conv.kernel) => Some(conv.kernel),
        _ => None,
    })?;
    let taps = KERNEL_TAPS.map(|taps| taps.to_string()).join(" or ");
    Some(format!(
        "short convolutions have kernels over {taps} tokens; over {kernel} (`conv_L_cache`) they use their slow reference form"
    ))
}

/// Returns whether the operations of Gated DeltaNet have kernels for these sizes.
fn delta_has_kernels(delta: &DeltaMixer) -> bool {
    KERNEL_TAPS.contains(&delta.conv_kernel)
        && delta.heads.key_dim.max(delta.heads.value_dim) <= MOST_WIDE_HEAD
}

impl BaseModel {
    /// Finds the model of `[model]`, reads its config.json and opens its weights, unless it starts
    /// random. `[quantization]`, if given, sets the format of its frozen linear layers.
    ///
    /// # Errors
    /// The model cannot be found or read, or is already quantized in another format than that of
    /// `[quantization]`.
    pub fn open(
        model: &ModelSection,
        quantization: Option<&QuantizationSection>,
        resolver: &Resolver<'_>,
    ) -> Result<Self> {
        let source = model.id.as_ref().ok_or_else(|| {
            Error::user("no model is given").hint("give one with `--model`, or as `model.id` in the recipe")
        })?;
        let (resolved, weights) = match model.init {
            ModelInit::Pretrained => {
                let (resolved, weights) = resolver.model_and_weights(source, &model.revision)?;
                (resolved, Some(weights))
            }
            ModelInit::Random => (resolver.model_headers(source, &model.revision)?, None),
        };
        let path = resolved.folder.join("config.json");
        let text = input_file::read_text("read", &path)?;
        let mut config = ModelConfig::from_json(&text, &path.display().to_string())?;
        let mut files = weights.map(|weights| weights.open(&resolved.folder)).transpose()?;
        if !model.dequantize && !files.as_mut().is_some_and(ModelFiles::keep_packed) {
            resolver.warn(KEEPS_NOTHING);
        }
        if let Some(files) = &mut files {
            model::settle(&mut config, files)?;
            files.warnings().for_each(|note| resolver.warn(note));
        }
        let stored = files.as_ref().and_then(stored_format);
        let mut base = BaseModel {
            tokenizer: resolved.folder.clone(),
            stored_tokens: config.vocab_size,
            semantics: config.semantics(),
            head_apart: files.as_ref().is_some_and(ModelFiles::head_is_apart),
            retained: files.as_ref().map_or_else(
                || RetainedTensors::default().named_by(config.family.class_names),
                |files| files.retained().clone(),
            ),
            has_weights: files.as_ref().is_some_and(|files| !files.is_header_only()),
            source: resolved,
            config,
            files,
            format: stored.or(quantization.map(format)),
            skipped: Vec::new(),
        };
        base.skipped = base.skipped_layers(quantization)?;
        Ok(base)
    }

    /// Opens the weights of a full run's checkpoint in `folder`.
    ///
    /// # Errors
    /// The files cannot be read, or are of another model.
    pub fn open_checkpoint(&self, folder: &Path) -> Result<ModelFiles> {
        let mut files = ModelFiles::open(folder)?;
        model::unstack_experts(&self.config, &mut files)?;
        Ok(files)
    }

    /// Returns the stacks in which a trained model has the experts of its blocks, by the name of
    /// each part: those of the files, or all if the weights start random.
    pub fn stacks(&self) -> BTreeMap<String, Arc<Stack>> {
        let mut stacks = BTreeMap::new();
        for StackParts { stack, parts } in model::stacked_experts(&self.config) {
            let is_stored = |files: &ModelFiles| {
                parts.iter().all(|part| files.info(&part.name).is_some_and(|info| info.stack.is_some()))
            };
            if self.files.as_ref().is_none_or(is_stored) {
                stacks.extend(parts.into_iter().map(|part| (part.name, Arc::clone(&stack))));
            }
        }
        stacks
    }

    /// Returns the linear layers that stay unquantized: those that `quantization` skips, or those
    /// unquantized in the checkpoint.
    fn skipped_layers(&self, quantization: Option<&QuantizationSection>) -> Result<Vec<String>> {
        let refused = || Error::user(format!("cannot quantize {}", self.source.folder.display()));
        let (wanted, stored) = (quantization.map(format), self.files.as_ref().and_then(stored_format));
        if let (Some(wanted), Some(stored)) = (wanted, stored)
            && wanted != stored
        {
            return Err(refused()
                .because(format!(
                    "it is quantized already, to {}; `[quantization]` asks for {}",
                    stored.scheme().describe(),
                    wanted.scheme().describe()
                ))
                .hint(
                    "remove `[quantization]` to use the checkpoint as it is, or give the unquantized model",
                ));
        }
        let skip = quantization.map_or(&[][..], |quantization| &quantization.skip_modules);
        let skipped = LinearLayers::new(&self.config, skip)?.skipped;
        let Some(files) = self.files.as_ref().filter(|_| stored.is_some()) else { return Ok(skipped) };
        let own = unquantized(&self.config, files)?;
        if !skip.is_empty() && own != skipped {
            return Err(refused()
                .because("it is quantized already, and its unquantized layers differ from `skip_modules`")
                .hint("remove `[quantization]` to use the checkpoint as it is"));
        }
        Ok(own)
    }

    /// Refuses a `[quantization]` that [`BaseModel::open`] would refuse for this model.
    ///
    /// # Errors
    /// The files are already quantized in another format; the section names missing layers.
    pub(crate) fn check_quantization(&self, quantization: &QuantizationSection) -> Result<()> {
        self.skipped_layers(Some(quantization)).map(drop)
    }

    /// Returns the identity of the model by names, headers, config.json and a sample of its
    /// weights. `seed` is the seed of its weights if they start random.
    ///
    /// # Errors
    /// The user's: the record of the original in a quantized checkpoint is malformed.
    pub fn identity(&self, seed: u64) -> Result<ModelIdentity> {
        let named = self.source.identity().with_config(self.semantics.clone());
        match &self.files {
            Some(files) => named.of_files(files),
            None => {
                let parameters = model::parameters(&self.config);
                Ok(named.drawn(seed, parameters.iter().map(|p| (p.name.as_str(), p.shape.as_slice()))))
            }
        }
    }

    /// Starts a digest of every byte of the weights; none if they start random or are not on this
    /// machine.
    ///
    /// # Errors
    /// Those of [`DigestTask::start`].
    pub fn start_digest(&self) -> Result<Option<DigestTask>> {
        let folder = assets::cache()?.join("digests");
        self.has_weights.then(|| DigestTask::start(&self.source.folder, folder)).transpose()
    }

    /// Returns [`BaseModel::identity`] with the digest of every byte; reads them all.
    ///
    /// # Errors
    /// Those of [`BaseModel::identity`] and [`DigestTask::wait`].
    pub fn whole_identity(&self, seed: u64) -> Result<ModelIdentity> {
        let task = self.start_digest()?;
        let identity = self.identity(seed)?;
        Ok(match task {
            Some(task) => identity.with_digest(&task.wait()?),
            None => identity,
        })
    }

    /// Compares the model with the base of the adapter in `folder`, and prints a doubtful result on
    /// the terminal. `force_base` accepts another model. The returned comparison goes on to compare
    /// every byte.
    ///
    /// # Errors
    /// The user's: the models differ, or the adapter cannot be read.
    pub fn check_adapter(
        &self,
        folder: &Path,
        seed: u64,
        force_base: bool,
        terminal: &Terminal,
    ) -> Result<BaseComparison> {
        let model = self.identity(seed)?;
        let adapter = SavedAdapter::read(folder)?.without(&model::unread_modules(&self.config));
        adapter.warning().into_iter().for_each(|note| terminal.warn(note));
        let trained_on = adapter.base_model()?;
        let what = format!("adapter {}", folder.display());
        let first = BaseCheck::new(&what, trained_on.as_ref(), &model, force_base)?;
        first.print(terminal);
        let comparable = trained_on.as_ref().is_some_and(ModelIdentity::covers_every_byte);
        let task = if comparable && first == BaseCheck::Same { self.start_digest()? } else { None };
        Ok(BaseComparison { what, trained_on, model, force_base, first, task })
    }

    /// Returns all parameters; with `options`, also their dtype and placement.
    ///
    /// # Errors
    /// Fails if a parameter of the model cannot be placed or quantized as the recipe wants.
    pub fn descs(&self, trains: Trains<'_>, options: Option<&EngineOptions>) -> Result<Vec<ParamDesc>> {
        self.param_descs_as((self.format, &self.skipped), trains, options)
    }

    /// Works like [`BaseModel::descs`] with the frozen linear layers in `format`, except those in
    /// `skipped`.
    pub(crate) fn param_descs_as(
        &self,
        (format, skipped): (Option<QuantFormat>, &[String]),
        trains: Trains<'_>,
        options: Option<&EngineOptions>,
    ) -> Result<Vec<ParamDesc>> {
        let skipped = skipped.iter().map(String::as_str).collect();
        let keeping = StoragePolicy {
            format,
            skipped: &skipped,
            files: self.files.as_ref(),
            // PiSSA changes the weights, so they need f32.
            narrow: trains.adapter().is_some_and(|a| !a.is_pissa())
                && options.is_some_and(|o| o.dtype == DType::F32 && o.device.is_cpu()),
            adapters_in_bf16: options.is_some_and(|o| o.dtype == DType::BF16 && o.traits.has_kernels),
        };
        descs(&self.config, trains, keeping)
    }

    /// Checks by headers that the files hold exactly the tensors of config.json, in its shapes.
    ///
    /// # Errors
    /// A tensor is missing, has another shape, or does not belong to the model; all weights of a
    /// quantized model would train.
    pub fn check(&self, trains: Trains<'_>) -> Result<()> {
        let stored = self.files.as_ref().and_then(stored_format);
        if let (Some(format), Trains::All) = (&self.format, trains) {
            let other = match stored {
                Some(format) if format.is_kept() => "remove `model.dequantize`",
                Some(_) => "give the unquantized model",
                None => "remove `[quantization]`",
            };
            return Err(Error::user("cannot train all weights of a quantized model")
                .because(format!(
                    "its linear layers are kept in {}, which takes no updates; the recipe has no `[adapter]`",
                    format.scheme().describe()
                ))
                .hint(format!("add `[adapter]` to train an adapter on it, or {other}")));
        }
        let adapter_setup = trains.adapter();
        if let (Some(format), true) = (stored, adapter_setup.is_some_and(AdapterSetup::needs_exact_weights)) {
            return Err(Error::user("cannot start the adapter from this model's weights")
                .because(format!(
                    "`adapter.init` is \"pissa\" or \"loftq\", which factor the weights before they are quantized; the model is stored in {}",
                    format.scheme().describe()
                ))
                .hint(match format {
                    format if format.is_kept() => "remove `model.dequantize`, or write `init = \"default\"`",
                    _ => "give the unquantized model and `[quantization]`, or write `init = \"default\"`",
                }));
        }
        let values = InitialValues::new(&self.config, self.files.as_ref(), adapter_setup, 0);
        values.check(&self.descs(trains, None)?, self.stored_tokens)
    }

    /// Returns the dtype of each tensor in the files; for random weights, that of config.json.
    pub fn stored_dtypes(&self) -> BTreeMap<String, StoredDtype> {
        let named = self.config.dtype.as_deref().and_then(|name| match name {
            "float32" => Some(StoredDtype::F32),
            "bfloat16" => Some(StoredDtype::BF16),
            "float16" => Some(StoredDtype::F16),
            _ => None,
        });
        let of = |name: &str| {
            let info = self.files.as_ref().and_then(|files| files.info(name));
            info.map(|info| info.dtype).filter(|dtype| dtype.is_float()).or(named).unwrap_or(StoredDtype::F32)
        };
        let specs = model::parameters(&self.config).into_iter();
        specs.map(|spec| (spec.name.clone(), of(&spec.name))).collect()
    }

    /// Loads the weights and returns an engine that trains `trains`.
    ///
    /// # Errors
    /// A tensor is missing, has another shape than in config.json, or does not belong to the model.
    pub fn engine(&self, trains: Trains<'_>, options: &EngineOptions) -> Result<Engine> {
        Ok(self.load(trains, options)?.0)
    }

    /// Loads like [`BaseModel::engine`]; also returns the factors that PiSSA took from the weights.
    ///
    /// # Errors
    /// The checkpoint does not fit the model; a weight cannot be read; the memory is too small.
    pub fn load(
        &self,
        trains: Trains<'_>,
        options: &EngineOptions,
    ) -> Result<(Engine, BTreeMap<String, LowRankFactors>)> {
        self.check(trains)?;
        let adapter_setup = trains.adapter();
        let values = InitialValues::new(&self.config, self.files.as_ref(), adapter_setup, options.seed);
        let descs = self.descs(trains, Some(options))?;
        let adapters = adapter_setup.map(AdapterSetup::adapters).unwrap_or_default();
        let fill_all = adapter_setup.is_some_and(AdapterSetup::derives_from_weights);
        let store = parallel::StoreOptions {
            dtype: options.dtype,
            device: options.device.clone(),
            mesh: options.mesh.clone(),
            reducing: options.reducing,
            offload: options.offload.clone(),
            fill_all,
            bf16_copy: options.bf16_copy,
            fp8: !options.fp8.is_empty(),
            master: options.master,
            frozen: options.frozen.clone(),
        };
        let mut fill = |desc: &_, local: &_, to: LoadTarget<'_>| values.fill(desc, local, to);
        let store = ParamStore::new(&self.config, descs, adapters, store, &mut fill)?;
        self.files.as_ref().map_or(Ok(()), ModelFiles::check_lengths)?;
        let (config, device) = (self.config.clone(), options.device.clone());
        let tables = RotaryTables::new(&config.ropes, &device);
        let engine = Engine { config, store, attention: options.attention, device, tables };
        Ok((engine, values.into_initial()))
    }
}

/// Returns the format that `[quantization]` sets.
pub fn format(quantization: &QuantizationSection) -> QuantFormat {
    QuantFormat::of_kind(quantization.kind, quantization.block_size, quantization.double_quant)
}

/// Returns the format of the quantized tensors in `files`; none without such tensors.
fn stored_format(files: &ModelFiles) -> Option<QuantFormat> {
    files.names().find_map(|name| files.quantized_format(name))
}

/// Returns the linear layers that a quantized checkpoint holds unquantized.
fn unquantized(config: &ModelConfig, files: &ModelFiles) -> Result<Vec<String>> {
    let LinearLayers { quantized: mut layers, skipped: routers, .. } = LinearLayers::new(config, &[])?;
    layers.retain(|layer| files.quantized_format(&format!("{layer}.weight")).is_none());
    layers.extend(routers);
    Ok(layers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_convolutions_without_a_kernel_are_named() -> Result<()> {
        let slow = |kernel: usize| -> Result<Option<String>> {
            let text = format!(
                r#"{{"model_type": "lfm2", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "layer_types": ["conv", "full_attention"], "conv_L_cache": {kernel}}}"#
            );
            Ok(slow_convolution(&ModelConfig::from_json(&text, "config.json")?))
        };
        assert_eq!([slow(3)?, slow(4)?], [None, None]);
        let warning = slow(5)?.unwrap_or_default();
        assert!(warning.contains("over 3 or 4 tokens; over 5 (`conv_L_cache`)"), "{warning}");
        Ok(())
    }
}
