//! The arguments of `finetune doctor`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::CommunicationArgs;

/// Arguments of `finetune doctor`.
#[derive(Debug, Clone, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true,
    after_help = "\
Examples:
  finetune doctor
  finetune doctor --disk /scratch --json
  finetune doctor --selftest
  finetune doctor net --ranks 4"
)]
pub struct DoctorArgs {
    /// Without a word: what this machine offers.
    #[command(subcommand)]
    pub what: Option<DoctorVerb>,
    /// Compare every operation, forward and backward, with its reference
    #[arg(long, conflicts_with = "json")]
    pub selftest: bool,
    /// Compute by the GPU's kernels, run on the processor (builds with the feature `kernel-emu`)
    #[arg(long, requires = "selftest")]
    pub emulated: bool,
    /// Write what each instruction of the kernels left in registers, to be kept in crates/ops/tests/golden
    #[arg(long, requires = "selftest", value_name = "FILE", hide = true)]
    pub probe: Option<PathBuf>,
    /// Measure the disks of the hub's cache and of DIR [default: the working folder]; takes some seconds
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    pub disk: Option<Option<PathBuf>>,
    /// Print what is found as JSON
    #[arg(long)]
    pub json: bool,
}

/// What else is looked into.
#[derive(Debug, Clone, Subcommand)]
pub enum DoctorVerb {
    /// Bandwidth of collectives and of every pair of ranks, slow pairs by name, and how far clocks are apart
    #[command(after_help = NET_EXAMPLES)]
    Net(CommunicationArgs),
}

const NET_EXAMPLES: &str = "\
Examples:
  finetune doctor net --ranks 4
  finetune doctor net --gpus 0-7 --sizes 64M
  mpirun -n 8 finetune doctor net --json";
