//! `finetune` without a verb and `finetune train`: from the recipe to a trained model on disk.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use super::{terminal, train_recipe_is, warn_without_kernels, working_folder};
use crate::checkpoint::SaveThreads;
use crate::cli::TrainArgs;
use crate::comparison::sweep;
use crate::error::Result;
use crate::launcher::ranks::{self, RankSetup};
use crate::launcher::{restarts, signals};
use crate::planning::Plan;
use crate::recipe::{AutoOr, Recipe};
use crate::report::{Terminal, Verbosity};
use crate::training::EarlierRun;
use crate::training::alerts;
use crate::training::output_folder::OutputFolder;
use crate::training::report_page::PlannedProcess;
use crate::training::showcase::Showcase;
use crate::training::smaller_micro_batch::OomRetry;
use crate::training::train::TrainRun;
use crate::training::train_plan::{check_learns, plan_of};
use crate::units;

/// Trains the model of a recipe.
pub(super) fn run(args: &TrainArgs) -> Result<()> {
    args.check_devices()?;
    if !args.sweep.is_empty() {
        return sweep::run(args, &working_folder()?, &terminal(&args.common));
    }
    if restarts::are_wanted(args) {
        return restarts::supervise(args, || OutputFolder::check_new(args));
    }
    let mut next = train(args, false)?;
    while let Some(args) = next {
        next = train(&args, true)?;
    }
    Ok(())
}

/// Trains once; `is_smaller` is true if a previous call ran out of memory. Returns the arguments
/// for a smaller micro-batch if the device ran out of memory and the plan may choose the
/// micro-batch.
fn train(args: &TrainArgs, is_smaller: bool) -> Result<Option<TrainArgs>> {
    let started = Instant::now();
    let launch = ranks::launch(args)?;
    let terminal = match launch.rank {
        0 => terminal(&args.common),
        _ => Terminal::stderr(Verbosity::Quiet),
    };
    let recipe = Recipe::load(&args.layers(&working_folder()?)?)?;
    let is_free = is_smaller || recipe.train.micro_batch_size == AutoOr::Auto;
    alerts::check(&recipe, args.common.offline)?;
    recipe.written.overruled().iter().for_each(|text| terminal.line(text));
    let ranks = RankSetup::open(launch, args)?;
    let first = ranks.launch.rank == 0;
    let output = (!args.dry_run).then(|| OutputFolder::prepare(args, first, &terminal)).transpose()?;
    let mut plan = plan_of(recipe, args, &ranks, output.as_ref(), &terminal)?;
    let resumed = output.as_ref().and_then(|output| output.resumed.as_ref());
    let base_check = plan.check_base(resumed, args.force_base)?;
    base_check.iter().for_each(|check| check.print(&terminal));
    print_plan(&plan, &terminal);
    check_learns(&plan, first, &terminal)?;
    let fits = plan.check_memory(ranks.launch.ranks_here, ranks.launch.local_world_size);
    let Some(mut output) = output else { return only_planned(&plan, fits, &terminal).map(|()| None) };
    // Only the first process answers: it holds the folder, which other hosts may not see.
    let has_ended = || Ok(vec![u8::from(output.has_ended(&plan, args.output())?)]);
    if args.resume.is_some() && ranks.agree("whether the run has ended", has_ended)? == [1] {
        report_ended(&plan, args, output.resumed.is_some(), &terminal);
        return Ok(None);
    }
    fits?;
    let resumed = output.resumed.take();
    let resume = |saved| plan.resume(saved, &args.allow_change);
    let changes = resumed.as_ref().map_or(Ok(Vec::new()), resume)?;
    changes.iter().for_each(|change| terminal.line(format!("resuming with a change: {change}")));
    let (folder, stop) = (OnceLock::new(), Arc::default());
    let showcase = Showcase::of(&plan, train_recipe_is(args, "quickstart"))?;
    let run = TrainRun {
        args,
        showcase,
        planned: PlannedProcess::of(&plan, ranks.launch.ranks_here),
        plan: &plan,
        resumed: resumed.as_ref(),
        base_check,
        folder: &folder,
        metrics: Mutex::default(),
        stop: &stop,
        // Dropped after all ranks have ended.
        writers: &SaveThreads::default(),
        terminal: &terminal,
        started,
        earlier: EarlierRun::read(resumed.as_ref(), args.output()),
        too_large: OomRetry::default(),
    };
    let claim = || {
        // Only now: until all processes have joined, a signal ends this one, which has nothing to
        // save.
        signals::watch(&stop)?;
        if first { run.claim(output) } else { Ok(()) }
    };
    let Err(error) = ranks.run(&plan, claim, |world, device| run.rank(world, device)) else {
        return Ok(None);
    };
    let is_alone = ranks.launch.master.is_none();
    let smaller = || run.too_large.smaller(args, &plan, &error, &terminal);
    (is_free && is_alone).then(smaller).flatten().map(Some).ok_or(error)
}

/// Prints that the run of `plan` is complete and how to train longer.
fn report_ended(plan: &Plan, args: &TrainArgs, can_go_on: bool, terminal: &Terminal) {
    let output = args.output().display();
    terminal.line(format!(
        "nothing is left to do: the run in {output} has done its {} and saved its result",
        units::exact(plan.total_steps, "step")
    ));
    let train = &plan.recipe.train;
    let more =
        train.max_steps.map_or(format!("--epochs {}", 2.0 * train.epochs), |n| format!("--steps {}", 2 * n));
    terminal.line(if can_go_on {
        format!("to train longer: `finetune --resume --output {output} {more}`")
    } else {
        format!("to train longer, give a new folder with `--output` and more steps, such as `{more}`")
    });
}

/// Prints the resolved recipe. Insufficient memory is only a warning, because the plan may be for
/// another machine.
fn only_planned(plan: &Plan, fits: Result<()>, terminal: &Terminal) -> Result<()> {
    fits.err().iter().for_each(|error| terminal.warn(error.in_one_line()));
    terminal.data(plan.portable_recipe().to_toml())
}

/// Prints the plan and its warnings before the first step.
fn print_plan(plan: &Plan, terminal: &Terminal) {
    let commit = plan.base.source.commit.as_ref().map(|commit| format!(" at {commit}")).unwrap_or_default();
    terminal.line(format!("model {}{commit}", plan.base.source.id));
    terminal.line(format!("data: {}", plan.train.dataset.report()));
    plan.held_out_report().iter().for_each(|report| terminal.line(format!("held out: {report}")));
    plan.dataset_loader.warnings().iter().for_each(|text| terminal.warn(text));
    warn_without_kernels(terminal, &plan.engine, &plan.base.config);
    let graphs = plan.engine.without_graphs(plan.recipe.train.cuda_graphs);
    graphs.into_iter().for_each(|text| terminal.warn(&text));
    terminal.line(plan.describe());
    plan.warnings().iter().for_each(|text| terminal.warn(text));
}
