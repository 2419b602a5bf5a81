//! Flags for common settings of training. Each sets one key of the recipe.

use clap::Args;

use crate::recipe::FlagAssignment;

/// Flags for the recipe keys that users change most. They override the recipe, and `--set`
/// overrides them.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Common settings (each sets the key in brackets; --set overrides them)")]
pub struct SettingArgs {
    /// Learning rate after the warm-up [optimizer.learning_rate]
    #[arg(long, value_name = "RATE", allow_hyphen_values = true)]
    pub lr: Option<String>,
    /// Passes over the data [train.epochs]
    #[arg(long, value_name = "N", allow_hyphen_values = true, conflicts_with = "max_steps")]
    pub epochs: Option<String>,
    /// Optimizer steps of the whole run [train.max_steps]
    #[arg(id = "max_steps", long = "steps", value_name = "N", allow_hyphen_values = true)]
    pub steps: Option<String>,
    /// Rows of a micro-batch on each rank, or auto [train.micro_batch_size]
    #[arg(long, value_name = "ROWS", allow_hyphen_values = true)]
    pub batch: Option<String>,
    /// Largest number of tokens in a row [data.max_seq_len]
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true)]
    pub seq_len: Option<String>,
    /// Rank of the adapter [adapter.r]
    #[arg(long, value_name = "R", allow_hyphen_values = true)]
    pub lora_r: Option<String>,
    /// Seed of all random numbers [train.seed]
    #[arg(long, value_name = "S", allow_hyphen_values = true)]
    pub seed: Option<String>,
}

/// Each flag with the section and key that it sets.
pub(super) const SETTINGS: [(&str, &str, &str); 7] = [
    ("--lr", "optimizer", "learning_rate"),
    ("--epochs", "train", "epochs"),
    ("--steps", "train", "max_steps"),
    ("--batch", "train", "micro_batch_size"),
    ("--seq-len", "data", "max_seq_len"),
    ("--lora-r", "adapter", "r"),
    ("--seed", "train", "seed"),
];

impl SettingArgs {
    /// Returns the flags on the command line as assignments to keys.
    pub fn assignments(&self) -> Vec<FlagAssignment> {
        let Self { lr, epochs, steps, batch, seq_len, lora_r, seed } = self;
        let given = [lr, epochs, steps, batch, seq_len, lora_r, seed];
        let named = SETTINGS.iter().zip(given);
        named
            .filter_map(|(&(flag, section, key), value)| {
                Some(FlagAssignment { flag, section, key, value: value.clone()? })
            })
            .collect()
    }
}
