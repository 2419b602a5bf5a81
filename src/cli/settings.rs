//! Common settings of training as flags of their own. Each sets one key of the recipe.

use clap::Args;

use crate::recipe::FlagAssignment;

/// Flags for the keys that people change most. They win over the recipe, and `--set` wins over them.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Common settings (each sets the key in brackets; --set wins over them)")]
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
    /// Rows that go through the model at once, or auto [train.micro_batch_size]
    #[arg(long, value_name = "ROWS", allow_hyphen_values = true)]
    pub batch: Option<String>,
    /// Tokens of a row at most [data.max_seq_len]
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true)]
    pub seq_len: Option<String>,
    /// Rank of the adapter [adapter.r]
    #[arg(long, value_name = "R", allow_hyphen_values = true)]
    pub lora_r: Option<String>,
    /// Seed of everything random [train.seed]
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
    /// The flags that were given, as assignments to keys.
    pub fn assignments(&self) -> Vec<FlagAssignment> {
        let Self { lr, epochs, steps, batch, seq_len, lora_r, seed } = self;
        let given = [lr, epochs, steps, batch, seq_len, lora_r, seed];
        let named = SETTINGS.iter().zip(given);
        let assign = |(&(flag, section, key), value): (
            &(&'static str, &'static str, &'static str),
            &Option<String>,
        )| {
            let value = value.clone()?;
            Some(FlagAssignment { flag, section, key, value })
        };
        named.filter_map(assign).collect()
    }
}
