//! Command line of `finetune verify-resume`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::Args;

use super::{CommonArgs, DeviceArgs, RecipeArgs};
use crate::error::Result;
use crate::recipe::RecipeLayers;

/// Arguments of `finetune verify-resume`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains the first steps of the recipe twice, once uninterrupted and once killed at a random instant and resumed. Compares \
every file of both runs byte by byte, except the times in metrics.jsonl and the files that hold times: README.md, \
report.html and TensorBoard's files.

Examples:
  finetune verify-resume --model Qwen/Qwen2.5-0.5B --recipe lora --dataset rows.jsonl
  finetune verify-resume --recipe my.toml --gpus 0-3 --steps 20 --kills 5")]
pub struct VerifyResumeArgs {
    /// Recipe of the run.
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Devices to train on.
    #[command(flatten)]
    pub devices: DeviceArgs,
    /// Steps of each of the two runs
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..=1_000_000))]
    pub steps: u64,
    /// Number of times to kill the second run
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub kills: u32,
    /// Folder for both runs; must be new or empty
    #[arg(long, value_name = "DIR", default_value = "verify-resume")]
    pub output: PathBuf,
    /// Keep the folders of both runs; otherwise equal runs are removed
    #[arg(long)]
    pub keep: bool,
    /// Accept an adapter of another base model
    #[arg(long)]
    pub force_base: bool,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
}

impl VerifyResumeArgs {
    /// Returns the layers of the recipe, like [`super::TrainArgs::layers`].
    ///
    /// # Errors
    /// The recipe cannot be found or read.
    pub fn layers(&self, folder: &Path) -> Result<RecipeLayers> {
        self.recipe.layers(folder)
    }

    /// Returns the command line that trains the same recipe into `output`. The keys of `set`
    /// override those of `--set`, because they come later.
    pub fn train_words(&self, output: &Path, set: &[String]) -> Vec<OsString> {
        let mut words: Vec<OsString> = Vec::new();
        let mut push = |flag: &str, value: &str| words.extend([OsString::from(flag), OsString::from(value)]);
        let RecipeArgs { run, eval_dataset, set: own } = &self.recipe;
        let named = [("--model", &run.model), ("--recipe", &run.recipe)];
        named.iter().for_each(|(flag, value)| value.iter().for_each(|value| push(flag, value)));
        run.dataset.iter().for_each(|value| push("--dataset", value));
        eval_dataset.iter().for_each(|value| push("--eval-dataset", value));
        own.iter().chain(set).for_each(|value| push("--set", value));
        if let Some(gpus) = &self.devices.gpus {
            push("--gpus", &gpus.0.iter().map(usize::to_string).collect::<Vec<_>>().join(","));
        }
        self.devices.ranks.iter().for_each(|ranks| push("--ranks", &ranks.to_string()));
        // A kill must end all ranks at once.
        let several = self.devices.gpus.as_ref().is_some_and(|gpus| gpus.0.len() > 1);
        words.extend(several.then(|| OsString::from("--gpus-in-process")));
        words.extend(self.force_base.then(|| OsString::from("--force-base")));
        words.extend(self.common.offline.then(|| OsString::from("--offline")));
        words.extend([OsString::from("--output"), output.into()]);
        words
    }
}
