//! The child's side of [`super::sandbox`]: the binary started by itself.

use std::io::{self, Write};
use std::process::ExitCode;

use super::sandbox::{ARGUMENT, REFUSED_BY_SYSTEM, SandboxedWork};
use super::sandbox_limits::confine;
use super::table_rows::{self, TableKind};
use super::{template_child, tokenizer_child};

/// Does the work of a child if this process was started as one; else returns `None` at once.
pub fn serve_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != ARGUMENT {
        return None;
    }
    let work = arguments.next().and_then(|name| SandboxedWork::named(name.to_str()?));
    let served = confine().and_then(|limits| match work {
        Some(SandboxedWork::ChatTemplate) => template_child::serve(&limits),
        Some(SandboxedWork::Tokenizer) => tokenizer_child::serve(&limits),
        Some(SandboxedWork::Parquet) => table_rows::serve(&limits, TableKind::Parquet),
        Some(SandboxedWork::Arrow) => table_rows::serve(&limits, TableKind::Arrow),
        None => Err(io::ErrorKind::InvalidInput.into()),
    });
    // A broken pipe shows the parent that the answer is missing, and the exit code whether the
    // request is at fault.
    Some(match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput) => {
            ExitCode::FAILURE
        }
        Err(error) => {
            drop(writeln!(io::stderr(), "{error}"));
            ExitCode::from(REFUSED_BY_SYSTEM)
        }
    })
}
