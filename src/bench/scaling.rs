//! Training speed by number of ranks: trains a plan for some steps and measures them.
//!
//! Every rank has its own micro-batches (weak scaling). Efficiency is the speed of N ranks over N
//! times the speed per rank of the first measured number. The bytes sent are counted, and compared
//! with the bytes that follow from the placement of parameters. Exposed time is the time of the
//! first rank inside collectives. On GPUs calls return before their work ends, so it counts only
//! the waits of the host.

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::Device;
use serde::Serialize;

use crate::collective::nccl::{self, AbortFlag, GroupInfo, NcclLibrary};
use crate::collective::{Collective, TimedCollective};
use crate::error::{Error, Result};
use crate::launcher::ranks::{end_process, run_on_cpu, run_on_gpus};
use crate::ops;
use crate::planning::Plan;
use crate::runtime::device;
use crate::training::trainer;
use crate::units;

/// Number of steps before the first measured one.
pub(crate) const WARM_UP: u64 = 2;

/// Result for one number of ranks.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ScalingResult {
    ranks: usize,
    threads_per_rank: usize,
    strategy: String,
    /// Median over the steps.
    step_secs: f64,
    tokens_per_sec: f64,
    efficiency: f64,
    /// Of one rank, like all fields below.
    bytes_sent_per_step: u64,
    bytes_by_formula: u64,
    exposed_secs_per_step: f64,
}

impl ScalingResult {
    /// Trains `plan` on `ranks` ranks of `devices`. `first` is the base of the efficiency; none:
    /// this result.
    ///
    /// # Errors
    /// The first failure of a rank.
    pub(crate) fn measure(
        plan: &Plan,
        devices: &ScalingDevices,
        ranks: usize,
        threads_per_rank: usize,
        first: Option<&ScalingResult>,
    ) -> Result<Self> {
        let measured = devices.run(ranks, threads_per_rank, |world, device| train(plan, world, device))?;
        let mut measured = measured.into_iter().next().ok_or_else(|| Error::internal("no rank"))?;
        measured.secs.sort_by(f64::total_cmp);
        let steps = measured.secs.len().max(1);
        let step_secs = measured.secs.get(steps / 2).copied().unwrap_or(f64::NAN);
        let tokens_per_sec = measured.tokens as f64 / steps as f64 / step_secs;
        let alone =
            first.map_or(tokens_per_sec / ranks as f64, |first| first.tokens_per_sec / first.ranks as f64);
        Ok(ScalingResult {
            ranks,
            threads_per_rank,
            strategy: plan.strategy().to_string(),
            step_secs,
            tokens_per_sec,
            efficiency: tokens_per_sec / (ranks as f64 * alone),
            bytes_sent_per_step: measured.sent / steps as u64,
            bytes_by_formula: measured.formula / steps as u64,
            exposed_secs_per_step: measured.exposed.as_secs_f64() / steps as f64,
        })
    }

    /// Formats `results` as a table.
    pub(crate) fn table(results: &[ScalingResult]) -> String {
        let mut text = String::from(
            "ranks  threads  strategy  tokens/s  efficiency  sent a step  by formula  waiting a step\n",
        );
        for result in results {
            text += &format!(
                "{:>5}  {:>7}  {:<8}  {:>8.1}  {:>8.1} %  {:>11}  {:>10}  {:>12.3} s\n",
                result.ranks,
                result.threads_per_rank,
                result.strategy,
                result.tokens_per_sec,
                100.0 * result.efficiency,
                units::bytes(result.bytes_sent_per_step),
                units::bytes(result.bytes_by_formula),
                result.exposed_secs_per_step,
            );
        }
        text
    }
}

/// Devices of the ranks of a measurement.
pub(crate) enum ScalingDevices {
    /// All ranks on the CPU.
    Cpu,
    /// A rank on each of the first GPUs; NCCL for several ranks.
    Gpus(Vec<Device>, Option<Arc<NcclLibrary>>),
}

impl ScalingDevices {
    /// Opens the GPUs with these `numbers`, or the CPU if none, for up to `most_ranks` ranks.
    ///
    /// # Errors
    /// The GPUs are fewer than the ranks; a GPU cannot be opened; NCCL is missing or too old.
    pub(crate) fn open(numbers: Option<&[usize]>, most_ranks: usize) -> Result<Self> {
        let Some(numbers) = numbers else { return Ok(ScalingDevices::Cpu) };
        let count = numbers.len();
        if most_ranks > count {
            return Err(Error::user(format!("cannot measure {most_ranks} ranks"))
                .because(format!("`--gpus` names {count}; each rank needs one of its own"))
                .hint("name more with `--gpus`, or give smaller numbers with `--ranks`"));
        }
        let nccl = (most_ranks > 1).then(NcclLibrary::open).transpose()?;
        let gpus = device::open_gpus(&numbers[..most_ranks])?;
        gpus.iter().try_for_each(ops::preload)?;
        Ok(ScalingDevices::Gpus(gpus, nccl))
    }

    /// Returns the device to plan for: the one with the least free memory.
    pub(crate) fn device(&self) -> Device {
        match self {
            ScalingDevices::Gpus(gpus, _) => device::tightest(gpus),
            ScalingDevices::Cpu => Device::Cpu,
        }
    }

    fn run(
        &self,
        ranks: usize,
        threads: usize,
        rank: impl Fn(Arc<dyn Collective>, &Device) -> Result<MeasuredSteps> + Sync,
    ) -> Result<Vec<MeasuredSteps>> {
        match self {
            ScalingDevices::Gpus(gpus, Some(library)) if ranks > 1 => {
                let id = library.unique_id()?;
                let group_info = GroupInfo { id, first: 0, size: ranks, deadline: nccl::DEADLINE };
                let work = |local_rank: usize, world| rank(world, &gpus[local_rank]);
                let abort_flag = AbortFlag::ending_by(end_process);
                run_on_gpus(library, &group_info, &gpus[..ranks], &abort_flag, threads, work)
                    .map_err(|failed| failed.error)
            }
            _ => run_on_cpu(ranks, threads, |world| rank(world, &self.device())),
        }
    }
}

/// Measurements of a rank over the measured steps.
#[derive(Default)]
struct MeasuredSteps {
    secs: Vec<f64>,
    tokens: u64,
    /// Bytes that the rank sent.
    sent: u64,
    /// Bytes by the formula of the placement.
    formula: u64,
    /// Time inside collectives.
    exposed: Duration,
}

/// Trains all steps of `plan` on one rank and measures those after the warm-up.
fn train(plan: &Plan, world: Arc<dyn Collective>, device: &Device) -> Result<MeasuredSteps> {
    let timed = TimedCollective::new(world);
    let (clock, size) = (timed.clock(), timed.size());
    let mut trainer = trainer(plan, None, Arc::new(timed), device)?;
    let mut sampler = plan.sampler()?;
    let mut measured = MeasuredSteps::default();
    while let Some(step) = sampler.next_step() {
        let (before, waited) = (trainer.engine.store.mesh().traffic(), clock.read());
        let started = Instant::now();
        trainer.step(&step)?;
        if sampler.steps_done() > WARM_UP {
            measured.secs.push(started.elapsed().as_secs_f64());
            measured.tokens += step.tokens;
            measured.exposed += clock.read() - waited;
            let store = &trainer.engine.store;
            measured.sent += store.mesh().traffic().since(&before).total_bytes();
            let turns = step.micro_batches.len().div_ceil(size) as u64;
            let stored = plan.recompute.stored(trainer.engine.config.num_layers(), true);
            measured.formula += store.sent_by_formula(turns, &stored);
        }
    }
    Ok(measured)
}
