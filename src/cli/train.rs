//! The arguments of training.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::{CommonArgs, Gpus, RunArgs, SettingArgs, SweepAxis, find_recipe};
use crate::checkpoint::{self, CHANGES_ON_REQUEST};
use crate::error::{Error, Result};
use crate::planning::RECIPE;
use crate::recipe::{Purpose, RecipeLayers, RecipeText};

/// The output folder where none is given.
const OUTPUT: &str = "out";

/// Arguments of `finetune` without a verb, and of `finetune train`.
#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// The model, rows and recipe of the run.
    #[command(flatten)]
    pub run: RunArgs,
    /// The same, held out for evaluation; may be repeated
    #[arg(long, value_name = "DATASET")]
    pub eval_dataset: Vec<String>,
    /// Common settings as flags.
    #[command(flatten)]
    pub settings: SettingArgs,
    /// The folder for everything the run leaves [default: out]
    #[arg(long = "output", value_name = "DIR")]
    pub output_folder: Option<PathBuf>,
    /// Set one key of the recipe; wins over flags and recipe; may be repeated
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
    /// Train once for each value of this key, into a folder each below --output; repeated: for each combination
    #[arg(long, value_name = "KEY=V1,V2", conflicts_with_all = ["ui", "dry_run"])]
    pub sweep: Vec<SweepAxis>,
    /// Go on from the newest checkpoint in the output folder, or from DIR; without --recipe, --model and --dataset
    /// by the recipe.toml that the run left there
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    pub resume: Option<Option<PathBuf>>,
    /// Devices, such as 0 or 0,2 or 0-3 [default: the first GPU, else the CPU]
    #[arg(long, value_name = "LIST")]
    pub gpus: Option<Gpus>,
    /// Train on the CPU with this many ranks, threads of this process
    #[arg(long, value_name = "N", conflicts_with = "gpus", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub ranks: Option<u16>,
    /// Restart from the newest checkpoint up to N times after a crash, a kill or a hang
    #[arg(long, value_name = "N")]
    pub max_restarts: Option<u16>,
    /// Let a resumed run change this key (learning rate or schedule); may be repeated
    #[arg(long, value_name = "KEY", requires = "resume", hide_possible_values = true, value_parser = PossibleValuesParser::new(CHANGES_ON_REQUEST))]
    pub allow_change: Vec<String>,
    /// Accept a checkpoint or adapter of another base model
    #[arg(long)]
    pub force_base: bool,
    /// Show the run on a whole screen: curves, speed, memory, where the time goes; `q` saves and stops
    #[arg(long, conflicts_with_all = ["quiet", "dry_run"])]
    pub ui: bool,
    /// Print the resolved recipe and what the run would do; train nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where the run is spread over several processes and no launcher says how.
    #[command(flatten)]
    pub processes: ProcessArgs,
}

/// The place of this process among several; torchrun, mpirun, Slurm and Kubernetes say it in the environment.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Several processes without a launcher")]
pub struct ProcessArgs {
    /// Ranks in all processes
    #[arg(long, value_name = "N", requires = "rank")]
    pub world_size: Option<usize>,
    /// The first rank of this process
    #[arg(long, value_name = "R", requires = "world_size")]
    pub rank: Option<usize>,
    /// The address at which rank 0 listens
    #[arg(long, value_name = "HOST")]
    pub master_addr: Option<String>,
    /// The port on which rank 0 listens
    #[arg(long, value_name = "PORT")]
    pub master_port: Option<u16>,
}

impl TrainArgs {
    /// The layers of the recipe; relative paths in flags start at `folder`.
    ///
    /// # Errors
    /// When the recipe cannot be found or read.
    pub fn layers(&self, folder: &Path) -> Result<RecipeLayers> {
        let own = self.goes_on_alone().then(|| self.left_recipe(folder)).transpose()?;
        Ok(RecipeLayers {
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

    /// The output folder: the one that is given, else that of the run which `--resume DIR` alone goes on with, else `out`.
    pub fn output(&self) -> &Path {
        let own = self.resumed_folder().filter(|_| self.goes_on_alone());
        self.output_folder.as_deref().or(own).unwrap_or(Path::new(OUTPUT))
    }

    /// Returns whether `--resume` is to find recipe, model and data by itself.
    fn goes_on_alone(&self) -> bool {
        let RunArgs { model, recipe, dataset } = &self.run;
        self.resume.is_some() && model.is_none() && recipe.is_none() && dataset.is_empty()
    }

    /// The folder of the run that `--resume DIR` names, where DIR may be one of its checkpoints.
    fn resumed_folder(&self) -> Option<&Path> {
        let named = self.resume.as_ref()?.as_deref()?;
        let run = named.parent().filter(|_| checkpoint::is_one(named));
        // The parent of a bare name is the working folder.
        Some(run.map_or(named, |run| if run.as_os_str().is_empty() { Path::new(".") } else { run }))
    }

    /// The recipe that the run to go on with left in its folder.
    fn left_recipe(&self, folder: &Path) -> Result<RecipeText> {
        let run = self.resumed_folder().unwrap_or(self.output());
        let file = run.join(RECIPE);
        if !folder.join(&file).is_file() {
            return Err(Error::user(format!("cannot resume in {}", run.display()))
                .because(format!("there is no {}, which every run leaves", file.display()))
                .hint("name the run's folder with `--output`, or give `--recipe`, `--model` and `--dataset` as before"));
        }
        RecipeText::find(&file.to_string_lossy(), folder)
    }
}
