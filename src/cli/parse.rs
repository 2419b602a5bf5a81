//! Parses the arguments into a [`Cli`], or prints help, the version or a usage error.

use std::ffi::OsString;
use std::io::{ErrorKind, Write};

use clap::Parser;

use super::{Cli, peer_flags};
use crate::error::{Error, ErrorCategory, Result};

/// Result of parsing the arguments.
#[derive(Debug)]
pub enum ParsedArgs {
    /// A command to run.
    Run(Box<Cli>),
    /// A text was printed; the exit code of the process.
    Shown(u8),
}

impl ParsedArgs {
    /// Passes the command to `run`, if the arguments hold one, and returns the exit code.
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

/// Parses the arguments of the process. Prints help, the version or a usage error.
///
/// # Errors
/// Usage: an argument is not UTF-8. Storage: help or version cannot be written, for example because
/// the disk is full. A closed pipe is no error.
pub fn parse() -> Result<ParsedArgs> {
    check_encoding(std::env::args_os().skip(1))?;
    let mut error = match Cli::try_parse() {
        Ok(cli) => return Ok(ParsedArgs::Run(Box::new(cli))),
        Err(error) => error,
    };
    let verb = std::env::args_os().nth(1);
    if verb.is_none_or(|word| word.to_str().is_some_and(peer_flags::is_for_training)) {
        peer_flags::explain(&mut error);
    }
    let code = u8::try_from(error.exit_code()).unwrap_or(ErrorCategory::Usage.exit_code());
    match error.print().and_then(|()| std::io::stdout().flush()) {
        // A usage error that cannot be printed has no other place to go.
        Err(why) if !error.use_stderr() && why.kind() != ErrorKind::BrokenPipe => {
            Err(Error::new(ErrorCategory::Storage, "cannot write the output").because(why.to_string()))
        }
        _ => Ok(ParsedArgs::Shown(code)),
    }
}

/// Refuses any argument that is not UTF-8: recipes and run records are UTF-8 and could not name
/// such a path.
fn check_encoding(words: impl Iterator<Item = OsString>) -> Result<()> {
    let mut before = None;
    for word in words {
        let Some(text) = word.to_str() else {
            // Replaces bytes only in the part before `=`, where clap knows no such flag.
            let lossy = word.to_string_lossy();
            let flag = lossy.split_once('=').map(|(flag, _)| flag.to_owned()).or(before);
            let flag = flag.filter(|flag| flag.starts_with("--"));
            let bytes = word.as_encoded_bytes().escape_ascii();
            let what =
                flag.map_or("cannot use an argument".to_owned(), |flag| format!("cannot use `{flag}`"));
            return Err(Error::new(ErrorCategory::Usage, what)
                .because(format!("`{bytes}` is not UTF-8; accepted: names in UTF-8"))
                .hint("rename the file or folder, or make a link to it whose name is UTF-8"));
        };
        before = Some(text.to_owned());
    }
    Ok(())
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;

    use super::*;

    #[test]
    fn the_argument_that_is_not_utf8_is_named() {
        let check =
            |words: &[&[u8]]| check_encoding(words.iter().map(|word| OsString::from_vec(word.to_vec())));
        assert!(check(&[b"--model", "é".as_bytes(), b"--quiet"]).is_ok());
        for (words, what, shown) in [
            (&[&b"--model"[..], b"a\xff/b"][..], "cannot use `--model`", "`a\\xff/b` is"),
            (&[&b"--quiet"[..], b"--output=\xe9\x1b"], "cannot use `--output`", "`--output=\\xe9\\x1b` is"),
            (&[&b"inspect"[..], b"\xff"], "cannot use an argument", "`\\xff` is"),
        ] {
            let error = check(words).unwrap_err();
            assert_eq!((error.kind(), error.what()), (ErrorCategory::Usage, what));
            assert!(error.causes()[0].starts_with(shown), "{error}");
        }
    }
}
