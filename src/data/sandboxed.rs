//! The binary as a child of itself: see [`super::sandbox`].

use std::io;
use std::process::ExitCode;

use super::sandbox::{ARGUMENT, SandboxedWork};
use super::sandbox_limits::confine;
use super::{parquet_rows, template_child};

/// Does the work of a child, where this process was started as one; else returns at once.
pub fn serve_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != ARGUMENT {
        return None;
    }
    let work = arguments.next().and_then(|name| SandboxedWork::named(name.to_str()?));
    let served = confine().and_then(|limits| match work {
        Some(SandboxedWork::ChatTemplate) => template_child::serve(&limits),
        Some(SandboxedWork::Parquet) => parquet_rows::serve(&limits),
        None => Err(io::ErrorKind::InvalidInput.into()),
    });
    // Whoever asked sees from the broken pipe that there is no answer.
    Some(if served.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
