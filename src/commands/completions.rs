//! `finetune completions`: the script that lets a shell complete verbs and flags.

use clap::CommandFactory;

use super::print;
use crate::cli::{Cli, CompletionsArgs};
use crate::error::Result;

/// Prints the script.
pub(super) fn run(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "finetune", &mut script);
    print(&String::from_utf8_lossy(&script))
}
