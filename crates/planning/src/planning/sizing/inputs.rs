//! The inputs of `finetune plan`: the model by its headers, the rows if any, and the hardware.

use std::path::Path;

use candle_core::{DType, Device};

use crate::data::Dataset;
use crate::error::{Error, Result};
use crate::loading::{AdapterSetup, BaseModel, DeviceTraits, EngineOptions, Resolver};
use crate::planning::sizing::hardware::{DeviceSheet, Hardware};
use crate::planning::sizing::rates::{Calibration, ComputeRates};
use crate::planning::{MemoryBudget, WorldSize};
use crate::recipe::enums::BaseProducts;
use crate::recipe::{ComputeDtype, DataSource, ModelInit, Recipe};
use crate::report::Terminal;
use crate::runtime::device;
use crate::runtime::machine::host_memory;

/// Bytes that a driver and its libraries hold on a GPU (assumed for CUDA 12 with cuBLAS).
const DRIVER: u64 = 600_000_000;
/// Bytes of the program with tokenizer and data, if they share the planned memory (an assumption: a
/// plan of a 70B folder takes 17 MB).
const PROGRAM: u64 = 32_000_000;

/// The model of a recipe, its rows and its adapter, as far as the planner reads them.
pub struct SizedModel {
    /// The base model.
    pub base: BaseModel,
    /// An adapter that the run starts from.
    pub adapter_setup: Option<AdapterSetup>,
    /// The training rows, if the recipe names any.
    pub train: Option<Dataset>,
    /// The held-out rows, if the recipe names any.
    pub held_out: Option<Dataset>,
    /// Ids of `model.new_tokens`.
    pub new_tokens: Vec<u32>,
}

impl SizedModel {
    /// Finds the sources of `recipe`; reads only the headers of weights. A folder without weights
    /// is planned from its config.json.
    ///
    /// # Errors
    /// A source cannot be found or read.
    pub fn find(recipe: &mut Recipe, resolver: &Resolver<'_>, terminal: &Terminal) -> Result<Self> {
        start_without_weights(recipe, terminal);
        let mut base = BaseModel::open(&recipe.model, None, resolver)?;
        recipe.data.fit_positions(base.config.max_position_embeddings);
        // The planner also sizes options without quantization, so the base stays as stored.
        recipe.quantization.as_ref().map_or(Ok(()), |quantization| base.check_quantization(quantization))?;
        let source = recipe.adapter.as_ref().and_then(|adapter| adapter.path.as_ref());
        let saved = source.map(|source| resolver.adapter(source)).transpose()?;
        let (mut train, mut held_out, mut new_tokens) = (None, None, Vec::new());
        if !recipe.data.train.is_empty() || !recipe.model.new_tokens.is_empty() {
            saved.as_ref().map_or(Ok(()), |source| base.adopt(&source.folder))?;
            let (tokenizer, tokens) = base.tokenizer_with(&recipe.model.new_tokens)?;
            let loader = base.dataset_loader(tokenizer, &recipe.data)?.for_objective(recipe);
            if !recipe.data.train.is_empty() {
                let (rows, others) = loader.load_run(&recipe.data, recipe.train.seed, resolver)?;
                (train, held_out) = (Some(rows.dataset), others.map(|others| others.dataset));
            }
            new_tokens = tokens;
        }
        let named = (base.source.id.as_str(), &base.config);
        let from_saved = |source: crate::loading::ResolvedSource| {
            AdapterSetup::from_saved(recipe, &source.folder, named, &new_tokens)
        };
        let adapter_setup = saved.map(from_saved).transpose()?;
        adapter_setup.iter().filter_map(AdapterSetup::warning).for_each(|text| resolver.warn(text));
        Ok(SizedModel { base, adapter_setup, train, held_out, new_tokens })
    }
}

/// Switches a folder without weights to random initialization, which has the same sizes.
fn start_without_weights(recipe: &mut Recipe, terminal: &Terminal) {
    let Some(DataSource::Path(folder)) = &recipe.model.id else { return };
    if recipe.model.init == ModelInit::Pretrained
        && folder.join("config.json").is_file()
        && !has_weights(folder)
    {
        terminal.line(format!("{} has no weights: planning from its config.json", folder.display()));
        recipe.model.init = ModelInit::Random;
    }
}

fn has_weights(folder: &Path) -> bool {
    let Ok(entries) = folder.read_dir() else { return true };
    entries
        .flatten()
        .any(|entry| entry.path().extension().is_some_and(|end| end == "safetensors" || end == "gguf"))
}

/// Returns the options of the engine on `hardware`, or on the devices of this machine.
///
/// # Errors
/// The device does not support the recipe's dtype or products in fp8, or does not exist.
pub fn engine_on(
    hardware: Option<&Hardware>,
    gpus: Option<&[usize]>,
    ranks: Option<usize>,
    recipe: &Recipe,
) -> Result<EngineOptions> {
    let Some(hardware) = hardware else {
        let device = match gpus {
            Some(gpus) => device::open_gpus(gpus)?.swap_remove(0),
            None if ranks.is_some() => Device::Cpu,
            None => device::open(device::preferred()?)?,
        };
        return EngineOptions::new(&recipe.model, device, recipe.train.seed);
    };
    let mut model = recipe.model.clone();
    let has_bf16 = hardware.device.bf16_tflops > 0.0;
    if model.dtype == ComputeDtype::Auto {
        // The rule of a run, except for GPUs without bf16, which no run accepts.
        let in_bf16 = has_bf16 && !hardware.device.processor;
        model.dtype = if in_bf16 { ComputeDtype::Bf16 } else { ComputeDtype::F32 };
    }
    if model.dtype == ComputeDtype::Bf16 && !has_bf16 {
        return Err(Error::user(format!("cannot compute in bf16 on {}", hardware.device.name))
            .because("`model.dtype` is \"bf16\", not supported by this device; accepted: auto, f32")
            .hint("write `dtype = \"f32\"` under `[model]`, or plan for another device"));
    }
    let mut engine = EngineOptions::new(&model, Device::Cpu, recipe.train.seed)?;
    let DeviceSheet { name, .. } = &hardware.device;
    // As in a run, another dtype is refused first, by `StepInputs::check`.
    if recipe.train.base_products == BaseProducts::Fp8
        && engine.dtype == DType::BF16
        && let Some(capability) = hardware.device.capability()
    {
        device::check_fp8_of(name, name, capability)?;
    }
    engine.traits = if hardware.device.processor { DeviceTraits::CPU } else { DeviceTraits::GPU };
    Ok(engine)
}

/// Reads the measurements of `file` for a plan with the options `engine`.
///
/// # Errors
/// The file cannot be read or parsed, or measured another dtype or another kind of device.
pub fn measured_for(file: &Path, engine: &EngineOptions) -> Result<Calibration> {
    let measured = Calibration::read(file)?;
    measured.check(file, engine.dtype, engine.traits.is_cpu)?;
    Ok(measured)
}

/// Returns the hardware for the plan's time, and its speed from the measurement or the table.
/// Returns none for this machine without a measurement.
pub fn timed_on(
    hardware: Option<&Hardware>,
    measured: Option<ComputeRates>,
    engine: &EngineOptions,
    ranks: usize,
) -> Option<(Hardware, ComputeRates)> {
    let of_table = |on: &Hardware| ComputeRates::of_sheet(&on.device, engine.dtype == DType::BF16);
    match (hardware, measured) {
        (Some(on), measured) => Some((on.clone(), measured.unwrap_or_else(|| of_table(on)))),
        (None, Some(rates)) if engine.traits.is_cpu => {
            let memory = host_memory().map_or(0, |memory| memory.limit);
            let rates = rates.shared_by(ranks);
            Some((Hardware::here(ranks, rates.copy / 1e9, memory, true), rates))
        }
        (None, Some(rates)) => Some((Hardware::here(ranks, rates.copy / 1e9, 0, false), rates)),
        (None, None) => None,
    }
}

/// Returns the ranks of a plan.
pub fn world_of(hardware: Option<&Hardware>, gpus: Option<&[usize]>, ranks: Option<usize>) -> WorldSize {
    match (hardware, gpus, ranks) {
        (Some(hardware), ..) => {
            WorldSize { all: hardware.devices(), local: Some(hardware.per_host), here: 1 }
        }
        (_, Some(gpus), _) => WorldSize::in_one_process(gpus.len()),
        (_, _, ranks) => WorldSize::in_one_process(ranks.unwrap_or(1)),
    }
}

/// Returns the memory available to a plan.
pub fn room_of(hardware: Option<&Hardware>) -> MemoryBudget {
    let Some(hardware) = hardware else { return MemoryBudget::Local };
    let process = if hardware.device.processor { PROGRAM } else { DRIVER };
    MemoryBudget::Given { free: ((hardware.device.memory_gb * 1e9) as u64).saturating_sub(process), process }
}
