//! Decides the strategy from `[parallel]` and the number of ranks, and the summation of gradients.

use candle_core::DType;

use super::memory::MemoryPlan;
use crate::error::{Error, Result};
use crate::loading::base_model::DeviceTraits;
use crate::parallel::{GradReduceOptions, OffloadTarget, ShardingStrategy};
use crate::recipe::{self, MasterWeights, Recipe, ReduceDtype, Strategy};
use crate::units;

/// The number of ranks of a run (torchrun's `WORLD_SIZE` and `LOCAL_WORLD_SIZE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorldSize {
    /// The ranks of all hosts.
    pub all: usize,
    /// The ranks of this host, if known.
    pub local: Option<usize>,
    /// The ranks of this process.
    pub here: usize,
}

impl WorldSize {
    /// Returns a world of `ranks` ranks in one process.
    pub fn in_one_process(ranks: usize) -> Self {
        WorldSize { all: ranks, local: Some(ranks), here: ranks }
    }
}

/// True if each micro-batch computes its gradients separately before they are added, so that the
/// sum has the same bits on any number of ranks. On a GPU, products accumulate directly: NCCL adds
/// ranks in an order of its own anyway.
pub(super) fn accumulates(recipe: &Recipe, device: DeviceTraits) -> bool {
    recipe.train.accumulation() > 1 && !device.has_kernels
}

/// Returns `optimizer.master` for weights in `dtype`.
///
/// # Errors
/// The key disables masters, but the weights are f32.
pub(super) fn master_weights(recipe: &Recipe, dtype: DType) -> Result<MasterWeights> {
    let master = recipe.optimizer.master;
    if master == MasterWeights::None && dtype != DType::BF16 {
        return Err(Error::user("cannot train without f32 master weights")
            .because(format!(
                "`optimizer.master` is \"none\", which rounds the weights to bf16, and this run computes in {}",
                dtype.as_str()
            ))
            .hint("write `dtype = \"bf16\"` under `[model]`, or remove `optimizer.master`"));
    }
    Ok(master)
}

/// Returns the dtype for gradients of blocks without f32 masters: bf16 if nothing is added to them.
pub(super) fn kept_gradients(recipe: &Recipe) -> DType {
    let one = recipe.optimizer.master == MasterWeights::None && recipe.train.accumulation() == 1;
    if one { DType::BF16 } else { DType::F32 }
}

/// Returns the options for summing gradients on `device`.
pub(super) fn reducing(recipe: &Recipe, device: DeviceTraits) -> GradReduceOptions {
    let dtype = reduce_dtype(&recipe.parallel);
    GradReduceOptions { accumulates: accumulates(recipe, device), dtype, block_dtype: kept_gradients(recipe) }
}

/// Returns the strategy that `[parallel]` names for this number of ranks; none if it is open.
///
/// # Errors
/// The number of ranks contradicts the strategy, or the groups of "hsdp" do not divide it.
pub(super) fn named_strategy(recipe: &Recipe, world: WorldSize) -> Result<Option<ShardingStrategy>> {
    let parallel = &recipe.parallel;
    let refuse = |why: String, hint: &str| {
        let asked = format!("cannot use `parallel.strategy = \"{}\"`", parallel.strategy);
        Err(Error::user(asked).because(why).hint(hint))
    };
    match (parallel.strategy, world.all) {
        (Strategy::Single, ranks) if ranks > 1 => {
            return refuse(
                format!(
                    "the run has {ranks} ranks; accepted with more than one: auto, ddp, zero1, zero2, fsdp, hsdp"
                ),
                "leave the strategy out, or use one rank",
            );
        }
        (Strategy::Auto | Strategy::Single, _) => {}
        (_, 1) => {
            return refuse(
                "the run has one rank; accepted with one: auto, single".into(),
                "give more ranks, or leave the strategy out",
            );
        }
        _ => {}
    }
    Ok(Some(match parallel.strategy {
        Strategy::Auto => return Ok(None),
        Strategy::Single => ShardingStrategy::Single,
        Strategy::Ddp => ShardingStrategy::Ddp,
        Strategy::Zero1 => ShardingStrategy::Zero1,
        Strategy::Zero2 => ShardingStrategy::Zero2,
        Strategy::Fsdp => ShardingStrategy::Fsdp,
        Strategy::Hsdp => ShardingStrategy::Hsdp(shard_size(parallel, world)?),
    }))
}

/// Returns the ranks of a group of "hsdp": those of the recipe, else those of one host.
fn shard_size(parallel: &recipe::ParallelSection, world: WorldSize) -> Result<usize> {
    let ranks = world.all;
    let divisors = || {
        let sizes = (1..=ranks).filter(|size| ranks.is_multiple_of(*size));
        sizes.map(|size| size.to_string()).collect::<Vec<_>>().join(", ")
    };
    let refused = |why: String| {
        Error::user("cannot divide the ranks into groups for `parallel.strategy = \"hsdp\"`")
            .because(why)
            .because(format!("accepted for {ranks} ranks: {}", divisors()))
    };
    match (parallel.shard_size, world.local) {
        (Some(size), _) if ranks.is_multiple_of(size) => Ok(size),
        (Some(size), _) => Err(refused(format!("`parallel.shard_size` is {size}"))
            .hint("give a divisor of the number of ranks as `parallel.shard_size`")),
        (None, Some(local)) if ranks.is_multiple_of(local) => Ok(local),
        (None, Some(local)) => {
            let local = units::exact(local, "rank");
            Err(refused(format!("`parallel.shard_size` is not set, and this host has {local}"))
                .hint("add `--set parallel.shard_size=SIZE`"))
        }
        (None, None) => Err(refused(
            "`parallel.shard_size` is not set, and the launcher does not report how many ranks a host has"
                .into(),
        )
        .hint("set LOCAL_RANK and LOCAL_WORLD_SIZE, or add `--set parallel.shard_size=SIZE`")),
    }
}

/// Picks the first strategy that fits `budget` bytes a rank, in order of the bytes sent, with the
/// reason. Returns none if none fits. Without a budget, picks the strategy that sends least.
///
/// # Errors
/// Those of `needed`.
pub(super) fn pick_strategy(
    ranks: usize,
    budget: Option<u64>,
    needed: impl Fn(ShardingStrategy) -> Result<MemoryPlan>,
) -> Result<Option<(ShardingStrategy, Option<String>)>> {
    if ranks == 1 {
        return Ok(Some((ShardingStrategy::Single, None)));
    }
    let Some(budget) = budget else {
        return Ok(Some((ShardingStrategy::Ddp, Some("ddp: it sends least".into()))));
    };
    let strategies = [
        (ShardingStrategy::Ddp, "ddp, which sends least, fits"),
        (ShardingStrategy::Zero1, "zero1 is the first to fit"),
        (ShardingStrategy::Zero2, "zero2 is the first to fit"),
        (ShardingStrategy::Fsdp, "fsdp, which needs least, fits"),
    ];
    for (kind, why) in strategies {
        let needed = needed(kind)?.required();
        if needed <= budget {
            let [need, have] = [needed, budget].map(units::bytes);
            return Ok(Some((kind, Some(format!("{why}: {need} a rank, {have} are available")))));
        }
    }
    Ok(None)
}

/// Returns the name of a strategy in a recipe.
pub(super) fn named(strategy: ShardingStrategy) -> Strategy {
    match strategy {
        ShardingStrategy::Single => Strategy::Single,
        ShardingStrategy::Ddp => Strategy::Ddp,
        ShardingStrategy::Zero1 => Strategy::Zero1,
        ShardingStrategy::Zero2 => Strategy::Zero2,
        ShardingStrategy::Fsdp => Strategy::Fsdp,
        ShardingStrategy::Hsdp(_) => Strategy::Hsdp,
    }
}

/// Returns the dtype in which ranks send gradients.
pub(super) fn reduce_dtype(recipe: &recipe::ParallelSection) -> DType {
    match recipe.reduce_dtype {
        ReduceDtype::F32 => DType::F32,
        ReduceDtype::Bf16 => DType::BF16,
    }
}

/// Returns the tensors to store outside the device, and their location.
pub(super) fn offload(parallel: &recipe::ParallelSection) -> OffloadTarget {
    let folder = parallel.offload_folder.as_ref().map(|folder| folder.0.clone());
    OffloadTarget { what: parallel.offload, folder }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group_of(shard_size: Option<usize>, world: WorldSize) -> Result<Option<ShardingStrategy>> {
        let mut recipe = Recipe::default();
        (recipe.parallel.strategy, recipe.parallel.shard_size) = (Strategy::Hsdp, shard_size);
        named_strategy(&recipe, world)
    }

    #[test]
    fn groups_are_the_ranks_of_a_host() {
        let two_hosts = WorldSize { all: 16, local: Some(8), here: 1 };
        assert_eq!(group_of(None, two_hosts).ok(), Some(Some(ShardingStrategy::Hsdp(8))));
        assert_eq!(group_of(Some(4), two_hosts).ok(), Some(Some(ShardingStrategy::Hsdp(4))));
        assert_eq!(group_of(None, WorldSize::in_one_process(4)).ok(), Some(Some(ShardingStrategy::Hsdp(4))));
        for (size, world, why) in [
            (None, WorldSize { all: 16, local: None, here: 1 }, "does not report how many ranks a host has"),
            (None, WorldSize { all: 4, local: Some(3), here: 1 }, "this host has 3 ranks"),
            (Some(3), WorldSize::in_one_process(4), "accepted for 4 ranks: 1, 2, 4"),
        ] {
            let error = group_of(size, world).expect_err(why).to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn the_strategy_that_sends_least_and_fits() {
        let needed = |kind| {
            let weights = match kind {
                ShardingStrategy::Ddp => 100,
                ShardingStrategy::Zero1 => 80,
                ShardingStrategy::Zero2 => 60,
                _ => 40,
            };
            Ok(MemoryPlan { weights, ..MemoryPlan::default() })
        };
        let picked = |budget| pick_strategy(2, budget, needed).ok().flatten().map(|(kind, _)| kind);
        assert_eq!(picked(None), Some(ShardingStrategy::Ddp));
        assert_eq!(
            [100, 99, 79, 59, 40].map(|budget| picked(Some(budget))),
            [
                ShardingStrategy::Ddp,
                ShardingStrategy::Zero1,
                ShardingStrategy::Zero2,
                ShardingStrategy::Fsdp,
                ShardingStrategy::Fsdp
            ]
            .map(Some)
        );
        assert_eq!(picked(Some(39)), None);
    }
}
