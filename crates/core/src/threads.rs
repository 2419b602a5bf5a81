//! Starts threads of this process, so that a refused start gives the same error everywhere.

#![allow(clippy::disallowed_methods, reason = "other code starts threads through these functions")]

use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use crate::error::{Error, Result};

/// Starts a thread named `name`.
///
/// # Errors
/// [`Error::cannot_start`] if the system refuses the thread.
pub fn start<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    Builder::new().name(name.to_owned()).spawn(work).map_err(|error| refused(name, &error))
}

/// Starts a thread named `name` that ends before `scope` does. `stack_bytes` overrides the default
/// stack size.
///
/// # Errors
/// Same as [`start`].
pub fn start_in<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    stack_bytes: Option<usize>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    let builder = Builder::new().name(name.to_owned());
    let builder = match stack_bytes {
        Some(bytes) => builder.stack_size(bytes),
        None => builder,
    };
    builder.spawn_scoped(scope, work).map_err(|error| refused(name, &error))
}

fn refused(name: &str, error: &std::io::Error) -> Error {
    Error::cannot_start(format!("the thread `{name}`"), error)
}
