//! How much memory a step will need, from shapes alone, and whether it fits: the ground for `recompute = "auto"`.

use std::collections::BTreeMap;

use candle_core::{DType, Device};

use crate::model::{ModelConfig, Segment};
use crate::ops::cross_entropy::logits_bytes;
use crate::optim::StateLayout;
use crate::quant::QuantRun;
use crate::recipe::enums::{Recompute, StateDtype};
use crate::runtime::param_storage::STAGING_ELEMENTS;
use crate::setup::adapter_setup::AdapterSetup;
use crate::sharding::{OffloadTarget, ParamDesc, ParamKind, Placement, ShardingStrategy};
use crate::units;

/// Bytes by cause. What is offloaded to host memory counts under its cause where the device is the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Weights as they are kept, and f32 masters.
    pub weights: u64,
    /// f32 gradients.
    pub gradients: u64,
    /// The optimizer's state, in 32 or 8 bits.
    pub optimizer: u64,
    /// What forward keeps for backward.
    pub activations: u64,
    /// What lives for a moment: one block's temporaries, the logits of a chunk.
    pub workspace: u64,
    /// Trained tensors as they were at a step, until they are written to files.
    pub saving: u64,
    /// What the process held before anything was loaded: the program, tokenizer and data.
    pub process: u64,
    /// Beside the device: what is offloaded to host memory.
    pub host: u64,
    /// Beside both: parameters in a file.
    pub file: u64,
}

impl MemoryPlan {
    /// The sum on the device.
    pub fn total(&self) -> u64 {
        let step = self.weights + self.gradients + self.optimizer + self.activations + self.workspace;
        step + self.saving + self.process
    }

    /// The parts of [`MemoryPlan::total`] in words.
    pub(super) fn by_cause(&self) -> String {
        let causes = [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("activations", self.activations),
            ("workspace", self.workspace),
        ];
        let at_times = [("saving", self.saving), ("the process itself", self.process)];
        let at_times = at_times.into_iter().filter(|(_, bytes)| *bytes > 0);
        let said = |(cause, bytes): (&str, u64)| format!("{cause} {}", units::bytes(bytes));
        causes.into_iter().chain(at_times).map(said).collect::<Vec<_>>().join(" + ")
    }

    /// Of a step of one rank, over micro-batches of `tokens` tokens.
    pub fn of_step(
        config: &ModelConfig,
        descs: &[ParamDesc],
        adapter_setup: Option<&AdapterSetup>,
        tokens: usize,
        recompute: Recompute,
        options: &MemoryOptions<'_>,
    ) -> Self {
        let size = options.dtype.size_in_bytes();
        let mut memory = MemoryPlan::default();
        // What is gathered for one use, and gradients before they are added up: by segment.
        let mut moment: BTreeMap<Segment, [u64; 2]> = BTreeMap::new();
        let mut longest = 0;
        for desc in descs {
            let n = desc.elements() as u64;
            let spec = options.kind.sharding_spec(desc.kind.role());
            let share =
                |placement: Placement| if placement.is_sharded() { options.sharded_over as u64 } else { 1 };
            let (value, master) = weight_bytes(desc, size);
            let away = options.offload.has_values(desc.kind.role());
            let [gathered, fresh] = moment.entry(desc.segment).or_default();
            if spec.values.is_sharded() || away {
                *gathered += value;
            }
            match options.offload.folder() {
                Some(_) if away => memory.file += value / share(spec.values),
                _ => memory.add(away && !options.on_host, |m| &mut m.weights, value / share(spec.values)),
            }
            let state_away = options.offload.has_state() && !options.on_host;
            memory.add(state_away, |m| &mut m.weights, master / share(spec.update));
            if desc.kind.trains() {
                memory.add(away && !options.on_host, |m| &mut m.gradients, 4 * n / share(spec.gradients));
                let state = options.optimizer_state.bytes(desc.elements()) as u64 / share(spec.update);
                memory.add(state_away, |m| &mut m.optimizer, state);
                if spec.gradients.is_sharded() || options.accumulates || away {
                    *fresh += 4 * n;
                }
                longest = longest.max(n / share(spec.update));
            }
        }
        if options.offload.has_state() {
            // A run of values, gradients and each tensor of the state.
            let staged = 2 + options.optimizer_state.tensors.len() as u64;
            memory.workspace += 4 * staged * longest.min(STAGING_ELEMENTS as u64);
        }
        let (input, saved) = block_bytes(config, adapter_setup, size);
        let layers = config.num_layers();
        let kept = match recompute {
            Recompute::None => layers * (input + saved),
            Recompute::Block => layers * input + saved,
        };
        memory.activations = (kept * tokens) as u64;
        // Backward holds the gradients of a block's widest tensors beside what it recomputes.
        let widest = 2 * config.intermediate_size + config.heads.qkv_width() + 4 * config.hidden_size;
        let logits = logits_bytes(config.vocab_size, tokens);
        let temporaries = (2 * widest * size * tokens) as u64;
        memory.workspace += temporaries + logits as u64 + for_a_moment(&moment);
        // Logits, gathered values and fresh gradients keep their memory from step to step.
        let let_go = memory.activations + temporaries;
        memory.add_saving(snapshot_bytes(descs, adapter_setup.is_some(), options), let_go, options);
        memory
    }

    /// Counts a `snapshot` of what is saved, copies in host memory; between steps there is room where `let_go` bytes were.
    fn add_saving(&mut self, snapshot: u64, let_go: u64, options: &MemoryOptions<'_>) {
        match options.saving {
            _ if !options.on_host => self.host += snapshot,
            Saving::InBackground => self.saving = snapshot,
            Saving::BetweenSteps | Saving::Outputs => self.saving = snapshot.saturating_sub(let_go),
        }
    }

    /// Counts `bytes` to the host, or to a cause.
    fn add(&mut self, to_host: bool, cause: impl Fn(&mut Self) -> &mut u64, bytes: u64) {
        *(if to_host { &mut self.host } else { cause(self) }) += bytes;
    }
}

/// What a run saves, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saving {
    /// The trained weights, after the last step.
    Outputs,
    /// Checkpoints: weights and the optimizer's state, while the ranks wait.
    BetweenSteps,
    /// Checkpoints, written while the next steps run.
    InBackground,
}

/// How parameters are kept and computed with.
#[derive(Debug, Clone, Copy)]
pub struct MemoryOptions<'a> {
    /// The dtype that is computed with.
    pub dtype: DType,
    /// What the optimizer keeps beside each parameter.
    pub optimizer_state: StateLayout,
    /// Who keeps what.
    pub kind: ShardingStrategy,
    /// All ranks.
    pub ranks: usize,
    /// Ranks that share one copy of what is sharded.
    pub sharded_over: usize,
    /// What is saved, and when.
    pub saving: Saving,
    /// More than one micro-batch a step adds up on a rank.
    pub accumulates: bool,
    /// What is kept away from the device.
    pub offload: &'a OffloadTarget,
    /// The device is the host.
    pub on_host: bool,
}

/// Bytes of the tensors that one rank copies to save them, at most: all of an adapter's run, the segments in turn of
/// others.
fn snapshot_bytes(descs: &[ParamDesc], first_saves_all: bool, options: &MemoryOptions<'_>) -> u64 {
    let state_bytes = |desc: &ParamDesc| match options.saving {
        Saving::Outputs => 0,
        _ => options.optimizer_state.bytes(desc.elements()) as u64,
    };
    // Of a segment: its values and the optimizer's state, and what is gathered of them for the moment.
    let mut segments: BTreeMap<Segment, [u64; 2]> = BTreeMap::new();
    for desc in descs.iter().filter(|desc| desc.kind.trains()) {
        let n = desc.elements() as u64;
        let [saved, gathered] = segments.entry(desc.segment).or_default();
        *saved += 4 * n + state_bytes(desc);
        if options.kind.sharding_spec(desc.kind.role()).update.is_sharded() && options.sharded_over > 1 {
            *gathered += 8 * n + state_bytes(desc);
        }
    }
    let savers = if first_saves_all { 1 } else { options.ranks };
    let mut shares = vec![0; savers];
    for (i, [saved, _]) in segments.values().enumerate() {
        shares[i % savers] += saved;
    }
    let gathered = segments.values().map(|[_, gathered]| *gathered).max().unwrap_or(0);
    shares.into_iter().max().unwrap_or(0) + gathered
}

/// Two blocks are whole at a time, or an end and a block; one segment's gradients are fresh.
fn for_a_moment(segments: &BTreeMap<Segment, [u64; 2]>) -> u64 {
    let largest = |index: usize, ends: bool| {
        let of_kind = segments.iter().filter(|(segment, _)| matches!(segment, Segment::Block(_)) != ends);
        of_kind.map(|(_, bytes)| bytes[index]).max().unwrap_or(0)
    };
    2 * largest(0, false) + largest(0, true) + largest(1, false) + largest(1, true)
}

/// Bytes that a parameter's value takes, and the master of a trainable one.
fn weight_bytes(desc: &ParamDesc, size: usize) -> (u64, u64) {
    let n = desc.elements();
    let bytes = match desc.kind {
        ParamKind::Frozen { dtype } => n * dtype.map_or(size, |dtype| dtype.size_in_bytes()),
        ParamKind::Quantized(format) => format.layout(n).iter().map(QuantRun::bytes).sum(),
        ParamKind::Trainable(_) => n * size,
        ParamKind::Adapter(_) => 4 * n,
    };
    let master = if matches!(desc.kind, ParamKind::Trainable(_)) && size != 4 { 4 * n } else { 0 };
    (bytes as u64, master as u64)
}

/// Bytes a token of a block's input, and of the rest that its backward needs.
fn block_bytes(config: &ModelConfig, adapter_setup: Option<&AdapterSetup>, size: usize) -> (usize, usize) {
    let heads = config.heads;
    let post = if config.post_norms { 2 * config.hidden_size } else { 0 };
    let values =
        heads.qkv_width() + heads.q_width() + config.hidden_size + 2 * config.intermediate_size + post;
    let ranks: usize = adapter_setup.map_or(0, |a| a.targets.iter().map(|target| target.r).sum());
    // DoRA keeps each layer's output before the magnitudes.
    let dora = match adapter_setup {
        Some(a) if a.config.spec.use_dora => {
            heads.qkv_width() + 2 * config.hidden_size + 2 * config.intermediate_size
        }
        _ => 0,
    };
    let adapters = 4 * (heads.num_heads + ranks / config.num_layers().max(1));
    (config.hidden_size * size, (values + dora) * size + adapters)
}

/// Bytes that can still be had on the device; none when nothing tells.
pub(super) fn available(device: &Device) -> Option<u64> {
    if !device.is_cpu() {
        return crate::runtime::device::free_bytes(device);
    }
    crate::runtime::machine::host_memory().map(|memory| memory.available)
}
