//! `finetune completions`: prints shell completion scripts and manual pages.

use clap::{Command, CommandFactory};

use super::print;
use crate::cli::{Cli, CompletionKind, CompletionsArgs};
use crate::error::{Error, Result};

/// Prints the script or the page.
pub(super) fn run(args: &CompletionsArgs) -> Result<()> {
    let mut text = Vec::new();
    match (args.kind, args.verb.as_deref()) {
        (CompletionKind::Shell(shell), None) => {
            clap_complete::generate(shell, &mut Cli::command(), "finetune", &mut text);
        }
        (CompletionKind::Shell(_), Some(verb)) => {
            return Err(Error::user("cannot print a part of a completion script")
                .because(format!("the verb `{verb}` is given, and a script has all verbs"))
                .hint(format!("remove `{verb}`, or write `man {verb}`")));
        }
        (CompletionKind::Man, verb) => {
            let page = clap_mangen::Man::new(command_of(verb)?);
            page.render(&mut text)
                .map_err(|e| Error::internal("cannot make the page").because(e.to_string()))?;
        }
    }
    print(&String::from_utf8_lossy(&text))
}

/// Returns the command that a manual page describes.
fn command_of(verb: Option<&str>) -> Result<Command> {
    let mut all = Cli::command();
    all.build();
    let Some(verb) = verb else { return Ok(all) };
    let known = all.get_subcommands().map(|subcommand| subcommand.get_name().to_owned()).collect::<Vec<_>>();
    let command = all.find_subcommand(verb).cloned();
    command.ok_or_else(|| {
        Error::user("cannot print a manual page")
            .because(format!("the verb is `{verb}`; accepted: {}", known.join(", ")))
            .hint("name one of these verbs, or none for finetune as a whole")
    })
}
