//! What `[parallel]` and the number of ranks come to: the strategy, and how a step's micro-batches are dealt out.

use candle_core::{DType, Device};

use super::memory::{MemoryPlan, available};
use crate::checkpoint::SavedCheckpoint;
use crate::engine::Recompute;
use crate::error::{Error, Result};
use crate::recipe::{self, Recipe, ReduceDtype, Strategy};
use crate::sharding::{Offload, ShardingStrategy};

/// Splits a resumed run's global batch over the ranks there are now: accumulation adapts, so that the run goes on with
/// the same steps. A fresh run takes the recipe's accumulation on every rank.
///
/// # Errors
/// The ranks do not divide the micro-batches of a step.
pub(super) fn split_global_batch(
    recipe: &mut Recipe,
    ranks: usize,
    resumed: Option<&SavedCheckpoint>,
) -> Result<()> {
    let Some(saved) = resumed.filter(|saved| saved.state.ranks != ranks) else { return Ok(()) };
    let Some(steps) = saved.state.micro_batches() else {
        return Err(Error::user(format!("cannot resume {}", saved.folder.display()))
            .because(format!(
                "it does not say how many micro-batches a step had, and was made by {} ranks",
                saved.state.ranks
            ))
            .hint(format!("resume with `--ranks {}`", saved.state.ranks)));
    };
    if !steps.is_multiple_of(ranks) {
        let counts: Vec<String> =
            (1..=steps).filter(|count| steps.is_multiple_of(*count)).map(|count| count.to_string()).collect();
        return Err(Error::user(format!("cannot resume {} with {ranks} ranks", saved.folder.display()))
            .because(format!(
                "its steps are {steps} micro-batches of {}, which {ranks} ranks cannot share evenly",
                recipe.train.micro_batch_size
            ))
            .hint(format!("use one of these numbers of ranks: {}", counts.join(", "))));
    }
    recipe.train.gradient_accumulation_steps = steps / ranks;
    Ok(())
}

/// The strategy of `[parallel]` on this many ranks, and why it was picked when it was left open. `needed` is the memory of a
/// step under a strategy.
///
/// # Errors
/// Keys that contradict one another or the number of ranks.
pub(super) fn strategy(
    recipe: &Recipe,
    ranks: usize,
    device: &Device,
    needed: &dyn Fn(ShardingStrategy, Recompute) -> MemoryPlan,
) -> Result<(ShardingStrategy, Option<String>)> {
    // Where recomputing is left open it may make room for a strategy that sends less.
    let least = match recipe.train.recompute {
        recipe::Recompute::None => Recompute::None,
        _ => Recompute::Block,
    };
    let parallel = &recipe.parallel;
    let refuse = |asked: String, why: String, hint: &str| {
        Err(Error::user(format!("cannot use `{asked}`")).because(why).hint(hint))
    };
    if let (Some(size), false) = (parallel.shard_size, parallel.strategy == Strategy::Hsdp) {
        let asked = format!("parallel.shard_size = {size}");
        let why = format!("it belongs to strategy \"hsdp\"; the strategy is \"{}\"", parallel.strategy);
        return refuse(asked, why, "write `strategy = \"hsdp\"`, or remove `shard_size`");
    }
    let kind = match parallel.strategy {
        Strategy::Auto => return Ok(pick(ranks, device, |kind| needed(kind, least))),
        Strategy::Single => ShardingStrategy::Single,
        Strategy::Ddp => ShardingStrategy::Ddp,
        Strategy::Zero1 => ShardingStrategy::Zero1,
        Strategy::Zero2 => ShardingStrategy::Zero2,
        Strategy::Fsdp => ShardingStrategy::Fsdp,
        Strategy::Hsdp => ShardingStrategy::Hsdp(parallel.shard_size.unwrap_or(ranks)),
    };
    let asked = format!("parallel.strategy = \"{}\"", parallel.strategy);
    match (kind, ranks) {
        (ShardingStrategy::Single, 1) => Ok((kind, None)),
        (ShardingStrategy::Single, _) => refuse(
            asked,
            format!(
                "there are {ranks} ranks; accepted with more than one: auto, ddp, zero1, zero2, fsdp, hsdp"
            ),
            "leave the strategy out, or run without `--ranks`",
        ),
        (_, 1) => refuse(
            asked,
            "there is one rank; accepted with one: auto, single".into(),
            "give more ranks, with `--ranks N`, or leave the strategy out",
        ),
        (ShardingStrategy::Hsdp(size), _) if !ranks.is_multiple_of(size) => refuse(
            format!("parallel.shard_size = {size}"),
            format!("groups of {size} do not divide {ranks} ranks"),
            "give a divisor of the number of ranks",
        ),
        _ => Ok((kind, None)),
    }
}

/// The first that fits of the strategies in order of what they send.
fn pick(
    ranks: usize,
    device: &Device,
    needed: impl Fn(ShardingStrategy) -> MemoryPlan,
) -> (ShardingStrategy, Option<String>) {
    if ranks == 1 {
        return (ShardingStrategy::Single, None);
    }
    // Ranks on the CPU share one memory; each GPU has its own.
    let each = |bytes: u64| if device.is_cpu() { bytes / ranks as u64 } else { bytes };
    let Some(bytes) = available(device).map(each) else {
        return (ShardingStrategy::Ddp, Some("ddp: it sends least".into()));
    };
    // A tenth is left for what the estimate does not know.
    let bytes = bytes / 10 * 9;
    let said = |kind: ShardingStrategy, why: &str| {
        let [need, have] = [needed(kind).total(), bytes].map(crate::units::bytes);
        format!("{why}: {need} a rank, {have} are available")
    };
    for (kind, why) in [
        (ShardingStrategy::Ddp, "ddp, which sends least, fits"),
        (ShardingStrategy::Zero1, "zero1 is the first to fit"),
        (ShardingStrategy::Zero2, "zero2 is the first to fit"),
    ] {
        if needed(kind).total() <= bytes {
            return (kind, Some(said(kind, why)));
        }
    }
    (ShardingStrategy::Fsdp, Some(said(ShardingStrategy::Fsdp, "fsdp, which needs least")))
}

/// A strategy by its name in a recipe.
pub(super) fn named(kind: ShardingStrategy) -> Strategy {
    match kind {
        ShardingStrategy::Single => Strategy::Single,
        ShardingStrategy::Ddp => Strategy::Ddp,
        ShardingStrategy::Zero1 => Strategy::Zero1,
        ShardingStrategy::Zero2 => Strategy::Zero2,
        ShardingStrategy::Fsdp => Strategy::Fsdp,
        ShardingStrategy::Hsdp(_) => Strategy::Hsdp,
    }
}

/// The dtype in which gradients are sent.
pub(super) fn reduce_dtype(recipe: &recipe::ParallelSection) -> DType {
    match recipe.reduce_dtype {
        ReduceDtype::F32 => DType::F32,
        ReduceDtype::Bf16 => DType::BF16,
    }
}

/// What is kept away from the device, and where.
pub(super) fn offload(parallel: &recipe::ParallelSection) -> Offload {
    match parallel.offload {
        recipe::Offload::None => Offload::None,
        recipe::Offload::Optimizer => Offload::Optimizer,
        recipe::Offload::Params => {
            Offload::Params(parallel.offload_folder.as_ref().map(|folder| folder.0.clone()))
        }
    }
}
