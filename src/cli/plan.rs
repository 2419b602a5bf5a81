//! Arguments of `finetune plan`.

use std::path::{Path, PathBuf};

use clap::Args;

use super::shared::rank_count;
use super::{CommonArgs, Gpus, RecipeArgs, SettingArgs};
use crate::error::Result;
use crate::recipe::{Purpose, RecipeLayers};

/// Command line of `finetune plan`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  finetune plan --model meta-llama/Llama-2-7b-hf --on 8xH100-80GB
  finetune plan --model Qwen/Qwen3-8B --recipe qlora --on 4090 --price 0.44/h
  finetune plan --model Qwen/Qwen3-8B --recipe full --on 4xA100-40GB*16 --price 32.77/h*16 --json
  finetune plan --recipe my.toml --on hardware.toml --html plan.html

DEVICE of `--on` is a name of the table (a wrong name lists all), or a TOML file with one table
[device]: name, memory_gb, bf16_tflops, f32_tflops, memory_gbps, link, link_gbps,
host_gbps, network_gbps, host_memory_gb, disk_gbps, devices_per_host, efficiency, source.
Sizes (_gb) are in 10^9 bytes, rates (_gbps) in 10^9 bytes a second. Optional: compute_capability,
processor (true if runs compute on the processor).")]
pub struct PlanArgs {
    /// Recipe of the run. Without data, all rows have `data.max_seq_len` tokens.
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Hardware, with a rank per device: [COUNTx]DEVICE[*HOSTS], such as 8xH100-80GB*2
    #[arg(long, value_name = "HARDWARE", allow_hyphen_values = true, conflicts_with_all = ["gpus", "ranks"])]
    pub on: Option<String>,
    /// GPUs of this machine, such as 0,2 or 0-3 [default: the first GPU, else the CPU]
    #[arg(long, value_name = "LIST")]
    pub gpus: Option<Gpus>,
    /// Number of ranks on the CPU of this machine
    #[arg(long, value_name = "N", conflicts_with = "gpus", value_parser = rank_count())]
    pub ranks: Option<u16>,
    /// Price: AMOUNT/h[*COUNT], or AMOUNT/GB-month[*GB] of storage; may be repeated
    #[arg(long, value_name = "PRICE", allow_hyphen_values = true)]
    pub price: Vec<String>,
    /// Speeds measured by `finetune bench ops --json`, instead of those of the table
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Write an HTML page to explore sizes and settings; it works offline
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Print all tables: memory by cause, rules of thumb, time, ways to train, splits
    #[arg(long)]
    pub full: bool,
    /// Print all results as JSON
    #[arg(long)]
    pub json: bool,
    /// Network and verbosity.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Common settings as flags.
    #[command(flatten)]
    pub settings: SettingArgs,
}

impl PlanArgs {
    /// Returns the layers of the recipe; relative paths in flags start at `folder`. Only the model
    /// is required.
    ///
    /// # Errors
    /// The recipe cannot be found or read.
    pub fn layers(&self, folder: &Path) -> Result<RecipeLayers> {
        Ok(RecipeLayers {
            settings: self.settings.assignments(),
            purpose: Purpose::Other,
            ..self.recipe.layers(folder)?
        })
    }
}
