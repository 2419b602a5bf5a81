//! Flags that several verbs accept.

use std::path::Path;

use clap::Args;
use clap::builder::TypedValueParser;

use super::Gpus;
use crate::error::Result;
use crate::recipe::{Purpose, RecipeLayers, RecipeText};

/// Verbosity and network access of a command.
#[derive(Debug, Clone, Default, Args)]
pub struct CommonArgs {
    /// Use only local files, without network access
    #[arg(long)]
    pub offline: bool,
    /// Print only errors and warnings
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Print more details
    #[arg(short, long)]
    pub verbose: bool,
}

/// Model, training data and recipe of a run.
#[derive(Debug, Clone, Default, Args)]
pub struct RunArgs {
    /// Model: a Hugging Face folder, a GGUF file or a hub id
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Recipe: a TOML file or the name of a built-in recipe
    #[arg(long, value_name = "RECIPE")]
    pub recipe: Option<String>,
    /// Training data: a file, a folder or a hub data set; may be repeated
    #[arg(long, value_name = "DATASET")]
    pub dataset: Vec<String>,
}

impl RunArgs {
    /// Returns the layers of the recipe with the values of `--set`; relative paths start at
    /// `folder`.
    ///
    /// # Errors
    /// The recipe cannot be found or read.
    pub(super) fn layers(&self, set: &[String], folder: &Path) -> Result<RecipeLayers> {
        Ok(RecipeLayers {
            recipe: self.recipe.as_deref().map(|name| RecipeText::find(name, folder)).transpose()?,
            model: self.model.clone(),
            train: self.dataset.clone(),
            set: set.to_vec(),
            folder: folder.to_owned(),
            ..RecipeLayers::default()
        })
    }
}

/// Recipe of a run with its held-out data and changed keys.
#[derive(Debug, Clone, Default, Args)]
pub struct RecipeArgs {
    /// Model, training data and recipe.
    #[command(flatten)]
    pub run: RunArgs,
    /// Held-out data for evaluation, given like --dataset; may be repeated
    #[arg(long, value_name = "DATASET")]
    pub eval_dataset: Vec<String>,
    /// Set a recipe key; overrides flags and recipe; may be repeated
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
}

impl RecipeArgs {
    /// Returns the layers of the recipe, like [`RunArgs::layers`].
    ///
    /// # Errors
    /// The recipe cannot be found or read.
    pub(super) fn layers(&self, folder: &Path) -> Result<RecipeLayers> {
        Ok(RecipeLayers { eval: self.eval_dataset.clone(), ..self.run.layers(&self.set, folder)? })
    }
}

/// Devices on which a run trains.
#[derive(Debug, Clone, Default, Args)]
pub struct DeviceArgs {
    /// GPUs, such as 0 or 0,2 or 0-3 [default: the first GPU, else the CPU]
    #[arg(long, value_name = "LIST")]
    pub gpus: Option<Gpus>,
    /// Train on the CPU with this many ranks, as threads of one process
    #[arg(long, value_name = "N", conflicts_with = "gpus", value_parser = rank_count())]
    pub ranks: Option<u16>,
}

/// Model to use: a model, an adapter on its own model, or an adapter on the named model.
#[derive(Debug, Clone, Default, Args)]
pub struct ModelArgs {
    /// Model: a Hugging Face folder, a GGUF file or a hub id [default: the one the adapter names]
    #[arg(long, value_name = "MODEL", required_unless_present = "adapter")]
    pub model: Option<String>,
    /// Adapter: a folder or a hub id
    #[arg(long, value_name = "ADAPTER")]
    pub adapter: Option<String>,
    /// Use the adapter on a model other than the one it was trained on
    #[arg(long, requires = "adapter")]
    pub force_base: bool,
}

/// Options that decide, beside the model, how rows are read.
#[derive(Debug, Clone, Default, Args)]
pub struct RowArgs {
    /// Recipe to read [data] and [model] from
    #[arg(long, value_name = "RECIPE")]
    pub recipe: Option<String>,
    /// Set a recipe key, such as data.max_seq_len=512; may be repeated
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
}

impl RowArgs {
    /// Returns the layers of a recipe for `model` and `dataset`, the values of their flags.
    ///
    /// # Errors
    /// The recipe cannot be found or read.
    pub fn layers(&self, model: &str, dataset: &[String], folder: &Path) -> Result<RecipeLayers> {
        let (model, recipe, dataset) = (Some(model.to_owned()), self.recipe.clone(), dataset.to_vec());
        let run = RunArgs { model, recipe, dataset };
        Ok(RecipeLayers { purpose: Purpose::Other, ..run.layers(&self.set, folder)? })
    }
}

pub(super) fn rank_count() -> impl TypedValueParser<Value = u16> {
    clap::value_parser!(u16).range(1..=1024)
}

pub(super) fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n >= 1).ok_or_else(|| "accepted: a whole number, at least 1".into())
}
