//! Arguments of training.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::{CommonArgs, Gpus, RunArgs, SettingArgs, SweepAxis, find_recipe};
use crate::checkpoint::{self, CHANGES_ON_REQUEST};
use crate::error::{Error, Result};
use crate::planning::RECIPE;
use crate::recipe::{Purpose, RecipeLayers, RecipeText};

/// Output folder if `--output` is absent.
const OUTPUT: &str = "out";

/// Arguments of `finetune` without a verb, and of `finetune train`.
#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// Model, training data and recipe of the run.
    #[command(flatten)]
    pub run: RunArgs,
    /// Held-out data for evaluation, given like --dataset; may be repeated
    #[arg(long, value_name = "DATASET")]
    pub eval_dataset: Vec<String>,
    /// Common settings as flags.
    #[command(flatten)]
    pub settings: SettingArgs,
    /// Folder for checkpoints, logs and the result [default: out]
    #[arg(long = "output", value_name = "DIR")]
    pub output_folder: Option<PathBuf>,
    /// Set a recipe key; overrides flags and recipe; may be repeated
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
    /// Train once per value, each in a folder of --output; repeated: per combination
    #[arg(long, value_name = "KEY=V1,V2", conflicts_with_all = ["ui", "dry_run"])]
    pub sweep: Vec<SweepAxis>,
    /// Resume from the newest checkpoint in the output folder, or from DIR
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    pub resume: Option<Option<PathBuf>>,
    /// GPUs, such as 0 or 0,2 or 0-3 [default: the first GPU, else the CPU]
    #[arg(long, value_name = "LIST")]
    pub gpus: Option<Gpus>,
    /// Train on the CPU with this many ranks, as threads of this process
    #[arg(long, value_name = "N", conflicts_with = "gpus", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub ranks: Option<u16>,
    /// Restart from the newest checkpoint up to N times after a crash, kill or hang
    #[arg(long, value_name = "N")]
    pub max_restarts: Option<u16>,
    /// Let this learning-rate or scheduler key differ on resume; may be repeated
    #[arg(long, value_name = "KEY", requires = "resume", hide_possible_values = true, value_parser = PossibleValuesParser::new(CHANGES_ON_REQUEST))]
    pub allow_change: Vec<String>,
    /// Accept a checkpoint or adapter of another base model
    #[arg(long)]
    pub force_base: bool,
    /// Show the run full-screen: curves, speed, memory, time; `q` saves and stops
    #[arg(long, conflicts_with_all = ["quiet", "dry_run"])]
    pub ui: bool,
    /// Print the resolved recipe and the plan of the run, without training
    #[arg(long)]
    pub dry_run: bool,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Position of this process among several without a launcher.
    #[command(flatten)]
    pub processes: ProcessArgs,
}

/// Position of this process among several. torchrun, mpirun, Slurm and Kubernetes set it in the
/// environment.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Several processes without a launcher")]
pub struct ProcessArgs {
    /// Number of ranks in all processes
    #[arg(long, value_name = "N", requires = "rank")]
    pub world_size: Option<usize>,
    /// First rank of this process
    #[arg(long, value_name = "R", requires = "world_size")]
    pub rank: Option<usize>,
    /// Address at which rank 0 listens
    #[arg(long, value_name = "HOST")]
    pub master_addr: Option<String>,
    /// Port on which rank 0 listens
    #[arg(long, value_name = "PORT")]
    pub master_port: Option<u16>,
}

impl TrainArgs {
    /// Returns the layers of the recipe; relative paths in flags start at `folder`.
    ///
    /// # Errors
    /// The recipe cannot be found or read.
    pub fn layers(&self, folder: &Path) -> Result<RecipeLayers> {
        let own = self.goes_on_alone().then(|| self.left_recipe(folder)).transpose()?;
        Ok(RecipeLayers {
            is_left: own.is_some(),
            recipe: own
                .map_or_else(|| find_recipe(self.run.recipe.as_deref(), folder), |own| Ok(Some(own)))?,
            model: self.run.model.clone(),
            train: self.run.dataset.clone(),
            eval: self.eval_dataset.clone(),
            settings: self.settings.assignments(),
            set: self.set.clone(),
            typed: std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect(),
            folder: folder.to_owned(),
            purpose: Purpose::Train,
        })
    }

    /// Returns the output folder: that of `--output`, else that of the run that `--resume DIR`
    /// alone resumes, else `out`.
    pub fn output(&self) -> &Path {
        let own = self.resumed_folder().filter(|_| self.goes_on_alone());
        self.output_folder.as_deref().or(own).unwrap_or(Path::new(OUTPUT))
    }

    /// Returns whether `--resume` stands alone and takes recipe, model and data from the run.
    fn goes_on_alone(&self) -> bool {
        let RunArgs { model, recipe, dataset } = &self.run;
        self.resume.is_some() && model.is_none() && recipe.is_none() && dataset.is_empty()
    }

    /// Returns the folder of the run that `--resume DIR` names; DIR may be one of its checkpoints.
    fn resumed_folder(&self) -> Option<&Path> {
        let named = self.resume.as_ref()?.as_deref()?;
        let run = named.parent().filter(|_| checkpoint::is_one(named));
        // The parent of a bare name is the working folder.
        Some(run.map_or(named, |run| if run.as_os_str().is_empty() { Path::new(".") } else { run }))
    }

    /// Reads the recipe.toml in the folder of the run to resume.
    fn left_recipe(&self, folder: &Path) -> Result<RecipeText> {
        let run = self.resumed_folder().unwrap_or(self.output());
        let file = run.join(RECIPE);
        if !folder.join(&file).is_file() {
            return Err(Error::user(format!("cannot resume in {}", run.display()))
                .because(format!("{} is missing, which every run writes", file.display()))
                .hint("name the run's folder with `--output`, or give `--recipe`, `--model` and `--dataset` as before"));
        }
        RecipeText::find(&file.to_string_lossy(), folder)
    }
}
