//! The arguments of `finetune bench`.

use std::path::Path;

use clap::{Args, Subcommand};

use super::{CommonArgs, Gpus, RunArgs, find_recipe};
use crate::error::Result;
use crate::recipe::RecipeLayers;

/// What to measure.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// What is measured.
    #[command(subcommand)]
    pub what: BenchVerb,
}

/// What can be measured.
#[derive(Debug, Clone, Subcommand)]
pub enum BenchVerb {
    /// Tokens a second by ranks, bytes sent beside the formula, time lost to communication
    Scaling(ScalingArgs),
}

/// `finetune bench scaling`.
#[derive(Debug, Clone, Args)]
pub struct ScalingArgs {
    /// What is trained.
    #[command(flatten)]
    pub run: RunArgs,
    /// Set one key of the recipe; wins over flags and recipe; may be repeated
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
    /// Measure on these GPUs, a rank on each, instead of the CPU: the first ones of the list for fewer ranks
    #[arg(long, value_name = "LIST")]
    pub gpus: Option<Gpus>,
    /// The numbers of ranks to measure
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [1, 2], value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub ranks: Vec<u16>,
    /// Threads of each rank [default: those there are, over the most ranks]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Steps measured, after two that are not
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub steps: u32,
    /// Print the figures as JSON
    #[arg(long)]
    pub json: bool,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
}

impl ScalingArgs {
    /// As [`TrainArgs::layers`].
    ///
    /// # Errors
    /// As there.
    pub fn layers(&self, folder: &Path) -> Result<RecipeLayers> {
        let (model, train, set) = (self.run.model.clone(), self.run.dataset.clone(), self.set.clone());
        let recipe = find_recipe(self.run.recipe.as_deref(), folder)?;
        Ok(RecipeLayers { recipe, model, train, set, folder: folder.to_owned(), ..RecipeLayers::default() })
    }
}
