//! One file a verb: each takes its part of the command line, builds what it needs from the floors below, and
//! returns an error instead of printing one.
//!
//! What a person asked for goes to the standard output through [`print`]; everything said about it goes to the
//! standard error, by way of `report`.

mod completions;
mod recipes;

use std::io::{ErrorKind, Write};

use crate::cli::{Cli, Verb};
use crate::error::{Error, Kind, Result};

/// Does what the command line says.
///
/// # Errors
/// Whatever the verb could not do; its kind is the exit code.
pub fn run(cli: Cli) -> Result<()> {
    match cli.verb {
        Some(Verb::Recipes(args)) => recipes::run(args),
        Some(Verb::Completions(args)) => completions::run(&args),
        _ => Err(Error::internal("this verb is not part of the program yet")),
    }
}

/// Writes data that was asked for to the standard output. A reader who has gone, as in `| head`, wanted no more
/// of it: no error.
///
/// # Errors
/// When the output cannot be written, such as to a full disk.
fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::new(Kind::Storage, "cannot write the output").because(error.to_string()))
        }
        _ => Ok(()),
    }
}
