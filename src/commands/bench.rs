//! `finetune bench`: how speed grows with ranks. Each number of ranks trains the same recipe for some steps.

use super::{print, terminal};
use crate::cli::{BenchArgs, BenchVerb, ScalingArgs};
use crate::error::{Error, Result};
use crate::plan::{Plan, WorldSize};
use crate::recipe::{Recipe, Strategy};
use crate::run::scaling::{ScalingDevices, ScalingResult, WARM_UP};
use crate::runtime::thread_pool;
use crate::setup::Resolver;

/// Measures what is asked for.
pub(super) fn run(args: &BenchArgs) -> Result<()> {
    match &args.what {
        BenchVerb::Scaling(args) => scaling(args),
    }
}

fn scaling(args: &ScalingArgs) -> Result<()> {
    let terminal = terminal(&args.common);
    let recipe = Recipe::load(&args.layers(&super::working_folder()?)?)?;
    let finder = Resolver::new(args.common.offline, &terminal)?;
    let most = args.ranks.iter().copied().max().map_or(1, usize::from);
    let devices = ScalingDevices::open(args.gpus.as_ref().map(|gpus| gpus.0.as_slice()), most)?;
    let threads = args.threads.map_or_else(|| (thread_pool::num_threads() / most).max(1), usize::from);
    let mut results: Vec<ScalingResult> = Vec::new();
    for ranks in args.ranks.iter().copied().map(usize::from) {
        let mut recipe = recipe.clone();
        recipe.train.max_steps = Some(WARM_UP + u64::from(args.steps));
        if ranks == 1 {
            (recipe.parallel.strategy, recipe.parallel.shard_size) = (Strategy::Single, None);
        }
        let now = chrono::Local::now().fixed_offset();
        let world = WorldSize::on_one_host(ranks);
        let plan = Plan::resolve(recipe, &finder, devices.device(), world, None, now)?;
        terminal.line(plan.describe());
        results.push(ScalingResult::measure(&plan, &devices, ranks, threads, results.first())?);
    }
    let json = || serde_json::to_string_pretty(&results).map_err(|e| Error::internal(e.to_string()));
    if args.json { print(&format!("{}\n", json()?)) } else { print(&ScalingResult::table(&results)) }
}
