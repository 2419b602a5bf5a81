//! Command line of `finetune doctor`.

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
    /// Part to examine; `None` describes this machine.
    #[command(subcommand)]
    pub what: Option<DoctorVerb>,
    /// Compare every operation, forward and backward, with its reference
    #[arg(long, conflicts_with = "json")]
    pub selftest: bool,
    /// Run the GPU kernels on the CPU (needs a build with the feature `kernel-emu`)
    #[arg(long, requires = "selftest")]
    pub emulated: bool,
    /// Write the register results of kernel instructions, for crates/ops/tests/golden
    #[arg(long, requires = "selftest", value_name = "FILE", hide = true)]
    pub probe: Option<PathBuf>,
    /// Measure the disks of hub cache and DIR (some seconds) [default: working folder]
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    pub disk: Option<Option<PathBuf>>,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
}

/// Other parts that `finetune doctor` examines.
#[derive(Debug, Clone, Subcommand)]
pub enum DoctorVerb {
    /// Measure collectives, every pair of ranks and clock skew, and name slow pairs
    #[command(after_help = NET_EXAMPLES)]
    Net(CommunicationArgs),
}

const NET_EXAMPLES: &str = "\
Examples:
  finetune doctor net --ranks 4
  finetune doctor net --gpus 0-7 --sizes 64M
  mpirun -n 8 finetune doctor net --json";
