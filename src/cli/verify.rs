//! Command line of `finetune verify-resume`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::Args;

use super::{CommonArgs, Gpus, RunArgs, find_recipe};
use crate::error::Result;
use crate::recipe::{Purpose, RecipeLayers};

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
    /// Model, training data and recipe of the run.
    #[command(flatten)]
    pub run: RunArgs,
    /// Held-out data for evaluation, given like --dataset; may be repeated
    #[arg(long, value_name = "DATASET")]
    pub eval_dataset: Vec<String>,
    /// Set a recipe key; overrides flags and recipe; may be repeated
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
    /// GPUs, such as 0 or 0,2 or 0-3 [default: the first GPU, else the CPU]
    #[arg(long, value_name = "LIST")]
    pub gpus: Option<Gpus>,
    /// Train on the CPU with this many ranks, as threads of one process
    #[arg(long, value_name = "N", conflicts_with = "gpus", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub ranks: Option<u16>,
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
        Ok(RecipeLayers {
            recipe: find_recipe(self.run.recipe.as_deref(), folder)?,
            model: self.run.model.clone(),
            train: self.run.dataset.clone(),
            eval: self.eval_dataset.clone(),
            set: self.set.clone(),
            folder: folder.to_owned(),
            purpose: Purpose::Train,
            ..RecipeLayers::default()
        })
    }

    /// Returns the command line that trains the same recipe into `output`. The keys of `set`
    /// override those of `--set`, because they come later.
    pub fn train_words(&self, output: &Path, set: &[String]) -> Vec<OsString> {
        let mut words: Vec<OsString> = Vec::new();
        let mut push = |flag: &str, value: &str| words.extend([OsString::from(flag), OsString::from(value)]);
        let named = [("--model", &self.run.model), ("--recipe", &self.run.recipe)];
        named.iter().for_each(|(flag, value)| value.iter().for_each(|value| push(flag, value)));
        self.run.dataset.iter().for_each(|value| push("--dataset", value));
        self.eval_dataset.iter().for_each(|value| push("--eval-dataset", value));
        self.set.iter().chain(set).for_each(|value| push("--set", value));
        if let Some(gpus) = &self.gpus {
            push("--gpus", &gpus.0.iter().map(usize::to_string).collect::<Vec<_>>().join(","));
        }
        self.ranks.iter().for_each(|ranks| push("--ranks", &ranks.to_string()));
        words.extend(self.force_base.then(|| OsString::from("--force-base")));
        words.extend(self.common.offline.then(|| OsString::from("--offline")));
        words.extend([OsString::from("--output"), output.into()]);
        words
    }
}
