//! Arguments of training.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::{CommonArgs, DeviceArgs, RecipeArgs, RunArgs, SettingArgs, SweepAxis};
use crate::checkpoint::{self, CHANGES_ON_REQUEST};
use crate::error::{Error, ErrorCategory, Result};
use crate::planning::RECIPE;
use crate::recipe::{RecipeLayers, RecipeText};

/// Output folder if `--output` is absent.
const OUTPUT: &str = "out";

/// Arguments of `finetune` without a verb, and of `finetune train`.
#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// Recipe of the run.
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Folder for checkpoints, logs and the result [default: out]
    #[arg(long = "output", value_name = "DIR")]
    pub output_folder: Option<PathBuf>,
    /// Train once per value, each in a folder of --output; repeated: per combination
    #[arg(long, value_name = "KEY=V1,V2", conflicts_with_all = ["ui", "dry_run"])]
    pub sweep: Vec<SweepAxis>,
    /// Resume from the newest checkpoint in the output folder, or from DIR
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    pub resume: Option<Option<PathBuf>>,
    /// Devices to train on.
    #[command(flatten)]
    pub devices: DeviceArgs,
    /// Run all --gpus as threads of one process, not as a process each
    #[arg(long, requires = "gpus")]
    pub gpus_in_process: bool,
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
    /// Common settings as flags.
    #[command(flatten)]
    pub settings: SettingArgs,
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
        let layers = self.recipe.layers(folder)?;
        Ok(RecipeLayers {
            is_left: own.is_some(),
            recipe: own.or(layers.recipe),
            settings: self.settings.assignments(),
            typed: std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect(),
            ..layers
        })
    }

    /// Checks that flags for several GPUs have several.
    ///
    /// # Errors
    /// Usage: `--gpus-in-process` with one GPU.
    pub fn check_devices(&self) -> Result<()> {
        let gpus = self.devices.gpus.as_ref().map_or(0, |gpus| gpus.0.len());
        if !self.gpus_in_process || gpus > 1 {
            return Ok(());
        }
        Err(Error::new(ErrorCategory::Usage, "cannot use `--gpus-in-process` with one GPU")
            .because("one GPU has one process anyway; accepted: two or more in `--gpus`")
            .hint("leave out `--gpus-in-process`, or name more GPUs with `--gpus`"))
    }

    /// Returns the output folder: that of `--output`, else that of the run that `--resume DIR`
    /// alone resumes, else `out`.
    pub fn output(&self) -> &Path {
        let own = self.resumed_folder().filter(|_| self.goes_on_alone());
        self.output_folder.as_deref().or(own).unwrap_or(Path::new(OUTPUT))
    }

    /// Returns whether `--resume` stands alone and takes recipe, model and data from the run.
    fn goes_on_alone(&self) -> bool {
        let RunArgs { model, recipe, dataset } = &self.recipe.run;
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
