//! The standard output: what a person or a program asked for.

use std::io::{ErrorKind, Write};

use serde::Serialize;

use crate::error::{Error, ErrorCategory, Result};

/// Writes data that was asked for to the standard output. A reader who has gone, as in `| head`, wanted no more
/// of it: no error.
///
/// # Errors
/// When the output cannot be written, such as to a full disk.
pub(super) fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::new(ErrorCategory::Storage, "cannot write the output").because(error.to_string()))
        }
        _ => Ok(()),
    }
}

/// Writes figures or facts that were asked for as JSON, as [`print`] does.
///
/// # Errors
/// As there.
pub(super) fn print_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::internal(e.to_string()))?;
    print(&format!("{text}\n"))
}
