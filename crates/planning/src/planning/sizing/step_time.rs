//! The time of a step by cause, and its bottleneck.
//!
//! ```text
//! T = max(T_compute, T_launch) + max(T_communication − w · T_compute, T_ends)
//!     + T_update + T_offload
//! ```
//!
//! T_compute are the operations of [`TokenFlops`] at [`ComputeRates`]. T_communication are the
//! bytes of [`SentBytes`], each part over the bandwidth of its ring ([`Hardware::ring_gbps`]), plus
//! the latency of that ring for each call (`Hardware::ring_latency`). w = 0.8 of the computation
//! can hide communication: gathers run ahead by a block, and gradients are reduced while the next
//! block's are computed. On a processor w = 0: the same threads copy and compute. Nothing hides the
//! first gather and the last reduction: T_ends is all of T_communication, but at most a fiftieth of
//! T_compute.

use candle_core::DType;
use serde::Serialize;

use super::SizingRequest;
use super::flops::{TokenFlops, TrainedWeights};
use super::hardware::Hardware;
use super::rates::ComputeRates;
use crate::model::ModelConfig;
use crate::parallel::{MeshAxis, MeshShape, ParamDesc, ParamKind, SentBytes};
use crate::planning::router_aux_loss::objective_cost;
use crate::planning::{PlannedStep, bf16_copy, parameter_counts};
use crate::recipe::{AdapterKind, Offload, Recipe, StateDtype};

/// Part of the computation that can overlap with communication.
pub(super) const OVERLAP: f64 = 0.8;
/// Communication before the first and after the last computation, as a part of the computation.
pub(super) const ENDS: f64 = 0.02;
/// Bytes that the update of a weight reads and writes: its value, the bf16 copy, its gradient, and
/// two moments.
pub(super) const UPDATED: f64 = 8.0 + 2.0 + 4.0 + 16.0;
/// Bytes that moments in 8 bits save.
const INT8_LESS: f64 = 12.0;
/// Bytes per weight that an update with offloaded states moves over the bus: its f32 value and both
/// moments to the device, and back.
const OFFLOADED: f64 = 2.0 * (4.0 + 8.0);
/// Bytes per weight more with offloaded parameters: the gradient to the host after the backward,
/// and to the device for the update, in f32.
const OFFLOADED_GRADIENT: f64 = 2.0 * 4.0;
/// Seconds that the host takes to launch a kernel (estimated, 6 to 8 µs; not yet measured on a
/// GPU).
const LAUNCH: f64 = 7e-6;
/// Kernels of a block, forward and backward: the limits of tests/kernels/counter.rs, which counts
/// them.
const BLOCK_KERNELS: [f64; 2] = [40.0, 60.0];
/// Smallest part of a step that makes a cause its bottleneck.
const BOUND: f64 = 0.3;
/// Part of exposed communication in a step from which more ranks do not help.
const HOPELESS: f64 = 0.5;

/// The work of a step.
#[derive(Debug, Clone, Copy)]
pub struct Workload {
    /// Mean tokens of a rank's micro-batch.
    pub tokens: f64,
    /// Mean tokens of a row.
    pub row: f64,
    /// Micro-batches of a rank in a step.
    pub micro_batches: u64,
}

/// Seconds of a step by cause, and derived figures.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepTime {
    /// Forward and backward.
    pub compute: f64,
    /// The part of `compute` that one forward takes.
    pub forward: f64,
    /// The part of `compute` for recomputing.
    pub recompute: f64,
    /// The part of `compute` for dequantizing to bf16.
    pub dequantize: f64,
    /// Time that the device waits for the host to launch kernels.
    pub launch: f64,
    /// The optimizer's update.
    pub update: f64,
    /// Copies between host and device that computation waits for.
    pub offload: f64,
    /// All communication, hidden or not.
    pub communication: f64,
    /// The part of communication that computation waits for.
    pub exposed: f64,
    /// The whole step.
    pub total: f64,
    /// Bytes that a rank sends.
    pub sent_bytes: u64,
    /// Tokens a second over all ranks.
    pub tokens_per_sec: f64,
    /// Model FLOP utilisation: operations of the model over those of the devices at their peak.
    pub mfu: f64,
    /// Hardware FLOP utilisation: as MFU, including recomputing.
    pub hfu: f64,
    /// The bottleneck of the step.
    pub bound: Bound,
}

/// The part of a step that is worth changing first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Arithmetic of the model.
    Compute,
    /// Kernel launches on the host; the kernels are too short to hide them.
    Launch,
    /// The optimizer's update.
    Update,
    /// Copies between host and device.
    Offload,
    /// Communication that nothing hides.
    Communication,
    /// Communication that takes at least half of a step: these ranks should not be connected this
    /// way.
    Hopeless,
}

impl Bound {
    /// Returns the bottleneck in words.
    pub fn text(self) -> &'static str {
        match self {
            Bound::Compute => "computation",
            Bound::Launch => "kernel launches: a larger micro-batch takes hardly longer",
            Bound::Update => "the optimizer's update",
            Bound::Offload => "copies between host and device",
            Bound::Communication => "communication",
            Bound::Hopeless => "communication: hopeless over this network",
        }
    }
}

impl SizingRequest<'_> {
    /// Counts the operations of a token of `recipe` in rows of `row` tokens, with the layout
    /// `step`.
    pub(super) fn flops(&self, recipe: &Recipe, step: &PlannedStep, row: f64) -> TokenFlops {
        let config = &self.inputs.base.config;
        let stored = step.stored(config);
        TokenFlops::new(config, TrainedWeights::of(config, &step.descs, &stored), row, &stored)
            .with_objective(objective_cost(recipe, config))
    }

    /// Returns the passes of a micro-batch that dequantize: none beside a bf16 copy, else forward,
    /// backward, and for recomputed blocks one more, unless it shares the panels of backward
    /// (`BlockWeights::with_panels`).
    pub(super) fn dequantizing_passes(&self, recipe: &Recipe, step: &PlannedStep) -> f64 {
        if bf16_copy::is_wanted(recipe) {
            return 0.0;
        }
        let engine = self.inputs.engine;
        let is_dora = recipe.adapter.as_ref().is_some_and(|adapter| adapter.kind == AdapterKind::Dora);
        let shares_panels = !engine.traits.is_cpu && engine.dtype == DType::BF16 && !is_dora;
        let stored = step.stored(&self.inputs.base.config);
        let again = (0..stored.count()).filter(|layer| stored.group(*layer).is_some());
        let again = again.filter(|layer| !shares_panels || !stored.ends_group(*layer)).count();
        2.0 + again as f64 / stored.count().max(1) as f64
    }

    /// Estimates a step of `recipe` with the layout `step`; none without the speed of the hardware.
    pub fn time(&self, recipe: &Recipe, step: &PlannedStep) -> Option<StepTime> {
        let ((hardware, rates), config) = (self.timed?, &self.inputs.base.config);
        let load = self.workload(recipe);
        let flops = self.flops(recipe, step, load.row);
        let turns = load.micro_batches as f64;
        let tokens = load.tokens * turns;
        let recompute = tokens * flops.recomputed / rates.linear;
        let one_pass = turns * dequantized_bytes(&step.descs) / rates.update;
        let dequantize = self.dequantizing_passes(recipe, step) * one_pass;
        let products = tokens * token_secs(config, &flops, rates);
        let compute = products + dequantize;
        let in_forward = if dequantize > 0.0 { one_pass } else { 0.0 };
        let forward = products * flops.forward / flops.hardware() + in_forward;
        let shards = step.mesh.size(MeshAxis::Shard) as f64;
        let (update, update_copies) = update(recipe, step, (hardware, rates), shards);
        let brought = turns * step.brought as f64 / (hardware.device.host_gbps * 1e9);
        // The ranks of a processor copy with their compute threads.
        let hidden = if hardware.device.processor { 0.0 } else { OVERLAP * compute };
        // The engine fetches values a block ahead.
        let offload = update_copies + (brought - hidden).max(0.0);
        let communication = communication(&step.sent, step.mesh, hardware);
        let exposed = (communication - hidden).max(communication.min(ENDS * compute));
        let launch = (launches(config, step, (hardware, turns)) - compute).max(0.0);
        let total = compute + launch + update + offload + exposed;
        let ranks = hardware.devices() as f64;
        let mfu = |per_token: f64| tokens * per_token / (total * rates.peak);
        Some(StepTime {
            compute,
            forward,
            recompute,
            dequantize,
            launch,
            update,
            offload,
            communication,
            exposed,
            total,
            sent_bytes: step.sent.total(),
            tokens_per_sec: tokens * ranks / total,
            mfu: mfu(flops.model()),
            hfu: mfu(flops.hardware()),
            bound: bound([exposed, offload, launch, update].map(|secs| secs / total)),
        })
    }
}

/// Returns the seconds in which the host launches the kernels of `turns` micro-batches, and one
/// kernel for each updated tensor. A processor launches none.
pub(super) fn launches(config: &ModelConfig, step: &PlannedStep, (hardware, turns): (&Hardware, f64)) -> f64 {
    if hardware.device.processor {
        return 0.0;
    }
    let [forward, backward] = BLOCK_KERNELS;
    let layers = config.num_layers() as f64;
    let stored = step.stored(config);
    let again = forward * (0..stored.count()).filter(|layer| stored.group(*layer).is_some()).count() as f64;
    let updated = step.descs.iter().filter(|desc| desc.kind.trains()).count() as f64;
    LAUNCH * (turns * (layers * (forward + backward) + again) + updated)
}

/// Returns the bottleneck of a step with these parts of exposed communication, offload, kernel
/// launches and update.
fn bound([exposed, offload, launch, update]: [f64; 4]) -> Bound {
    match () {
        () if exposed >= HOPELESS => Bound::Hopeless,
        () if exposed >= BOUND && exposed >= offload => Bound::Communication,
        () if offload >= BOUND => Bound::Offload,
        () if launch >= BOUND => Bound::Launch,
        () if update >= BOUND => Bound::Update,
        () => Bound::Compute,
    }
}

/// Returns the seconds of a token's products and elementwise operations, forward and backward.
pub(super) fn token_secs(config: &ModelConfig, flops: &TokenFlops, rates: &ComputeRates) -> f64 {
    rates.seconds(flops) + elementwise(config, rates)
}

/// Returns the bytes read and written to dequantize all codes to bf16 once.
pub(super) fn dequantized_bytes(descs: &[ParamDesc]) -> f64 {
    let bytes = |desc: &ParamDesc| match desc.kind {
        ParamKind::Quantized(format) => {
            desc.global_elements() as f64 * (format.scheme().hint().bits as f64 / 8.0 + 2.0)
        }
        _ => 0.0,
    };
    descs.iter().map(bytes).sum()
}

/// Returns the seconds of a token's norms, rotations, gates and sums, if they are measured
/// separately: bytes that each reads and writes, forward and backward, in bf16.
fn elementwise(config: &ModelConfig, rates: &ComputeRates) -> f64 {
    let Some(rate) = rates.elementwise else { return 0.0 };
    let (d, f, [input, _]) = (config.hidden_size, config.active_width(), config.mean_token_mixer());
    // Two norms and a residual: 2 · (2 + 5) d; the rotation, or a convolution, 4 times the first
    // projections; a gate 3 + 6 f, an activation without one 2 + 4 f.
    let values = (14 * d + 3 * (f + config.first_mlp_width())) as f64 + 4.0 * input;
    2.0 * values * config.num_layers() as f64 / rate
}

/// Returns the seconds of the update, and of the copies that it waits for if states are in host
/// memory.
pub(super) fn update(
    recipe: &Recipe,
    step: &PlannedStep,
    (hardware, rates): (&Hardware, &ComputeRates),
    shards: f64,
) -> (f64, f64) {
    let (trained, _) = parameter_counts(&step.descs);
    let mine = trained as f64 / shards;
    let (less, rate) = match recipe.optimizer.state {
        StateDtype::Int8 => (INT8_LESS, rates.update_int8),
        StateDtype::F32 => (0.0, rates.update),
    };
    let moved = match recipe.parallel.offload {
        Offload::None => 0.0,
        // Adapters and their gradients stay on the device.
        Offload::Params if recipe.adapter.is_none() => OFFLOADED - less + OFFLOADED_GRADIENT,
        Offload::Optimizer | Offload::Params => OFFLOADED - less,
    };
    (mine * (UPDATED - less) / rate, mine * moved / (hardware.device.host_gbps * 1e9))
}

/// Returns the seconds of everything that a rank sends.
fn communication(sent: &SentBytes, mesh: MeshShape, hardware: &Hardware) -> f64 {
    let ranks = mesh.ranks();
    if ranks == 1 {
        return 0.0;
    }
    let (shards, copies) = (mesh.size(MeshAxis::Shard), mesh.size(MeshAxis::Data));
    // A gather circulates once around the shards, a sum twice around all ranks.
    let of_call =
        if shards > 1 { hardware.ring_latency(1, shards) } else { 2.0 * hardware.ring_latency(1, ranks) };
    let latency = of_call * sent.calls as f64;
    let by_all = sent.whole + sent.scalars;
    // Bytes, ranks of their ring, and stride between these.
    let rings = [
        (sent.total() - by_all - sent.between, shards, 1),
        (by_all, ranks, 1),
        (sent.between, copies, mesh.stride(MeshAxis::Data)),
    ];
    let secs = rings.into_iter().filter(|(bytes, ..)| *bytes > 0).map(|(bytes, size, stride)| {
        // A rank of a processor also copies its own part into the gathered values.
        let in_memory = hardware.device.processor && stride * size <= hardware.per_host;
        let own = if in_memory { size as f64 / (size - 1) as f64 } else { 1.0 };
        hardware.ring_secs(bytes as f64 * own, stride, size)
    });
    secs.sum::<f64>() + latency
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::error::{Error, Result};
    use crate::parallel::ShardingStrategy;

    /// Four hosts of eight cards, 15 GB/s among them and 1.25 GB/s between hosts. Checks every
    /// strategy by its formula for 10^9 parameters, bf16 weights and f32 gradients.
    #[test]
    fn communication_is_bytes_over_the_rings_that_they_take() -> Result<()> {
        let hosts = Hardware::parse("8x4090*4", Path::new("."))?;
        let (link, network) = (15e9, 1.25e9);
        assert_eq!([hosts.device.link_gbps, hosts.device.network_gbps], [15.0, 1.25]);
        let p = 1e9;
        // In a host of eight: seven hops of 5.7 µs. Over four hosts: 31 hops, three of them of 14
        // µs. 8.4 µs a call.
        let (in_host, over_hosts) = (8.4e-6 + 7.0 * 5.7e-6, 8.4e-6 + 28.0 * 5.7e-6 + 3.0 * 14e-6);
        let take = |strategy: ShardingStrategy, sent: SentBytes| {
            let secs = communication(&sent, strategy.mesh_shape(hosts.devices())?, &hosts);
            let of_call = match strategy {
                ShardingStrategy::Ddp => 2.0 * over_hosts,
                ShardingStrategy::Hsdp(_) => in_host,
                _ => over_hosts,
            };
            Ok::<f64, Error>(secs - of_call * sent.calls as f64)
        };
        let near = |secs: f64, by_hand: f64| (secs / by_hand - 1.0).abs() < 1e-6;
        // 31/32 of the gradients twice.
        let all = (2.0 * 31.0 / 32.0 * 4.0 * p) as u64;
        let ddp = SentBytes { gradients: all, whole: all, calls: 3, ..SentBytes::default() };
        assert!(near(take(ShardingStrategy::Ddp, ddp)?, 2.0 * 31.0 / 32.0 * 4.0 * p / network));
        // 31/32 of the weights twice and of the gradients once.
        let gathers = (31.0 / 32.0 * 2.0 * 2.0 * p) as u64;
        let fsdp = SentBytes {
            gathers,
            gradients: (31.0 / 32.0 * 4.0 * p) as u64,
            calls: 9,
            ..SentBytes::default()
        };
        assert!(near(take(ShardingStrategy::Fsdp, fsdp)?, 31.0 / 32.0 * 8.0 * p / network));
        // Groups of eight: 7/8 of that within a host, then 3/4 of an eighth of the gradients twice
        // between hosts, from all eight cards of a host at once.
        let between = (2.0 * 3.0 / 4.0 * 4.0 * p / 8.0) as u64;
        let gradients = (7.0 / 8.0 * 4.0 * p) as u64 + between;
        let gathers = (7.0 / 8.0 * 4.0 * p) as u64;
        let hsdp = SentBytes { gathers, gradients, between, calls: 9, ..SentBytes::default() };
        let by_hand = 7.0 / 8.0 * 8.0 * p / link + 8.0 * 2.0 * 3.0 / 4.0 * 4.0 * p / 8.0 / network;
        assert!(near(take(ShardingStrategy::Hsdp(8), hsdp)?, by_hand));
        Ok(())
    }
}
