//! Arguments to a [`Cli`], or what was shown instead of running: help, the version, what is wrong with the arguments.

use std::io::{ErrorKind, Write};

use clap::Parser;

use super::Cli;
use crate::error::{Error, ErrorCategory, Result};

/// What the arguments come to.
#[derive(Debug)]
pub enum ParsedArgs {
    /// A command to run.
    Run(Box<Cli>),
    /// A text was shown; the exit code that goes with it.
    Shown(u8),
}

impl ParsedArgs {
    /// Has `run` do what the arguments say; the exit code where that is no error.
    ///
    /// # Errors
    /// Those of `run`.
    pub fn run_by(self, run: impl FnOnce(Cli) -> Result<()>) -> Result<u8> {
        match self {
            ParsedArgs::Run(cli) => run(*cli).map(|()| 0),
            ParsedArgs::Shown(code) => Ok(code),
        }
    }
}

/// Reads the arguments of the process; shows what is to be shown.
///
/// # Errors
/// Storage: help or version cannot be written, such as to a full disk. A reader who has gone wanted no more of it.
pub fn parse() -> Result<ParsedArgs> {
    let error = match Cli::try_parse() {
        Ok(cli) => return Ok(ParsedArgs::Run(Box::new(cli))),
        Err(error) => error,
    };
    let code = u8::try_from(error.exit_code()).unwrap_or(ErrorCategory::Usage.exit_code());
    match error.print().and_then(|()| std::io::stdout().flush()) {
        // Where nobody listens to a complaint there is nobody to tell.
        Err(why) if !error.use_stderr() && why.kind() != ErrorKind::BrokenPipe => {
            Err(Error::new(ErrorCategory::Storage, "cannot write the output").because(why.to_string()))
        }
        _ => Ok(ParsedArgs::Shown(code)),
    }
}
