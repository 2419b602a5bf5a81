//! `finetune bench`: how speed grows with ranks.
//!
//! Each number of ranks trains the same recipe for some steps, every rank its own micro-batches (weak scaling). Efficiency is the
//! speed of N ranks over N times that of the first number measured, by rank. Bytes are counted where they are sent and shown beside what the
//! placement of parameters says they must be; exposed time is what the first rank spent inside collectives: on GPUs, where
//! calls return before their work, only where the host itself waits.

use std::sync::Arc;
use std::time::Duration;

use candle_core::Device;
use serde::Serialize;

use super::{open_gpus, print, terminal};
use crate::cli::{BenchArgs, BenchVerb, ScalingArgs};
use crate::collective::nccl::{self, AbortFlag, GroupInfo, NcclLibrary};
use crate::collective::{Collective, TimedCollective, in_process};
use crate::error::{Error, Result};
use crate::plan::{Plan, WorldSize};
use crate::recipe::{Recipe, Strategy};
use crate::runtime::{device, thread_pool};
use crate::setup::Resolver;
use crate::units;

/// Steps before the first that is measured.
const WARM_UP: u64 = 2;

/// Measures.
pub(super) fn run(args: &BenchArgs) -> Result<()> {
    match &args.what {
        BenchVerb::Scaling(args) => scaling(args),
    }
}

/// What one number of ranks gave.
#[derive(Debug, Clone, Serialize)]
struct Figures {
    ranks: usize,
    threads_per_rank: usize,
    strategy: String,
    /// Median over the steps.
    step_secs: f64,
    tokens_per_sec: f64,
    efficiency: f64,
    /// By one rank.
    bytes_sent_per_step: u64,
    bytes_by_formula: u64,
    exposed_secs_per_step: f64,
}

/// What a rank saw of the measured steps.
struct Seen {
    secs: Vec<f64>,
    tokens: u64,
    sent: u64,
    formula: u64,
    exposed: Duration,
}

fn scaling(args: &ScalingArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let recipe = Recipe::load(&args.layers(&super::working_folder()?)?)?;
    let finder = Resolver::new(args.common.offline, &terminal)?;
    let most = args.ranks.iter().copied().max().map_or(1, usize::from);
    let place = BenchPlace::open(args, most)?;
    let threads = args.threads.map_or_else(|| (thread_pool::num_threads() / most).max(1), usize::from);
    let mut all: Vec<Figures> = Vec::new();
    for ranks in args.ranks.iter().copied().map(usize::from) {
        let mut recipe = recipe.clone();
        recipe.train.max_steps = Some(WARM_UP + u64::from(args.steps));
        if ranks == 1 {
            (recipe.parallel.strategy, recipe.parallel.shard_size) = (Strategy::Single, None);
        }
        let now = chrono::Local::now().fixed_offset();
        let world = WorldSize::on_one_host(ranks);
        let plan = Plan::resolve(recipe, &finder, place.device(), world, None, now)?;
        terminal.line(plan.describe());
        let seen = place
            .run(ranks, |end, device| thread_pool::in_own_pool(threads, || steps(&plan, end, device)))?;
        let first = seen.into_iter().next().ok_or_else(|| Error::internal("no rank"))?;
        all.push(figures(&plan, ranks, threads, first, all.first()));
    }
    let json = || serde_json::to_string_pretty(&all).map_err(|e| Error::internal(e.to_string()));
    if args.json { print(&format!("{}\n", json()?)) } else { print(&table(&all)) }
}

/// Where ranks run.
enum BenchPlace {
    Cpu,
    /// A rank on each of the first ones; NCCL where there is more than one rank.
    Gpus(Vec<Device>, Option<Arc<NcclLibrary>>),
}

impl BenchPlace {
    /// What `--gpus` names, for up to `most` ranks.
    fn open(args: &ScalingArgs, most: usize) -> Result<Self> {
        let Some(gpus) = &args.gpus else { return Ok(BenchPlace::Cpu) };
        let count = gpus.0.len();
        if most > count {
            return Err(Error::user(format!("cannot measure {most} ranks"))
                .because(format!("`--gpus` names {count}; each rank needs one of its own"))
                .hint("name more with `--gpus`, or give smaller numbers with `--ranks`"));
        }
        let nccl = (most > 1).then(NcclLibrary::open).transpose()?;
        Ok(BenchPlace::Gpus(open_gpus(&gpus.0[..most])?, nccl))
    }

    fn device(&self) -> Device {
        match self {
            BenchPlace::Gpus(gpus, _) => device::tightest(gpus),
            BenchPlace::Cpu => Device::Cpu,
        }
    }

    fn run(
        &self,
        ranks: usize,
        rank: impl Fn(Arc<dyn Collective>, &Device) -> Result<Seen> + Sync,
    ) -> Result<Vec<Seen>> {
        match self {
            BenchPlace::Gpus(gpus, Some(library)) if ranks > 1 => {
                let id = library.unique_id()?;
                let group_info = GroupInfo { id, first: 0, size: ranks, deadline: nccl::DEADLINE };
                let work = |place: usize, end| rank(end, &gpus[place]);
                let done = nccl::run_on_gpus(library, &group_info, &gpus[..ranks], &AbortFlag::new(), work);
                done.map_err(|failed| failed.error)
            }
            _ => in_process::run_ranks(in_process::InProcessWorld::new(ranks).communicators(), |end| {
                rank(Arc::new(end), &self.device())
            }),
        }
    }
}

fn steps(plan: &Plan, end: Arc<dyn Collective>, device: &Device) -> Result<Seen> {
    let timed = TimedCollective::new(end);
    let (clock, size) = (timed.clock(), timed.size());
    let mut trainer = plan.trainer(None, Arc::new(timed), device)?;
    let mut sampler = plan.sampler()?;
    let mut seen = Seen { secs: Vec::new(), tokens: 0, sent: 0, formula: 0, exposed: Duration::ZERO };
    while let Some(step) = sampler.next_step() {
        let (before, waited) = (trainer.engine.store.mesh().traffic(), clock.read());
        let started = std::time::Instant::now();
        trainer.step(&step)?;
        if sampler.steps_done() > WARM_UP {
            seen.secs.push(started.elapsed().as_secs_f64());
            seen.tokens += step.tokens;
            seen.exposed += clock.read() - waited;
            let strategy = &trainer.engine.store;
            seen.sent += strategy.mesh().traffic().since(&before).total_bytes();
            seen.formula += strategy.sent_by_formula(step.micro_batches.len().div_ceil(size) as u64);
        }
    }
    Ok(seen)
}

fn figures(plan: &Plan, ranks: usize, threads: usize, mut seen: Seen, first: Option<&Figures>) -> Figures {
    seen.secs.sort_by(f64::total_cmp);
    let steps = seen.secs.len().max(1);
    let step_secs = seen.secs.get(steps / 2).copied().unwrap_or(f64::NAN);
    let tokens_per_sec = seen.tokens as f64 / steps as f64 / step_secs;
    let alone =
        first.map_or(tokens_per_sec / ranks as f64, |first| first.tokens_per_sec / first.ranks as f64);
    Figures {
        ranks,
        threads_per_rank: threads,
        strategy: plan.recipe.parallel.strategy.to_string(),
        step_secs,
        tokens_per_sec,
        efficiency: tokens_per_sec / (ranks as f64 * alone),
        bytes_sent_per_step: seen.sent / steps as u64,
        bytes_by_formula: seen.formula / steps as u64,
        exposed_secs_per_step: seen.exposed.as_secs_f64() / steps as f64,
    }
}

fn table(all: &[Figures]) -> String {
    let mut text = String::from(
        "ranks  threads  strategy  tokens/s  efficiency  sent a step  by formula  exposed a step\n",
    );
    for f in all {
        text += &format!(
            "{:>5}  {:>7}  {:<8}  {:>8.1}  {:>8.1} %  {:>11}  {:>10}  {:>12.3} s\n",
            f.ranks,
            f.threads_per_rank,
            f.strategy,
            f.tokens_per_sec,
            100.0 * f.efficiency,
            units::bytes(f.bytes_sent_per_step),
            units::bytes(f.bytes_by_formula),
            f.exposed_secs_per_step,
        );
    }
    text
}
