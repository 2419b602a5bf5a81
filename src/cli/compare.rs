//! Command line of `finetune compare`.

use std::path::PathBuf;

use clap::Args;

/// Arguments of `finetune compare`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Prints a line for each run: the recipe keys that differ, steps, losses, time and peak memory.

Examples:
  finetune compare out/r4 out/r8 out/r16
  finetune compare first second --html runs.html")]
pub struct CompareArgs {
    /// Output folders of 2 to 20 runs
    #[arg(value_name = "OUTPUT", required = true, num_args = 2..=20)]
    pub runs: Vec<PathBuf>,
    /// Print the table as JSON
    #[arg(long)]
    pub json: bool,
    /// Also write an HTML page with the table and all curves; replaces an older one
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}
