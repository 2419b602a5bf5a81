//! Plan of a training run. Each process makes it for itself, and all plans are the same.

use super::output_folder::{OutputFolder, parse_date};
use crate::cli::TrainArgs;
use crate::clock;
use crate::collective::launch::Launch;
use crate::error::Result;
use crate::launcher::ranks::RankSetup;
use crate::loading::Resolver;
use crate::planning::{MemoryBudget, Plan, WorldSize};
use crate::recipe::Recipe;
use crate::report::Terminal;

/// Plans the run of `recipe` that writes to the folder `output_folder`, if any.
///
/// # Errors
/// Those of [`Plan::resolve`]; the processes do not all join.
pub(crate) fn plan_of(
    recipe: Recipe,
    args: &TrainArgs,
    ranks: &RankSetup,
    output_folder: Option<&OutputFolder>,
    terminal: &Terminal,
) -> Result<Plan> {
    // A dry run contacts no other process.
    let budget = output_folder.map_or(Ok(MemoryBudget::Local), |_| ranks.memory())?;
    let Launch { world_size: all, local_world_size: local, ranks_here: here, .. } = ranks.launch;
    let resolver = Resolver::new(args.common.offline, terminal)?;
    let resolver = if args.dry_run { resolver.leaving_weights() } else { resolver };
    let recorded = output_folder.map_or(Ok(None), OutputFolder::date)?;
    let resolve = |recipe, now| {
        let resumed = output_folder.and_then(|output_folder| output_folder.resumed.as_ref());
        Plan::resolve(
            recipe,
            &resolver,
            (ranks.device(), budget),
            WorldSize { all, local, here },
            resumed,
            now,
        )
    };
    let mut plan = resolve(recipe.clone(), recorded.unwrap_or_else(clock::now))?;
    if let (Some(own), Some(OutputFolder { resumed: None, .. })) = (plan.dataset_loader.date(), output_folder)
    {
        // Every process must pass the same date to the template.
        let agreed = ranks.agree("the date of the chat template", || Ok(own.to_rfc3339().into_bytes()))?;
        let agreed = parse_date(&String::from_utf8_lossy(&agreed))?;
        if agreed != own {
            plan = resolve(recipe, agreed)?;
        }
    }
    Ok(plan)
}

/// Refuses a run that learns nothing. The first process warns about ends of answers that the run
/// cannot learn.
///
/// # Errors
/// Those of [`Plan::check_learns`] and [`Plan::unlearnable_ends`].
pub(crate) fn check_learns(plan: &Plan, first: bool, terminal: &Terminal) -> Result<()> {
    if first {
        plan.unlearnable_ends()?.iter().for_each(|text| terminal.warn(text));
    }
    plan.check_learns()
}
