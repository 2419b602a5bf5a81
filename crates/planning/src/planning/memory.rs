//! Estimates the memory of a step from shapes alone, the basis of `recompute = "auto"`.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use candle_core::{DType, Device};

use super::activation_memory::ActivationMemory;
use super::carried::carried_bytes;
use super::fp8_weights::Fp8Weights;
use super::gpu_memory::{GpuStep, Workspace, nccl_bytes};
use super::loss_path::LossPath;
use super::moment::{MomentBytes, for_a_moment};
use crate::collective::Phase;
use crate::error::Result;
use crate::loading::adapter_setup::AdapterSetup;
use crate::model::{BlockModule, BlockSaved, Experts, LoraShape, ModelConfig, SavedBytes, Segment};
use crate::objectives::ObjectiveCost;
use crate::ops::cross_entropy::{chunked_loss_bytes, frozen_loss_bytes, logits_bytes};
use crate::optim::StateLayout;
use crate::parallel::{
    MeshShape, OffloadTarget, ParamDesc, ParamKind, Placements, ShardingStrategy, is_shareable, trains_rows,
};
use crate::recipe::enums::{AdapterKind, MasterWeights, Recompute};
use crate::runtime::param_storage::STAGING_ELEMENTS;
use crate::units;

/// The cause of the memory that a process holds before it loads anything.
pub const PROCESS: &str = "the process itself";
/// The cause of the memory of communicators.
pub const NCCL: &str = "NCCL";

/// Bytes by cause. Tensors offloaded to host memory count under their cause if the device is the
/// host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Weights in their stored format, and f32 masters.
    pub weights: u64,
    /// Gradients in the dtype that the run keeps.
    pub gradients: u64,
    /// The optimizer's state, in 32 or 8 bits.
    pub optimizer: u64,
    /// Activations that forward keeps for backward.
    pub activations: u64,
    /// Transient tensors: one block's temporaries, the logits of a chunk.
    pub workspace: u64,
    /// Part of `workspace`: gathered or copied values, and gradients before accumulation or in
    /// flight.
    pub in_flight: u64,
    /// Part of `workspace` that a run does without if its memory is short: dequantized matrices
    /// that a GPU makes ahead of their products, and results that graphs hold.
    pub optional: u64,
    /// Bytes of a chunk's logits, which are in the workspace during the loss.
    pub logits: u64,
    /// Copies of trained tensors for a checkpoint, until the files are written.
    pub saving: u64,
    /// Bytes that NCCL's communicators hold on a GPU, outside the memory of tensors.
    pub nccl: u64,
    /// Bytes of the process before it loads anything: the program, tokenizer and data.
    pub process: u64,
    /// Bytes outside the device: tensors offloaded to host memory.
    pub host: u64,
    /// Bytes outside both: parameters in a file.
    pub file: u64,
}

impl MemoryPlan {
    /// Returns the sum on the device.
    pub fn total(&self) -> u64 {
        let step = self.weights + self.gradients + self.optimizer + self.activations + self.workspace;
        step + self.saving + self.nccl + self.process
    }

    /// Returns the least sum on the device with which a step runs.
    pub fn required(&self) -> u64 {
        self.total() - self.optional
    }

    /// Returns the sum of the tensors, and on the host of the process that holds them.
    pub fn tensors(&self) -> u64 {
        self.total() - self.nccl
    }

    /// Returns the peak of [`MemoryPlan::tensors`] in `phase`. On the host, the process keeps the
    /// memory of a step for the next one, in any phase.
    pub fn in_phase(&self, phase: Phase, on_host: bool) -> u64 {
        let persistent = self.weights + self.gradients + self.optimizer + self.process;
        match phase {
            Phase::Meet => self.process,
            Phase::Load => persistent,
            _ if on_host => self.tensors(),
            Phase::Forward | Phase::Loss | Phase::Backward | Phase::Evaluate => self.tensors(),
            _ => persistent + self.saving,
        }
    }

    /// Returns the cause whose memory grows in `phase`, with its bytes.
    pub fn grows_in(&self, phase: Phase) -> (&'static str, u64) {
        match phase {
            Phase::Meet | Phase::Load => (
                "weights, gradients and the optimizer's state",
                self.weights + self.gradients + self.optimizer,
            ),
            Phase::Forward => ("activations", self.activations),
            Phase::Save | Phase::Output => ("what is saved", self.saving + self.host),
            _ => ("workspace", self.workspace),
        }
    }

    /// Returns the parts of [`MemoryPlan::total`]: cause and bytes. Omits `saving`, NCCL and the
    /// process if they are 0.
    pub fn causes(&self) -> Vec<(&'static str, u64)> {
        let causes = [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("workspace", self.workspace),
        ];
        let at_times = [("saving", self.saving), (NCCL, self.nccl), (PROCESS, self.process)];
        let at_times = at_times.into_iter().filter(|(_, bytes)| *bytes > 0);
        causes.into_iter().chain(at_times).collect()
    }

    /// Returns the parts of [`MemoryPlan::total`] in words.
    pub(super) fn by_cause(&self) -> String {
        let text_of = |(cause, bytes): (&str, u64)| format!("{cause} {}", units::bytes(bytes));
        self.causes().into_iter().map(text_of).collect::<Vec<_>>().join(" + ")
    }

    /// Estimates a step of one rank over micro-batches of `tokens` tokens.
    ///
    /// # Errors
    /// The user's: the ranks that split a parameter do not divide it.
    pub fn of_step(
        config: &ModelConfig,
        descs: &[ParamDesc],
        adapter_setup: Option<&AdapterSetup>,
        tokens: usize,
        recompute: Recompute,
        options: &MemoryOptions<'_>,
    ) -> Result<Self> {
        let tensors = MicroBatchTensors::new(config, descs, adapter_setup, tokens, options);
        Self::of_tensors(&tensors, descs, adapter_setup.is_some(), recompute, options)
    }

    /// Estimates a step from the `tensors` of its micro-batches. `has_adapter` is true if the run
    /// trains an adapter instead of all weights.
    pub(super) fn of_tensors(
        tensors: &MicroBatchTensors<'_>,
        descs: &[ParamDesc],
        has_adapter: bool,
        recompute: Recompute,
        options: &MemoryOptions<'_>,
    ) -> Result<Self> {
        let MicroBatchTensors { config, tokens, saved, on_gpu } = tensors;
        // Gathered values, and gradients before accumulation, by segment.
        let mut moment: BTreeMap<Segment, MomentBytes> = BTreeMap::new();
        // The table of per-layer inputs, whose values and gradients never lie beside the logits.
        let mut table = MomentBytes::default();
        let (mut memory, mut longest) = (MemoryPlan::default(), 0);
        let trains_rows = trains_rows(descs);
        for desc in descs {
            let elements = desc.local_elements(options.mesh)?;
            let n = elements as u64;
            let spec = options.strategy.sharding_spec(desc.kind.role());
            let share = |placements: Placements| placements.parts(0, options.mesh) as u64;
            let (value, master) = weight_bytes(desc, options)?;
            let away = options.offload.has_values(desc.kind.role());
            let of_segment = if desc.is_of_per_layer_table() {
                &mut table
            } else {
                moment.entry(desc.segment).or_default()
            };
            if spec.values.is_sharded() || away {
                of_segment.gathered += value;
            }
            memory.weights += options.codes(desc);
            let value = value / options.sharing(desc, trains_rows);
            match options.offload.folder() {
                Some(_) if away => memory.file += value,
                _ => memory.add(away && !options.on_host, |m| &mut m.weights, value),
            }
            let state_away = options.offload.has_state() && !options.on_host;
            memory.add(state_away, |m| &mut m.weights, master / share(spec.update));
            if desc.kind.trains() {
                let dtype = kept_gradients(desc, options);
                let bytes = n * dtype.size_in_bytes() as u64 / share(spec.gradients);
                memory.add(away && !options.on_host, |m| &mut m.gradients, bytes);
                let state = options.optimizer_state.bytes(elements) as u64 / share(spec.update);
                memory.add(state_away, |m| &mut m.optimizer, state);
                let is_part = spec.gradients.is_sharded() || away;
                let elsewhere = is_part || rounds_from_f32(dtype, options);
                of_segment.add_gradients(4 * n, elsewhere, options.accumulates, options.over_nccl);
                longest = longest.max(n / share(spec.update));
            }
        }
        memory.in_flight += staged_bytes(options, longest);
        let activations = ActivationMemory::new(saved, recompute);
        let saved_bytes = activations.peak() as u64;
        memory.activations = saved_bytes + carried_bytes(config, descs, *tokens, options.dtype);
        let temporaries = (temporary_values(config) * options.dtype.size_in_bytes() * *tokens) as u64;
        memory.in_flight += for_a_moment(&moment);
        let of_objective = options.objective.bytes_per_token * *tokens;
        let of_head = loss_bytes(config, descs, *tokens, options.dtype, on_gpu.is_some());
        memory.logits = (of_head + of_objective) as u64;
        // Blocks keep nothing while it is whole.
        let table = table.most().saturating_sub(saved_bytes);
        let on_host = || Workspace::of(temporaries.max(table) + memory.logits);
        let of_step = on_gpu.as_ref().map(|step| step.workspace(&activations).at_least(table));
        let Workspace { all, required } = of_step.unwrap_or_else(on_host);
        (memory.workspace, memory.optional) = (memory.in_flight + all, all - required);
        if options.over_nccl {
            memory.nccl = nccl_bytes(options.strategy, options.mesh, descs);
        }
        // Logits, gathered values and fresh gradients keep their memory from step to step.
        let snapshot = snapshot_bytes(descs, has_adapter, options);
        memory.add_saving(snapshot, memory.activations + temporaries, options);
        Ok(memory)
    }

    /// Counts a `snapshot` of the saved tensors, copied to host memory. Between steps it reuses
    /// `let_go` bytes.
    fn add_saving(&mut self, snapshot: u64, let_go: u64, options: &MemoryOptions<'_>) {
        match options.saving {
            _ if !options.on_host => self.host += snapshot,
            Saving::InBackground => self.saving = snapshot,
            Saving::BetweenSteps | Saving::Outputs => self.saving = snapshot.saturating_sub(let_go),
        }
    }

    /// Adds `bytes` to the host or to a cause.
    fn add(&mut self, to_host: bool, cause: impl Fn(&mut Self) -> &mut u64, bytes: u64) {
        *(if to_host { &mut self.host } else { cause(self) }) += bytes;
    }
}

/// Returns the values of a token in the gradients of a channel mixer: gate and up, and of experts
/// the copies of their input and output.
fn widest_channels(config: &ModelConfig) -> usize {
    let copies = |experts: &Experts| experts.router.chosen * 2 * config.hidden_size;
    config.first_mlp_width() + config.experts().map(copies).max().unwrap_or(0)
}

/// Tensors that a micro-batch keeps for its backward or holds temporarily, independent of sharding.
pub(super) struct MicroBatchTensors<'a> {
    config: &'a ModelConfig,
    tokens: usize,
    /// Bytes that each block keeps.
    saved: Vec<SavedBytes>,
    /// None if the device is the host.
    on_gpu: Option<GpuStep<'a>>,
}

impl<'a> MicroBatchTensors<'a> {
    /// Describes a micro-batch of `tokens` tokens.
    pub(super) fn new(
        config: &'a ModelConfig,
        descs: &[ParamDesc],
        adapter_setup: Option<&AdapterSetup>,
        tokens: usize,
        options: &MemoryOptions<'_>,
    ) -> Self {
        let widths = (tokens, options.dtype);
        let fp8 = Fp8Weights {
            names: Some(options.fp8).filter(|names| !names.is_empty()),
            keeps_codes: options.keeps_codes(),
            scales_rows: options.scales_rows,
        };
        let names = dequantized(descs, options);
        let step = || GpuStep::new(config, &names, adapter_setup, widths, fp8).with_graphs(options.graphs);
        let saved = by_block(config, descs, adapter_setup, options, |layer, adapter| {
            BlockSaved::bytes(config, layer, tokens, options.dtype, adapter)
        });
        MicroBatchTensors { config, tokens, saved, on_gpu: (!options.on_host).then(step) }
    }
}

/// The files that a run saves, and their time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saving {
    /// The trained weights, after the last step.
    Outputs,
    /// Checkpoints: weights and the optimizer's state, while the ranks wait.
    BetweenSteps,
    /// Checkpoints, written while the next steps run.
    InBackground,
}

/// Storage and compute settings of parameters.
#[derive(Debug, Clone, Copy)]
pub struct MemoryOptions<'a> {
    /// The dtype of the computation.
    pub dtype: DType,
    /// The tensors that the optimizer keeps beside each parameter.
    pub optimizer_state: StateLayout,
    /// The sharding of parameters over the ranks.
    pub strategy: ShardingStrategy,
    /// The number of ranks along each axis.
    pub mesh: MeshShape,
    /// The number of ranks that share frozen weights in the memory of one process.
    pub frozen_ranks: usize,
    /// The files that the run saves, and their time.
    pub saving: Saving,
    /// True if a rank accumulates several micro-batches a step, each computed separately first.
    pub accumulates: bool,
    /// Selects f32 masters, or bf16 weights that the optimizer updates directly.
    pub master: MasterWeights,
    /// The dtype of the gradients of blocks without masters.
    pub kept_gradients: DType,
    /// True if the ranks communicate over NCCL. Then the gradients of a block are reduced while
    /// those of the next block are computed.
    pub over_nccl: bool,
    /// The tensors that are stored outside the device.
    pub offload: &'a OffloadTarget,
    /// True if the device is the host.
    pub on_host: bool,
    /// True if quantized weights are also kept in bf16.
    pub bf16_copy: bool,
    /// The names of the weights that are multiplied in fp8 while they are frozen.
    pub fp8: &'a BTreeSet<String>,
    /// True if products in fp8 multiply by the scales of rows themselves.
    pub scales_rows: bool,
    /// True if passes over blocks are launched as graphs on a GPU.
    pub graphs: bool,
    /// The objective's own work and memory.
    pub objective: ObjectiveCost,
}

impl MemoryOptions<'_> {
    /// Returns the number of ranks that a parameter's values are spread over: those that shard
    /// them, or those of a process that share them.
    pub(super) fn sharing(&self, desc: &ParamDesc, trains_rows: bool) -> u64 {
        let role = desc.kind.role();
        let is_shared =
            !self.offload.has_values(role) && is_shareable(self.strategy, role, desc.segment, trains_rows);
        let ranks = if is_shared { self.frozen_ranks } else { 1 };
        (self.strategy.sharding_spec(role).values.parts(0, self.mesh) * ranks) as u64
    }
}

/// Returns the bytes of the whole tensors that one rank copies to save them: the maximum over
/// ranks, on the host the mean. Rank 0 saves all of an adapter; otherwise the ranks save the
/// segments in turn.
fn snapshot_bytes(descs: &[ParamDesc], first_saves_all: bool, options: &MemoryOptions<'_>) -> u64 {
    let state_bytes = |desc: &ParamDesc| match options.saving {
        Saving::Outputs => 0,
        _ => options.optimizer_state.bytes(desc.global_elements()) as u64,
    };
    // By segment: its values with the optimizer's state, and their temporary gathered copy.
    let mut segments: BTreeMap<Segment, [u64; 2]> = BTreeMap::new();
    for desc in descs.iter().filter(|desc| desc.kind.trains()) {
        let n = desc.global_elements() as u64;
        let [saved, gathered] = segments.entry(desc.segment).or_default();
        let updated = if is_updated_itself(desc.kind, options) { options.dtype } else { DType::F32 };
        *saved += updated.size_in_bytes() as u64 * n + state_bytes(desc);
        if options.strategy.sharding_spec(desc.kind.role()).update.parts(0, options.mesh) > 1 {
            *gathered += 8 * n + state_bytes(desc);
        }
    }
    let savers = if first_saves_all { 1 } else { options.mesh.ranks() };
    let mut shares = vec![0; savers];
    for (i, [saved, _]) in segments.values().enumerate() {
        shares[i % savers] += saved;
    }
    let gathered = segments.values().map(|[_, gathered]| *gathered).max().unwrap_or(0);
    // Copies of all ranks add up in the memory of one host, so the mean counts there.
    let share = if options.on_host {
        shares.iter().sum::<u64>() / savers as u64
    } else {
        shares.into_iter().max().unwrap_or(0)
    };
    share + gathered
}

/// Returns the names of the matrices that a product on a GPU dequantizes.
fn dequantized<'a>(descs: &'a [ParamDesc], options: &MemoryOptions<'_>) -> HashSet<&'a str> {
    let quantized = descs.iter().filter(|desc| matches!(desc.kind, ParamKind::Quantized(_)));
    quantized.filter(|_| !options.bf16_copy).map(|desc| desc.name.as_str()).collect()
}

/// Returns the bytes of a parameter's local value, including its bf16 copy, and of its f32 master.
///
/// # Errors
/// Those of [`ParamDesc::local_shape`].
pub(super) fn weight_bytes(desc: &ParamDesc, options: &MemoryOptions<'_>) -> Result<(u64, u64)> {
    let (n, size) = (desc.local_elements(options.mesh)?, options.dtype.size_in_bytes());
    let copy = if options.bf16_copy { n * DType::BF16.size_in_bytes() } else { 0 };
    let bytes = match desc.kind {
        ParamKind::Frozen { dtype } => n * dtype.map_or(size, |dtype| dtype.size_in_bytes()),
        ParamKind::Quantized(format) => copy + format.scheme().bytes(n),
        ParamKind::Trainable(_) => n * size,
        ParamKind::Adapter(_) | ParamKind::Buffer { .. } => 4 * n,
        ParamKind::AdapterInBf16(_) => 2 * n,
    };
    let has_master = matches!(desc.kind, ParamKind::AdapterInBf16(_))
        || matches!(desc.kind, ParamKind::Trainable(_)) && !is_updated_itself(desc.kind, options);
    let master = if has_master { 4 * n } else { 0 };
    Ok((bytes as u64, master as u64))
}

/// True if the optimizer updates the values of this kind that the step computes with.
fn is_updated_itself(kind: ParamKind, options: &MemoryOptions<'_>) -> bool {
    let weight = matches!(kind, ParamKind::Trainable(_));
    weight && (options.dtype == DType::F32 || options.master == MasterWeights::None)
}

/// Returns the dtype in which the run keeps the gradients of a parameter.
pub(super) fn kept_gradients(desc: &ParamDesc, options: &MemoryOptions<'_>) -> DType {
    let of_block = matches!(desc.segment, Segment::Block(_));
    let in_bf16 = of_block && options.dtype != DType::F32 && is_updated_itself(desc.kind, options);
    if in_bf16 { options.kept_gradients } else { DType::F32 }
}

/// True if gradients accumulate in f32 before they are stored as `stored`. One rank on the host
/// writes bf16 directly.
fn rounds_from_f32(stored: DType, options: &MemoryOptions<'_>) -> bool {
    stored == DType::BF16 && !(options.mesh.ranks() == 1 && options.on_host)
}

/// Calls `each` for every block with the adapters on it, and returns the results. Branches compute
/// in bf16 if a parameter of `descs` is an adapter in bf16, else in f32.
pub(super) fn by_block<T>(
    config: &ModelConfig,
    descs: &[ParamDesc],
    adapter_setup: Option<&AdapterSetup>,
    options: &MemoryOptions<'_>,
    each: impl Fn(usize, &dyn Fn(&BlockModule) -> Option<LoraShape>) -> T,
) -> Vec<T> {
    let kind = match adapter_setup {
        Some(adapter_setup) if adapter_setup.config.spec.use_dora => AdapterKind::Dora,
        _ => AdapterKind::Lora,
    };
    let in_bf16 = descs.iter().any(|desc| matches!(desc.kind, ParamKind::AdapterInBf16(_)));
    let dtype = if in_bf16 { DType::BF16 } else { DType::F32 };
    let targets = adapter_setup.map_or(&[][..], |adapter_setup| &adapter_setup.targets);
    let ranks: HashMap<&str, usize> = targets.iter().map(|target| (target.name.as_str(), target.r)).collect();
    let shape = |layer: usize, module: &BlockModule| {
        let r = ranks.get(module.name_in(layer).as_str())?;
        Some(LoraShape { kind, r: *r, dtype, has_kernels: !options.on_host })
    };
    let of_layer = |layer| each(layer, &|module: &BlockModule| shape(layer, module));
    (0..config.num_layers()).map(of_layer).collect()
}

/// Returns the bytes of logits held at once for `tokens` tokens of type `dtype`.
fn loss_bytes(config: &ModelConfig, descs: &[ParamDesc], tokens: usize, dtype: DType, on_gpu: bool) -> usize {
    let (vocab, width) = (config.vocab_size, config.hidden_size);
    match LossPath::of(config, descs) {
        _ if on_gpu => logits_bytes(vocab, tokens),
        LossPath::Frozen => frozen_loss_bytes(vocab, width, tokens),
        _ => chunked_loss_bytes(vocab, width, tokens, dtype, config.logit_softcap.is_some()),
    }
}

/// Returns the free bytes of the device; none if they are unknown.
pub fn available(device: &Device) -> Option<u64> {
    if !device.is_cpu() {
        return crate::runtime::device::free_bytes(device);
    }
    crate::runtime::machine::host_memory().map(|memory| memory.available)
}

/// Returns the bytes staged at once while the state is on the host: a chunk of values, of gradients
/// and of each tensor of the state, of which `longest` elements are updated together.
fn staged_bytes(options: &MemoryOptions<'_>, longest: u64) -> u64 {
    if !options.offload.has_state() {
        return 0;
    }
    let staged = 2 + options.optimizer_state.tensors.len() as u64;
    4 * staged * longest.min(STAGING_ELEMENTS as u64)
}

/// Returns the values a token of the gradients of a block's widest tensors, which backward holds
/// beside the recomputed ones.
fn temporary_values(config: &ModelConfig) -> usize {
    // Several hidden states are split in f32, and so are their gradients.
    let width = config.streams_width();
    let streams = if width > config.hidden_size { 4 * width } else { 0 };
    let widest = widest_channels(config) + config.token_mixer_width() + 4 * config.hidden_size + streams;
    // The first block makes the inputs of all blocks.
    2 * widest.max(2 * config.per_layer_width(config.num_layers()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::{LrGroup, UpdateRule};
    use crate::recipe::enums::StateDtype;
    use crate::recipe::{AdapterSection, Offload, TargetModules};

    /// Layers may differ: an adapter need not be on each.
    #[test]
    fn activations_are_the_sum_over_the_blocks() -> Result<()> {
        let text = r#"{"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}"#;
        let config = ModelConfig::from_json(text, "config.json")?;
        let named = vec!["model.layers.1.mlp.down_proj".to_owned(), "lm_head".to_owned()];
        let target_modules = TargetModules::Named(named);
        let section = AdapterSection { target_modules, r: 5, ..AdapterSection::default() };
        let adapter_setup = AdapterSetup::from_recipe(&section, ("base", &config), &[])?;
        let options = MemoryOptions {
            dtype: DType::BF16,
            optimizer_state: StateLayout { tensors: &[], dtype: StateDtype::F32 },
            strategy: ShardingStrategy::Single,
            mesh: MeshShape::ONE,
            saving: Saving::Outputs,
            accumulates: false,
            master: MasterWeights::F32,
            kept_gradients: DType::F32,
            over_nccl: false,
            offload: &OffloadTarget::default(),
            on_host: true,
            bf16_copy: false,
            fp8: &BTreeSet::new(),
            scales_rows: true,
            graphs: false,
            frozen_ranks: 1,
            objective: ObjectiveCost::default(),
        };
        let activations = |adapter_setup: Option<&AdapterSetup>, recompute| {
            MemoryPlan::of_step(&config, &[], adapter_setup, 7, recompute, &options)
                .map(|plan| plan.activations)
        };
        // Of a token: qkv, attention's output, h, gate and up in bf16, log-sum-exps in f32.
        let (input, rest, branch) = (7 * 2 * 16, 7 * (2 * (32 + 16 + 16 + 48) + 4 * 4), 7 * 4 * 5);
        assert_eq!(activations(None, Recompute::None)?, 3 * (input + rest));
        assert_eq!(activations(None, Recompute::Block)?, 3 * input + rest);
        assert_eq!(activations(Some(&adapter_setup), Recompute::None)?, 3 * (input + rest) + branch);
        // When backward recomputes block 1, the input of block 2 is free, which is more.
        assert_eq!(activations(Some(&adapter_setup), Recompute::Block)?, 3 * input + rest);
        Ok(())
    }

    #[test]
    fn a_second_buffer_is_counted_where_gradients_are_reduced_beside_computation() -> Result<()> {
        let text = r#"{"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}"#;
        let config = ModelConfig::from_json(text, "config.json")?;
        let rule = UpdateRule { decay: false, lr_group: LrGroup::Base };
        let desc = |segment, elements| {
            let (name, shape) = (format!("{segment:?}"), vec![elements]);
            ParamDesc::new(name, shape, Placements::REPLICATED, segment, ParamKind::Trainable(rule))
        };
        let descs = [(Segment::Embed, 5000), (Segment::Block(0), 700), (Segment::Block(1), 900)]
            .map(|(segment, elements)| desc(segment, elements));
        let away = OffloadTarget::from(Offload::Params);
        let total = |strategy: ShardingStrategy, offload: &OffloadTarget, over_nccl| {
            let options = MemoryOptions {
                dtype: DType::F32,
                optimizer_state: StateLayout { tensors: &[], dtype: StateDtype::F32 },
                strategy,
                mesh: strategy.mesh_shape(4)?,
                saving: Saving::Outputs,
                accumulates: true,
                master: MasterWeights::F32,
                kept_gradients: DType::F32,
                over_nccl,
                offload,
                bf16_copy: false,
                fp8: &BTreeSet::new(),
                scales_rows: true,
                graphs: false,
                frozen_ranks: 1,
                on_host: false,
                objective: ObjectiveCost::default(),
            };
            MemoryPlan::of_step(&config, &descs, None, 7, Recompute::None, &options)
                .map(|plan| plan.tensors())
        };
        use ShardingStrategy::{Ddp, Fsdp, Hsdp, Zero1, Zero2};
        // The gradients of the largest block; embedding and head use pooled memory, one after the
        // other.
        for kind in [Zero2, Fsdp, Hsdp(2)] {
            assert_eq!(
                total(kind, &OffloadTarget::default(), true)?,
                total(kind, &OffloadTarget::default(), false)? + 4 * 900
            );
        }
        // These strategies reduce the kept gradients in place.
        for kind in [Ddp, Zero1] {
            assert_eq!(
                total(kind, &OffloadTarget::default(), true)?,
                total(kind, &OffloadTarget::default(), false)?
            );
            assert_eq!(total(kind, &away, true)?, total(kind, &away, false)? + 4 * 900);
        }
        Ok(())
    }
}
