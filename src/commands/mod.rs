//! Verbs of the command line, one file each. A verb takes its arguments, calls the modules below,
//! and returns an error instead of printing it.
//!
//! Results go to the standard output through [`print`], messages to the standard error.

mod adapter_base;
mod bench;
mod compare;
mod completions;
mod data;
mod data_json;
mod data_view;
mod doctor;
mod eval;
mod export;
mod generate;
mod inspect;
mod merge;
mod output;
mod plan;
mod quantize;
mod recipes;
mod train;
mod verify_resume;

use std::path::{Path, PathBuf};

use candle_core::Device;

use self::adapter_base::model_or_base;
use self::output::{print, print_json};
use crate::cli::{Cli, CommonArgs, TrainArgs, Verb};
use crate::error::input_file;
use crate::error::{Error, Result};
use crate::instruction_set;
use crate::launcher::restarts;
use crate::loading::{EngineOptions, ResolvedSource};
use crate::model::ModelConfig;
use crate::recipe::RecipeText;
use crate::report::{Terminal, Verbosity};
use crate::runtime::{device, thread_pool};

/// Runs the command.
///
/// # Errors
/// The error of the verb; its category decides the exit code.
pub fn run(cli: Cli) -> Result<()> {
    thread_pool::check_environment(&|name| std::env::var_os(name))?;
    instruction_set::check_environment(&|name| std::env::var_os(name))?;
    if computes(&cli) {
        thread_pool::start()?;
    }
    match cli.verb {
        Some(Verb::Recipes(args)) => recipes::run(args),
        Some(Verb::Completions(args)) => completions::run(&args),
        None => train::run(&cli.train),
        Some(Verb::Train(args)) => train::run(&args),
        Some(Verb::Merge(args)) => merge::run(&args),
        Some(Verb::Quantize(args)) => quantize::run(&args),
        Some(Verb::Export(args)) => export::run(&args),
        Some(Verb::Generate(args)) => generate::run(&args),
        Some(Verb::Eval(args)) => eval::run(&args),
        Some(Verb::Compare(args)) => compare::run(&args),
        Some(Verb::Inspect(args)) => inspect::run(&args),
        Some(Verb::Data(args)) => data::run(&args),
        Some(Verb::Plan(args)) => plan::run(&args),
        Some(Verb::Bench(args)) => bench::run(&args),
        Some(Verb::Doctor(args)) => doctor::run(&args),
        Some(Verb::VerifyResume(args)) => verify_resume::run(&args),
    }
}

/// Returns whether this process computes and so needs threads. Verbs that only print texts, read
/// headers or start other processes do not.
fn computes(cli: &Cli) -> bool {
    match &cli.verb {
        None => computes_when_training(&cli.train),
        Some(Verb::Train(args)) => computes_when_training(args),
        Some(Verb::Recipes(_) | Verb::Completions(_) | Verb::Inspect(_)) => false,
        Some(Verb::Compare(_) | Verb::VerifyResume(_)) => false,
        Some(_) => true,
    }
}

/// Returns whether this training command trains or plans in its own process.
fn computes_when_training(args: &TrainArgs) -> bool {
    args.sweep.is_empty() && !restarts::are_wanted(args)
}

fn terminal(common: &CommonArgs) -> Terminal {
    Terminal::stderr(match (common.quiet, common.verbose) {
        (true, _) => Verbosity::Quiet,
        (_, true) => Verbosity::Verbose,
        _ => Verbosity::Normal,
    })
}

fn working_folder() -> Result<PathBuf> {
    std::env::current_dir().map_err(|e| Error::io("find", Path::new("the working folder"), &e))
}

/// Opens the first GPU if this build and machine have one, else the CPU.
fn open_device() -> Result<Device> {
    device::open(device::preferred()?)
}

/// Warns about operations that are slow because the device has no kernel or product for them.
fn warn_without_kernels(terminal: &Terminal, options: &EngineOptions, config: &ModelConfig) {
    let texts = [options.without_kernels(config), options.software_fp8()];
    texts.iter().flatten().for_each(|text| terminal.warn(text));
}

/// Reads the config.json of a model.
fn config_of(source: &ResolvedSource) -> Result<ModelConfig> {
    let path = source.folder.join("config.json");
    let text = input_file::read_text("read", &path)?;
    ModelConfig::from_json(&text, &path.display().to_string())
}

/// Returns whether a training command uses the built-in recipe `name`.
fn train_recipe_is(args: &TrainArgs, name: &str) -> bool {
    let recipe_text = args.recipe.run.recipe.as_deref().map(|text| RecipeText::find(text, Path::new(".")));
    matches!(recipe_text, Some(Ok(recipe)) if recipe.is_built_in(name))
}
