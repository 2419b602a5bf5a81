//! Writes results of commands to the standard output.

use std::io::{ErrorKind, Write};

use serde::Serialize;

use crate::error::{Error, ErrorCategory, Result};

/// Writes `text` to the standard output and flushes it. A pipe that the reader has closed, as in `|
/// head`, is no error.
///
/// # Errors
/// The output cannot be written, for example because the disk is full.
pub(super) fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::new(ErrorCategory::Storage, "cannot write the output").because(error.to_string()))
        }
        _ => Ok(()),
    }
}

/// Writes `value` to the standard output as indented JSON, like [`print`].
///
/// # Errors
/// The value cannot be serialized; else those of [`print`].
pub(super) fn print_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::internal(e.to_string()))?;
    print(&format!("{text}\n"))
}
